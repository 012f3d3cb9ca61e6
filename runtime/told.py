"""Arguments that are neither tensors nor literals, as texts by which two calls are compared.

A call may pass functions, modules without tensors, sets and the like. The program is that of the
ones it was compiled with, and a generated file cannot hold them. So it holds what there is to tell
of them::

    inputs = {"activation": Told("function torch.nn.functional.gelu 3f0c...")}

Two functions are told apart by their code and by what it has around it, wherever they are made.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._compile import _disable_dynamo

from shardwright.runtime.left_out import LeftOut


class UntoldError(Exception):
    """Two calls cannot be compared by a value. ``args[0]``: what it is, or holds, in words."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a class was compiled with at one path of its arguments."""

    text: str

    # A graph of torch's compiler is guarded by the code of a function, not by what it reads.
    @_disable_dynamo
    def fits(self, value: Any) -> bool:
        """Whether a value is told by the same text."""
        try:
            return told(value) == self.text
        except UntoldError:
            return False


def told(value: Any) -> str:
    """What there is to tell of a value, with no address in it: the same in all processes.

    Raises :class:`UntoldError` for tensors, for what holds some, and for objects of other kinds.
    """
    return _told(value, ())


def _told(value: Any, around: tuple[int, ...]) -> str:
    """``around``: the objects that hold the value, by their addresses."""
    if id(value) in around:
        return "itself"

    def inner(found: Any) -> str:
        return _told(found, (*around, id(value)))

    for kinds, tell in _FORMS:
        if isinstance(value, kinds):
            return f"{type(value).__name__} {tell(value, inner)}"
    raise UntoldError(f"a {type(value).__name__}")


Inner = Callable[[Any], str]


def _function(function: types.FunctionType, inner: Inner) -> str:
    code = function.__code__
    words = [f"{function.__module__}.{function.__qualname__}", code_digest(code)]
    words += _named({**(function.__kwdefaults__ or {})}, inner)
    words += [inner(default) for default in function.__defaults__ or ()]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            words.append(f"{name}={inner(cell.cell_contents)}")
        except ValueError:  # a variable that is set later
            words.append(name)
    return " ".join(words)


def _builtin(function: Any, inner: Inner) -> str:
    owner = function.__self__
    of = "" if owner is None or isinstance(owner, types.ModuleType | type) else inner(owner)
    return f"{function.__module__}.{function.__qualname__} {of}".strip()


def _module(module: torch.nn.Module, inner: Inner) -> str:
    if any(True for _ in _tensors(module)):
        raise UntoldError("a module with tensors of its own")
    attributes = {name: x for name, x in vars(module).items() if not name.startswith("_")}
    parts = [*_named(attributes, inner), *_named(dict(module.named_children()), inner)]
    return f"{_path(type(module))}({', '.join(parts)})"


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _named(values: Mapping[Any, Any], inner: Inner) -> list[str]:
    return [f"{name}={inner(value)}" for name, value in values.items()]


def _path(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _items(items: Any, inner: Inner) -> str:
    return f"({', '.join(map(inner, items))})"


_FORMS: tuple[tuple[Any, Callable[[Any, Inner], str]], ...] = (
    (Enum, lambda value, inner: f"{_path(type(value))}.{value.name}"),
    (
        type(None) | bool | int | float | complex | str | bytes | range | type(Ellipsis),
        lambda value, inner: repr(value),
    ),
    (
        torch.Size | torch.dtype | torch.layout | torch.memory_format | torch.device,
        lambda value, inner: str(value),
    ),
    (slice, lambda value, inner: _items((value.start, value.stop, value.step), inner)),
    (types.FunctionType, _function),
    (types.BuiltinFunctionType, _builtin),
    (types.MethodType, lambda value, inner: _items((value.__func__, value.__self__), inner)),
    (types.ModuleType, lambda value, inner: value.__name__),
    (type, lambda value, inner: _path(value)),
    (
        functools.partial,
        lambda value, inner: _items((value.func, value.args, value.keywords), inner),
    ),
    (torch.nn.Module, _module),
    (tuple | list, _items),
    (set | frozenset, lambda value, inner: f"({', '.join(sorted(map(inner, value)))})"),
    (Mapping, lambda value, inner: f"({', '.join(_named(value, inner))})"),
    (LeftOut, lambda value, inner: _path(type(value))),
)


@functools.lru_cache(maxsize=1024)
def code_digest(code: types.CodeType) -> str:
    """A digest of what code computes; lines and files do not count."""
    inner = [code_digest(x) if inspect.iscode(x) else told(x) for x in code.co_consts]
    said = (code.co_code.hex(), code.co_names, code.co_freevars, code.co_varnames, inner)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]
