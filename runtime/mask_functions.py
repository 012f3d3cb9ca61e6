"""The functions of block masks (``flex_attention``) as data: what a function reads besides
positions, and a name for its code.

    def visible(b, h, q, k):
        return document[b, q] == document[b, k]

reads ``document``. So a block mask that is an argument of a model is an input like any other: its
function may close over other tensors in each call, but must have the same code.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwright.runtime.told import code_digest

_PLAIN = (torch.Tensor, torch.SymInt, torch.dtype, torch.device, bool, int, float, str, type(None))

_MADE_LIKE: dict[str, tuple[types.CodeType, dict[str, Any]]] = {}
"""The code of each function by its name, and the globals of its module."""


class MaskFunction:
    """A function as its code and what it reads. ``code``: where it is defined, and a digest of what
    it computes. ``reads``: variables around it, by name; functions among them are taken apart, too.
    """

    def __init__(self, code: str, reads: dict[str, Any]) -> None:
        self.code, self.reads = code, reads

    def made(self) -> types.FunctionType:
        """The function itself."""
        code, names = _MADE_LIKE[self.code]
        cells = tuple(types.CellType(_put_together(self.reads[name])) for name in code.co_freevars)
        return types.FunctionType(code, names, code.co_name, None, cells)


def taken_apart(function: Any) -> Any:
    """A function as :class:`MaskFunction`; the function itself where :func:`unreadable` says why
    not.
    """
    if unreadable(function) is not None:
        return function
    return _taken_apart(function)


def unreadable(function: Any) -> str | None:
    """Why a function cannot be taken apart: it must be Python's own, and read tensors, numbers, and
    functions like itself.
    """
    return next(_hindrances(function, "its function"), None)


def _hindrances(value: Any, what: str) -> Iterator[str]:
    if type(value) in (tuple, list):
        for item in value:
            yield from _hindrances(item, what)
    elif isinstance(value, types.FunctionType):
        if value.__defaults__ or value.__kwdefaults__:
            yield f"{what} has arguments with defaults"
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                found = cell.cell_contents
            except ValueError:  # a variable that is set later
                yield f"{what} reads {name!r}, which has no value yet"
                continue
            yield from _hindrances(found, repr(name))
    elif not isinstance(value, _PLAIN):
        yield f"{what} is of type {type(value).__name__}"


def _taken_apart(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_taken_apart, value))
    if not isinstance(value, types.FunctionType):
        return value
    code = value.__code__
    name = f"{value.__module__}.{value.__qualname__} {code_digest(code)}"
    _MADE_LIKE.setdefault(name, (code, value.__globals__))
    cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
    return MaskFunction(name, {name: _taken_apart(cell.cell_contents) for name, cell in cells})


def _put_together(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_put_together, value))
    return value.made() if isinstance(value, MaskFunction) else value


BLOCK_MASK = "torch.nn.attention.flex_attention:BlockMask"
"""The import path of the class of block masks."""


def block_mask_children(mask: Any) -> tuple[tuple[str, Any], ...]:
    """What there is to know of a block mask: its blocks follow from it."""
    return ("seq_lengths", tuple(mask.seq_lengths)), ("mask_mod", taken_apart(mask.mask_mod))


def block_mask_of(cls: type, fields: Mapping[str, Any]) -> Any:
    """A block mask of one block, all of which its function decides."""
    function, lengths = fields["mask_mod"], fields["seq_lengths"]
    if isinstance(function, MaskFunction):
        function = function.made()
    size = max(128, *lengths)
    make: Any = cls.from_kv_blocks  # type: ignore[attr-defined]
    with torch.utils._python_dispatch._disable_current_modes():
        blocks = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        return make(*blocks, BLOCK_SIZE=size, mask_mod=function, seq_lengths=lengths)
