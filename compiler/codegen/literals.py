"""Source text of literals, and of names that hold a layer's number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardwright.compiler.ir.quote import quoted, quoted_with_layer
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops.render import Source, argument_source
from shardwright.compiler.plan.repeated_blocks import layered


def source(literal: Any) -> str:
    """The source of a literal."""
    return argument_source(literal, lambda value: value.name, to_python)


def named(leaf: Any, container: tuple[str, int] | None, write: Callable[[str], str] = str) -> Any:
    """A name of a layer as source that puts in the layer's number; anything else as it is."""
    parts = layered(leaf, container, write) if isinstance(leaf, str) else leaf
    return Source(quoted_with_layer(*parts)) if isinstance(parts, tuple) else leaf


def tuple_text(items: Iterable[str]) -> str:
    """The source of a tuple of sources."""
    words = list(items)
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def range_text(start: int, length: int) -> str:
    """The source of consecutive numbers."""
    return f"range({start}, {start + length})" if start else f"range({length})"


def names_text(names: Iterable[str]) -> str:
    """The source of a tuple of names."""
    return tuple_text(map(quoted, names))


def joined_text(joined_axes: Iterable[tuple[str, ...]]) -> str:
    """The source of sets of axes."""
    return tuple_text(map(names_text, joined_axes))
