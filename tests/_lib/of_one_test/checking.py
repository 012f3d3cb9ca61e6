"""Functions that check values, and some that decide by them; in test files pytest writes other code
for ``assert``.
"""

from __future__ import annotations

import contextlib
import warnings

from torch import Tensor


def raises(x: Tensor) -> Tensor:
    if x is not None and x.max() >= 2:
        raise ValueError(f"values of {x.shape} must be below {2 if x.ndim else 3}")
    return x + 1


def raises_unless(x: Tensor) -> Tensor:
    if not (x >= 0).all():
        raise ValueError("negative")
    return x + 1


def raises_for_one_of_two(x: Tensor) -> Tensor:
    if x.min() < -1 or x.max() > 2:
        raise ValueError
    return x + 1


def raises_for_both(x: Tensor) -> Tensor:
    if x.min() < -1 and x.ndim == 2:
        raise ValueError
    return x + 1


def asserts(x: Tensor) -> Tensor:
    assert x.isnan().sum() == 0 and x.isinf().sum() == 0, "numbers"
    return x + 1


def asserts_a_number(x: Tensor) -> Tensor:
    assert x.max().item() <= x.shape[0]
    return x + 1


def asserts_of_a_number(x: Tensor) -> Tensor:
    assert x.max().item() <= 3
    return x + 1


def asserts_an_element(x: Tensor) -> Tensor:
    assert (x >= 0).all().item(), "negative"
    return x + 1


def raises_for_any(x: Tensor) -> Tensor:
    if any([x.isnan().any(), x.max() > 2]):
        raise ValueError
    return x + 1


def asks_for_a_truth_value(x: Tensor) -> Tensor:
    if not bool(x.max() < 2):
        raise ValueError
    return x + 1


def loops(x: Tensor) -> Tensor:
    for row in x:
        if row.max() > 2:
            raise ValueError
    return x + 1


def other_branch(x: Tensor) -> Tensor:
    if x.max() > 2:
        x = x * 2
        raise ValueError
    return x + 1


def counts_first(x: Tensor) -> Tensor:
    if x.max() > 2:
        calls(x)
        raise ValueError
    return x + 1


def returns(x: Tensor) -> Tensor:
    if x.max() < 2:
        return x
    raise ValueError


def returns_early(x: Tensor) -> Tensor:
    if x.max() > 2 or x.ndim == 2:
        return x
    raise ValueError


def both(x: Tensor) -> Tensor:
    if x.max() > 2:
        raise ValueError
    raise KeyError


def calls(x: Tensor) -> Tensor:
    if x.max() > 2:
        warnings.warn("large", stacklevel=2)
    return x + 1


def caught_by_itself(x: Tensor) -> Tensor:
    try:
        if x.max() > 2:
            raise ValueError
    except ValueError:
        return x
    return x + 1


def suppressed(x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        if x.max() > 2:
            raise ValueError
        return x
    return x + 1


def chooses(x: Tensor) -> Tensor:
    y = x if x.max() > 2 else x + 1
    if y.ndim > 2:
        raise ValueError
    return y


def number_used(x: Tensor) -> Tensor:
    if (largest := x.max().item()) > 2:
        raise ValueError
    return x * largest


def element_decides(x: Tensor) -> Tensor:
    if (x >= 0).all().item():
        x = x * 2
    return x + 1


def truth_value_kept(x: Tensor) -> Tensor:
    large = bool(x.max() > 2)
    if large:
        raise ValueError
    return x + large


def number_computed(x: Tensor) -> Tensor:
    assert x.max().item() + 1 <= 2
    return x + 1
