"""Degrees that a user fixes, the rest left to the search: the option ``degrees``, ``{"tp": 4}`` or
``{"sp": 1}``.

A degree belongs to a role (``dp``, ``sp``, ``ep``, ``tp``) and says among how many ranks its dims
are split. Above 1 it is an axis of every mesh that is tried, named like the role, which splits the
dims of the role and no others; other axes leave these dims alone. With 1 every axis does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.candidates.axis_names import ROLES, role_of
from shardwright.policies.autodist.candidates.meshes import meshes
from shardwright.runtime.errors import ConfigError, did_you_mean
from shardwright.runtime.layout import Mesh


def check_degrees(degrees: Mapping[str, int], num_ranks: int, num_positions: int | None) -> None:
    """Raise :class:`ConfigError` for degrees of no role, or that do not divide the ranks of a
    pipeline position.
    """
    roles = tuple(role for role, _ in ROLES)
    for role, degree in degrees.items():
        if role not in roles:
            hint = f"num_stages={degree}" if role == "pp" else did_you_mean(role, roles)
            raise ConfigError(f"option 'degrees' of policy 'autodist' has no {role!r}", hint=hint)
        if degree < 1:
            raise ConfigError(
                f"option 'degrees' of policy 'autodist' has {role}={degree}",
                why="a degree is at least 1",
            )
    total, own = math.prod(degrees.values()), num_ranks // (num_positions or 1)
    if own % total:
        told = ", ".join(f"{role}={degree}" for role, degree in degrees.items())
        raise ConfigError(
            f"the degrees of policy 'autodist' do not divide the ranks: {told}",
            why=f"their product is {total}, and "
            f"{'a pipeline position' if num_positions else 'the plan'} has {own} ranks",
        )


def meshes_with(degrees: Mapping[str, int], size: int, max_axes: int) -> list[Mesh]:
    """Every mesh of ``size`` ranks with an axis for each degree above 1, in any order, and as many
    others as ``max_axes`` leaves, at least one where ranks are left.
    """
    fixed = [(role, degree) for role, degree in degrees.items() if degree > 1]
    total = math.prod(degree for _, degree in fixed)
    if size % total:
        return []
    found: dict[Mesh, None] = {}
    for rest in meshes(size // total, max(1, max_axes - len(fixed))):
        for order in itertools.permutations((*fixed, *rest.axes)):
            if [axis for axis in order if axis in rest.axes] == list(rest.axes):
                found[Mesh(tuple(order))] = None
    return list(found)


def forbidden(
    graph: IRGraph, mesh: Mesh, degrees: Mapping[str, int], forbid: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """What axes of a mesh must leave alone for the degrees, besides what a user forbids."""
    found = {dim: tuple(axes) for dim, axes in forbid.items()}
    for dim in sorted(
        {known.name for body in graph.bodies if body.dims for known in body.dims.classes}
        if degrees
        else ()
    ):
        role = role_of(dim)
        axes = tuple(
            axis for axis in mesh.names if axis != role and (axis in degrees or role in degrees)
        )
        if axes:
            found[dim] = tuple(dict.fromkeys((*found.get(dim, ()), *axes)))
    return found
