"""How unevenly tokens choose experts, as it is assumed: how many times its even share of rows the
busiest rank gets.

It is one number for all layers, or one for each: ``{"model.layers.0.mlp": 1.1, "model.layers.1":
2.3}`` names modules, and covers the experts below each of them.

A rank gets all rows at most, which is as many times its even share as there are ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.compiler.ops.tables.experts import IMBALANCE
from shardwright.runtime.errors import ConfigError

Imbalance = float | Mapping[str, float]


def imbalance_problem(imbalance: Any, where: str) -> str | None:
    """What is wrong with an imbalance, in words; ``None`` if nothing is."""
    by_layer = imbalance if isinstance(imbalance, Mapping) else {"": imbalance}
    if not by_layer:
        return f"{where} names no layers"
    for name, value in by_layer.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # The comparison is false for what is no number, and infinity means nothing.
        if not isinstance(name, str) or not number or not 1 <= value < float("inf"):
            shown = f"{where} of {name!r}" if isinstance(imbalance, Mapping) else where
            return f"{shown} is {value!r}, not a number from 1"
    return None


def check_reachable(imbalance: Imbalance, num_ranks: int, where: str) -> None:
    """Raise :class:`ConfigError` for more than one of ``num_ranks`` ranks can get.

    The default figure passes on one rank, too: it is there whether anybody gave it or not.
    """
    by_layer = imbalance if isinstance(imbalance, Mapping) else {"": imbalance}
    for name, value in by_layer.items():
        if value != _capped(value, num_ranks):
            shown = f"{where} of {name!r}" if isinstance(imbalance, Mapping) else where
            raise ConfigError(
                f"{shown} is {value:g}, more than a rank can get",
                why=f"all tokens together are {num_ranks} times the even share of a rank",
                hint=f"give {num_ranks} for the worst case",
            )


def capped(imbalance: Imbalance, num_ranks: int) -> Imbalance:
    """An imbalance with what a rank can get, where it says more; the default stays as it is."""
    if not isinstance(imbalance, Mapping):
        return _capped(imbalance, num_ranks)
    return {name: _capped(value, num_ranks) for name, value in imbalance.items()}


def _capped(value: float, num_ranks: int) -> float:
    return value if value == IMBALANCE else min(value, float(num_ranks))


def imbalance_text(imbalance: Imbalance) -> str:
    """An imbalance in a few words: ``1.25``, or ``1.1 to 2.3 (by layer)``."""
    if not isinstance(imbalance, Mapping):
        return f"{imbalance:g}"
    low, high = min(imbalance.values()), max(imbalance.values())
    return f"{low:g} to {high:g} (by layer)"


def scaled(imbalance: Imbalance, factor: float) -> Imbalance:
    """An imbalance that is so many times as large."""
    if not isinstance(imbalance, Mapping):
        return imbalance * factor
    return {name: value * factor for name, value in imbalance.items()}


def of_layer(path: str, imbalance: Imbalance) -> float | None:
    """The imbalance of the experts of a module: that of the longest name that covers it, ``None``
    if no name does.
    """
    if not isinstance(imbalance, Mapping):
        return imbalance
    covering = [name for name in imbalance if path == name or path.startswith(f"{name}.")]
    return imbalance[max(covering, key=len)] if covering else None
