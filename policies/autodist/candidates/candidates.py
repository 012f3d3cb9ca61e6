"""What the search tries: meshes of a stage, numbers of stages, schedules; and the plan that each of
them makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.policies.autodist.stages.tiers import lie
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Atom, Layout, Mesh

AXIS_NAMES = ("x", "y", "z")
"""What the axes are called until it is known what they split."""


BEYOND_NODE, FURTHER_AXIS = 2.0, 1.3
"""By how much a mesh is less likely to be the best that lies on several nodes, and one of an axis
more to be worth its time. They decide what is tried first.
"""


def meshes(size: int, max_axes: int = 2) -> list[Mesh]:
    """Every way to write ``size`` ranks as at most ``max_axes`` axes of two and more, major to
    minor, fewest axes first.
    """
    found = [sizes for count in range(1, max_axes + 1) for sizes in _factorizations(size, count)]
    return [Mesh(tuple(zip(AXIS_NAMES, sizes, strict=False))) for sizes in found or [()]]


def _factorizations(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of ``count`` factors above 1."""
    if count == 1:
        if size > 1:
            yield (size,)
        return
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorizations(size // first, count - 1))


def slower(num_positions: int, num_microbatches: int, longest_share: float) -> float:
    """How much longer a step takes for the positions that wait while a pipeline fills and drains,
    and where one operator, of so large a share of a forward and backward, is more than a
    position's.
    """
    return (1 + (num_positions - 1) / num_microbatches) * max(1.0, num_positions * longest_share)


def unlikely(mesh: Mesh, node_size: int) -> float:
    """How much longer a step is expected to take on a mesh, before anything is placed on it: where
    one position does not lie in a node; and how much longer it takes to see whether it does.
    """
    return (BEYOND_NODE if mesh.size > node_size else 1.0) * FURTHER_AXIS ** max(
        0, len(mesh.axes) - 1
    )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def stage_sizes(num_ranks: int) -> list[int]:
    """On how many ranks a stage may be that need not be like the others: any number of up to 7 that
    are no power of two; else divisors and powers of two, from a sixteenth of the ranks.
    """
    if num_ranks <= 7 and num_ranks & (num_ranks - 1):
        return list(range(1, num_ranks))
    return [
        n
        for n in range(1, num_ranks)
        if 16 * n >= num_ranks and (num_ranks % n == 0 or n & (n - 1) == 0)
    ]


@dataclass(frozen=True)
class Pace:
    """A schedule by name with the stages that each position runs."""

    schedule: str
    chunks: int


def paces(
    num_positions: int,
    num_microbatches: int,
    schedules: Sequence[str],
    chunks: int | None,
    most: int,
) -> list[Pace]:
    """The schedules that work with these numbers. ``chunks``: only that many; ``most``: stages that
    the model can have.
    """
    found = []
    for name in schedules:
        method = SCHEDULES[name]
        upper = method.max_chunks or max(method.min_chunks, 4)
        for count in range(method.min_chunks, upper + 1):
            if (chunks is not None and count != chunks) or num_positions * count > most:
                continue
            try:
                method.check(num_positions, num_microbatches, count)
            except PlanError:
                continue  # the number of microbatches is given, and some schedules need another
            found.append(Pace(name, count))
    return found


def with_pp(inner: Mesh, num_positions: int, place: int = 0) -> Mesh:
    """The mesh with a ``pp`` axis before its axis number ``place``."""
    return Mesh((*inner.axes[:place], ("pp", num_positions), *inner.axes[place:]))


def position_ranks(inner: Mesh, num_positions: int, place: int = 0) -> list[tuple[int, ...]]:
    """The ranks of every pipeline position, in the order of its mesh ``inner``."""
    grid = np.arange(num_positions * inner.size).reshape(
        [size for _, size in with_pp(inner, num_positions, place).axes]
    )
    return [tuple(row) for row in np.moveaxis(grid, place, 0).reshape(num_positions, -1).tolist()]


def inner_places(hardware: Hardware, inner: Mesh, num_positions: int) -> list[int]:
    """Where the pipeline axis may stand among those of a mesh, but for the outermost place: one for
    every way in which the ranks of all positions can lie on the tiers.
    """
    found: dict[bytes, int] = {}
    for place in range(len(inner.axes) + 1 if num_positions > 1 else 1):
        ranks = itertools.chain.from_iterable(position_ranks(inner, num_positions, place))
        found.setdefault(lie(hardware, tuple(ranks)), place)
    return [place for place in found.values() if place]


def staged(
    whole: Plan,
    starts: Sequence[str],
    num_positions: int,
    pace: Pace,
    num_microbatches: int,
    pp_place: int = 0,
) -> Plan:
    """A plan of the whole model on the mesh of a stage, dealt out over pipeline positions on a
    ``pp`` axis, which stands before axis number ``pp_place`` of the mesh.

    ``starts``: the first operators of stages 1, 2, ...
    """
    schedule = generate(pace.schedule, num_positions, num_microbatches, pace.chunks)
    inner = whole.mesh
    ranks = position_ranks(inner, num_positions, pp_place)
    stages = tuple(
        StagePlan(first, inner, ranks[schedule.placement[index]])
        for index, first in enumerate(["", *starts])
    )
    return replace(
        whole,
        mesh=with_pp(inner, num_positions, pp_place),
        stages=stages,
        schedule=pace.schedule,
        num_microbatches=num_microbatches,
    )


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
    """Of a dim by its name: ``tp`` for anything that no other role has."""
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
    return {axis for dim in layout.dims for atom in dim for axis in atom.axes}


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with other names for its axes; ``names`` may leave some as they are."""

    def layout(item: Layout) -> Layout:
        dims = tuple(
            tuple(Atom(atom.segments, tuple(new(a) for a in atom.axes)) for atom in dim)
            for dim in item.dims
        )
        return Layout(
            dims, tuple(sorted(map(new, item.partial))), tuple(sorted(map(new, item.grad_partial)))
        )

    def new(axis: str) -> str:
        return names.get(axis, axis)

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
