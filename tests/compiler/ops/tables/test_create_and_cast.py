"""Tensors made from sizes, and casts: bound from every form of call, every split against the whole
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import split_check
import torch

from shardwright.compiler.ir.op import RankDevice

T = torch.Tensor
X = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
F32 = torch.float32

CREATE: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str, dict[str, Any]]] = [
    (torch.zeros, (2, 3), {}, "zeros", {"size": (2, 3)}),
    (torch.zeros, ((2, 3),), {"dtype": F32}, "zeros", {"size": (2, 3), "dtype": F32}),
    (torch.zeros, (), {"size": (2, 1)}, "zeros", {"size": (2, 1)}),
    (torch.ones, ([4],), {"requires_grad": False}, "ones", {"size": (4,)}),
    (torch.ones, ((),), {}, "ones", {"size": ()}),
    (torch.full, ((2, 3), 1.5), {}, "full", {"size": (2, 3), "fill_value": 1.5}),
    (
        torch.zeros_like,
        (X,),
        {},
        "zeros",
        {"size": (4, 3), "dtype": torch.float64, "device": RankDevice()},
    ),
    (
        torch.ones_like,
        (X,),
        {"dtype": F32},
        "ones",
        {"size": (4, 3), "dtype": F32, "device": RankDevice()},
    ),
    (
        torch.full_like,
        (X, 2),
        {},
        "full",
        {"size": (4, 3), "fill_value": 2, "dtype": torch.float64, "device": RankDevice()},
    ),
    (
        T.new_zeros,
        (X, 2, 3),
        {},
        "zeros",
        {"size": (2, 3), "dtype": torch.float64, "device": RankDevice()},
    ),
    (
        T.new_ones,
        (X, (2, 3)),
        {"dtype": F32},
        "ones",
        {"size": (2, 3), "dtype": F32, "device": RankDevice()},
    ),
    (
        T.new_full,
        (X, (2,), 3.0),
        {},
        "full",
        {"size": (2,), "fill_value": 3.0, "dtype": torch.float64, "device": RankDevice()},
    ),
    (torch.arange, (5,), {}, "arange", {"bounds": (5,)}),
    (torch.arange, (2, 5), {"dtype": F32}, "arange", {"bounds": (2, 5), "dtype": F32}),
    (torch.arange, (), {"start": 2, "end": 7, "step": 2}, "arange", {"bounds": (2, 7, 2)}),
    (torch.arange, (3,), {"end": 7}, "arange", {"bounds": (3, 7, 1)}),
    (torch.eye, (3, 4), {}, "eye", {"n": 3, "m": 4}),
    (torch.linspace, (0, 1), {"steps": 5}, "linspace", {"start": 0, "end": 1, "steps": 5}),
    (
        torch.tril_indices,
        (3, 3),
        {"offset": -1},
        "tril_indices",
        {"row": 3, "col": 3, "offset": -1},
    ),
    (torch.tensor, ([[1, 2], [3, 4]],), {}, "tensor", {"data": [[1, 2], [3, 4]]}),
]


@pytest.mark.parametrize(
    "function, args, kwargs, name, bound",
    CREATE,
    ids=[f"{c[0].__name__}-{c[3]}{c[2]}" for c in CREATE],
)
def test_create(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    bound: dict[str, Any],
) -> None:
    op = split_check.check(function, *args, **kwargs)
    assert (op.target, dict(op.args)) == (name, bound)
    assert op.rule is not None
    assert all(
        op.rule.splittable(factor.name) == (name in ("zeros", "ones", "full"))
        for factor in op.rule.factors
    )


@pytest.mark.parametrize(
    "function, args, kwargs, dtype",
    [
        (T.to, (X, F32), {}, F32),
        (T.to, (X,), {"dtype": torch.complex128}, torch.complex128),
        (T.to, (X, "cpu"), {}, torch.float64),
        (T.to, (X, torch.device("cpu"), F32), {"non_blocking": True}, F32),
        (T.to, (X, torch.zeros(2, dtype=torch.int32)), {}, torch.int32),
        (T.to, (X,), {"tensor": torch.zeros(2)}, F32),
        (T.cpu, (X,), {}, torch.float64),
        (T.float, (X,), {}, F32),
        (T.long, (X,), {}, torch.int64),
        (T.bool, (X,), {}, torch.bool),
        (T.type, (X, F32), {}, F32),
        (T.type, (X, "torch.FloatTensor"), {}, F32),
        (T.type_as, (X, torch.zeros(2, dtype=torch.bfloat16)), {}, torch.bfloat16),
    ],
)
def test_to(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    op, tensors, expected = split_check.trace(function, *args, **kwargs)
    assert dict(op.args)["dtype"] == dtype
    assert len(op.operands) == 1
    result = split_check.run(op, tensors)[0]
    assert result.dtype == expected[0].dtype == dtype
    assert torch.equal(result, expected[0])
    assert op.rule is not None
    fractional = dtype.is_floating_point or dtype.is_complex
    assert op.rule.linear_sets == ((frozenset({0}),) if fractional else ())


@pytest.mark.parametrize(
    "function, kwargs",
    [
        (T.double, {}),
        (T.cdouble, {}),
        (torch.clone, {}),
        (T.clone, {"memory_format": torch.contiguous_format}),
        (T.contiguous, {}),
        (T.detach, {}),
        (T.data.__get__, {}),
    ],
)
def test_copies(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    split_check.check(function, X, **kwargs)
