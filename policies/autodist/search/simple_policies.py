"""Audit the plans of the simple policies that may be better than what was found: the last step of a
search, and a first one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.mesh_requests import (
    PipelineMesh,
    PlacedMesh,
    PlacedModel,
)
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES, position_ranks
from shardwright.policies.autodist.candidates.results import (
    Candidate,
    CutRequest,
    LoweredPlacement,
    NotCompared,
)
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.search.auditing import (
    CORRECTION,
    MAX_CORRECTIONS,
    Audits,
    least_of,
)
from shardwright.policies.autodist.search.loss_pieces import most_saved_bytes
from shardwright.policies.autodist.search.search_state import AUDIT, BOUNDS_SHARES, SearchState
from shardwright.policies.autodist.search.simple_plans import (
    SimplePlan,
    simple_plans,
)
from shardwright.policies.autodist.search.simple_rules import Rules
from shardwright.policies.autodist.search.zigzag_bounds import ZigzagBounds
from shardwright.policies.autodist.stages.walk import Walk
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

SIMPLY_CUT = ", in the stages of a simple policy"
"""What follows the mesh in titles of such plans."""

NO_BOUND = "no bound, as the search did not come to the mesh"
"""The proof of a plan on such a mesh."""

SIMPLE_PLANS = "plans of a simple policy"
"""What the clock calls making some."""

KEPT_SHARES = (0.2, 0.45)
"""The least and the most of the time limit that is kept for them to come last."""

GATHER_SHARE, BEGIN_SHARE = 0.2, 0.4
"""The shares of a short limit that making some of their plans, and auditing them, may take to begin
with.
"""

SHORTEST_SHARE = 0.7
"""The share that either may take where there is time for little else."""

MUCH_ATTENTION = 0.25
"""The share of a model's time from which on causal attention is much of its work. Over many ranks
that each have one piece a step then takes 1.25 times as long as in zigzag.
"""

ZIGZAG_SHARE = 0.5
"""The share of the limit until which plans in zigzag may be tried before all others."""

SHORTEST = 10.0
"""A limit of less than that many times what it takes to estimate all meshes leaves time for plans
of one mesh and little else: making these may take the larger share.
"""


class SimplePolicies:
    """The part of a search that audits the plans of simple policies which may be the best.

    It comes last, when few of their plans may still be better. A share of the limit is kept for it,
    so that it also comes where time ends the search.
    """

    def __init__(self, state: SearchState, audits: Audits) -> None:
        self.state, self.audits = state, audits
        self.space, self.result, self.clock = state.space, state.result, state.clock
        self._rules = Rules(state.graph, state.config)
        self._compared: set[PipelineMesh] = set()
        self._listings: dict[PipelineMesh, _Listing] = {}
        self._tried: dict[str, PipelineMesh] = {}  # titles of plans that were audited, and where
        self._kept = KEPT_SHARES[0]
        self._placed: dict[PipelineMesh, PlacedMesh] = {}

    def keep_time(self, num_meshes: int) -> None:
        """Keep a share of the time for :meth:`run`, which comes last. On a mesh, making their plans
        takes about as long as the estimates.
        """
        if self.space.simple:
            needed_s = num_meshes * self.state.estimates_s
            least, most = KEPT_SHARES
            self._kept = min(max(least, self.clock.share_of(needed_s)), most)
            self.clock.reserve(self._kept)

    def begin(self, left: Sequence[PipelineMesh]) -> None:
        """Find a first plan, where there is little time: on the meshes where they likely take
        least, the plan whose parts take least, or the next that fits. At least one of those that
        likely fit is audited.
        """
        # Half of the reserve is enough from now on: this does the likely part of what comes last.
        self.clock.reserve(self._kept / 2)
        # Plans of the meshes that likely take least, as many as the time allows.
        found: list[tuple[SimplePlan, PipelineMesh]] = []
        is_shortest = self.clock.limit_s < SHORTEST * self.state.estimates_s
        making, trying = GATHER_SHARE, BEGIN_SHARE
        if is_shortest:
            making = trying = SHORTEST_SHARE
        for number, where in enumerate(
            sorted(left, key=self.state.likely_s if len(left) > 1 else None)
        ):
            if number and self.clock.spent() > GATHER_SHARE:
                break
            listing = self._plans(where, making, likely=True, must_find=is_shortest)
            found += [(simple, where) for simple in listing.found]
        # The least first; what does not fit in memory is passed over. Parts leave out what is held
        # for a moment: as much as audits have found.
        further_bytes = 0.0
        for simple, where in sorted(found, key=lambda item: item[0].least_s):
            num_bytes = simple.least_bytes(gradients=True)
            if num_bytes + further_bytes > self.space.memory_bytes:
                continue
            # One plan is there, and little time is left.
            if self.result.audited or (self._tried and self.clock.spent() > trying):
                return
            num_too_large = len(self.audits.too_large)
            self._try(simple, where, None)
            # Of several the least, so that what may fit is tried.
            for _, cost in self.audits.too_large[num_too_large:]:
                own_bytes = cost.peak_bytes - num_bytes
                further_bytes = min(further_bytes or own_bytes, own_bytes)

    @property
    def best_where(self) -> PipelineMesh | None:
        """Where the best plan so far is, if it is one of theirs."""
        best = self.result.best
        return None if best is None else self._tried.get(best.title)

    def end_reserve(self) -> None:
        """Keep nothing of the limit for them any more, and a little for the bounds of pipelines."""
        is_cut = any(candidate.plan.stages for candidate in self.result.tried)
        self.clock.reserve(self.clock.steady * BOUNDS_SHARES[0] if is_cut else 0.0)

    def run_in_zigzag(self, left: Sequence[PipelineMesh]) -> None:
        """Audit the plans that deal positions in zigzag before all others, in a share of the time,
        where attention is causal and much of the work: they may take half as long as plans that
        give each rank one piece, which then need no placement.

        Example: one sequence of a million positions on 64 ranks, with 8 groups of heads. Each rank
        has one piece: 68 s, as the last one has most keys. In zigzag: 36 s.
        """
        if not self.space.simple or not (zigzag := self._in_zigzag(left)):
            return
        if self.state.growing_share() >= MUCH_ATTENTION:
            self.state.estimate_in_zigzag()
            share = self.clock.steady * ZIGZAG_SHARE
            self._compare(deque(self._ordered([], zigzag)), share)

    def run(self, placed_meshes: Sequence[PlacedMesh], left: Sequence[PipelineMesh]) -> None:
        """Audit the plans of the simple policies that may beat the best one, the most likely first.
        Those that do become candidates. Meshes are those that were placed and those in ``left``.
        """
        if not self.space.simple:
            return
        self._placed = {placed.where: placed for placed in placed_meshes}
        # Estimates of many meshes, which order them, take longer than a moment.
        if not self._has_time(SIMPLE_PLANS):
            return
        # Meshes by their bound, and those that were never placed.
        zigzag = self._in_zigzag([*(placed.where for placed in placed_meshes), *left])
        self._compare(deque(self._ordered(placed_meshes, [*left, *zigzag])))

    def _compare(
        self, waiting: deque[tuple[PipelineMesh, PlacedMesh | None]], share: float = math.inf
    ) -> None:
        """Audit plans on these meshes, while there is time and until a share of it is over."""
        waiting = deque(item for item in waiting if item[0] not in self._compared)
        while waiting and self._has_time(SIMPLE_PLANS) and self.clock.spent() < share:
            found, all_of = self._gathered(waiting, share)
            for simple, where, placed_mesh in found:
                # Sorted: nothing behind it can win.
                if simple.least_s >= self.state.beaten_s():
                    break
                if _title(simple, where) in self._tried:
                    continue
                # Without any plan that fits, whatever may fit is tried.
                if self.state.beaten_s() == float("inf") or simple.may_fit(self._most_bytes):
                    if self._has_time(AUDIT) and self.clock.spent() < share:
                        self._try(simple, where, placed_mesh)
                    else:
                        # Not all plans of this mesh were compared.
                        all_of.discard(where)
            self._compared |= all_of

    @cached_property
    def _most_bytes(self) -> float:
        """What a plan may need, if what the loss in pieces saves of it is enough to make it fit."""
        saved_bytes = most_saved_bytes(self.state.graph) if self.space.pieces else 0.0
        return self.space.memory_bytes + saved_bytes / self.state.config.plan_ngpus

    def _gathered(
        self, waiting: deque[tuple[PipelineMesh, PlacedMesh | None]], until: float
    ) -> tuple[list[tuple[SimplePlan, PipelineMesh, PlacedMesh | None]], set[PipelineMesh]]:
        """Make plans on the next meshes, in at most half of the time that is left until a share of
        the limit is over.

        Returns the plans, the one that is likely the best first, and the meshes of which these are
        all plans that may be better. A mesh with more of them goes on waiting.
        """
        found: list[tuple[SimplePlan, PipelineMesh, PlacedMesh | None]] = []
        all_of: set[PipelineMesh] = set()
        # Half of that time is for making plans; the rest for auditing them.
        spent = self.clock.spent()
        share = spent + self.clock.steady * (min(until, 1.0) - spent) / 2
        while (
            waiting and (not found or self.clock.spent() <= share) and self._has_time(SIMPLE_PLANS)
        ):
            where, placed_mesh = waiting.popleft()
            if self._bound_s(where) < self.state.beaten_s():
                listing = self._plans(where, share)
                found += [(simple, where, placed_mesh) for simple in listing.found]
                # More plans of this mesh come later.
                if not listing.has_all:
                    waiting.appendleft((where, placed_mesh))
                    break
                all_of.add(where)
                del self._listings[where]
        return sorted(found, key=lambda item: item[0].least_s), all_of

    def bound_theirs(self, placed_meshes: Sequence[PlacedMesh]) -> None:
        """Give their plans the bounds of meshes that were placed since."""
        known = {placed.where: placed for placed in placed_meshes}
        self.result.audited = [self._bounded(candidate, known) for candidate in self.result.audited]

    def note(self, placed_meshes: Sequence[PlacedMesh], left: Sequence[PipelineMesh]) -> None:
        """Note where there was no time for them."""
        if not self.space.simple:
            return
        result = self.result
        result.compared = [title for title in self._tried if title not in result.refused]
        known = self._placed = {placed.where: placed for placed in placed_meshes}
        for where in (*known, *left, *self._in_zigzag([*known, *left])):
            number, mesh, pp_place = where
            # Unless it was compared, or cannot be better.
            if where not in self._compared and self._bound_s(where) < self.state.beaten_s():
                mesh = known[where].fastest.plan.mesh if where in known else mesh
                title = mesh_title(number, mesh, pp_place)
                likely_s = self.state.known_likely_s(where)
                result.not_compared.append(NotCompared(title, self._bound_s(where), likely_s))

    def _bound_s(self, where: PipelineMesh) -> float:
        """What no plan on a mesh takes less than: as the model was placed on it, or, in zigzag, on
        the same mesh with one piece for each rank.
        """
        if where in self._placed:
            return self._placed[where].bound_s
        number, mesh, pp_place = where
        in_pieces = self._placed.get(where._replace(mesh=Mesh(mesh.axes)))
        if in_pieces is None or not mesh.turns:
            return 0.0
        setting = self.state.setting(position_ranks(mesh, number, pp_place)[0])
        # It takes a moment: none after the end.
        if self.clock.left_s <= 0.0 and not self._zigzag_bounds.has(mesh, setting):
            return 0.0
        return self._zigzag_bounds.bound_s(
            mesh, in_pieces, setting, self.state.share_despite_overlap(number)
        )

    @cached_property
    def _zigzag_bounds(self) -> ZigzagBounds:
        return ZigzagBounds(self._rules.counted)

    def _in_zigzag(self, wheres: Sequence[PipelineMesh]) -> list[PipelineMesh]:
        """Meshes of a search with an axis that deals in zigzag: these it does not place itself. Of
        two that differ in the order of axes alone, where that makes no difference, one.
        """
        if not self.space.zigzag:
            return []
        found = {
            where._replace(mesh=mesh): None
            for where in wheres
            for mesh in self._rules.zigzag_meshes(where.mesh)
        }
        return [where for where in found if self._twin(where) not in found]

    def _twin(self, where: PipelineMesh) -> PipelineMesh | None:
        """The mesh whose first axis deals in zigzag in the place of the second, and has its ranks,
        where all ranks of a position lie in one node. It has the same plans, and further ones.

        Example: of ``x=2 x y=4 zigzag`` on eight ranks of a node, ``x=4 zigzag x y=2``.
        """
        number, mesh, pp_place = where
        if len(mesh.axes) < 2 or pp_place or mesh.turns[0][0] != mesh.names[1]:
            return None
        node = self.state.hardware.tiers[0].sizes[0]
        lie = ({rank // node for rank in ranks} for ranks in position_ranks(mesh, number, pp_place))
        if not set(mesh.names) <= set(AXIS_NAMES) or any(len(nodes) > 1 for nodes in lie):
            return None
        (outer, outer_size), (inner, inner_size) = mesh.axes
        turns = ((outer, mesh.turns[0][1]),)
        return where._replace(mesh=Mesh(((outer, inner_size), (inner, outer_size)), turns))

    def _bounded(self, candidate: Candidate, known: Mapping[PipelineMesh, PlacedMesh]) -> Candidate:
        """A candidate of theirs that was there before its mesh was placed, with the bound that is
        known since.
        """
        where = self._tried.get(candidate.title)
        placed_mesh = known.get(where) if where is not None else None
        if placed_mesh is None or not candidate.is_simple:
            return candidate
        placed = replace(placed_mesh.fastest, plan=candidate.placed[0].plan)
        return replace(candidate, placed=(placed,))

    def _ordered(
        self, placed_meshes: Sequence[PlacedMesh], left: Sequence[PipelineMesh]
    ) -> Sequence[tuple[PipelineMesh, PlacedMesh | None]]:
        """All meshes, those first whose plans of simple policies are likely the best."""
        # Of meshes that the search has placed, those whose bound is above the best plan are out.
        known = {
            placed_mesh.where: placed_mesh
            for placed_mesh in placed_meshes
            if placed_mesh.bound_s < self.state.beaten_s()
        }
        # Those in zigzag have a bound, too.
        meshes = [
            where for where in (*known, *left) if self._bound_s(where) < self.state.beaten_s()
        ]
        if len(meshes) > 1:
            meshes.sort(key=self.state.likely_s)
        return [(where, known.get(where)) for where in meshes]

    def _has_time(self, *kinds: str) -> bool:
        """Whether the limit leaves time for steps of these kinds, as long as others took, or there
        is no plan yet.
        """
        if self.state.beaten_s() == float("inf"):
            return not self.clock.is_over
        needed_s = sum(map(self.clock.longest_s, kinds))
        # The first plan takes about as long as the estimates.
        if SIMPLE_PLANS in kinds and not self.clock.longest_s(SIMPLE_PLANS):
            needed_s += self.state.estimates_s
        return self.clock.spent(needed_s) <= 1.0

    def _plans(
        self, where: PipelineMesh, share: float, *, likely: bool = False, must_find: bool = True
    ) -> _Listing:
        """The plans on one mesh that may be better, as many as there is time for in that share of
        the limit. ``must_find``: with no plan of any kind, one more than are known, however long
        that takes. ``likely``: only those that likely fit.
        """
        if where not in self._listings:
            number, mesh, pp_place = where
            setting = self.state.setting(position_ranks(mesh, number, pp_place)[0])
            # Schedules with more chunks take longer to simulate.
            named_schedules = sorted(
                [*self.state.named_schedules(number), *self._left_out(number)],
                key=lambda named_schedule: named_schedule.chunks,
            )
            below_s = self.state.beaten_s()
            later: list[Iterator[SimplePlan | None]] = []
            plans = simple_plans(
                self.state.graph,
                mesh,
                named_schedules,
                number,
                pp_place,
                self.space,
                setting,
                below_s,
                self._rules,
                later,
                self._most_bytes,
                self.state.cutter.bounds.waits,
            )
            self._listings[where] = _Listing(plans, later)
        listing = self._listings[where]
        num_known = len(listing.found)
        # Go on where the last call has stopped.
        while not (listing.has_likely if likely else listing.has_all):
            with self.clock.timed(SIMPLE_PLANS):
                listing.go_on()
            has_new = self.state.beaten_s() < float("inf") or len(listing.found) > num_known
            is_late = self.clock.spent() > share and (has_new or not must_find)
            if is_late or not self._has_time(SIMPLE_PLANS):
                break
        return listing

    def _try(self, simple: SimplePlan, where: PipelineMesh, placed_mesh: PlacedMesh | None) -> None:
        """A simple policy's plan; if it is better than all others, also the fastest placement in
        its stages.
        """
        # Without a placement of the search the plan bounds nothing.
        free = (
            placed_mesh.fastest
            if placed_mesh is not None
            else PlacedModel(simple.whole, 0.0, NO_BOUND, "")
        )
        title = _title(simple, where)
        self._tried[title] = where
        if not self._is_better(
            title, simple.plan, replace(free, plan=simple.whole), is_simple=True
        ):
            return
        if where.mesh.turns and simple.again:
            self._mix(simple, where, free)
        # The stages of the simple plan with the placement of the search in them.
        if simple.plan.stages and placed_mesh is not None and self._has_time(AUDIT):
            whole = replace(free.plan, recompute=simple.whole.recompute)
            starts = [stage.first_op for stage in simple.plan.stages[1:]]
            number, pp_place = where.num_positions, where.pp_place
            title = (
                scheduled_title(mesh_title(number, whole.mesh, pp_place), simple.named_schedule)
                + SIMPLY_CUT
            )
            plan = staged(
                whole, starts, number, simple.named_schedule, self.space.num_microbatches, pp_place
            )
            self._is_better(title, plan, replace(free, plan=whole))

    def _mix(self, simple: SimplePlan, where: PipelineMesh, placed: PlacedModel) -> None:
        """Compute again only as many layers of a plan in zigzag, and parts of layers, as its memory
        needs, where the plan computes all of them again.

        Example: without anything computed again a plan needs 90 GB of 80, with all 32 layers 30 GB
        and a third more time. With 8 layers it needs 78 GB and 8 % more time.
        """
        number, mesh, pp_place = where
        plain = replace(placed, plan=replace(simple.whole, recompute=()))
        setting = self.state.setting(position_ranks(mesh, number, pp_place)[0])
        walk = Walk(lower(self.state.graph, plain.plan), setting)
        title = mesh_title(number, plain.plan.mesh, pp_place)
        cut_request = CutRequest(
            f"{scheduled_title(title, simple.named_schedule)}, as {simple.whose} has it",
            (LoweredPlacement(plain, walk),),
            number,
            simple.named_schedule,
            pp_place,
            below_s=self.state.beaten_s(),
        )
        known: list[Plan] = []
        memory_bytes = self.space.memory_bytes
        # What the audit finds too large is cut again for less.
        while len(known) <= MAX_CORRECTIONS and self._has_time(AUDIT):
            found = self.state.cutter.cut(cut_request, memory_bytes)
            if not isinstance(found, Candidate) or found.plan in known:
                return
            known.append(found.plan)
            self._tried[found.title] = where
            cost = self.audits.audit(replace(found, is_simple=True))
            if cost is None or cost.peak_bytes <= self.space.memory_bytes:
                return
            over = cost.peak_bytes - self.space.memory_bytes
            memory_bytes = found.used_bytes - CORRECTION * over

    def _is_better(
        self, title: str, plan: Plan, placed: PlacedModel, *, is_simple: bool = False
    ) -> bool:
        """Whether an audit says that a plan fits and takes less than all before it: then it is the
        best candidate.
        """
        try:
            with self.clock.timed(AUDIT):
                cost = self.audits.auditor(plan)
        except PlanError as error:
            self.result.refuse(title, error)
            return False
        if cost.peak_bytes > self.space.memory_bytes:
            # For the message if nothing fits at all: what came nearest.
            self.result.least = min(self.result.least, least_of(cost, title))
            # With the loss in pieces it may fit.
            candidate = Candidate(title, plan, cost.step_s, (placed,), is_simple=True)
            self.audits.too_large.append((candidate, cost))
        elif cost.step_s < min(self.state.space.worth_s, self._taken_s()):
            self.result.audited.insert(
                0, Candidate(title, plan, cost.step_s, (placed,), cost=cost, is_simple=is_simple)
            )
            return True
        return False

    def _taken_s(self) -> float:
        """The step of the best plan so far, as it is emitted."""
        return math.inf if self.result.best is None else self.result.best.step_s

    def _left_out(self, num_positions: int) -> Sequence[NamedSchedule]:
        """What policies run and a search of several schedules leaves out: it holds more than 1F1B
        and seldom takes less.
        """
        several = (
            num_positions > 1 and len(self.space.schedules) > 1 and self.space.chunks in (None, 1)
        )
        return [NamedSchedule("gpipe", 1)] if several and self.space.may_have(num_positions) else []


class _Listing:
    """The plans on one mesh, as far as they are ``found``: first those that likely fit, then
    those that come ``later``.
    """

    def __init__(
        self, plans: Iterator[SimplePlan | None], later: list[Iterator[SimplePlan | None]]
    ) -> None:
        self._plans, self._later = plans, later
        self.found: list[SimplePlan] = []
        self.has_likely = self.has_all = False

    def go_on(self) -> None:
        """Do the next step, which may find one."""
        try:
            simple = next(self._plans)
        except StopIteration:
            if self.has_likely:
                self.has_all = True
            else:
                # Only now are all of those that come later known.
                self.has_likely, self._plans = True, itertools.chain(*self._later)
            return
        if simple is not None:
            self.found.append(simple)


def _title(simple: SimplePlan, where: PipelineMesh) -> str:
    mesh = mesh_title(where.num_positions, simple.whole.mesh, where.pp_place)
    scheduled = scheduled_title(mesh, simple.named_schedule)
    return f"{scheduled}{simple.again}, as {simple.whose} has it"
