"""Which of two plans is simpler, and which of those that take about as long is taken.

Example: on nodes of 8, ``pp=2 x dp=2 x tp=16`` has two stages with two axes each, and the ranks of
both axes lie on several nodes. Without stages, those of ``dp=8 x tp=8`` lie on several for ``dp``
only: it is simpler. The same plan with ZeRO-1 is simpler than with ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True)
class Complexity:
    """What makes a plan harder to follow, and its step to foresee: ``stages`` of its pipeline (1
    without), ``axes`` of the mesh of a stage, and those that are ``far``, whose ranks the fastest
    links do not join; of stages that differ, the most. ``zero_stage``: of ZeRO, where the search
    has chosen it. Each stage of ZeRO splits what the one before splits, and more.
    """

    stages: int
    axes: int
    far: int
    zero_stage: int = 0

    @classmethod
    def of(cls, plan: Plan, hardware: Hardware) -> Complexity:
        placed = [(stage.mesh, stage.ranks) for stage in plan.stages]
        placed = placed or [(plan.mesh, tuple(range(plan.mesh.size)))]
        return cls.of_meshes(max(1, len(plan.stages)), placed, hardware, plan.zero_stage or 0)

    @classmethod
    def of_meshes(
        cls,
        num_stages: int,
        placed: Sequence[tuple[Mesh, tuple[int, ...]]],
        hardware: Hardware,
        zero_stage: int = 0,
    ) -> Complexity:
        """That of a plan with so many stages on these meshes, each with its ranks."""
        return cls(
            num_stages,
            max(len(_split_axes(mesh)) for mesh, _ in placed),
            max(_num_far(mesh, ranks, hardware) for mesh, ranks in placed),
            zero_stage,
        )

    def is_less_than(self, other: Complexity) -> bool:
        """Whether nothing is more, and something less."""
        counts = zip(astuple(self), astuple(other), strict=True)
        return self != other and all(own <= theirs for own, theirs in counts)


def simplest(audited: Sequence[Candidate], hardware: Hardware, within: float) -> Candidate:
    """The fastest plan, or one that takes at most the share ``within`` longer and is simpler: of
    several the fastest than which none is simpler. ``audited``: the fastest first.
    """
    chosen, limit_s = audited[0], (1 + within) * audited[0].step_s
    for candidate in audited[1:]:
        if candidate.step_s > limit_s:
            break
        least = Complexity.of(chosen.plan, hardware)
        if Complexity.of(candidate.plan, hardware).is_less_than(least):
            chosen = candidate
    return chosen


def _split_axes(mesh: Mesh) -> list[str]:
    return [name for name, size in mesh.axes if size > 1]


def _num_far(mesh: Mesh, ranks: Sequence[int], hardware: Hardware) -> int:
    """The axes of which some group is in two groups of the innermost tier."""
    node_of = hardware.tiers[0].group_of
    return sum(
        any(len({int(node_of[ranks[i]]) for i in group}) > 1 for group in mesh.groups(name))
        for name in _split_axes(mesh)
    )
