"""Operators that make a tensor from sizes and numbers. Random ones stand in the table of dropout.

Constant tensors are free in every dim: a rank makes its piece. Tensors whose elements depend on
their place are frozen. ``zeros_like``, ``new_ones`` and the like read only the shape and dtype of
their operand, and become ``zeros``, ``ones``.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.ir.op import IROp, RankDevice
from shardwright.compiler.ops.aliases import Kwargs, rewriting, without
from shardwright.compiler.ops.definitions import Normalise, define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import RuleBuilder, linear_sets, whole_rule
from shardwright.compiler.ops.terms import local_size

_MEMORY = ("layout", "pin_memory", "requires_grad", "out", "names", "memory_format")


def _constant(op: IROp) -> OpRule:
    build = RuleBuilder()
    # A fill value may be a tensor of one element.
    operands = [((),) * value.ndim for value in op.operands]
    result = build.tensor(op.results[0].shape)
    return build.rule(
        operands, [result], linear=linear_sets(op, ("fill_value",)), localise=local_size
    )


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _options(kwargs: Kwargs) -> Kwargs:
    return {key: value for key, value in kwargs.items() if key not in _MEMORY}


def _factory(args: tuple[Any, ...], kwargs: Kwargs) -> tuple[tuple[Any, ...], Kwargs]:
    size = kwargs.pop("size") if "size" in kwargs else _sizes(args)
    return (tuple(size),), _options(kwargs)


def _full(size: Any, fill_value: Any, **kwargs: Any) -> Kwargs:
    return {"size": tuple(size), "fill_value": fill_value, **_options(kwargs)}


def _like(*, fill: bool = False) -> Normalise:
    """``zeros_like(x)``, and ``full_like(x, value)``: shape and dtype of another tensor."""

    def like(
        input: Any, *values: Any, dtype: Any = None, device: Any = None, **kwargs: Any
    ) -> Kwargs:
        # ``full_like(x, fill_value=...)``: the value by position or by name.
        if "fill_value" in kwargs:
            values = (kwargs["fill_value"],)
        filled: Kwargs = {"fill_value": values[0]} if fill else {}
        return {
            "size": tuple(input.shape),
            **filled,
            "dtype": dtype or input.dtype,
            "device": RankDevice(),
        }

    return rewriting(like)


def _new(*, fill: bool = False) -> Normalise:
    """``x.new_zeros(2, 3)`` and ``x.new_full((2, 3), value)``: the dtype of another tensor."""

    def new(self: Any, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Kwargs:
        named: Kwargs = {key: kwargs[key] for key in ("size", "fill_value") if key in kwargs}
        positional = iter(args)
        if "size" not in named:
            # ``new_zeros(2, 3)`` and ``new_zeros((2, 3))``; ``new_full`` takes a tuple only.
            named["size"] = next(positional) if fill else _sizes(args)
        if fill and "fill_value" not in named:
            named["fill_value"] = next(positional)
        named["size"] = tuple(named["size"])
        return named | {"dtype": dtype or self.dtype, "device": RankDevice()}

    return rewriting(new)


def _bounds(*bounds: Any, **kwargs: Any) -> Kwargs:
    """``arange(end)``, ``arange(start, end)``, ``arange(start, end, step)``, also by name."""
    named: Kwargs = {key: kwargs.pop(key) for key in ("start", "end", "step") if key in kwargs}
    if named:
        names = ("end",) if len(bounds) == 1 and "end" not in named else ("start", "end", "step")
        given = {**dict(zip(names, bounds, strict=False)), **named}
        bounds = (given.get("start", 0), given["end"], given.get("step", 1))
    return {"bounds": bounds, **_options(kwargs)}


_OPTIONS = "*, dtype=None, device=None"
for _name in ("zeros", "ones", "empty"):
    define(
        _name,
        f"size, {_OPTIONS}",
        f"torch.{_name}",
        _constant,
        (getattr(torch, _name), _factory),
        (getattr(torch, f"{_name}_like"), _like()),
        (getattr(torch.Tensor, f"new_{_name}"), _new()),
    )
define(
    "full",
    f"size, fill_value, {_OPTIONS}",
    "torch.full",
    _constant,
    (torch.full, rewriting(_full)),
    (torch.full_like, _like(fill=True)),
    (torch.Tensor.new_full, _new(fill=True)),
)
define(
    "arange",
    "*bounds, dtype=None, device=None",
    "torch.arange",
    whole_rule,
    (torch.arange, rewriting(_bounds)),
)
for _name, _signature in {
    "eye": "n, m=None",
    "linspace": "start, end, steps",
    "logspace": "start, end, steps, base=10.0",
    "tril_indices": "row, col, offset=0",
    "triu_indices": "row, col, offset=0",
    "tensor": "data",
}.items():
    define(
        _name,
        f"{_signature}, {_OPTIONS}",
        f"torch.{_name}",
        whole_rule,
        (getattr(torch, _name), without(*_MEMORY)),
    )
