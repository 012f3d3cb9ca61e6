"""The names of mesh axes, after what they split: ``dp``, ``sp``, ``ep``, ``tp``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.layout import Atom, Layout, Mesh

ROLES: Sequence[tuple[str, frozenset[str]]] = (
    ("dp", frozenset({"batch"})),
    ("sp", frozenset({"seq", "query_seq", "key_seq"})),
    ("ep", frozenset({"experts"})),
    ("tp", frozenset({"heads", "kv_heads", "ffn", "vocab", "head_dim", "hidden"})),
)
"""What an axis is called by the dims that most of its splits cut."""


COPIES = "copies"
"""What an axis is called whose ranks all do and hold the same."""


def role_of(dim: str) -> str:
    """The role of a dim by its name: ``tp`` for anything that no other role has."""
    return next((role for role, members in ROLES if dim.rstrip("0123456789_") in members), "tp")


def named(plan: Plan, dims: Mapping[str, Mapping[str, str]], kept: Collection[str] = ()) -> Plan:
    """The plan with its axes called after what they split: ``dp``, ``sp``, ``ep``, or ``tp`` for
    anything else of the model; :data:`COPIES` where an axis splits nothing.

    ``dims``: operator and axis to the name of the dim that is split there. ``kept``: axes that have
    their name already.
    """
    counts = {axis: dict.fromkeys([role for role, _ in ROLES], 0) for axis in plan.mesh.names}
    for by_axis in dims.values():
        for axis, dim in by_axis.items():
            counts[axis][role_of(dim)] += 1
    names = {axis: axis for axis in plan.mesh.names if axis in kept}
    for axis in plan.mesh.names:
        if axis in names:
            continue
        role = max(counts[axis], key=lambda role: counts[axis][role])
        if not any(counts[axis].values()):
            role = (
                "tp" if any(axis in _cut_by(layout) for layout in plan.stored.values()) else COPIES
            )
        taken = sum(1 for name in names.values() if name.rstrip("0123456789") == role)
        names[axis] = role if not taken else f"{role}{taken + 1}"
    return renamed(plan, names)


def _cut_by(layout: Layout) -> set[str]:
    """The axes that cut some dim of a tensor."""
    found: set[str] = set()
    for dim in layout.dims:
        for atom in dim:
            found.update(atom.axes)
    return found


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
        return Atom(atom.segments, tuple(map(new, atom.axes)))

    def mesh(item: Mesh) -> Mesh:
        return Mesh(tuple((new(axis), size) for axis, size in item.axes))

    def by_axis(item: Mapping[str, str]) -> dict[str, str]:
        return {new(axis): value for axis, value in item.items()}

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
