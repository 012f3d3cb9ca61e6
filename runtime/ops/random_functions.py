"""The operators of a compiled module that draw random numbers, under the names of their modules.

A generated class declares each, with the axes along which ranks draw different numbers, and calls
it as the original does:

    def declare(self):
        for layer in range(12):
            self.random_function(f"h.{layer}.mlp.dropout", dropout, "dp")

    ...
    y = self.random.h[layer].mlp.dropout(x, p=0.1, training=self.training)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.runtime.ops.random import NO_SIZES, Draw, NamedSizes


class RandomFunctions:
    """A level of names, with functions and further levels as attributes and by index. It is called
    if it is a function itself. It has no methods, whose names a model's would hide.
    """

    def __init__(self) -> None:
        self._below: dict[str, RandomFunctions] = {}
        self._function: Callable[..., Any] | None = None
        self._draw: Draw | None = None
        self._layout: str | None = None

    def __bool__(self) -> bool:
        """Whether there is any function."""
        return self._function is not None or bool(self._below)

    def __getitem__(self, path: int | str) -> RandomFunctions:
        """What lies at a path of names: ``random.h[0]``, ``random["a-b.dropout"]``."""
        level = self
        for name in str(path).split("."):
            level = level._below[name]
        return level

    def __call__(self, *args: Any, sizes: NamedSizes = NO_SIZES, **keywords: Any) -> Any:
        """What the function draws. ``sizes``: the values of sizes that its layout names."""
        draw = self._draw
        assert self._function is not None and draw is not None, "a level of names was called"
        if self._layout is not None:
            draw = draw.rng.draw(draw.name, layout=self._layout, sizes=sizes)
        return self._function(*args, draw=draw, **keywords)


def add_function(
    root: RandomFunctions,
    path: str,
    function: Callable[..., Any],
    draw: Draw,
    layout: str | None = None,
) -> None:
    """Add a function below a level. ``layout``: that of the whole tensor that is drawn; its sizes
    may have names, of which each call gives the values.
    """
    level = root
    for name in path.split("."):
        below = level._below.setdefault(name, RandomFunctions())
        # An underscore begins what a level needs itself: such names are read by index alone.
        if not name.startswith("_"):
            level.__dict__[name] = below
        level = below
    assert level._function is None, f"{path} is declared twice"
    level._function, level._draw, level._layout = function, draw, layout


def replace_functions(
    level: RandomFunctions, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let ``replaced(function)`` draw in the place of every function of a level and below it."""
    if level._function is not None:
        level._function = replaced(level._function)
    for below in level._below.values():
        replace_functions(below, replaced)
