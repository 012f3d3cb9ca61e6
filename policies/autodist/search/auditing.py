"""The audit of candidates: which are lowered to programs, and what these really cost.

Example: three candidates are predicted to take 2.0, 2.1 and 2.9 s. The first is audited at 2.05 s
and needs 82 GB of the 80 GB there are. It is cut again for 2.1 GB less, which gives a fourth
candidate of 2.08 s. That and the second one are audited; the third is predicted to take more than
1.03 times the best, so it stays as it is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.compiler.cost.audit import audit, time_of_step
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.finish import finished
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.policies.autodist.candidates.axis_roles import renamed
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.candidates.titles import memory_words
from shardwright.policies.autodist.search.search_state import AUDIT, SearchState
from shardwright.policies.autodist.stages.split_chain import NoGain
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

MAX_CORRECTIONS = 3
"""How often the stages of a schedule are cut again because the audit finds more memory used than
the model of stages.
"""

LATE_AUDITS = 2
"""How many audits a search makes in any case that has no plan yet."""

PARTS_NAMED = 4
"""The number of parts that are named, of what takes memory where a plan does not fit."""

ANSWER_AUDITS = 2.0
"""The time to settle on a plan and to say what slows it, in audits. Measured for 175B on 512 ranks:
1.9 s of CPU, and 0.8 to 1.2 for an audit.
"""

CORRECTION, LATE_CORRECTION = 1.05, 2.0
"""The share of the excess by which the limit is lowered; and where time is over and nothing fits
yet.
"""


@dataclass(frozen=True)
class Auditor:
    """Audits plans of one graph, for steps of so many microbatches. ``gathers_ahead``: whether
    gathers of weights are begun one weight ahead, as in :func:`audit`.
    """

    graph: IRGraph
    config: ComputeConfig
    hardware: Hardware
    num_microbatches: int
    optimizer: OptimizerMemory = ADAM
    times: OperatorTimes | None = None
    gathers_ahead: bool = True

    def __call__(self, plan: Plan) -> PlanCost:
        """The cost of a plan, from the program that is really emitted."""
        lowered = self.lowered(plan)
        emitted = finished(lowered, self.config)
        cost = self._audited(emitted)
        if emitted is lowered:
            return cost
        apart_s = self.step_s(lowered)
        return cost if apart_s == cost.step_s else replace(cost, apart_s=apart_s)

    def step_s(self, program: Program | PipelineProgram) -> float:
        """The step of a program alone, which takes a fraction of the time of an audit."""
        return time_of_step(
            program, self.config, self.hardware, self.optimizer, self.times,
            self.num_microbatches, gathers_ahead=self.gathers_ahead,
        ).step_s  # fmt: skip

    def lowered(self, plan: Plan) -> Program | PipelineProgram:
        """The program of a plan before it is finished for emission."""
        graph = self.graph
        if plan.recompute:
            graph = mark_recompute(
                graph, plan.recompute, stage_of_ops(graph, plan) if plan.stages else {}
            )
        # A pipeline is lowered stage by stage; regions are marked before.
        return lower_stages(graph, plan) if plan.stages else lower(graph, plan)

    def _audited(self, program: Program | PipelineProgram) -> PlanCost:
        return audit(
            program, self.config, self.hardware,
            optimizer=self.optimizer, times=self.times, gathers_ahead=self.gathers_ahead,
            # A pipeline's schedule says it.
            num_microbatches=self.num_microbatches if isinstance(program, Program) else None,
        )  # fmt: skip


class Audits:
    """Audits of the candidates of a search. ``sure``: candidates that were placed to fit, where
    time is short. ``too_large``: those that take too much memory, with their costs.
    """

    def __init__(self, state: SearchState, auditor: Callable[[Plan], PlanCost]) -> None:
        self.state, self.auditor = state, auditor
        self.result, self.clock = state.result, state.clock
        self.space, self.cutter = state.space, state.cutter
        self.sure: list[Candidate] = []
        self.too_large: list[tuple[Candidate, PlanCost]] = []
        self._seen: list[Candidate] = []  # what was audited
        self._needed: dict[str, float] = {}  # the bytes of what does not fit, by title

    def audit_promising(self, most: int | None = None, near: float | None = None) -> None:
        """Lower and audit the most promising candidates; what does not fit is cut again for less
        memory, or refused. What is the same as another with its axes in another order stays as it
        is predicted. ``most``, ``near``: in the place of what the space says of them.
        """
        near = self.space.near if near is None else near
        # Candidates, and how often each was cut again for less memory.
        waiting = [(candidate, 0) for candidate in self.result.others]
        if not self.result.audited and self.sure:
            waiting.append((self.sure.pop(), 0))
        wanted = self.space.audits if most is None else most
        same: list[Candidate] = []
        audits = 0
        while waiting and (audits < wanted or not self.result.audited):
            # Then what is most likely to fit is the answer.
            late = not self.result.audited and self.clock.spent() > 1.0
            waiting.sort(key=lambda item: _by_fit(item[0]) if late else (True, item[0].predicted_s))
            # Nothing that is left can be worth it.
            if waiting[0][0].predicted_s > self.space.worth_s:
                return
            if self.result.audited:
                # What is predicted to take clearly longer than the best.
                if waiting[0][0].predicted_s > near * self.state.best_s():
                    return
                if self.clock.spent(self.clock.longest_s(AUDIT)) > 1.0:
                    return self.state.end_by_time()
            elif late and audits >= LATE_AUDITS and self.clock.is_over:
                return self.state.end_by_time()
            candidate, corrections = waiting.pop(0)
            # The same plan under another order of axes.
            if any(is_same(candidate, other) for other in self._seen):
                same.append(candidate)
                continue
            self._seen.append(candidate)
            audits += 1
            cost = self.audit(candidate)
            # Too large: cut again for less, as much less as it was over.
            if cost is not None and cost.peak_bytes > self.space.memory_bytes:
                mended = (
                    self._mended(candidate, cost.peak_bytes)
                    if corrections < MAX_CORRECTIONS
                    else None
                )
                if mended is not None:
                    self.result.refused.pop(candidate.title, None)
                    waiting.append((mended, corrections + 1))
            self.result.others = [*same, *(candidate for candidate, _ in waiting)]

    def audit(self, candidate: Candidate) -> PlanCost | None:
        """The cost of a candidate, which is noted among those that were audited, or refused: of one
        title what needs least.

        A plan that has no program is refused, too, and has no cost. The search goes on with others.
        """
        try:
            self.state.tell(f"audit of {candidate.title}")
            with self.clock.timed(AUDIT):
                cost = self.auditor(candidate.plan)
        except PlanError as error:
            self.result.refuse(candidate.title, error)
            return None
        # A title is refused until one plan of it fits.
        if cost.peak_bytes <= self.space.memory_bytes:
            self.result.refused.pop(candidate.title, None)
            # In one step: the limit may end the search between any two.
            audited = [*self.result.audited, replace(candidate, cost=cost)]
            self.result.audited = sorted(audited, key=lambda candidate: candidate.step_s)
            self.state.alarm.note_answer(ANSWER_AUDITS * self.clock.longest_s(AUDIT))
        else:
            self._refuse(candidate.title, cost.peak_bytes)
            if not candidate.plan.loops:
                self.too_large.append((candidate, cost))
            self.result.least = min(self.result.least, least_of(cost, candidate.title))
        return cost

    def _refuse(self, title: str, needed_bytes: float) -> None:
        """Note that a plan takes too much memory, unless one with its title fits: of a title what
        takes least, in the place of what was predicted.
        """
        if any(fitting.title == title for fitting in self.result.audited):
            return
        needed_bytes = self._needed[title] = min(needed_bytes, self._needed.get(title, math.inf))
        self.result.refused[title] = memory_words(needed_bytes, self.space.memory_bytes)
        self.result.needed_bytes[title] = needed_bytes

    def _mended(self, candidate: Candidate, peak_bytes: float) -> Candidate | None:
        """The candidate cut again, for as much less memory as it took too much; None if that leaves
        nothing else. Where time is over, for less than that, so that it is the last time.
        """
        cut_request = candidate.cut_request
        if cut_request is None:
            return None
        over = peak_bytes - self.space.memory_bytes
        # Predictions of memory are off by some percent, so the limit of the next cut is lowered by
        # more than what this one took too much.
        for by in (LATE_CORRECTION, CORRECTION) if self.clock.spent() > 1.0 else (CORRECTION,):
            found = self.cutter.cut(cut_request, candidate.used_bytes - by * over)
            if isinstance(found, NoGain):
                self.result.bound(cut_request, found.bound_s)
            elif isinstance(found, Candidate) and found.plan != candidate.plan:
                return found
        return None


def fullest(cost: PlanCost) -> RankMemory:
    """The memory of the rank that holds most."""
    return max(cost.memory, key=lambda memory: memory.peak_bytes)


def least_of(cost: PlanCost, title: str) -> tuple[float, str, str]:
    """What a plan needs, its title, and what it needs most for."""
    held = fullest(cost).by_category
    parts = (
        f"{name} {amount(held[name], 'B')}"
        for name in sorted(held, key=lambda name: -held[name])[:PARTS_NAMED]
    )
    return cost.peak_bytes, title, ", ".join(parts)


def _by_fit(candidate: Candidate) -> tuple[bool, float]:
    """What is placed to fit first, then what takes least memory."""
    return candidate.cut_request is not None, candidate.used_bytes


def is_same(candidate: Candidate, other: Candidate) -> bool:
    """Whether two candidates are one plan with its axes in another order, on links of the same
    kinds: what is predicted of them is equal then, too.
    """
    alike = math.isclose(candidate.predicted_s, other.predicted_s, rel_tol=1e-9) and math.isclose(
        candidate.used_bytes, other.used_bytes, rel_tol=1e-9, abs_tol=1.0
    )
    return alike and _in_order(candidate.plan) == _in_order(other.plan)


def _in_order(plan: Plan) -> Plan:
    """The plan with axes named after what they split and their sizes, in the order of these names,
    and no ranks.
    """
    names = {axis: f"{axis.rstrip('0123456789')}@{size}" for axis, size in plan.mesh.axes}
    # Two plans that differ in axis names or in the order of axes alone are one plan. Numbers behind
    # names go, ``dp2`` is ``dp``; if two axes then are the same, all keep their names.
    if len(set(names.values())) == len(names):
        plan = renamed(plan, names)

    def ordered(mesh: Mesh) -> Mesh:
        return mesh.of_axes(sorted(mesh.axes))

    stages = tuple(
        replace(stage, mesh=ordered(stage.mesh), ranks=tuple(sorted(stage.ranks)))
        for stage in plan.stages
    )
    return replace(plan, mesh=ordered(plan.mesh), stages=stages, notes=())
