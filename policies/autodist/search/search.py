"""The search on one page: what is tried, in which order, what prunes it, and what decides.

``Search._search`` below holds all of it, for one stage of ZeRO and one size of a microbatch
(``subsearches.py`` has one search for each). Each of its steps is a file of this folder:

===================  ==========================================================================
mesh_search.py       places the model on every mesh, and tries every schedule with what fits: by
                     mesh_order.py, mesh_placing.py, mesh_trials.py, mesh_bounds.py, mesh_pace.py
leanest_plans.py     finds what takes least memory, where nothing has fitted
simple_policies.py   audits the plans of the simple policies that may still be better
mixed_stages.py      lets every stage of a pipeline choose its placement and number of ranks
certificate.py       raises the lower bounds of pipelines, once the answer is known
auditing.py          lowers candidates to programs and audits them: this decides
loss_pieces.py       computes the loss in pieces, where plans are too large without
search_state.py      what the steps share: the space, the clock, the result so far
===================  ==========================================================================

**What prunes.** A mesh is tried only while its lower bound is below the best plan so far, or a
little above it if its plans are simpler (``SearchState.out_s``). The bound comes with the fastest
placement on the mesh, of whatever memory. Of the candidates that are left, those predicted to be
near the best are audited.

**What decides.** The audited cost of the lowered program. A prediction never does.

Example: on ``x=4`` the fastest placement takes 2.0 s, but 90 GB of the 80 GB there are, and does
not fit with layers computed again either. The same mesh is placed within 80 GB (2.3 s), and once
more for a price on memory with layers computed again (2.2 s). All three are cut for every schedule,
the best of them is audited at 2.21 s, and every mesh whose bound is above that is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.lower_bounds import arithmetic_bound_s
from shardwright.policies.autodist.candidates.mesh_requests import LeastStep, Place
from shardwright.policies.autodist.candidates.results import INTERRUPT, SearchResult
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.search.auditing import Auditor, Audits
from shardwright.policies.autodist.search.certificate import raise_bounds
from shardwright.policies.autodist.search.leanest_plans import LeastMemory
from shardwright.policies.autodist.search.loss_pieces import LossPieces
from shardwright.policies.autodist.search.mesh_search import MeshSearch
from shardwright.policies.autodist.search.mixed_stages import MixedStages
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.policies.autodist.search.simple_policies import SimplePolicies
from shardwright.runtime.config import ComputeConfig

FIRST_SHARE, FURTHER_SHARE, LAST_SHARE = 0.1, 0.2, 0.7
"""The share of the time limit at which the meshes placed so far are tried before more are, how much
later that comes again, and when for the last time. The first comes soon: once a plan is known, less
is asked of meshes that cannot be better.
"""

ESTIMATED = 120.0
"""A limit of less than that many times what it takes to estimate all meshes is very short."""


class Search:
    """One search. ``result`` is valid at any time, so an interrupted search still has an answer."""

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        hardware: Hardware,
        space: SearchSpace,
        place: Place,
        *,
        optimizer: OptimizerMemory = ADAM,
        times: OperatorTimes | None = None,
        clock: Clock | None = None,
        alarm: Alarm | None = None,
        least: LeastStep | None = None,
    ) -> None:
        self.graph, self.config, self.space = graph, config, space
        self.clock, self.alarm = clock or Clock(), alarm or Alarm()
        self.state = SearchState(
            graph, config, hardware, space, place, optimizer, times, self.clock, self.alarm
        )
        self.result = self.state.result
        self.auditor = Auditor(graph, config, hardware, space.num_microbatches, optimizer, times)
        self.audits = Audits(self.state, self.auditor)
        self.meshes = MeshSearch(self.state, self.audits, least)
        self.simple_policies = SimplePolicies(self.state, self.audits)

    def run(self) -> SearchResult:
        """Search until done, out of time, or interrupted from the keyboard. When the limit is over
        the best plan so far is the answer, whatever step is under way, or the first plan that fits.
        An interrupt ends a search in the same way; a second one ends the making of the answer, too.

        Raises:
            KeyboardInterrupt: interrupted with no plan known.
        """
        try:
            with self.alarm.may_interrupt():
                self._search()
        except KeyboardInterrupt:
            self._answer_at_once()
        self._bound()
        self.result.seconds = self.clock.seconds
        return self.result

    def _search(self) -> None:
        """Everything that is tried, in this order."""
        meshes, simple_policies = self.meshes, self.simple_policies

        # The meshes in the order in which they are likely good; and a share of the time for later.
        meshes.list_all()
        simple_policies.keep_time(len(meshes.left))

        # Where there is very little time: first of all the most likely plan of a simple policy.
        if self._has_little_time():
            simple_policies.begin(meshes.left)
            meshes.put_first(simple_policies.best_where)

        # Where later positions have more to do: plans that deal them in zigzag. Of those that are
        # too large the same with the loss in pieces.
        loss_pieces = LossPieces(self.state, self.audits)
        simple_policies.run_in_zigzag(meshes.left)
        if self.space.pieces and self.audits.too_large:
            loss_pieces.run()

        # Where there is time for few meshes: a plan from the first few, before all others. If it is
        # too large, the same with the loss in pieces; then whatever else these meshes may give.
        meshes.try_first()
        if meshes.pace.is_short:
            if self.space.pieces and not self.result.audited:
                loss_pieces.run()
            meshes.try_placed()

        # Place the model on every mesh for speed alone, which also bounds every plan on that mesh.
        # Then, mesh by mesh while its bound is below the best plan: place it within the memory, cut
        # it into stages for every schedule, and audit the most promising plans.
        for share in rounds(self.clock):
            has_placed_all = meshes.place_until(share)
            meshes.try_placed()
            if not self.state.is_late():
                meshes.try_more_chunks()
            if has_placed_all or self._is_ended():
                break
        else:
            self.state.end_by_time()

        # Where nothing fits: what takes least memory, on every mesh.
        if not self.result.audited and not self._another_has_a_plan():
            LeastMemory(self.state, self.audits).run(meshes.placed)

        # Where plans were too large: the same with the loss in pieces, if they are faster.
        if self.space.pieces:
            loss_pieces.run()

        # More stages on each position, for the best plans.
        if not self.state.is_late():
            meshes.try_more_chunks()

        # Audit what is predicted to beat the best plan; bound the meshes that are left; audit
        # simple policies' plans that may be better, and of those that are too large the same with
        # the loss in pieces.
        simple_policies.end_reserve()
        if self.result.audited:
            self.audits.audit_promising(most=1, near=1.0)
            meshes.bound_left()
        simple_policies.run(meshes.placed, meshes.left)
        if self.space.pieces:
            loss_pieces.run()

        # Last, what is seldom better: stages that differ, the pipeline axis further inside, and
        # further placements on meshes whose fastest one fits.
        if not self.state.is_late():
            MixedStages(self.state, self.audits).run(meshes.placed)
            meshes.try_inner()
            meshes.try_further()
            meshes.try_more_chunks()
        if self.result.audited:
            self.audits.audit_promising(most=1, near=1.0)

    def _bound(self) -> None:
        """State what no plan takes less than, as far as that is known."""
        simple_policies, placed, left = self.simple_policies, self.meshes.placed, self.meshes.left
        simple_policies.bound_theirs(placed)
        self.meshes.bounds.bound_unanswered(self.meshes.trials.made)
        # Raising bounds takes time and may be interrupted; the answer stands.
        try:
            with self.alarm.may_interrupt():
                self.clock.reserve(0.0)  # this is what was kept
                self.meshes.bounds.bound_untried()
                raise_bounds(self.state)
                # What bounds leave of the time is for plans that there was no time to compare with.
                if self.result.audited and self.result.interrupted != INTERRUPT:
                    before = self.result.best
                    simple_policies.run(placed, left)
                    if self.result.best is not before:
                        raise_bounds(self.state)
        except KeyboardInterrupt:
            self.clock.end()
            if not self.alarm.has_rung:
                self.result.interrupted = INTERRUPT
        simple_policies.note(placed, left)
        self.result.num_left = len(left)
        self.result.arithmetic_bound_s = arithmetic_bound_s(
            self.graph,
            self.config,
            self.state.hardware.device,
            self.space.num_microbatches,
            self.state.times,
        )

    def _answer_at_once(self) -> None:
        """End with what is known, or the first plan that fits; a second interrupt ends that."""
        self.clock.end()
        # After the alarm there is an answer, here or in another search.
        if self.alarm.has_rung:
            self.state.end_by_time()
        else:
            self.result.interrupted = INTERRUPT
            with contextlib.suppress(KeyboardInterrupt):
                self.meshes.answer_at_once()
            if self.result.best is None and not self.result.refused:
                raise KeyboardInterrupt
        self.meshes.leave_untried()

    def _has_little_time(self) -> bool:
        """Whether the limit is very short, and a plan of a simple policy may be the answer."""
        if not self.space.simple or self._another_has_a_plan():
            return False
        return self.clock.limit_s < ESTIMATED * self.state.estimates_s

    def _another_has_a_plan(self) -> bool:
        """Whether another search, of another stage of ZeRO or batch, has a plan already."""
        return self.space.worth_s != float("inf")

    def _is_ended(self) -> bool:
        """Whether time ends the search, with an answer or without one."""
        return self.state.is_late() and bool(self.result.audited or self.clock.is_over)


def rounds(clock: Clock) -> Iterator[float]:
    """The shares of the limit until which meshes are placed, before those are tried. However long
    trying took, more are placed for as long as before, so that trying begins with the most likely.
    Rounds are no longer in a long search, of whose limit the clock's ``steady`` share counts.

    Example, where trying takes no time: until 12, 36, 60 and 84 of 120 s, and also 108 to 204 and
    210 of 300 s. Where it takes 30 s each time: until 12, 66 and 84 of 120 s.
    """
    share = clock.steady * FIRST_SHARE
    while share < LAST_SHARE * (1 - 1e-9):
        yield share
        share = max(share, clock.spent()) + clock.steady * FURTHER_SHARE
    yield LAST_SHARE
