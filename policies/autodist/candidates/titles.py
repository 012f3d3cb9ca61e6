"""What a search calls its candidates, and its reasons against them.

Example: ``pp=2 x tp=4, 1f1b_interleaved x2, 3 of 8 layers computed again``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardwright.compiler.plan.amounts import amount
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.stages.chain import Part
from shardwright.runtime.layout import Mesh
from shardwright.runtime.mesh import in_turns

MOST_LISTED = 4
"""Reasons of a kind that an error has."""


def mesh_title(num_positions: int, mesh: Mesh, pp_place: int = 0) -> str:
    """``pp=2 x tp=4``; ``sp=4 zigzag``; ``one rank``."""
    sizes = [f"{axis}={size}{in_turns(mesh.turns_of(axis))}" for axis, size in mesh.axes]
    sizes = sizes if mesh.size > 1 else []
    if num_positions > 1:
        sizes.insert(pp_place, f"pp={num_positions}")
    return " x ".join(sizes) or "one rank"


_AXIS = rf"\b[{''.join(AXIS_NAMES)}]="
_SIZED = rf"{_AXIS}\d+(?: zigzag)?"
_UNNAMED = re.compile(rf"{_SIZED}(?: x {_SIZED})*")


def in_sizes(title: str) -> str:
    """A title as it is shown to people. Axes have names by what a plan splits along them, so those
    of a mesh without a plan have sizes only: ``pp=2 x x=2 x y=4`` is ``pp=2 x 2 x 4 ranks``, and
    ``x=4 zigzag x y=2`` is ``4 zigzag x 2 ranks``.
    """
    return _UNNAMED.sub(lambda found: f"{re.sub(_AXIS, '', found[0])} ranks", title)


def stages_title(meshes: Sequence[Mesh]) -> str:
    """``tp=4 | tp=2 | one rank``: the meshes of all stages, one after the other."""
    return " | ".join(mesh_title(1, mesh) for mesh in meshes)


def scheduled_title(title: str, named_schedule: NamedSchedule) -> str:
    """The title with the schedule and its chunks: ``pp=2 x tp=4, 1f1b_interleaved x2``."""
    if not named_schedule.name:
        return title  # there is no pipeline
    chunks = f" x{named_schedule.chunks}" if named_schedule.chunks > 1 else ""
    return f"{title}, {named_schedule.name}{chunks}"


def memory_words(needed_bytes: float, limit_bytes: float, *, verb: str = "needs") -> str:
    """Why nothing fits. ``needed_bytes``: infinite where there are fewer blocks than stages."""
    if needed_bytes == float("inf"):
        return "the model cannot be cut into so many stages"
    return (
        f"it {verb} {amount(needed_bytes, 'B', digits=4)} on a device, and "
        f"{amount(limit_bytes, 'B', digits=4)} are allowed"
    )


def refusals(found: SearchResult) -> list[str]:
    """Why nothing tried is the answer, a line each: what needs least memory first, and once what is
    said of many.
    """
    # What was too large, smallest first: the first line is what came nearest.
    large = sorted(
        found.refused.keys() & found.needed_bytes.keys(),
        key=lambda title: (found.needed_bytes[title], title),
    )
    lines = [f"{in_sizes(title)}: {found.refused[title]}" for title in large[:MOST_LISTED]]
    if len(large) > MOST_LISTED:
        lines.append(f"{len(large) - MOST_LISTED} more need as much or more")
    # Other reasons are said once, with the first candidate that has them.
    alike: dict[str, list[str]] = {}
    for title in (title for title in found.refused if title not in found.needed_bytes):
        alike.setdefault(found.refused[title], []).append(title)
    lines += [
        f"{first_of(titles)}: {reason}" for reason, titles in list(alike.items())[:MOST_LISTED]
    ]
    left = sum(map(len, list(alike.values())[MOST_LISTED:]))
    return [*lines, f"and {left} more, for other reasons"] if left else lines


def first_of(titles: Sequence[str]) -> str:
    """The first two, and how many more there are: ``tp=2, tp=4 and 3 more``; with semicolons where
    titles have commas.
    """
    has_commas = any("," in title for title in titles)
    shown = ("; " if has_commas else ", ").join(map(in_sizes, titles[:2]))
    if len(titles) <= 2:
        return shown
    return f"{shown}{'; and' if has_commas else ' and'} {len(titles) - 2} more"


def recompute_title(chosen: Sequence[Sequence[Part]], layers: Mapping[int, str]) -> str:
    """``, 3 of 8 layers computed again``, and of how many some modules."""
    whole = sum(1 for parts in chosen if any(part.path in layers.values() for part in parts))
    parts, all_layers = len(chosen) - whole, f"{len(layers)} layers"
    if whole and parts:
        return f", {whole} of {all_layers} and parts of {parts} computed again"
    if whole:
        return f", {whole} of {all_layers} computed again"
    return f", parts of {parts} of {all_layers} computed again" if parts else ""
