"""The last step of a search: audit the plans of the simple policies that may be better than what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.auditing import Auditor, least_of
from shardwright.policies.autodist.bench import Bench
from shardwright.policies.autodist.candidates import Pace, position_ranks, staged
from shardwright.policies.autodist.found import Candidate, Opening
from shardwright.policies.autodist.simple import SIMPLE_SLACK, Simple, simple_plans
from shardwright.policies.autodist.space import Placed
from shardwright.policies.autodist.words import mesh_title, paced_title

SIMPLE, SIMPLY_CUT = ", as a simple policy has it", ", in the stages of a simple policy"
"""In titles."""


class Rivals:
    """The part of a search that holds it to the simple policies."""

    def __init__(self, bench: Bench, audited: Auditor) -> None:
        self.bench, self.audited = bench, audited
        self.space, self.found = bench.space, bench.found

    def run(self, openings: Sequence[Opening]) -> None:
        """The plans of the simple policies, on meshes whose bound is below the best plan; those that beat it are candidates."""
        for opening in sorted(openings if self.space.simple else (), key=lambda opening: opening.bound_s):
            if opening.bound_s >= self.bench.beaten_s() or self.bench.is_late():
                return
            number, place = opening.num_positions, opening.pp_place
            setting = self.bench.setting(position_ranks(opening.mesh, number, place)[0])
            paces = [*self.bench.paces(number), *self._left_out(number)]
            below_s = self.bench.beaten_s()
            found = simple_plans(self.bench.graph, opening.mesh, paces, number, place, self.space, setting, below_s)
            for simple in sorted(found, key=lambda simple: simple.least_s):
                if SIMPLE_SLACK * simple.least_s >= self.bench.beaten_s() or self.bench.is_late():
                    break
                if self.bench.beaten_s() == float("inf") or simple.may_fit(self.space.memory_bytes):
                    self._try(simple, opening)

    def _try(self, simple: Simple, opening: Opening) -> None:
        """A simple policy's plan; if it is better than all others, also the fastest placement in its stages."""
        number, place = opening.num_positions, opening.pp_place
        title = paced_title(mesh_title(number, simple.whole.mesh, place), simple.pace) + SIMPLE
        if not self._is_better(title, simple.plan, replace(opening.free, plan=simple.whole), is_simple=True):
            return
        if simple.plan.stages and not self.bench.is_late():
            free = replace(opening.free.plan, recompute=simple.whole.recompute)
            starts = [stage.first_op for stage in simple.plan.stages[1:]]
            title = paced_title(mesh_title(number, free.mesh, place), simple.pace) + SIMPLY_CUT
            plan = staged(free, starts, number, simple.pace, self.space.num_microbatches, place)
            self._is_better(title, plan, replace(opening.free, plan=free))

    def _is_better(self, title: str, plan: Plan, placed: Placed, *, is_simple: bool = False) -> bool:
        """Whether an audit says that a plan fits and takes less than all before it: then it is the best candidate."""
        cost = self.audited(plan)
        if cost.peak_bytes > self.space.memory_bytes:
            self.found.least = min(self.found.least, least_of(cost, title))
        elif cost.step_s < self.bench.beaten_s():
            self.found.audited.insert(0, Candidate(title, plan, cost.step_s, (placed,), cost=cost, is_simple=is_simple))
            return True
        return False

    def _left_out(self, num_positions: int) -> Sequence[Pace]:
        """What policies run and a search of several schedules leaves out: it holds more than 1F1B and seldom takes less."""
        several = num_positions > 1 and len(self.space.schedules) > 1 and self.space.chunks in (None, 1)
        return [Pace("gpipe", 1)] if several and self.space.may_have(num_positions) else []
