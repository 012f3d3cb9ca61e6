"""What the steps of a search share: what is asked, the time there is, what is found so far; and how
candidates are made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.mesh_requests import (
    MeshRequest,
    NoPlacement,
    PipelineMesh,
    Place,
    PlacedMesh,
    PlacedModel,
)
from shardwright.policies.autodist.candidates.results import (
    Candidate,
    CutRequest,
    LoweredPlacement,
    SearchResult,
    time_over,
)
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, named_schedules
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.candidates.simpler import Complexity
from shardwright.policies.autodist.candidates.titles import memory_words
from shardwright.policies.autodist.cutting.cut_stages import Cutter
from shardwright.policies.autodist.search.step_estimates import StepEstimates
from shardwright.policies.autodist.stages.split_chain import NoFit, NoGain
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.context_axes import balancing_turns
from shardwright.runtime.activity import tell
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

TRYING_SHARE = 0.8
"""The share of the time limit after which nothing further is tried: the rest is for audits."""

AUDITS_KEPT = 2
"""The number of audits that must have time behind that share, if more is to be tried."""

BOUNDS_SHARES = (0.1, 0.2)
"""The share of the time limit that is kept for raising the bounds of pipelines, and the most that
this may take.
"""

TRIED = "trying a mesh"
"""What the clock calls cutting a placement into stages for all schedules."""

AUDIT = "audit"
"""What the clock calls the lowering and audit of a plan."""

ESTIMATE = "estimating meshes"
"""What the clock calls estimating what the plans of simple policies take."""

PLACING = 1.5
"""How many times as long as the estimates a placement on a mesh of one axis is expected to take,
where none was made yet.
"""

MORE_AXES = 8.0
"""How many times as long as on a mesh of one axis less a placement is expected to take, where none
was made yet.
"""


class SearchState:
    """What is asked, the time there is, and what is found so far. ``result`` is valid at any time.

    ``placements``: those on the first ranks, lowered, which stages that differ may choose.
    """

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        hardware: Hardware,
        space: SearchSpace,
        place: Place,
        optimizer: OptimizerMemory,
        times: OperatorTimes | None,
        clock: Clock,
        alarm: Alarm | None = None,
    ) -> None:
        self.graph, self.config, self.hardware = graph, config, hardware
        self.space, self.place = space, place
        self.optimizer, self.times, self.clock = optimizer, times, clock
        self.alarm = alarm or Alarm()
        self.cutter = Cutter(graph, space)
        self.placements: list[LoweredPlacement] = []
        self._last_lowered: list[LoweredPlacement] = []  # the last one on other ranks
        self.result = SearchResult()
        self._likely_s: dict[PipelineMesh, float] = {}
        self._in_zigzag: StepEstimates | None = None

    # ---------------------------------------------------------------------------------------------
    # time, and the best so far

    def tell(self, title: str) -> None:
        """Say where the search is, and what it has found."""
        best = self.result.best
        found = "" if best is None else f"; best so far {amount(best.step_s, 's')}, {best.title}"
        share = (
            self.clock.share_of(self.clock.seconds) if math.isfinite(self.clock.limit_s) else None
        )
        tell(f"{title}{found}", share)

    def end_by_time(self) -> None:
        """Note that time ended the search, if nothing else did."""
        if self.result.interrupted is None:
            self.result.interrupted = time_over(self.clock.limit_s)

    def is_late(self) -> bool:
        """Whether nothing further is tried; then that is noted."""
        if (
            self.result.interrupted is None
            and self.clock.spent() > TRYING_SHARE
            and not self.may_try()
        ):
            self.end_by_time()
        return self.result.interrupted is not None

    def may_try(self) -> bool:
        """Whether the limit leaves time to try another mesh with all schedules, as long as others
        took, and audit what that gives.
        """
        audits_s = AUDITS_KEPT * self.clock.longest_s(AUDIT)
        return self.clock.spent(self.clock.longest_s(TRIED) + audits_s) < 1.0

    def best_s(self) -> float:
        """The step of the best plan so far, here or in another search: audited, or predicted where
        nothing is here. As bounds and predictions count it, which it is compared with: with each
        message by itself.
        """
        if self.result.best is not None:
            return self.beaten_s()
        predicted = (candidate.step_s for candidate in self.result.others)
        return min(self.space.beaten_s, *predicted, float("inf"))

    def beaten_s(self) -> float:
        """The step of the best plan that was audited, here or in another search, with each message
        by itself.
        """
        best, others_s = self.result.best, self.space.beaten_s
        return others_s if best is None else min(others_s, best.compared_s)

    def out_s(self, placed_mesh: PlacedMesh) -> float:
        """The bound from which on a mesh is not tried: the best step so far, and as much more as
        may be lost for a simpler plan, if all plans on the mesh are simpler than the best one.
        """
        best_s, best, hardware = self.best_s(), self.result.best, self.hardware
        if best is None:
            return best_s
        number, ranks = placed_mesh.num_positions, placed_mesh.request.ranks
        own = Complexity.of_meshes(number, [(placed_mesh.mesh, ranks)], hardware)
        is_simpler = own.is_less_than(Complexity.of(best.plan, hardware))
        return best_s * (1 + self.space.simpler_within * is_simpler)

    def placing_s(self, num_axes: int) -> float:
        """How long placing the model on a mesh of so many axes may take, by what it took so far."""
        if num_axes < 1:
            return PLACING * self.clock.longest_s(ESTIMATE) / MORE_AXES
        return self.clock.longest_s(_placing(num_axes)) or MORE_AXES * self.placing_s(num_axes - 1)

    def slower(self, num_positions: int) -> float:
        """How much longer a step takes in so many positions, by rule of thumb.

        Positions wait while a pipeline fills and drains. And one operator, of so large a share of a
        forward and backward, may be more than a position's.
        """
        if num_positions == 1:
            return 1.0
        waiting = 1 + (num_positions - 1) / self.space.num_microbatches
        return waiting * max(1.0, num_positions * self._longest_share)

    @cached_property
    def _alone_s(self) -> list[float]:
        """The seconds of every operator, unsplit."""
        return [
            op_time(op, {}, Mesh(()), self.hardware, self.times).total_s for op in self.graph.ops
        ]

    @cached_property
    def _longest_share(self) -> float:
        """The share of the longest operator in the time of all, unsplit."""
        return max(self._alone_s, default=0.0) / (sum(self._alone_s) or 1.0)

    def growing_share(self) -> float:
        """The share of attention whose later queries have more to do, in the time of all operators,
        unsplit.
        """
        growing_s = sum(
            own_s
            for own_s, op in zip(self._alone_s, self.graph.ops, strict=True)
            if op.target in ATTENTION and balancing_turns(op)
        )
        return growing_s / (sum(self._alone_s) or 1.0)

    @property
    def estimates_s(self) -> float:
        """Seconds that it took to estimate what simple policies take."""
        return self.clock.longest_s(ESTIMATE)

    def one_axis_s(self, num_axes: int) -> float:
        """How long placing the model on a mesh of one axis may take, by one of so many axes."""
        return self.placing_s(num_axes) / MORE_AXES ** max(0, num_axes - 1)

    @cached_property
    def _estimates(self) -> StepEstimates | None:
        """Where the simple policies count, and the model has a batch and dims inside for them to
        split.
        """
        try:
            with self.clock.timed(ESTIMATE):
                return StepEstimates(self.graph, self.config) if self.space.simple else None
        except PlanError:
            return None

    def likely_s(self, where: PipelineMesh) -> float:
        """About what the best plan of a simple policy takes on a mesh; infinite where it has none,
        or that is not known.
        """
        number, mesh, pp_place = where
        estimates = self._estimates
        if mesh.turns and self._in_zigzag is not None:
            estimates = self._in_zigzag
        if estimates is None:
            return float("inf")
        if where not in self._likely_s:
            self._likely_s[where] = estimates.step_s(
                mesh, number, pp_place, self.setting(())
            ) * self.slower(number)
        return self._likely_s[where]

    def known_likely_s(self, where: PipelineMesh) -> float:
        """What :meth:`likely_s` has said of a mesh; infinite if it was not asked."""
        return self._likely_s.get(where, float("inf"))

    def estimate_in_zigzag(self) -> None:
        """Estimate meshes with an axis in zigzag by a program of their own from now on, which takes
        longer. Without it they are taken to be as good as the same meshes with one piece each.
        """
        with contextlib.suppress(PlanError):
            self._in_zigzag = StepEstimates(self.graph, self.config, in_zigzag=True)

    def may_place(self, mesh: Mesh) -> bool:
        """Whether the limit leaves time for another placement on a mesh and an audit of what it
        gives, or there is no plan yet, here or in another search; if not, that is noted.
        """
        needed_s = self.placing_s(len(mesh.axes)) + self.clock.longest_s(AUDIT)
        if self.beaten_s() == float("inf") or self.clock.spent(needed_s) <= 1.0:
            return True
        self.end_by_time()
        return False

    # ---------------------------------------------------------------------------------------------
    # candidates

    def may_have(self, num_positions: int) -> bool:
        """Whether there may be so many pipeline positions."""
        return num_positions == 1 or (
            self.config.use_end2end and num_positions <= len(self.graph.ops)
        )

    def named_schedules(self, num_positions: int) -> Sequence[NamedSchedule]:
        """The schedules of so many positions."""
        space = self.space
        found = [NamedSchedule("", 1)]
        if num_positions > 1:
            found = named_schedules(
                num_positions,
                space.num_microbatches,
                space.schedules,
                space.chunks,
                most=len(self.graph.ops),
            )
        # Schedules with more stages than the model has places to begin at are none.
        return [
            named_schedule
            for named_schedule in found
            if space.may_have(num_positions * named_schedule.chunks)
        ]

    def placed(
        self, mesh_request: MeshRequest, title: str, *, keeps: bool = False
    ) -> PlacedModel | None:
        """The placement that is asked for; ``None`` if there is none, which is noted with its
        reason. ``keeps``: whether it is of use to the caller also where it is all that an
        interrupted solver had.
        """
        self.tell(title)
        try:
            with self.clock.timed(_placing(len(mesh_request.mesh.axes))):
                placed = self._over_units(self.place(mesh_request))
            # Ctrl-C inside the solver: the answer is used by who wants it, else the search ends
            # here, too.
            if placed.interrupted and not keeps:
                raise KeyboardInterrupt
            return placed
        except PlanError as error:
            self.result.refuse(title, error)
            if isinstance(error, NoPlacement):
                self.result.needed_bytes[title] = error.needed_bytes
            return None

    def share_despite_overlap(self, num_positions: int) -> float:
        """What a step takes of all its work at least, whatever collectives run beside passes."""
        # The schedule that may hide most decides, as a bound is for all of them.
        chunks = [found.chunks for found in self.named_schedules(num_positions)]
        return share_despite_overlap(
            self.config, num_positions, max(chunks, default=1), self.space.num_microbatches
        )

    def lowered(self, placed: PlacedModel, ranks: tuple[int, ...]) -> LoweredPlacement:
        """A placement lowered. One on the first ranks is kept for stages that differ, one on other
        ranks until the next: a mesh asks for its fastest placement twice.
        """
        program = None
        for known in (*self.placements, *self._last_lowered):
            # Lowering takes as long as placing; a bound that has changed since does not matter to
            # it.
            if known.placed.plan is placed.plan:
                if known.walk.setting.ranks == ranks:
                    return replace(known, placed=placed)
                program = known.walk.program  # the same on other ranks
        program = program or lower(self.graph, placed.plan)
        lowered = LoweredPlacement(placed, Walk(program, self.setting(ranks)))
        if ranks == tuple(range(placed.plan.mesh.size)):
            self.placements.append(lowered)
        else:
            self._last_lowered = [lowered]
        return lowered

    def setting(self, ranks: tuple[int, ...]) -> Setting:
        """What a placement on these ranks is timed for."""
        return Setting(
            self.hardware,
            self.config,
            ranks,
            self.optimizer,
            self.times,
            self.space.num_microbatches,
            gathers_ahead=True,
        )

    def _over_units(self, placed: PlacedModel) -> PlacedModel:
        """The placement with parameters stored over the units where the config has ZeRO-3, as the
        program will have it.
        """
        return replace(placed, plan=replace(placed.plan, zero=units_of_storage(self.config)))

    def cut(self, cut_request: CutRequest, memory_bytes: float) -> Candidate | None:
        """The plan with the best stages for a schedule; ``None``, which is noted, if none fits."""
        found = self.cutter.cut(cut_request, memory_bytes)
        # No gain: it cannot be below what was asked. No fit: it needs more memory.
        if isinstance(found, NoGain):
            self.result.bound(cut_request, found.bound_s)
            return None
        if isinstance(found, NoFit):
            words = memory_words(
                found.needed_bytes, self.space.memory_bytes, verb="is predicted to need"
            )
            self.result.refused[cut_request.title] = words
            self.result.needed_bytes[cut_request.title] = found.needed_bytes
            return None
        self.result.refused.pop(cut_request.title, None)
        return found


def _placing(num_axes: int) -> str:
    """What the clock calls placing the model on a mesh of so many axes."""
    return f"placing on {num_axes}"
