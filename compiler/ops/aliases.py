"""The callables that mean an operator, and how their arguments become those of the canonical one.

One operator has many names: ``torch.add``, ``Tensor.add``, ``Tensor.add_``, ``Tensor.__radd__``,
``torch.special.expit``. In-place names mean the functional operator; whoever reads a trace
redirects the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ops.definitions import Normalise

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_NAMESPACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.special)


def callables(*names: str, namespaces: tuple[Any, ...] = _NAMESPACES) -> list[Any]:
    """Every function and method of torch with one of these names, with and without a trailing
    underscore.

    Special names (``__add__``) are looked up in ``Tensor`` alone.
    """
    found: list[Any] = []
    for name in names:
        for namespace in (torch.Tensor,) if name.startswith("__") else namespaces:
            for spelling in (name, f"{name}_"):
                function = getattr(namespace, spelling, None)
                if callable(function) and function not in found:
                    found.append(function)
    return found


def methods(*names: str) -> list[Any]:
    """Methods of tensors only, for names that mean something else elsewhere."""
    return callables(*names, namespaces=(torch.Tensor,))


def functions(*names: str) -> list[Any]:
    """Functions of ``torch`` only."""
    return callables(*names, namespaces=(torch,))


def getter(name: str) -> Any:
    """What a trace sees when a property of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


def through(normalise: Normalise, aliases: list[Any]) -> list[tuple[Any, Normalise]]:
    """The aliases, each with its arguments rewritten first."""
    return [(alias, normalise) for alias in aliases]


def rewriting(function: Callable[..., Kwargs]) -> Normalise:
    """A normaliser from a function that has the alias's parameters and returns the canonical
    arguments by name.
    """

    def normalise(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return (), function(*args, **kwargs)

    return normalise


def swapped(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The operands of a reflected operator in the order of the plain one."""
    first, second, *rest = args
    return (second, first, *rest), kwargs


def without(*names: str, after: int | None = None) -> Normalise:
    """Drops keyword arguments that do not matter, and positional ones after the first ``after``."""

    def normalise(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return args[:after], {key: value for key, value in kwargs.items() if key not in names}

    return normalise
