"""What is in the arguments of a call, and the same arguments without some of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Passed = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones, and those by name."""


def tensors_in(arg: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument or result, in order."""
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from tensors_in(item)
    elif isinstance(arg, dict):
        for item in arg.values():
            yield from tensors_in(item)


def binds(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``function`` takes these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def is_sizes(data: Any) -> bool:
    """Whether ``data`` is a number or a flat list of numbers."""
    items = data if isinstance(data, tuple | list) else (data,)
    return all(
        isinstance(item, bool | int | float | torch.SymInt | torch.SymFloat) for item in items
    )


def is_numbers(data: Any) -> bool:
    """Whether ``data`` is a number, a tensor of one element, or a nested list of such."""
    if isinstance(data, tuple | list):
        return all(map(is_numbers, data))
    if isinstance(data, torch.Tensor):
        return data.numel() == 1
    return is_sizes(data)


def only_first_differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Passed for a loss that refuses targets with gradients: every floating input of a trace has
    one.
    """
    rest = (arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args[1:])
    return (*args[:1], *rest)


def has_traced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether something that exists only while tracing is among the arguments."""

    def traced(arg: Any) -> bool:
        if isinstance(arg, tuple | list):
            return any(map(traced, arg))
        return isinstance(arg, FakeTensor | torch.SymInt | torch.SymFloat)

    return traced(args) or traced(tuple(kwargs.values()))


def without_inplace_flag(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of ``F.relu(x, inplace=True)`` without the flag; ``None`` if it is not set."""
    if kwargs.get("inplace"):
        return args, {key: value for key, value in kwargs.items() if key != "inplace"}
    if len(args) < 2 or args[-1] is not True or not inspect.isfunction(func):
        return None
    parameters = list(inspect.signature(func).parameters)
    is_flag = len(parameters) >= len(args) and parameters[len(args) - 1] == "inplace"
    return (args[:-1], kwargs) if is_flag else None


def without_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed | None:
    """The arguments of ``torch.cat`` without empty one-dim tensors, which it ignores; ``None`` if
    there are none.
    """
    tensors = args[0] if args else kwargs["tensors"]
    kept = [tensor for tensor in tensors if tensor.ndim != 1 or tensor.shape[0] != 0]
    if len(kept) == len(tensors) or not kept:
        return None
    return (kept, *args[1:]), {key: value for key, value in kwargs.items() if key != "tensors"}
