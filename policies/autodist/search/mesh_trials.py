"""Tries one mesh: which placements on it are cut into stages, for which schedules.

Example: on ``x=4`` in two positions the fastest placement only fits with layers computed again, by
1F1B and by ``zb_h1``. So the model is placed once more, within the memory. That fits as it is, and
no further placement is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.mesh_requests import (
    MeshRequest,
    PlacedMesh,
    PlacedModel,
)
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.mesh_bounds import MeshBounds, title_of
from shardwright.policies.autodist.search.mesh_pace import LAST_SHARE, MeshPace
from shardwright.policies.autodist.search.search_state import SearchState

SURE_SHARES = (0.93, 1.0)
"""The shares of the memory that the first plan may take by the model of stages: that model leaves
out some per cent of what programs take. The second share counts where the first is too little.
"""

EXPOSED = 0.001
"""The share of a forward and backward that gathers must add to them to be placed as waited for."""

WITHIN_REACH = 1.1
"""Where time is scarce a schedule that took more than that many times the best plan's step with one
placement is not tried with another one on the same mesh.
"""


class MeshTrials:
    """Tries meshes, one by one. ``made``: what they were tried with."""

    def __init__(
        self, state: SearchState, audits: Audits, pace: MeshPace, bounds: MeshBounds
    ) -> None:
        self._state, self._audits, self._pace, self._bounds = state, audits, pace, bounds
        self._result, self._space = state.result, state.space
        self.made: list[tuple[PlacedMesh, PlacedModel]] = []
        self._paused: list[tuple[float, PlacedMesh, Iterator[float]]] = []

    def schedules_to_try(self, placed_mesh: PlacedMesh) -> list[NamedSchedule]:
        """The schedules to try on a mesh: all, or, where the pipeline axis stands further inside
        than outermost, those of which a plan outermost may take less than the best one but for what
        positions send one another. Where ranks share cores, positions that lie otherwise share
        them with others: all.
        """
        found = list(self._state.named_schedules(placed_mesh.num_positions))
        is_inner = self._space.pp_place is None and placed_mesh.pp_place > 0
        if not is_inner or self._state.hardware.device.sharing is not None:
            return found
        sizes = [size for _, size in placed_mesh.mesh.axes]
        without_s: dict[NamedSchedule, float] = {}
        for candidate in self._result.tried:
            asked = candidate.cut_request
            if asked is None or len(asked.placements) > 1 or asked.pp_place:
                continue
            # Axes have names by now.
            if [size for _, size in asked.placements[0].placed.plan.mesh.axes] == sizes:
                known_s = without_s.get(asked.named_schedule, float("inf"))
                own_s = candidate.step_s - candidate.messages_s
                without_s[asked.named_schedule] = min(known_s, own_s)
        best_s = self._state.best_s()
        return [each for each in found if without_s.get(each, float("inf")) < best_s]

    def try_all(self, placed_mesh: PlacedMesh) -> None:
        """Try all schedules on one mesh: with the fastest placement, and with further ones if that
        does not fit. Where it does, further ones wait until all meshes were tried
        (:meth:`take_paused`): other meshes seldom leave them a chance.
        """
        trying = self._trying(placed_mesh)
        for step_s in trying:
            if not self._pace.hurries():
                self._paused.append((step_s, placed_mesh, trying))
                return

    def take_paused(self) -> list[tuple[PlacedMesh, Iterator[float]]]:
        """The meshes that wait for further placements, the likely good ones first, with what goes
        on where trying them has stopped.
        """
        paused, self._paused = sorted(self._paused, key=lambda item: item[0]), []
        return [(placed_mesh, trying) for _, placed_mesh, trying in paused]

    def _trying(self, placed_mesh: PlacedMesh) -> Iterator[float]:
        """Try one mesh. Yields after each placement that fits: the step of the best plan so far, as
        predicted.
        """
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        title = mesh_title(number, placed_mesh.mesh, pp_place)
        # Placements that were cut: another request may give the same.
        seen: list[Plan] = []
        fits = False
        named_schedules: Sequence[NamedSchedule] = self.schedules_to_try(placed_mesh)
        self._bounds.bound_schedules(placed_mesh, named_schedules)
        steps_s: dict[NamedSchedule, float] = {}  # the best so far
        for request in self._requests(placed_mesh):
            # As it is, without computing anything again: further placements only save memory.
            if fits and not (request and request.waits):
                return
            placed = placed_mesh.fastest
            if request is not None:
                found = self._state.placed(request, title)
                if found is None:
                    continue
                placed = found
                if self._is_beaten(placed_mesh, request, placed):
                    continue
            if any(_places_alike(placed.plan, plan) for plan in seen):
                continue
            seen.append(placed.plan)
            # The bound of the fastest placement leaves open what is computed again, and when.
            fastest = placed_mesh.fastest
            placed = replace(placed, bound_s=fastest.bound_s, proof=fastest.proof)
            self.made.append((placed_mesh, placed))
            # Axes may be better named by now.
            title = mesh_title(number, placed.plan.mesh, pp_place)
            if request is not None and request.hurried and number == 1:
                self._audits.sure.append(self._as_placed(title, placed))
                return
            lowered = self._state.lowered(placed, ranks)
            without_schedule = NamedSchedule("", 1)
            cut_request = CutRequest(title, (lowered,), number, without_schedule, pp_place)
            named_schedules = self._promising(cut_request, named_schedules)
            # The fastest placement: others take longer.
            if not named_schedules:
                return
            tried = self.try_schedules(cut_request, named_schedules)
            fits |= any(not candidate.plan.recompute for candidate in tried.values())
            before_s = min(steps_s.values(), default=float("inf"))
            for named_schedule, candidate in tried.items():
                known_s = steps_s.get(named_schedule, float("inf"))
                steps_s[named_schedule] = min(known_s, candidate.step_s)
            if tried:
                yield min(steps_s.values())
            if self._pace.is_scarce():
                # Placements that have bettered nothing are followed by no further ones.
                if before_s <= min(steps_s.values(), default=float("inf")) < float("inf"):
                    return
                within_s = WITHIN_REACH * self._state.best_s()
                named_schedules = [
                    each for each in named_schedules if steps_s.get(each, 0.0) <= within_s
                ]

    def _is_beaten(
        self, placed_mesh: PlacedMesh, request: MeshRequest, placed: PlacedModel
    ) -> bool:
        """Whether stages of a placement are not worth cutting, as those of one position take as
        long as the best plan. Of a placement that is made for computing again they may take less,
        as stages compute less again; and of one that waits for its gathers, too.

        Example: the best plan takes 23.0 s. Within the memory of 8 positions a placement takes
        194 s, so the stages of one of them take 24.2 s at least.
        """
        is_for_again = request.memory_weight or request.recompute != placed_mesh.request.recompute
        if is_for_again or not request.hides_gathers:
            return False
        # Of plans that were audited, as nothing else is sure to fit.
        out_s = (1 + self._space.simpler_within) * self._state.beaten_s()
        return placed.cost_s / placed_mesh.num_positions >= out_s

    def _as_placed(self, title: str, placed: PlacedModel) -> Candidate:
        """A plan as it is placed. Nothing predicts what it takes: its program will tell."""
        again = ", all layers computed again" if placed.plan.recompute else ""
        return Candidate(
            title + again,
            placed.plan,
            placed.cost_s,
            (placed,),
            used_bytes=self._space.memory_bytes,
        )

    def _requests(self, placed_mesh: PlacedMesh) -> Iterator[MeshRequest | None]:
        """What a mesh is tried with, ``None`` for the fastest placement; in a hurry only what is
        likely to fit.
        """
        if not (self._pace.hurries() and placed_mesh.memory_binds and placed_mesh.further):
            yield None
        further = list(placed_mesh.further)
        # Where gathers of the fastest placement are not hidden after all, they are waited for.
        if not self._pace.hurries() and self._is_exposed(placed_mesh):
            further = [
                replace(request, hides_gathers=False) for request in (placed_mesh.request, *further)
            ]
        for request in further:
            if self._pace.may_end(LAST_SHARE) or not self._state.may_place(placed_mesh.mesh):
                return self._state.end_by_time()
            if not self._pace.hurries():
                yield request
            # The last request is the one that needs least memory.
            elif request is further[-1]:
                yield replace(request, hurried=True)

    def _is_exposed(self, placed_mesh: PlacedMesh) -> bool:
        """Whether much of what the fastest placement gathers is not hidden behind operators, though
        it was placed as if it were.
        """
        number, mesh, pp_place = placed_mesh.where
        ranks = position_ranks(mesh, number, pp_place)[0]
        walk = self._state.lowered(placed_mesh.fastest, ranks).walk
        work_s = sum(walk.forward_s) + sum(walk.backward_s)
        return walk.exposed_s > EXPOSED * work_s

    def try_schedules(
        self, cut_request: CutRequest, named_schedules: Sequence[NamedSchedule]
    ) -> dict[NamedSchedule, Candidate]:
        """Cut for these schedules. Returns what there is of those that fit."""
        found: dict[NamedSchedule, Candidate] = {}
        for named_schedule in named_schedules:
            if self._pace.may_end(LAST_SHARE):
                self._state.end_by_time()
                break
            title = scheduled_title(cut_request.title, named_schedule)
            scheduled = replace(cut_request, title=title, named_schedule=named_schedule)
            candidate = self._cut(scheduled)
            if candidate is not None:
                # A cut may be the same as one of another schedule.
                if not self._is_known(candidate):
                    self._result.others.append(candidate)
                found[named_schedule] = candidate
        return found

    def _cut(self, cut_request: CutRequest) -> Candidate | None:
        """The plan with the best stages, for as much less memory as audits have found predictions
        of plans like it to be too low; where that leaves nothing, for all of it.
        """
        memory_bytes = self._space.memory_bytes
        if excess_bytes := self._excess_bytes(cut_request):
            candidate = self._state.cut(cut_request, memory_bytes - excess_bytes)
            if candidate is not None:
                return candidate
        return self._state.cut(cut_request, memory_bytes)

    def _excess_bytes(self, cut_request: CutRequest) -> float:
        """How much more than predicted a plan may take, by audits of plans with as many positions
        on the same schedule: of that which came nearest to the memory, as the moments at which
        something is computed again take more the more of it is.

        Example: 186 GB were predicted, and 209 GB audited. Cut again for 161 GB it takes 179. So on
        the next mesh stages are cut for 18 GB less than the 186 GB that there are.
        """
        like = cut_request.num_positions, cut_request.named_schedule
        audited = [(each, each.cost) for each in self._result.audited]
        found: list[tuple[float, float]] = []
        for candidate, cost in (*audited, *self._audits.too_large):
            asked = candidate.cut_request
            if asked is None or cost is None or candidate.is_mixed or candidate.plan.loops:
                continue
            if (asked.num_positions, asked.named_schedule) == like:
                off = abs(cost.peak_bytes - self._space.memory_bytes)
                found.append((off, cost.peak_bytes - candidate.used_bytes))
        return max(0.0, min(found)[1]) if found else 0.0

    def _promising(
        self, cut_request: CutRequest, named_schedules: Sequence[NamedSchedule]
    ) -> list[NamedSchedule]:
        """The schedules for which some cut may take less than the best plan, as far as that is soon
        known. The bounds of the others are noted.

        Example: two layers are the least that some of 64 positions have, and take 25.1 s of a step.
        The best plan takes 24.5 s.
        """
        # Of plans that were audited, as nothing else is sure to fit.
        out_s = (1 + self._space.simpler_within) * self._state.beaten_s()
        if cut_request.num_positions == 1 or out_s == float("inf"):
            return list(named_schedules)
        setting = cut_request.placements[0].walk.setting
        sharing, count = setting.hardware.device.sharing, self._space.num_microbatches
        # Bounds are of ranks that all compute; a rank with a core for itself is faster.
        out_s *= 1.0 if sharing is None else sharing.speed(1)
        found = []
        for each in named_schedules:
            title = scheduled_title(cut_request.title, each)
            scheduled = replace(cut_request, title=title, named_schedule=each)
            share = share_despite_overlap(
                setting.config, cut_request.num_positions, each.chunks, count
            )
            if self._state.cutter.bounds.may_take_less(scheduled, out_s / share):
                found.append(each)
            else:
                self._result.bound(scheduled, out_s)
        return found

    def try_one(self, placed_mesh: PlacedMesh) -> bool:
        """Cut the fastest placement for the first schedule, with so little memory that it is most
        likely to fit. Returns whether it does.
        """
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        lowered = self._state.lowered(placed_mesh.fastest, ranks)
        for named_schedule in self._state.named_schedules(number)[:1]:
            title = scheduled_title(title_of(placed_mesh), named_schedule)
            cut_request = CutRequest(title, (lowered,), number, named_schedule, pp_place)
            # With less memory than there is, as predictions may be too low.
            for share in SURE_SHARES:
                candidate = self._state.cut(cut_request, share * self._space.memory_bytes)
                if candidate is not None:
                    self._result.others.append(candidate)
                    return True
        return False

    def _is_known(self, candidate: Candidate) -> bool:
        """Whether a plan was found already where time is short."""
        if not self._pace.is_short:
            return False
        known = [*self._result.audited, *self._result.others]
        return any(
            candidate.title == other.title and candidate.plan == other.plan for other in known
        )


def _places_alike(plan: Plan, other: Plan) -> bool:
    return plan.strategies == other.strategies and plan.stored == other.stored
