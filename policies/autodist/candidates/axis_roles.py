"""The roles of mesh axes: ``dp``, ``sp``, ``ep`` and ``tp``. Axes are named after what they split,
and a user may fix the degree of a role.

The option ``degrees`` is ``{"tp": 4}`` or ``{"sp": 1}``. A degree says among how many ranks the
dims of its role are split. Above 1 it is an axis of every mesh that is tried, named like the role,
which splits the dims of the role and no others; other axes leave these dims alone. With 1 every
axis does.

Example: on the mesh ``x=2 x y=4`` a plan splits the batch over ``x``, heads and ffn over ``y``. Its
axes are then called ``dp=2 x tp=4``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.meshes import meshes
from shardwright.runtime.atoms import Atom
from shardwright.runtime.errors import ConfigError, did_you_mean
from shardwright.runtime.layout import Layout, Mesh

ROLES: Sequence[tuple[str, frozenset[str]]] = (
    ("dp", frozenset({"batch"})),
    ("sp", frozenset({"seq", "query_seq", "key_seq"})),
    ("ep", frozenset({EXPERTS})),
    ("tp", frozenset({"heads", "kv_heads", "ffn", "vocab", "head_dim", "hidden"})),
)
"""What an axis is called by the dims that most of its splits cut."""


TOKENS = ("dp", "sp")
"""The roles whose dims an axis for experts may split too: outside of the experts it has tokens."""

COPIES = "copies"
"""What an axis is called whose ranks all do and hold the same."""

WHOLE = ("R", "G")
"""The strategies with which every rank of an axis computes everything."""


def role_of(dim: str) -> str:
    """The role of a dim by its name: ``tp`` for anything that no other role has. Where tokens are
    exchanged for experts, ``batch -> experts``, it is that of the experts.
    """
    if dim.count(" -> ") and EXPERTS in dim:
        return "ep"
    return next((role for role, members in ROLES if dim.rstrip("0123456789_") in members), "tp")


def named(plan: Plan, dims: Mapping[str, Mapping[str, str]], kept: Collection[str] = ()) -> Plan:
    """The plan with its axes called after what they split: ``dp``, ``sp``, ``ep``, or ``tp`` for
    anything else of the model; :data:`COPIES` where an axis splits nothing.

    ``dims``: operator and axis to the name of the dim that is split there. ``kept``: axes that have
    their name already.
    """
    # A vote: how many operators split a dim of each role along the axis.
    counts = {axis: dict.fromkeys([role for role, _ in ROLES], 0) for axis in plan.mesh.names}
    for by_axis in dims.values():
        for axis, dim in by_axis.items():
            counts[axis][role_of(dim)] += 1
    names = {axis: axis for axis in plan.mesh.names if axis in kept}
    for axis in plan.mesh.names:
        if axis in names:
            continue
        # The first of :data:`ROLES` wins where two have as many.
        role = max(counts[axis], key=lambda role: counts[axis][role])
        # No operator splits along it: it cuts stored parameters only, or copies everything.
        if not any(counts[axis].values()):
            role = (
                "tp" if any(axis in layout.cut_axes for layout in plan.stored.values()) else COPIES
            )
        # A second axis of one role is ``tp2``.
        taken = sum(1 for name in names.values() if name.rstrip("0123456789") == role)
        names[axis] = role if not taken else f"{role}{taken + 1}"
    return renamed(plan, names)


def copying_axes(plan: Plan) -> frozenset[str]:
    """The axes along which all ranks do and hold the same, whatever they are called: no operator
    splits anything along them, and no tensor is stored in pieces over them.
    """
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    axes = {name for mesh in meshes for name in mesh.names}
    for assignment in plan.strategies.values():
        axes.difference_update(axis for axis, does in assignment.items() if does not in WHOLE)
    layouts = [*plan.stored.values(), *plan.inputs.values(), *plan.outputs.values()]
    for layout in layouts:
        if isinstance(layout, Layout):
            axes.difference_update(layout.cut_axes, layout.partial)
    return frozenset(axes)


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with other names for its axes; ``names`` may leave some as they are."""

    def layout(item: Layout) -> Layout:
        dims = tuple(tuple(map(renamed_atom, dim)) for dim in item.dims)
        return Layout(
            dims, tuple(sorted(map(new, item.partial))), tuple(sorted(map(new, item.grad_partial)))
        )

    def new(axis: str) -> str:
        return names.get(axis, axis)

    def renamed_atom(atom: Atom) -> Atom:
        return replace(atom, axes=tuple(map(new, atom.axes)))

    def mesh(item: Mesh) -> Mesh:
        axes = tuple((new(axis), size) for axis, size in item.axes)
        return Mesh(axes, tuple((new(axis), count) for axis, count in item.turns))

    def by_axis(item: Mapping[str, str]) -> dict[str, str]:
        return {new(axis): value for axis, value in item.items()}

    # Every part of a plan that speaks of axes.
    return replace(
        plan,
        mesh=mesh(plan.mesh),
        strategies={op: by_axis(assignment) for op, assignment in plan.strategies.items()},
        stored={fqn: layout(item) for fqn, item in plan.stored.items()},
        inputs={name: layout(item) for name, item in plan.inputs.items()},
        outputs={
            path: layout(item) if isinstance(item, Layout) else item
            for path, item in plan.outputs.items()
        },
        stages=tuple(replace(stage, mesh=mesh(stage.mesh)) for stage in plan.stages),
        dims={op: by_axis(found) for op, found in plan.dims.items()},
        notes=tuple(replace(note, axis=new(note.axis)) for note in plan.notes),
    )


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
    # For example 16 ranks with tp=4: 4 ranks are left, so meshes of one axis more are tp=4 x x=4
    # and x=4 x tp=4, in both orders, as it matters which ranks are neighbours.
    fixed = [(role, degree) for role, degree in degrees.items() if degree > 1]
    total = math.prod(degree for _, degree in fixed)
    if size % total:
        return []
    found: dict[Mesh, None] = {}
    for rest in meshes(size // total, max(1, max_axes - len(fixed))):
        for order in itertools.permutations((*fixed, *rest.axes)):
            # The other axes have no names yet. Two orders of them would be the same mesh, so one is
            # kept.
            if [axis for axis in order if axis in rest.axes] == list(rest.axes):
                found[Mesh(tuple(order))] = None
    return list(found)


def forbidden(
    graph: IRGraph, mesh: Mesh, degrees: Mapping[str, int], forbid: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """What axes of a mesh must leave alone for the degrees, besides what a user forbids."""
    found = {dim: tuple(axes) for dim, axes in forbid.items()}
    # A degree such as ``tp=4`` is for its role alone: other axes leave the dims of that role to it.
    for dim in sorted(
        {known.name for body in graph.bodies if body.dims for known in body.dims.classes}
        if degrees
        else ()
    ):
        role = role_of(dim)
        axes = [axis for axis in mesh.names if axis != role]
        if role not in degrees:
            axes = [axis for axis in axes if axis in degrees]
        if role in TOKENS:  # experts may be on the axis that also splits tokens
            axes = [axis for axis in axes if axis != "ep"]
        if axes:
            found[dim] = tuple(dict.fromkeys((*found.get(dim, ()), *axes)))
    return found
