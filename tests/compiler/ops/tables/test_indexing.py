"""Indexing, gathering and scattering: every split against the whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import split_check
import torch
from covers import spread

T = torch.Tensor
ALL = slice(None)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(len(shape)),
        requires_grad=True,
    )


def ints(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(7))


X = rand(4, 3, 5)
I, J = ints(2, 3, below=4), ints(3, below=3)


@pytest.mark.parametrize(
    "index, annotation",
    spread(
        [
            (0, "a^ b c -> b c"),
            ((ALL, -1), "a b^ c -> a c"),
            ((Ellipsis, 0), "a b c^ -> a b"),
            ((ALL, None, ALL, None), "a b c -> a 1 b 1 c"),
            ((slice(0, 4), slice(0, 3)), "a b c -> a b c"),
            ((ALL, slice(1, None)), "a b^ c -> a d^ c"),
            ((ALL, slice(1, 2)), "a b^ c -> a 1 c"),
            ((Ellipsis, slice(None, None, 2)), "a b c^ -> a b d^"),
            (I, "a^ b c, d e -> d e b c"),
            ((I, J), "a^ b^ c, d e, e -> d e c"),
            ((ALL, J), "a b^ c, d -> a d c"),
            ((I, ALL, J), "a^ b c^, d e, e -> d e b"),
            ((0, ALL, J), "a^ b c^, d -> b d"),
            ((ALL, J[:, None], J), "a b^ c^, d 1, e -> a d e"),
            ((None, J, slice(1, 3)), "a^ b^ c, d -> 1 d e^ c"),
            ((torch.tensor(2), J), "a^ b^ c, , d -> d c"),
            ([0, 2], "a^ b^ c^ -> d^ e^ f^"),
            ((True,), "a^ b^ c^ -> 1 d^ e^ f^"),
        ],
        2,
    ),
)
def test_getitem(index: Any, annotation: str) -> None:
    op = split_check.check(T.__getitem__, X, index)
    assert op.rule is not None
    assert split_check.canonical(op.rule.annotation) == split_check.canonical(annotation)


def test_tensors_apart_put_their_dims_in_front() -> None:
    op = split_check.check(T.__getitem__, rand(2, 4, 3, 5), (ALL, J, slice(0, 2), J))
    assert op.rule is not None
    assert split_check.canonical(op.rule.annotation) == split_check.canonical(
        "a b^ c^ d^, e, e -> e a f^"
    )


def along(dim: int, size: int, *shape: int) -> torch.Tensor:
    """Places along ``dim`` that are all different, so that writes have no order."""
    order = torch.rand(
        shape[:dim] + (size,) + shape[dim + 1 :], generator=torch.Generator().manual_seed(3)
    ).argsort(dim)
    return order.narrow(dim, 0, shape[dim])


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (torch.index_select, (X, 1, J), {}, "a b^ c, d -> a d c"),
    (torch.gather, (X, 1, ints(4, 2, 5, below=3)), {}, "a b^ c, a d c -> a d c"),
    (T.gather, (X, -1, ints(4, 2, 6, below=5)), {}, "a b^ c^, a d^ e -> a d e"),
    (torch.take_along_dim, (X, ints(4, 1, 1, below=5), 2), {}, "a b c^, a 1 1 -> a b 1"),
    (torch.take_along_dim, (rand(4, 1, 5), ints(1, 3, 2, below=5)), {"dim": 2},
        "a 1 c^, 1 b d -> a b d"),
    (torch.take_along_dim, (X, I), {}, "a^ b^ c^, d^ e^ -> f^"),
    (torch.take, (X, I), {}, "a^ b^ c^, d e -> d e"),
    (torch.narrow, (X, 1, 1, 2), {}, "a b^ c -> a d^ c"),
    (torch.narrow, (X, 1, 0, 3), {}, "a b c -> a b c"),
    (torch.select, (X, 1, 2), {}, "a b^ c -> a c"),
    (torch.isin, (I, J), {}, "a b, c^ -> a b"),
    (torch.bucketize, (X.detach(), torch.linspace(-1, 1, 4, dtype=torch.float64)), {},
        "a b c, d^ -> a b c"),
    (torch.scatter_add, (X, 1, ints(4, 6, 5, below=3), rand(4, 6, 5)), {},
        "a b^ c, a d+ c, a d c -> a b c"),
    (T.scatter_add, (X, 0, ints(3, 2, 5, below=4), rand(3, 2, 5)), {},
        "a^ b^ c, d+ e^ c, d f^ c -> a b c"),
    (torch.scatter, (X, 1, along(1, 3, 4, 2, 5), rand(4, 2, 5)), {},
        "a b^ c, a d^ c, a d c -> a b c"),
    (T.scatter, (X, 1, along(1, 3, 4, 2, 5), 2.0), {}, "a b^ c, a d^ c -> a b c"),
    (T.scatter, (X, 1, along(1, 3, 4, 2, 5)), {"value": 0}, "a b^ c, a d^ c -> a b c"),
    (T.scatter_reduce, (X, 1, ints(4, 6, 5, below=3), rand(4, 6, 5), "amax"), {},
        "a b^ c, a d^ c, a d c -> a b c"),
    (T.index_add, (X, 1, ints(6, below=3), rand(4, 6, 5)), {"alpha": 2},
        "a b^ c, d+, a d c -> a b c"),
    (T.index_copy, (X, 1, torch.tensor([2, 0]), rand(4, 2, 5)), {}, "a b^ c, d^, a d c -> a b c"),
    (T.index_fill, (X, 1, torch.tensor([2, 0]), 0.0), {}, "a b^ c, d^ -> a b c"),
    (T.index_fill, (X, 1, torch.tensor([2, 0]), rand()), {}, "a b^ c, d^,  -> a b c"),
    (torch.slice_scatter, (X, rand(4, 2, 5)), {"dim": 1, "start": 1, "end": 3},
        "a b^ c, a d^ c -> a b c"),
    (torch.slice_scatter, (X, rand(4, 3, 5)), {"dim": 1, "start": 0, "end": 3},
        "a b c, a b c -> a b c"),
    (torch.select_scatter, (X, rand(4, 5), 1, 2), {}, "a b^ c, a c -> a b c"),
    (torch.diagonal_scatter, (X, rand(3, 4)), {"dim1": 0, "dim2": 2}, "a^ b c^, b d^ -> a b c"),
    (T.masked_scatter, (X, X.detach() > 0, rand(60)), {}, "a^ b^ c^, a b c, d^ -> a b c"),
    (T.index_put, (X, (I,), rand(2, 3, 3, 5)), {"accumulate": True},
        "a^ b c, d+ e+, d e b c -> a b c"),
    (T.index_put, (X, (I, J), rand(1, 5)), {"accumulate": True}, "a^ b^ c, d+ e+, e, 1 c -> a b c"),
    (T.index_put, (X, (torch.tensor([0, 2]),), rand()), {}, "a^ b c, d^,  -> a b c"),
    (torch.ops.aten.index_put, (X, (None, torch.tensor([0, 2])), rand(4, 2, 1)), {},
        "a b^ c, d^, a d 1 -> a b c"),
    (T.index_put, (X, (X.detach() > 0,), rand()), {}, "a^ b^ c^, d^ e^ f^,  -> g^ h^ i^"),
]  # fmt: skip


@pytest.mark.parametrize(
    "function, args, kwargs, annotation",
    spread(CALLS, 3),
    ids=[f"{c[0].__name__}-{c[3]}" for c in CALLS],
)
def test_calls(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], annotation: str
) -> None:
    op = split_check.check(function, *args, **kwargs)
    assert op.rule is not None
    assert split_check.canonical(op.rule.annotation) == split_check.canonical(annotation)


def test_adding_writes_pass_partial_inputs_on() -> None:
    op = split_check.check(T.scatter_add, X, 1, ints(4, 6, 5, below=3), rand(4, 6, 5))
    assert op.rule is not None
    assert op.rule.additive == (0,)
    assert op.rule.linear_sets == (frozenset({0, 2}),)


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_scatter_with_a_reduction_has_no_gradient_and_is_not_linear() -> None:
    op, *_ = split_check.trace(
        T.scatter, X.detach(), 1, along(1, 3, 4, 2, 5), rand(4, 2, 5).detach(), reduce="add"
    )
    assert op.rule is not None
    assert op.rule.linear_sets == ()
