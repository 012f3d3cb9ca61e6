"""Inputs for a check: the dummy arguments in float64, and others like them for other units and
samples.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Container, Mapping
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime import structure
from shardwright.runtime.errors import ConfigError


def in_float64(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with floating tensors in float64."""

    def cast(path: str, leaf: Any) -> Any:
        return _wide(leaf) if isinstance(leaf, Tensor) else leaf

    return {name: structure.map_leaves(value, cast, name) for name, value in args.items()}


def _wide(tensor: Tensor) -> Tensor:
    """A tensor's numbers in float64 or complex128; integers stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def model_in_float64(model: nn.Module) -> nn.Module:
    """A copy of the model in float64, tensors and dtypes in plain attributes included: ``double()``
    leaves those as they are.

    Raises :class:`ConfigError` for complex parameters, which cannot be stored any wider, and for
    tensors without values.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"the model has no values: {name} is on the meta device",
                why="verify trains it, and compares numbers",
                hint="make it on the CPU; with fewer and narrower layers if it is large: the same "
                "rules split it",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"the parameter {name} is complex, and verify compares in float64",
                why="files of weights hold complex64 at most, whose rounding of 1e-7 would hide "
                "what is wrong",
                hint="keep real and imaginary parts in one real parameter, and call "
                "torch.view_as_complex in forward",
            )
    model = copied(model).double()
    for part in model.modules():
        for name in (*vars(part), *_slots(part)):
            value = getattr(part, name, None) if name not in vars(part) else vars(part)[name]
            wide = _wide_attribute(value)
            if wide is not value:
                object.__setattr__(part, name, wide)
    return model


def _wide_attribute(value: Any) -> Any:
    """A tensor, or a dtype that a constructor has settled for what forward casts, in float64;
    anything else as it is.
    """
    if isinstance(value, Tensor):
        return _wide(value) if value.is_floating_point() or value.is_complex() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, functools.partial):
        settled = {name: _wide_attribute(item) for name, item in value.keywords.items()}
        return functools.partial(value.func, *value.args, **settled)
    return value


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Of modules with ``__slots__`` torch's own leaves out what is in them, and it
    refuses tensors that were computed from others (the weight of the old ``nn.utils.weight_norm``):
    their values are copied.
    """
    memo: dict[int, Any] = {}
    for part in model.modules():
        for value in vars(part).values():
            # ``deepcopy`` refuses these; in the memo they are copied already.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    result = copy.deepcopy(model, memo)
    for part, new in zip(model.modules(), result.modules(), strict=True):
        for name in _slots(part):
            if hasattr(part, name):
                setattr(new, name, copy.deepcopy(getattr(part, name), memo))
        for name, value in vars(new).items():
            object.__setattr__(new, name, _rebound(value, memo))
    return result


def _rebound(value: Any, memo: Mapping[int, Any]) -> Any:
    """A function, or one of several in a dict (of hooks, say), that sees the copies of modules and
    tensors where it sees those of the model that was copied: ``lambda module, args: self.scale *
    args[0]``. A deep copy takes functions as they are.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, FunctionType):
                value[key] = _rebound(item, memo)
        return value
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    seen = [_content(cell) for cell in value.__closure__]
    # ``memo`` is that of ``copy.deepcopy``: what was copied, by the address of the original.
    if not any(isinstance(item, nn.Module | Tensor) and id(item) in memo for item in seen):
        return value
    cells = []
    for cell, item in zip(value.__closure__, seen, strict=True):
        is_copied = isinstance(item, nn.Module | Tensor) and id(item) in memo
        cells.append(CellType(memo[id(item)]) if is_copied else cell)
    rebound = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    rebound.__kwdefaults__, rebound.__dict__ = value.__kwdefaults__, dict(value.__dict__)
    return rebound


def _content(cell: CellType) -> Any:
    """What a function sees through one of its cells; ``None`` of one that is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _slots(part: nn.Module) -> list[str]:
    found: list[str] = []
    for cls in type(part).__mro__:
        names = cls.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def rolled(args: Mapping[str, Any], number: int, constants: Container[str] = ()) -> dict[str, Any]:
    """Other inputs: the rows of every tensor moved on by ``number``, values of floating ones
    scaled. ``constants``: the inputs that are the same in every call.
    """

    def move(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or number == 0 or leaf.ndim == 0:
            return leaf
        if path in constants:
            return leaf
        moved = leaf.roll(number, 0)
        # Rolled rows alone would have the same sum, which is all that some losses see.
        return moved * (1 + 0.1 * number) if leaf.is_floating_point() else moved

    return {name: structure.map_leaves(value, move, name) for name, value in args.items()}
