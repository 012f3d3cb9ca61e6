"""Dynamic dims: sizes that stay symbolic while tracing.

Every name in ``dynamic_dims`` becomes one symbol of a :class:`ShapeEnv`; tensors get it in their
fake shapes, torch computes with it, and :meth:`Dynamic.size` turns what comes out into a sympy
expression over the user's names.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch._guards import GuardSource, Source
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shardwright.compiler.ir.size import DynamicSize, Size, simplify
from shardwright.compiler.ir.value import SourceLocation
from shardwright.compiler.trace.context.source import user_location
from shardwright.runtime.errors import TraceError, did_you_mean


@dataclass(frozen=True)
class _NamedSize(Source):
    """The place from which torch takes a symbol to come. (Its own sources are in ``torch._dynamo``,
    which takes a second to import.)
    """

    label: str

    @property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return self.label


class _WatchedShapeEnv(ShapeEnv):
    """Notes the user's line that first fixed a symbol, or tied two together."""

    def __init__(self) -> None:
        super().__init__(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self.fixed_at: dict[sympy.Basic, SourceLocation | None] = {}

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        result = super().evaluate_expr(*args, **kwargs)
        for replaced in self.replacements.keys() - self.fixed_at.keys():
            self.fixed_at[replaced] = user_location()
        return result


class Dynamic:
    """The dynamic dims of one trace.

    ``dims``: input path to ``{dim: name}``; ``shapes``: input path to the shape in the dummy
    arguments. Raises :class:`TraceError` for a path or dim that does not exist, for one name with
    two sizes, and for sizes below 2, which torch would take for broadcasting.
    """

    def __init__(
        self, dims: Mapping[str, Mapping[int, str]], shapes: Mapping[str, torch.Size]
    ) -> None:
        _check_paths(dims, shapes)
        # Without dynamic dims nothing of torch's symbolic shapes runs: sizes stay plain numbers.
        self.env = _WatchedShapeEnv() if dims else None
        self._dims = {
            # Dims may be counted from the end: -1 is the last one.
            path: {dim % max(len(shapes[path]), 1): name for dim, name in by_dim.items()}
            for path, by_dim in dims.items()
        }
        self._example: dict[str, int] = {}
        for path, by_dim in self._dims.items():
            for dim, name in by_dim.items():
                size = int(shapes[path][dim])
                if self._example.setdefault(name, size) != size:
                    raise TraceError(
                        f"dynamic dim {name!r} has two sizes in the dummy arguments",
                        where=f"dim {dim} of {path}",
                        why=f"{size} here, {self._example[name]} before",
                        hint="give dims that differ different names",
                    )
        self._sizes: dict[str, torch.SymInt] = {}
        self._names: dict[sympy.Basic, sympy.Symbol] = {}
        for name, size in self._example.items():
            if size < 2:
                raise TraceError(
                    f"dynamic dim {name!r} has size {size} in the dummy arguments",
                    why="a size of 0 or 1 takes special paths (broadcasting, empty tensors)",
                    hint="use an example with a size of at least 2",
                )
            self._sizes[name] = self._new_size(name, size)

    def _new_size(self, name: str, size: int) -> torch.SymInt:
        assert self.env is not None
        source = _NamedSize(name)
        # torch numbers its symbols; ours carry the user's name, which is what is printed and
        # generated.
        torch_symbol = self.env.create_symbol(
            size, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self._names[torch_symbol] = DynamicSize(name, size)
        return cast(
            torch.SymInt, self.env.create_symintnode(torch_symbol, hint=size, source=source)
        )

    def shape(self, path: str, shape: torch.Size) -> list[int | torch.SymInt]:
        """The shape of the input at ``path`` with symbols where it is dynamic."""
        names = self._dims.get(path, {})
        return [
            self._sizes[names[dim]] if dim in names else int(size) for dim, size in enumerate(shape)
        ]

    def size(self, size: Any) -> Size:
        """A size, or any other symbolic number, as an ``int`` or an expression over the names of
        dynamic dims, which it may be already: the recorder makes values of values.
        """
        if isinstance(size, (int, sympy.Basic)):
            return size
        expression = size.node.expr.xreplace(self._names)
        if getattr(expression, "is_Integer", False):
            return simplify(expression)
        # A scale such as ``size ** -0.5`` of a fixed size has become a number on the way.
        return float(expression) if expression.is_number and expression.is_Float else expression

    def conditions(self) -> tuple[sympy.Basic, ...]:
        """What the traced control flow took for granted about the sizes."""
        if self.env is None:
            return ()
        found: dict[str, sympy.Basic] = {}
        for guard in self.env.guards:
            # torch's symbols (``s0``) by the names that the user has given to the dims.
            expression = guard.expr.xreplace(self._names)
            found.setdefault(str(expression), expression)
        return tuple(
            expression
            for expression in found.values()
            if expression not in (sympy.true, sympy.false)
        )

    def check(self) -> None:
        """Raise :class:`TraceError` when the model fixed a dynamic dim, or made two of them
        equal.
        """
        if self.env is None:
            return
        for torch_symbol, name in self._names.items():
            # torch replaces a symbol once control flow has told what it equals.
            value = self.env.replacements.get(torch_symbol)
            if value is None:
                continue
            value = value.xreplace(self._names)
            fixed = (
                f"to {value}" if value.is_number else f"in terms of another one: {name} == {value}"
            )
            location = self.env.fixed_at.get(torch_symbol)
            raise TraceError(
                f"the model fixes the dynamic dim {name.name!r} {fixed}",
                where=str(location) if location else None,
                why=_why_fixed(text := _text_of(location)),
                hint=_instead(text, name.name)
                + ("" if value.is_number else f", or give both dims the name {value}"),
            )

    def all_dims(self) -> list[tuple[str, int, str]]:
        """``(input path, dim, name)`` of every dynamic dim."""
        return [
            (path, dim, name) for path, dims in self._dims.items() for dim, name in dims.items()
        ]


def _is_loop(text: str) -> bool:
    """Whether a line loops, as a statement or within brackets, as often as a size says."""
    return (text.startswith("for ") and " in " in text) or bool(_LOOP_OVER_RANGE.search(text))


_LOOP_OVER_RANGE = re.compile(r"\bfor\b.+\bin\b.*\brange\(")


def _why_fixed(text: str) -> str:
    """Why a line fixes a size, in words. ``text``: the line, if it is known."""
    if _is_loop(text):
        return (
            f"a loop in Python is traced for one number of steps, and this one runs over it: {text}"
        )
    reason = "this line needs the size as a number, or compares it with a fixed one"
    return f"{reason}: {text}" if text else reason


def _instead(text: str, name: str) -> str:
    """What to do about a line that fixes the dim ``name``."""
    if _is_loop(text):
        return (
            f"leave {name!r} out of dynamic_dims, pad inputs to a few lengths and compile once for "
            "each; or write the loop with a function that loops by itself (torch.cumsum, nn.LSTM)"
        )
    return (
        "compute with x.shape[...] instead (torch.sym_float(size) for float(size), math.sqrt for "
        f"another library's), or leave {name!r} out of dynamic_dims"
    )


def _text_of(location: SourceLocation | None) -> str:
    """The user's line."""
    return linecache.getline(location.file, location.line).strip() if location else ""


def _check_paths(dims: Mapping[str, Mapping[int, str]], shapes: Mapping[str, torch.Size]) -> None:
    """Raise :class:`TraceError` for a dynamic dim of an input that is not there."""
    for path, by_dim in dims.items():
        if path not in shapes:
            raise TraceError(
                f"dynamic_dims names an input that is not among the arguments: {path!r}",
                hint=did_you_mean(path, list(shapes)),
            )
        for dim in by_dim:
            if not -len(shapes[path]) <= dim < len(shapes[path]):
                raise TraceError(
                    f"dynamic_dims names dim {dim} of {path!r}, which has {len(shapes[path])} dims"
                )
