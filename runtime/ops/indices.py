"""Indices into a dim that is split: each rank looks up its own part of them, so none would miss
what no rank has.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from types import FrameType

import torch
from torch import Tensor

from shardwright.runtime.errors import InputError


def check_indices(known: Tensor, what: str, size: int) -> None:
    """Refuse indices out of range, as one device does. ``known``: whether each of them is in range.

    Raises :class:`InputError`. On a GPU, which is not waited for, its assertion fails as those of
    torch's own kernels do.
    """
    try:
        torch._assert_async(known.all(), f"{what} is out of range: {_why(size)}")
    except RuntimeError as error:
        raise _out_of_range(what, size) from error


def looked_up(table: Tensor, indices: Tensor, what: str) -> Tensor:
    """What a 1-D ``table`` has at ``indices [n]``. Refuses indices out of range like
    :func:`check_indices`, without a further operator.
    """
    try:
        return table.index_select(0, indices)
    except IndexError as error:
        raise _out_of_range(what, len(table)) from error


def _out_of_range(what: str, size: int) -> InputError:
    return InputError(
        f"{what} is out of range",
        where=_generated_line(),
        why=_why(size),
        hint="compare the inputs with the sizes of the model",
    )


def _why(size: int) -> str:
    return f"all of them are from 0 to {size - 1}"


def _generated_line() -> str | None:
    """The line of the generated file that runs now, and the layer that it runs for, as far as it is
    known: ``gencode0.py:88 (model.layers.3)``. ``None`` outside of generated code.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = os.path.basename(frame.f_code.co_filename)
        if name.startswith("gencode"):
            # Methods of layers are handed the scope of their layer. In forward itself a comment
            # stands above what belongs to a module.
            layer = getattr(frame.f_locals.get("block"), "_path", None) or _section(frame)
            return f"{name}:{frame.f_lineno}" + (f" ({layer})" if layer else "")
        frame = frame.f_back
    return None


def _section(frame: FrameType) -> str | None:
    """The module in the last comment that stands by itself above the line of a frame."""
    for line in range(frame.f_lineno, frame.f_code.co_firstlineno, -1):
        found = re.fullmatch(r"\s*# ([\w.]+)\s*", linecache.getline(frame.f_code.co_filename, line))
        if found:
            return found[1]
    return None
