"""Pointwise operators: every split and every partial operand against the whole call; every alias
against torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import split_check
import torch
import torch.nn.functional as F
from covers import spread
from in_shares import Named, check_each, shares

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.opdef import REQUIRED

T = torch.Tensor


def rand(*shape: int) -> torch.Tensor:
    return (
        torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
        * 0.8
        + 0.1
    ).requires_grad_()


X, ROW, COLUMN, SCALAR = rand(3, 5), rand(5), rand(3, 1), rand()
MASK = rand(3, 5) > 0.5
INTS = torch.arange(15).reshape(3, 5)


@pytest.mark.parametrize(
    "other",
    [X.detach() * 2, ROW, COLUMN, SCALAR, 2.0, 0],
    ids=["same", "row", "column", "scalar", "2", "0"],
)
@pytest.mark.parametrize(
    "function",
    spread(
        [
            torch.add,
            torch.sub,
            torch.mul,
            T.__rsub__,
            T.__radd__,
            torch.maximum,
            torch.lt,
            torch.pow,
        ],
        3,
    ),
)
def test_binary(function: Callable[..., Any], other: Any) -> None:
    if function is torch.maximum:  # takes tensors only
        other = torch.as_tensor(other, dtype=torch.float64)
    split_check.check(function, X, other)


@pytest.mark.parametrize(
    "function, args, kwargs",
    spread(
        [
            (torch.add, (X, ROW), {"alpha": 2}),
            (torch.sub, (X, COLUMN), {"alpha": 3}),
            (torch.rsub, (X, ROW), {"alpha": 3}),
            (torch.add, (X, X), {}),
            (torch.mul, (X, X), {}),
            (torch.add, (ROW, COLUMN), {}),
            (torch.div, (X, ROW), {}),
            (torch.div, (X, ROW), {"rounding_mode": "floor"}),
            (T.__rtruediv__, (X, 2.0), {}),
            (T.__rpow__, (X, 2.0), {}),
            (T.__rmod__, (INTS + 1, 7), {}),
            (T.__rfloordiv__, (INTS + 1, 20), {}),
            (T.__floordiv__, (INTS, 2), {}),
            (T.__and__, (MASK, ~MASK), {}),
            (T.__invert__, (MASK,), {}),
            (T.__neg__, (X,), {}),
            (torch.mul, (X, MASK), {}),
            (torch.add, (INTS, INTS), {}),
            (torch.where, (MASK, X, ROW), {}),
            (torch.where, (MASK, X, 0.0), {}),
            (torch.where, (MASK, 1.0, X), {}),
            (T.where, (X, MASK, COLUMN), {}),
            (T.masked_fill, (X, MASK, 0.0), {}),
            (T.masked_fill, (X, MASK, -1.0), {}),
            (T.masked_fill, (X, MASK[:1], SCALAR), {}),
            (torch.clamp, (X,), {"min": 0.3}),
            (torch.clamp, (X, ROW * 0.5), {"max": 0.6 * COLUMN}),
            (torch.lerp, (X, ROW, 0.3), {}),
            (torch.lerp, (X, ROW, COLUMN), {}),
            (torch.addcmul, (X, ROW, COLUMN), {"value": 2}),
            (torch.addcdiv, (X, ROW, COLUMN), {"value": 2}),
            (torch.complex, (X, ROW.expand(3, 5)), {}),
            (torch.polar, (X, X), {}),
            (torch.real, (torch.complex(X, X).detach(),), {}),
            (F.relu, (X - 0.5,), {"inplace": True}),
            (F.leaky_relu, (X - 0.5, 0.2, False), {}),
            (F.gelu, (X,), {"approximate": "tanh"}),
            (F.softplus, (X, 2.0), {}),
            (F.prelu, (X - 0.5, rand(5)), {}),
            (F.prelu, (X - 0.5, rand(1)), {}),
            (torch.nan_to_num, (X,), {"posinf": 1.0}),
            (torch.round, (X,), {"decimals": 1}),
            (torch.polygamma, (1, X), {}),
            (torch.rsqrt, (X,), {}),
            (torch.tanh, (rand(),), {}),
        ],
        3,
    ),
)
def test_calls(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    split_check.check(
        function, *(a.detach() if isinstance(a, torch.Tensor) else a for a in args), **kwargs
    )


SAMPLES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "lcm"], (INTS, INTS + 3)),
    **dict.fromkeys(["bitwise_left_shift", "bitwise_right_shift"], (INTS, INTS % 3)),
    **dict.fromkeys(
        ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"],
        (MASK, ~MASK),
    ),
    **dict.fromkeys(["bitwise_not", "logical_not"], (MASK,)),
    **dict.fromkeys(["real", "imag", "conj", "conj_physical"], (torch.complex(X, X).detach(),)),
    "acosh": (X + 1,),
    "where": (MASK, X, X),
    "masked_fill": (X, MASK, 0.5),
    "clamp": (X, 0.3, 0.6),
    "clamp_min": (X, 0.3),
    "clamp_max": (X, 0.6),
    "threshold": (X, 0.3, 0.1),
    "lerp": (X, X * 2, 0.3),
    "prelu": (X - 0.5, rand(5)),
    "polygamma": (1, X),
    "float_power": (X, 2),
}


def pointwise_aliases() -> list[Any]:
    table = "shardwright.compiler.ops.tables.pointwise"
    names = {name for name, opdef in registry.OPS.items() if opdef.rule.__module__ == table}
    found = [
        (f"{name}:{split_check.title(f)}", (f, name))
        for f, (name, _) in registry.CALLABLES.items()
        if name in names
    ]
    assert len(found) > 450
    return found


@pytest.mark.parametrize("aliases", shares(pointwise_aliases()))
def test_aliases(aliases: Sequence[Named]) -> None:
    check_each(aliases, check_alias)


def check_alias(title: str, alias: tuple[Callable[..., Any], str]) -> None:
    """Every alias, bound to the canonical operator and written as source, computes the same."""
    function, name = alias
    required = [p for p in registry.OPS[name].parameters if p.default is REQUIRED]
    args = SAMPLES.get(name) or (X, *(X * (i + 2) for i in range(len(required) - 1)))
    args = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
    if function is T.where:
        args = (args[1], args[0], args[2])
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    op, tensors, expected = split_check.trace(function, *args)
    assert op.target == name
    expected = [result.clone() for result in expected]
    for value in op.operands:  # an in-place alias has overwritten its operand
        tensors[value.name].copy_(
            next(b for a, b in zip(args, before, strict=True) if a is tensors[value.name])
        )
    results = split_check.run(op, {name: t.clone() for name, t in tensors.items()})
    for result, reference in zip(results, expected, strict=True):
        if not getattr(function, "__name__", "").endswith("_"):
            assert result.dtype == reference.dtype
        torch.testing.assert_close(
            result.to(reference.dtype), reference, rtol=1e-15, atol=0, equal_nan=True
        )
