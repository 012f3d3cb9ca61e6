"""Which ranks play a role together: all groups of a job by role, as numbers.

An example: tensor 2 x data 2 x pipeline 2 in Megatron's order (``tp-cp-ep-dp-pp``).

    role       groups                     what its ranks share
    tensor     [0,1] [2,3] [4,5] [6,7]    the layers of one stage, each in pieces
    data       [0,2] [1,3] [4,6] [5,7]    nothing: each reads samples of its own
    pipeline   [0,4] [1,5] [2,6] [3,7]    samples that go from stage to stage
    model      [0,1,4,5] [2,3,6,7]        one copy of the model

A table is made of sizes and an order (:meth:`RoleTable.of_sizes`), or of the meshes of a plan
(:meth:`RoleTable.of_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.rank_groups import mesh_of_order, rank_groups

Role = Literal[
    "data",
    "tensor",
    "pipeline",
    "model",
    "context",
    "expert",
    "expert_tensor",
    "expert_data",
]

Groups = tuple[tuple[int, ...], ...]

_DENSE: dict[Role, tuple[str, ...]] = {
    "data": ("dp",),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "model": ("tp", "pp"),
    "context": ("cp",),
}
"""The axes of an order along which the ranks of a role differ."""

_EXPERT: dict[Role, str] = {"expert": "ep", "expert_tensor": "tp", "expert_data": "dp"}
"""The axes of expert layers, which lay a grid of their own over the ranks of a stage: there ``tp``
and ``dp`` have other sizes, and ``cp`` is 1.
"""

UNITS, POSITIONS = "units", "pp"
"""How the axes around a stage's mesh are called in the grid of a plan."""

_BATCH_AXES = frozenset({"dp", "edp", "ep", "ep2", "etp"})
_CONTEXT_AXES = frozenset({"cp", "cp2"})
_EXPERT_AXES = frozenset({"ep", "ep2", "tp_ep", "tp_ep2"})
_EXPERT_TENSOR_AXES = frozenset({"tp", "tp2", "etp"})


@dataclass(frozen=True)
class Sizes:
    """The sizes of an :class:`~shardwright.MPU`, as they were asked for."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None


@dataclass(frozen=True)
class RoleTable:
    """The groups of all ranks by role.

    ``groups``: of each role; a rank is in exactly one group of each. A role is missing where there
    is no such group: ``pipeline``, where stages have different numbers of ranks. ``positions``: the
    ranks of each place of the pipeline. ``first``, ``last``: the ranks that run the first and the
    last stage. ``grid`` and ``grid_ranks``: all ranks as a grid of named axes, major to minor,
    where they form one. ``takes_wholes``: the model cuts what it is given, as compiled ones do;
    else ranks of a ``context`` group read pieces of the sequence.
    """

    groups: Mapping[Role, Groups]
    positions: Groups
    first: frozenset[int]
    last: frozenset[int]
    grid: Mesh | None = None
    grid_ranks: tuple[int, ...] = ()
    takes_wholes: bool = False

    @classmethod
    def of_sizes(cls, sizes: Sizes, num_ranks: int, order: str) -> RoleTable:
        """The table of ``num_ranks`` ranks, numbered by ``order`` (see
        :func:`~shardwright.rank_groups`). Data-parallel ranks are as many as remain.

        Raises :class:`ConfigError` for sizes that do not divide the ranks, an axis of several ranks
        that the order lacks, and expert layers whose stages would be other ranks.
        """
        dense = {"tp": sizes.tensor, "cp": sizes.context, "pp": sizes.pipeline}
        # Megatron's rule: what the other sizes leave of the ranks.
        dense["dp"] = _remaining(num_ranks, dense, "data-parallel")
        _check_names(order)
        groups: dict[Role, Groups] = {
            role: _frozen(rank_groups(order, dense, axes)) for role, axes in _DENSE.items()
        }
        groups |= _expert_groups(sizes, num_ranks, order, groups)
        positions = tuple(zip(*groups["pipeline"], strict=True))
        axes = (axis for axis in mesh_of_order(order, dense).axes if axis[0] != "ep")
        return cls(
            groups,
            positions,
            frozenset(positions[0]),
            frozenset(positions[-1]),
            Mesh(tuple(axes)),
            tuple(range(num_ranks)),
        )

    @classmethod
    def of_plan(
        cls, stages: Sequence[tuple[Mesh, Sequence[int]]], unit_size: int, num_units: int
    ) -> RoleTable:
        """The table of ``num_units`` units that run one plan. ``stages``: the mesh of each, and the
        unit ranks that it lies on, in the order of the mesh; a plan without a pipeline is one.

        Units read samples of their own, so they are the data-parallel ranks. The ranks of a unit
        read the same samples: axes of its mesh that split the batch belong to ``model``.
        """
        # Several stages may lie on one position, as in interleaved schedules: each position counts
        # once.
        places = list(dict.fromkeys((mesh, tuple(ranks)) for mesh, ranks in stages))
        # The first rank of each unit. All else is worked out for one unit and moved by these.
        starts = range(0, unit_size * num_units, unit_size)
        positions = [tuple(s + r for s in starts for r in ranks) for _, ranks in places]
        groups: dict[Role, Groups] = {
            "data": tuple(tuple(s + rank for s in starts) for rank in range(unit_size)),
            "model": tuple(tuple(range(s, s + unit_size)) for s in starts),
        }
        for role in _AXES_OF_PLANS:
            inside = [
                tuple(ranks[index] for index in group)
                for mesh, ranks in places
                for group in mesh.groups(_axes_of(role, mesh))
            ]
            groups[role] = tuple(tuple(s + r for r in group) for s in starts for group in inside)
        grid: Mesh | None = None
        grid_ranks: tuple[int, ...] = ()
        # Positions of different sizes have no rank that corresponds, so no pipeline groups.
        if len({len(ranks) for ranks in positions}) == 1:
            groups["pipeline"] = tuple(tuple(sorted(g)) for g in zip(*positions, strict=True))
        if len({mesh for mesh, _ in places}) == 1:
            grid = Mesh(((UNITS, num_units), (POSITIONS, len(places)), *places[0][0].axes))
            grid_ranks = tuple(s + r for s in starts for _, ranks in places for r in ranks)
        first, last = (frozenset(s + r for s in starts for r in stages[i][1]) for i in (0, -1))
        return cls(groups, tuple(positions), first, last, grid, grid_ranks, True)

    def group(self, role: Role, rank: int) -> tuple[int, ...]:
        """The ranks that play a role with ``rank``, itself included, ascending."""
        return self._group_of[role][rank]

    def index(self, role: Role, rank: int) -> int:
        """Which of the ranks of its group ``rank`` is."""
        return self.group(role, rank).index(rank)

    def position(self, rank: int) -> int:
        """The place of ``rank`` in the pipeline."""
        return next(i for i, ranks in enumerate(self.positions) if rank in ranks)

    @cached_property
    def _group_of(self) -> dict[Role, dict[int, tuple[int, ...]]]:
        """The group of each rank by role: tables of thousands of ranks are asked for all of
        them.
        """
        return {
            role: {rank: group for group in groups for rank in group}
            for role, groups in self.groups.items()
        }


_AXES_OF_PLANS: tuple[Role, ...] = ("tensor", "context", "expert", "expert_tensor", "expert_data")


def _axes_of(role: Role, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a plan's mesh along which a role's ranks differ. Policies name their axes
    (``dp``, ``tp``, ``tp2``, ``cp``, ``ep``, ...); an axis of any other name splits the model.
    """
    # Without experts there is no grid of theirs, and no ranks that differ in it.
    has_experts = bool(_EXPERT_AXES & set(mesh.names))
    found = {
        "tensor": lambda name: name not in _BATCH_AXES | _CONTEXT_AXES,
        "context": lambda name: name in _CONTEXT_AXES,
        "expert": lambda name: name in _EXPERT_AXES,
        "expert_tensor": lambda name: has_experts and name in _EXPERT_TENSOR_AXES,
        "expert_data": lambda name: has_experts and name not in _EXPERT_AXES | _EXPERT_TENSOR_AXES,
    }[role]
    return tuple(filter(found, mesh.names))


