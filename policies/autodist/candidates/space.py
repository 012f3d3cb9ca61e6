"""What is searched, and what a placement is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.policies.autodist.placement.lean import Weight
from shardwright.policies.autodist.stages.chain import SHARE
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


class NoPlacement(PlanError):
    """No placement on a mesh fits. ``needed_bytes``: what any needs on a device; infinite where
    that is not known.
    """

    def __init__(self, why: str, needed_bytes: float) -> None:
        super().__init__("no placement fits", why=why)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class Placed:
    """The best placement of the whole model on one mesh. ``bound_s``: no placement on it takes less
    per step, for the reason ``proof``, of those in ``space``. ``interrupted``: it is what the
    solver had when it was interrupted from the keyboard.
    ``cost_s``: seconds per step by the problem. ``longest_s``: seconds per step that none takes
    less in one operator.
    """

    plan: Plan
    bound_s: float
    proof: str
    space: str
    interrupted: bool = False
    cost_s: float = 0.0
    longest_s: float = 0.0

    def share_s(self, num_positions: int) -> float:
        """Seconds per step that some pipeline position takes at least, in any placement on this
        mesh: its share of the work, or an operator, which one of them has whole.
        """
        return max(self.bound_s / num_positions, self.longest_s)


@dataclass(frozen=True)
class Wish:
    """What is to be placed: the whole model on a mesh over some ranks of the unit, in its order,
    the first of ``num_positions`` that will share it.

    ``memory_bytes``: what all of it may take on a rank, with ``in_flight`` microbatches'
    activations; those of ``recompute`` are computed again. ``hurried``: one that fits soon is
    wished for, be it not the best.
    ``lean``: what memory counts beside time, in the place of that limit.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    num_microbatches: int
    memory_bytes: float | None = None
    in_flight: int = 1
    recompute: tuple[str, ...] = ()
    hurried: bool = False
    lean: Weight | None = None
    num_positions: int = 1


Placer = Callable[[Wish], Placed]
"""Raises :class:`PlanError` if nothing is allowed, or nothing fits."""

Least = Callable[[Wish], float]
"""Seconds per step that no plan for a wish with memory is below, whatever layers are computed again
besides; ``inf`` where none fits.
"""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched. ``None`` leaves a choice to the search.

    ``num_positions``: pipeline positions; 1 is no pipeline. ``meshes``: of the ranks of one
    position, by their number.
    ``mixed``: whether stages may differ in placement and number of ranks, where the schedule has
    one for each position.
    ``simple``: whether plans of the simple policies count too, as far as they obey the
    ``constraints`` on their mesh.
    ``pp_place``: before which axis of the mesh the pipeline axis stands; 0 is outermost.
    ``recompute``: module paths computed again, whatever the memory; ``None``: layers, as few as
    memory asks for. ``audits``: how many candidates are audited at once; ``near``: only those
    predicted to take that many times what the best takes, or less; ``worth_s``: none that is
    predicted to take longer. ``tolerance``: stages begin between layers where a step takes at most
    so much longer than with other stages, as a share of it. ``block_share``: the most that a block
    of a stage of average length takes, where stages may begin elsewhere, too.
    """

    meshes: Mapping[int, Sequence[Mesh]]
    num_microbatches: int
    num_positions: int | None = None
    schedules: Sequence[str] = ("1f1b",)
    chunks: int | None = None
    stage_starts: Sequence[str] | None = None
    recompute: Sequence[str] | None = None
    memory_bytes: float = float("inf")
    audits: int = 6
    worth_s: float = float("inf")
    near: float = 1.1
    tolerance: float = 0.0
    block_share: float = SHARE
    mixed: bool = True
    simple: bool = False
    constraints: Callable[[Mesh], Constraints] = lambda mesh: Constraints()
    pp_place: int | None = None

    def may_have(self, num_stages: int) -> bool:
        """Whether a plan may have so many stages: any number, or that of which the begins are
        given.
        """
        return self.stage_starts is None or num_stages == len(self.stage_starts) + 1
