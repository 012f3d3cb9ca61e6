"""The modes of policy ``tensor``: their names, their axes, and the numbers of ranks that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["1d", "2d", "2.5d", "3d"]

AXES: Mapping[Mode, tuple[str, ...]] = {
    "1d": ("tp",),
    "2d": ("r", "c"),
    "2.5d": ("d", "r", "c"),
    "3d": ("i", "j", "k"),
}
"""The axes of a mode, major to minor."""


def fitting_sizes(mode: str, depth: int | None) -> str:
    """Some numbers of ranks that a mode could have, in words."""
    sizes = {
        "2d": [q * q for q in range(2, 6)],
        "2.5d": [q * q * (depth or 1) for q in range(2, 6)],
        "3d": [q**3 for q in range(2, 5)],
    }[mode]
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]} ranks would do"
