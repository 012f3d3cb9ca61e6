"""Source text of literals, and of names that hold a layer's number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops.render import argument_source
from shardwright.compiler.plan.blocks import layered


class _Raw(str):
    """Source text that stands in an argument as it is."""

    __slots__ = ()

    def __new__(cls, text: str) -> _Raw:
        return super().__new__(cls, f"\N{SYMBOL FOR START OF TEXT}{text}")


def unraw(code: str) -> str:
    """A statement with the text of names from :func:`named` in place of the strings they stood for."""
    return re.sub("([\"'])\N{SYMBOL FOR START OF TEXT}(.*?)\\1", r'f"\2"', code)


def source(literal: Any) -> str:
    """The source of a literal."""
    return argument_source(literal, lambda value: value.name, to_python)


def named(leaf: Any, container: tuple[str, int] | None, write: Callable[[str], str] = str) -> Any:
    """A name of a layer as source that puts in the layer's number; anything else as it is."""
    text = layered(leaf, container, write) if isinstance(leaf, str) else leaf
    return leaf if text == leaf else _Raw(text)


def tuple_text(items: Iterable[str]) -> str:
    """The source of a tuple of sources."""
    words = list(items)
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def joined_text(joined_axes: Iterable[tuple[str, ...]]) -> str:
    """The source of sets of axes."""
    return tuple_text(tuple_text(f'"{axis}"' for axis in axes) for axes in joined_axes)
