"""Operators that give the same elements again: copies, and elements of another dtype.

Device arguments are dropped: a rank's tensors all live on its own device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.aliases import (
    Args,
    Kwargs,
    callables,
    functions,
    getter,
    methods,
    rewriting,
    through,
    without,
)
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import RuleBuilder, linear_sets
from shardwright.compiler.ops.tables.pointwise import LINEAR


def _cast(op: IROp) -> OpRule:
    """Casts to a number with a fraction are linear; rounding to integers is not."""
    build = RuleBuilder()
    refs = build.tensor(op.results[0].shape)
    return build.rule([refs], [refs], linear=linear_sets(op, ("input",)))


def _to(input: Any, *args: Any, **kwargs: Any) -> Kwargs:
    """All forms of ``Tensor.to``: the only thing that matters is the dtype, if one is given."""
    given = [*args, kwargs.get("dtype"), kwargs.get("tensor")]
    dtypes = [
        item if isinstance(item, torch.dtype) else item.dtype for item in given if _has_dtype(item)
    ]
    return {"input": input, "dtype": dtypes[0] if dtypes else input.dtype}


def _has_dtype(item: Any) -> bool:
    return isinstance(item, torch.dtype | torch.Tensor | IRValue)


def _fixed(dtype: torch.dtype) -> Callable[[Args, Kwargs], tuple[Args, Kwargs]]:
    return lambda args, kwargs: ((args[0], dtype), {})


def _type(input: Any, dtype: Any, non_blocking: bool = False) -> Kwargs:
    """``Tensor.type``, which also takes tensor types and their names
    (``"torch.cuda.FloatTensor"``).
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.rpartition(".")[2])
    return {"input": input, "dtype": dtype if isinstance(dtype, torch.dtype) else dtype.dtype}


_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "cdouble": torch.complex128,
    "cfloat": torch.complex64,
    "char": torch.int8,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
}

define(
    "to",
    "input, dtype",
    ".to",
    _cast,
    *through(rewriting(_to), methods("to", "cpu", "cuda")),
    *((getattr(torch.Tensor, name), _fixed(dtype)) for name, dtype in _DTYPES.items()),
    (torch.Tensor.type, rewriting(_type)),
    (torch.Tensor.type_as, rewriting(lambda self, other: {"input": self, "dtype": other.dtype})),
)
define("clone", "input, *, memory_format=None", ".clone", LINEAR, *callables("clone"))
define(
    "contiguous",
    "input",
    ".contiguous",
    LINEAR,
    *through(without("memory_format", after=1), methods("contiguous")),
)
define("detach", "input", ".detach", LINEAR, *callables("detach"), getter("data"))
define("alias", "input", "torch.ops.aten.alias", LINEAR, *functions("alias_copy"))