def _check_names(order: str) -> None:
    known = ("tp", "cp", "ep", "dp", "pp")
    for name in order.split("-"):
        if name not in known:
            raise ConfigError(
                f"the order {brief(order)} has an unknown axis {brief(name)}",
                why="the axes are tp (tensor), cp (context), ep (expert), dp (data), pp (pipeline)",
                hint=did_you_mean(name, known),
            )


def _expert_groups(
    sizes: Sizes, num_ranks: int, order: str, dense: Mapping[Role, Groups]
) -> dict[Role, Groups]:
    """The groups of expert layers. Without sizes of their own these lie as all other layers do."""
    # Megatron's layout: the data-parallel ranks of an expert are then also those of context
    # parallelism, which hold the same weights.
    if sizes.expert == 1 and sizes.expert_tensor is None:
        alone = tuple((rank,) for rank in range(num_ranks))
        copies = rank_groups(
            order,
            {
                "tp": sizes.tensor,
                "cp": sizes.context,
                "pp": sizes.pipeline,
                "dp": num_ranks // (sizes.tensor * sizes.context * sizes.pipeline),
            },
            ("dp", "cp"),
        )
        return {
            "expert": alone,
            "expert_tensor": dense["tensor"],
            "expert_data": _frozen(copies),
        }
    # Expert layers have a grid of their own over the same ranks. Only the stages must agree, as
    # activations go from one to the next.
    etp = sizes.tensor if sizes.expert_tensor is None else sizes.expert_tensor
    inside = {"tp": etp, "ep": sizes.expert, "pp": sizes.pipeline}
    inside["dp"] = _remaining(num_ranks, inside, "expert-data-parallel")
    stages = _frozen(rank_groups(order, inside, "pp"))
    if stages != dense["pipeline"]:
        raise ConfigError(
            "the stages of expert layers would be other ranks than those of the rest",
            why=f"in the order {order!r} neighbouring stages are {_stride(dense['pipeline'])} "
            f"ranks apart outside of experts, and {_stride(stages)} within them",
            hint="put pp last in the order, or choose expert sizes with which both agree",
        )
    return {role: _frozen(rank_groups(order, inside, axis)) for role, axis in _EXPERT.items()}


def _stride(pipeline: Groups) -> int:
    return pipeline[0][1] - pipeline[0][0]


def _remaining(num_ranks: int, sizes: Mapping[str, int], what: str) -> int:
    """The number of ranks of each kind that ``sizes`` leave."""
    product = math.prod(sizes.values())
    if num_ranks % product:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{num_ranks} ranks do not divide into groups of {product}",
            why=f"{text} is {product}, and {what} ranks are what remains",
            hint=f"start a multiple of {product} ranks, or choose sizes whose product divides "
            f"{num_ranks}",
        )
    return num_ranks // product


def _frozen(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(map(tuple, groups))
