"""The part of a search that goes over meshes: which comes first, what is placed on each, and which
schedules are tried with it.

Example: four ranks and a pipeline allow ``x=4`` and ``x=2 x y=2`` without a pipeline, ``pp=2`` with
``x=2``, and ``pp=4``. The model is placed for speed on the first of them, say ``x=4`` in 2.0 s. If
no plan on ``pp=4`` takes less than 2.1 s, and the plan on ``x=4`` fits, ``pp=4`` is not tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.mesh_requests import (
    LeastStep,
    MeshRequest,
    PipelineMesh,
    PlacedMesh,
    PlacedModel,
    mesh_requests,
)
from shardwright.policies.autodist.candidates.meshes import (
    divisors,
    inner_places,
    position_ranks,
)
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import (
    INTERLEAVED,
    MOST_CHUNKS,
    NamedSchedule,
    works,
)
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.search_state import (
    TRIED,
    TRYING_SHARE,
    SearchState,
)
from shardwright.policies.autodist.stages.chain import layer_blocks
from shardwright.runtime.layout import Mesh

BEYOND_NODE, FURTHER_AXIS = 2.0, 1.3
"""The factors by which a mesh is less likely to be the best that lies on several nodes, and one of
an axis more to be worth its time. They decide what is tried first.
"""

BINDS = 1e-3
"""How much of the time of a step the memory must cost at least to be said to bind."""

SHORT = 60.0
"""A limit of less than that many times what it takes to place the model on a mesh of one axis
leaves time for few of them.
"""

FIRST_MESH_SHARES = (0.2, 0.45)
"""The shares of a short limit until which meshes are placed to begin with, and tried."""

SURE_SHARES = (0.93, 1.0)
"""The shares of the memory that the first plan may take by the model of stages: that model leaves
out some per cent of what programs take. The second share counts where the first is too little.
"""

WITHIN_REACH = 1.1
"""Where time is scarce a schedule that took more than that many times the best plan's step with one
placement is not tried with another one on the same mesh.
"""

NUM_VARIED = 3
"""How many of the best plans each time have their placements tried with more stages on a position.
"""

LAST_SHARE = 0.9
"""The share of the time limit after which also the mesh that is being tried is left, if there is
something to audit.
"""


class MeshSearch:
    """The meshes of a search. ``left``: those on which nothing is placed yet, the likely good ones
    first; ``placed``: those on which the model is placed for speed.
    """

    def __init__(self, state: SearchState, audits: Audits, least: LeastStep | None) -> None:
        self.state, self.audits, self.least = state, audits, least
        self.result, self.clock, self.space = state.result, state.clock, state.space
        self.left: deque[PipelineMesh] = deque()
        self.placed: list[PlacedMesh] = []
        self._num_tried = 0  # meshes
        self._num_waiting = 0  # of the placed ones, to be tried after the one that is
        self._num_first = 0  # of the placed ones, tried before others were placed
        # Whether the limit is short for a model of this size; None before the first placement.
        self._is_short: bool | None = None
        self._untried: list[PlacedMesh] = []  # that may have the best plan by their bounds
        self._made: list[tuple[PlacedMesh, PlacedModel]] = []  # what meshes were tried with
        self._varied: list[tuple[int, int, Plan]] = []  # what was tried with more stages

    # --------------------------------------------------------------------------------------------
    # which meshes, in which order

    def list_all(self) -> None:
        """Fill ``left`` with all that the space has. What is likely good and soon placed comes
        first: by what simple policies take on it, then by rule of thumb.
        """
        num_ranks, node = self.state.config.plan_ngpus, self.state.hardware.tiers[0].sizes[0]
        found: list[PipelineMesh] = []
        # Positions of a pipeline, and the meshes that each of them may be.
        for number in divisors(num_ranks):
            if number != (self.space.num_positions or number):
                continue
            if not self.state.may_have(number) or not self.state.named_schedules(number):
                continue
            for mesh in self.space.meshes.get(num_ranks // number, ()):
                # Where the pipeline axis stands among the others is tried last.
                pp_place = min(self.space.pp_place or 0, len(mesh.axes)) if number > 1 else 0
                found.append(PipelineMesh(number, mesh, pp_place))

        def further_axes(mesh: Mesh) -> float:
            return FURTHER_AXIS ** max(0, len(mesh.axes) - 1)

        def by_thumb(where: PipelineMesh) -> float:
            on_nodes = BEYOND_NODE if where.mesh.size > node else 1.0
            return on_nodes * further_axes(where.mesh) * self.state.slower(where.num_positions)

        def by_estimate(where: PipelineMesh) -> float:
            return further_axes(where.mesh) * self.state.likely_s(where)

        # First by the rule; estimates, which take time, then decide among what is there.
        found.sort(key=by_thumb)
        if len(found) > 1:
            found.sort(key=by_estimate)
        self.left = deque(found)

    def put_first(self, where: PipelineMesh | None) -> None:
        """Place the model on this mesh before all others."""
        if where is not None and where in self.left:
            self.left.remove(where)
            self.left.appendleft(where)

    # --------------------------------------------------------------------------------------------
    # placing

    def place_until(self, share: float) -> bool:
        """Place the model on further meshes until a share of the time limit is over. Returns
        whether none are left that there is time for.
        """
        for where in tuple(self.left):
            number, mesh, pp_place = where
            if not self.state.may_place(mesh):
                continue  # there may be time for one of fewer axes
            self.left.remove(where)
            placed_mesh = self._placed_mesh(number, mesh, pp_place)
            if placed_mesh is None:
                continue
            self.placed.append(placed_mesh)
            if placed_mesh.fastest.interrupted:
                raise KeyboardInterrupt  # the solver has kept what it had; now the search ends, too
            if self.clock.spent() > share:
                return not self.left
        return True

    def _placed_mesh(self, num_positions: int, mesh: Mesh, pp_place: int) -> PlacedMesh | None:
        """A mesh with the fastest placement on it, and what bounds every plan there; ``None`` if
        nothing can be placed.
        """
        ranks = position_ranks(mesh, num_positions, pp_place)[0]
        first, *further = mesh_requests(self.state.graph, self.space, num_positions, mesh, ranks)
        fastest = self.state.placed(first, mesh_title(num_positions, mesh, pp_place), keeps=True)
        if self._is_short is None:
            self._is_short = self.clock.limit_s < SHORT * self.state.one_axis_s(len(mesh.axes))
        if fastest is None:
            return None
        binds, least_s = False, 0.0
        # A bound that heeds the memory takes as long as another placement, so it is only asked for
        # where the mesh may still have the best plan.
        is_worth = not self._is_short and fastest.share_s(num_positions) < self.state.beaten_s()
        if further and self.least is not None and is_worth and not fastest.interrupted:
            try:
                least_s = self.least(further[0])
                binds = least_s > (1 + BINDS) * fastest.bound_s
                fastest = _within_memory(fastest, least_s)
            except KeyboardInterrupt:
                fastest, binds = replace(fastest, interrupted=True), True  # for all that is known
        return PlacedMesh(
            num_positions,
            mesh,
            pp_place,
            self._despite_overlap(fastest, num_positions),
            tuple(further),
            memory_binds=binds,
            never_fits=least_s == float("inf"),
        )

    def _despite_overlap(self, fastest: PlacedModel, num_positions: int) -> PlacedModel:
        """The placement with a bound that also holds where collectives run beside passes."""
        share = self.state.share_despite_overlap(num_positions)
        if share == 1.0:
            return fastest
        proof = (
            f"{fastest.proof}; what passes may hide of sums and gatherings beside them is taken off"
        )
        return replace(fastest, bound_s=share * fastest.bound_s, proof=proof)

    # --------------------------------------------------------------------------------------------
    # trying

    def try_first(self) -> None:
        """Place the first mesh. Where that shows that there is time for few meshes, go on at once
        to a plan that fits, and to what else the first few may give.
        """
        # The first mesh tells how long placing takes.
        self.place_until(0.0)
        if not self._is_short:
            return
        # As many meshes as a part of the time allows; the rest of it is for plans that fit.
        while self.left:
            next_axes = len(self.left[0][1].axes)
            if self.clock.spent(self.state.placing_s(next_axes)) >= FIRST_MESH_SHARES[0]:
                break
            self.place_until(0.0)
        # A cut that is sure to fit, for each of them.
        for placed_mesh in sorted(self.placed, key=self._likely_s):
            in_time = not self.result.others or self.clock.spent() < FIRST_MESH_SHARES[1]
            if in_time and placed_mesh.bound_s < self.state.best_s():
                fits = self._try_one_schedule(placed_mesh)
                index = self.placed.index(placed_mesh)
                self.placed[index] = replace(placed_mesh, memory_binds=not fits)
        # One audit, so that there is an answer.
        self.audits.audit_promising(most=1, near=1.0)
        self._try_all(self.placed)
        self._num_first = len(self.placed)

    def try_placed(self) -> None:
        """Try the meshes that were placed since the last call."""
        self._try_all(self.placed[self._num_first :])
        self._num_first = len(self.placed)

    def try_inner(self) -> None:
        """Try the pipeline axis further inside, wherever that puts some ranks on other tiers of the
        machine. Meshes are tried whose bound is below the best plan: their own axes lie on no
        slower tiers where the pipeline axis is outermost. So only what positions send one another
        can take less: where that is too little, a schedule is bounded, and not tried once more.

        Example: the best plan takes 15.5 s. On another mesh one of ``zb_v`` takes 15.8 s, and no
        chain of its actions waits for more than 0.1 s of messages: further inside none takes less
        than 15.7.
        """
        if self.space.pp_place is not None:
            return  # the user has said where it stands
        inner: list[PlacedMesh] = []
        for placed_mesh in sorted(self.placed, key=lambda placed_mesh: placed_mesh.bound_s):
            number, mesh = placed_mesh.num_positions, placed_mesh.mesh
            for pp_place in inner_places(self.state.hardware, mesh, number):
                is_beaten = placed_mesh.bound_s >= self.state.best_s()
                if is_beaten or self.state.is_late() or not self.state.may_place(mesh):
                    break
                if not self._schedules_to_try(replace(placed_mesh, pp_place=pp_place)):
                    self._leave_untried(replace(placed_mesh, pp_place=pp_place))
                    continue
                found = self._placed_mesh(number, mesh, pp_place)
                if found is not None:
                    inner.append(found)
        if inner:
            self._try_all(inner)

    def _schedules_to_try(self, placed_mesh: PlacedMesh) -> list[NamedSchedule]:
        """The schedules to try on a mesh: all, or, where the pipeline axis stands further inside
        than outermost, those of which a plan outermost may take less than the best one but for what
        positions send one another. Where ranks share cores, positions that lie otherwise share
        them with others: all.
        """
        found = list(self.state.named_schedules(placed_mesh.num_positions))
        is_inner = self.space.pp_place is None and placed_mesh.pp_place > 0
        if not is_inner or self.state.hardware.device.sharing is not None:
            return found
        sizes = [size for _, size in placed_mesh.mesh.axes]
        without_s: dict[NamedSchedule, float] = {}
        for candidate in self.result.tried:
            asked = candidate.cut_request
            if asked is None or len(asked.placements) > 1 or asked.pp_place:
                continue
            # Axes have names by now.
            if [size for _, size in asked.placements[0].placed.plan.mesh.axes] == sizes:
                known_s = without_s.get(asked.named_schedule, float("inf"))
                own_s = candidate.step_s - candidate.messages_s
                without_s[asked.named_schedule] = min(known_s, own_s)
        best_s = self.state.best_s()
        return [each for each in found if without_s.get(each, float("inf")) < best_s]

    def try_more_chunks(self) -> None:
        """Try interleaved 1F1B with more stages on each position than schedules are tried with, for
        the placements of the best plans: as many as deal the layers out evenly.

        Example: of 80 layers on 4 positions 5, 10 and 20 stages on each.
        """
        if self.space.chunks is not None or INTERLEAVED not in self.space.schedules:
            return
        num_layers, is_new = len(layer_blocks(self.state.graph)[1]), False
        for candidate in tuple(self.result.audited[:NUM_VARIED]):
            asked = candidate.cut_request
            if asked is None or asked.num_positions == 1 or len(asked.placements) > 1:
                continue
            number, placed = asked.num_positions, asked.placements[0].placed
            varied = (number, asked.pp_place, placed.plan)
            if num_layers % number or any(varied == other for other in self._varied):
                continue
            self._varied.append(varied)
            title = mesh_title(number, placed.plan.mesh, asked.pp_place)
            more = [count for count in divisors(num_layers // number) if count > MOST_CHUNKS]
            found = [NamedSchedule(INTERLEAVED, count) for count in more]
            usable = [each for each in found if works(each, number, self.space.num_microbatches)]
            if usable:
                self._try_these(replace(asked, title=title), usable)
                is_new = True
        if is_new:
            self.audits.audit_promising()

    def answer_at_once(self) -> None:
        """Find one plan that fits, where there is none yet, from what is known."""
        self.audits.audit_promising(most=1)
        for placed_mesh in sorted(self.placed, key=self._likely_s):
            # As it is, and then with what is most likely to fit.
            for likely in (placed_mesh, replace(placed_mesh, memory_binds=True)):
                if self.result.best is None:
                    self._try_mesh(likely)
                    self.audits.audit_promising(most=1)

    def _try_all(self, placed_meshes: Sequence[PlacedMesh]) -> None:
        """Try the meshes that may have the best plan, the most likely first, and audit what they
        give; again while audits leave others that may have it.
        """
        waiting = sorted(placed_meshes, key=self._likely_s)
        hurried: list[PlacedMesh] = []  # and so tried with one request only
        # A mesh whose bound is above the best plan cannot win.
        while promising := [
            placed_mesh for placed_mesh in waiting if placed_mesh.bound_s < self.state.best_s()
        ]:
            for placed_mesh in promising:
                if self._may_end(TRYING_SHARE):
                    # The mesh may be out of the race by what was found meanwhile.
                    self.state.end_by_time()
                    break
                if placed_mesh.bound_s < self.state.best_s():
                    hurries = self._hurries()
                    with self.clock.timed(TRIED):
                        self._try_mesh(placed_mesh)
                    self._num_tried += 1
                    waiting.remove(placed_mesh)
                    self._num_waiting = sum(
                        other.bound_s < self.state.best_s() for other in waiting
                    )
                    # An answer, and how long audits take, before the others use up the time.
                    if self._is_scarce() and not self.result.audited:
                        self.audits.audit_promising(most=1)
                    if hurries:
                        hurried.append(placed_mesh)
                        break
            self.audits.audit_promising()
            # Now that something fits, the others get all their requests.
            if self.result.audited:
                waiting, hurried = hurried + waiting, []
            has_some = self.result.audited or self.result.others
            if self.result.interrupted is not None and (has_some or self.clock.is_over):
                break
        for placed_mesh in waiting:
            self._refuse(placed_mesh)

    def _refuse(self, placed_mesh: PlacedMesh) -> None:
        """Note why a mesh is not tried, or not any further."""
        words = f"every plan on it takes at least {amount(placed_mesh.bound_s, 's')}"
        if placed_mesh.bound_s < self.state.best_s():
            self._leave_untried(placed_mesh)
            words = f"there was no time to try it further; {words}"
        self.result.refused[_title(placed_mesh)] = words

    def _leave_untried(self, placed_mesh: PlacedMesh) -> None:
        """Note a mesh that may have the best plan by its bound: at the end it is raised."""
        self.result.unanswered[_title(placed_mesh)] = placed_mesh.bound_s
        self._untried.append(placed_mesh)

    def _try_mesh(self, placed_mesh: PlacedMesh) -> None:
        """Try all schedules on one mesh: with the fastest placement first, and with further ones if
        that does not fit, or only with layers computed again.
        """
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        title = mesh_title(number, placed_mesh.mesh, pp_place)
        # Placements that were cut: another request may give the same.
        seen: list[Plan] = []
        named_schedules: Sequence[NamedSchedule] = self._schedules_to_try(placed_mesh)
        self._bound_schedules(placed_mesh, named_schedules)
        steps_s: dict[NamedSchedule, float] = {}  # the best so far
        for request in self._requests(placed_mesh):
            placed = placed_mesh.fastest
            if request is not None:
                found = self.state.placed(request, title)
                if found is None:
                    continue
                placed = found
            if any(_places_alike(placed.plan, plan) for plan in seen):
                continue
            seen.append(placed.plan)
            # The bound of the fastest placement leaves open what is computed again, and when.
            fastest = placed_mesh.fastest
            placed = replace(placed, bound_s=fastest.bound_s, proof=fastest.proof)
            self._made.append((placed_mesh, placed))
            # Axes may be better named by now.
            title = mesh_title(number, placed.plan.mesh, pp_place)
            if request is not None and request.hurried and number == 1:
                self.audits.sure.append(self._as_placed(title, placed))
                return
            lowered = self.state.lowered(placed, ranks)
            without_schedule = NamedSchedule("", 1)
            cut_request = CutRequest(title, (lowered,), number, without_schedule, pp_place)
            tried = self._try_these(cut_request, named_schedules)
            # It fits without computing anything again: further placements only save memory.
            if any(not candidate.plan.recompute for candidate in tried.values()):
                return
            before_s = min(steps_s.values(), default=float("inf"))
            for named_schedule, candidate in tried.items():
                known_s = steps_s.get(named_schedule, float("inf"))
                steps_s[named_schedule] = min(known_s, candidate.step_s)
            if self._is_scarce():
                # Placements that have bettered nothing are followed by no further ones.
                if before_s <= min(steps_s.values(), default=float("inf")) < float("inf"):
                    return
                within_s = WITHIN_REACH * self.state.best_s()
                named_schedules = [
                    each for each in named_schedules if steps_s.get(each, 0.0) <= within_s
                ]

    def _as_placed(self, title: str, placed: PlacedModel) -> Candidate:
        """A plan as it is placed. Nothing predicts what it takes: its program will tell."""
        again = ", all layers computed again" if placed.plan.recompute else ""
        return Candidate(
            title + again,
            placed.plan,
            placed.cost_s,
            (placed,),
            used_bytes=self.space.memory_bytes,
        )

    def _requests(self, placed_mesh: PlacedMesh) -> Iterator[MeshRequest | None]:
        """What a mesh is tried with, ``None`` for the fastest placement; in a hurry only what is
        likely to fit.
        """
        if not (self._hurries() and placed_mesh.memory_binds and placed_mesh.further):
            yield None
        for request in placed_mesh.further:
            if self._may_end(LAST_SHARE) or not self.state.may_place(placed_mesh.mesh):
                return self.state.end_by_time()
            if not self._hurries():
                yield request
            # The last request is the one that needs least memory.
            elif request is placed_mesh.further[-1]:
                yield replace(request, hurried=True)

    def _try_these(
        self, cut_request: CutRequest, named_schedules: Sequence[NamedSchedule]
    ) -> dict[NamedSchedule, Candidate]:
        """Cut for these schedules. Returns what there is of those that fit."""
        found: dict[NamedSchedule, Candidate] = {}
        for named_schedule in named_schedules:
            if self._may_end(LAST_SHARE):
                self.state.end_by_time()
                break
            title = scheduled_title(cut_request.title, named_schedule)
            scheduled = replace(cut_request, title=title, named_schedule=named_schedule)
            candidate = self.state.cut(scheduled, self.space.memory_bytes)
            if candidate is not None:
                # A cut may be the same as one of another schedule.
                if not self._is_known(candidate):
                    self.result.others.append(candidate)
                found[named_schedule] = candidate
        return found

    def _try_one_schedule(self, placed_mesh: PlacedMesh) -> bool:
        """Cut the fastest placement for the first schedule, with so little memory that it is most
        likely to fit. Returns whether it does.
        """
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        lowered = self.state.lowered(placed_mesh.fastest, ranks)
        for named_schedule in self.state.named_schedules(number)[:1]:
            title = scheduled_title(_title(placed_mesh), named_schedule)
            cut_request = CutRequest(title, (lowered,), number, named_schedule, pp_place)
            # With less memory than there is, as predictions may be too low.
            for share in SURE_SHARES:
                candidate = self.state.cut(cut_request, share * self.space.memory_bytes)
                if candidate is not None:
                    self.result.others.append(candidate)
                    return True
        return False

    # --------------------------------------------------------------------------------------------
    # time, and what is known

    def _may_end(self, share: float) -> bool:
        """Whether a share of the time is over, with no time for more, and there is something to
        audit, or overtime is over; never before the first mesh was tried.
        """
        has_some = bool(self.result.others or self.result.audited or self.audits.sure)
        is_over = self.clock.spent() > share and not self.state.may_try()
        return is_over and (has_some or (self._num_tried > 0 and self.clock.is_over))

    def _is_scarce(self) -> bool:
        """Whether the time left is too short to try every mesh that waits, as long as others
        took.
        """
        return self.clock.spent(self._num_waiting * self.clock.longest_s(TRIED)) >= 1.0

    def _hurries(self) -> bool:
        """Whether there is time for little more than one plan that fits, and none yet."""
        return bool(self._is_short or self.clock.spent() > LAST_SHARE) and not self.result.audited

    def _likely_s(self, placed_mesh: PlacedMesh) -> float:
        """What a step may take on a mesh, with the most common of schedules, if memory does not
        bind.
        """
        share_s = placed_mesh.fastest.bound_s / placed_mesh.num_positions
        return max(placed_mesh.bound_s, share_s * self.state.slower(placed_mesh.num_positions))

    def _is_known(self, candidate: Candidate) -> bool:
        """Whether a plan was found already by :meth:`try_first`."""
        if not self._is_short:
            return False
        known = [*self.result.audited, *self.result.others]
        return any(
            candidate.title == other.title and candidate.plan == other.plan for other in known
        )

    def bound_untried(self) -> None:
        """Bound pipelines of meshes that were left untried by schedule, as those are that were
        tried: such bounds can be raised.
        """
        for placed_mesh in sorted(self._untried, key=lambda placed_mesh: placed_mesh.bound_s):
            number, title = placed_mesh.num_positions, _title(placed_mesh)
            named_schedules = self.state.named_schedules(number)
            is_beaten = placed_mesh.bound_s >= self.state.best_s()
            if number == 1 or not named_schedules or is_beaten or self.clock.left_s <= 0.0:
                continue
            self._bound_schedules(placed_mesh)
            # An interrupt before this leaves a bound too many, and none too few.
            self.result.unanswered.pop(title, None)

    def _bound_schedules(self, placed_mesh: PlacedMesh, but: Sequence[NamedSchedule] = ()) -> None:
        """Bound the schedules of a mesh, but for those that are tried."""
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        rest = [each for each in self.state.named_schedules(number) if each not in but]
        if not rest:
            return
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        lowered = self.state.lowered(placed_mesh.fastest, ranks)
        for each in rest:
            name = scheduled_title(_title(placed_mesh), each)
            cut_request = CutRequest(name, (lowered,), number, each, pp_place)
            self.result.bound(cut_request, placed_mesh.bound_s)

    def bound_unanswered(self) -> None:
        """Keep the bounds of meshes that were tried and left nothing that fits.

        Without a pipeline such a bound is of all placements, and another one may fit. A pipeline's
        bound is of the placements chosen, no split of which fits: it is said to be in no bound.
        """
        # Meshes of which something was tried have the bounds of these candidates.
        known = {id(candidate.placed[0]) for candidate in self.result.tried}
        # A mesh is answered when one of its placements became a candidate that was tried.
        answered = {
            placed_mesh.where
            for placed_mesh, placed in self._made
            if known & {id(placed), id(placed_mesh.fastest)}
        }
        for placed_mesh, _ in self._made:
            number, title = placed_mesh.num_positions, _title(placed_mesh)
            if placed_mesh.never_fits or placed_mesh.where in answered:
                continue
            if not self.state.named_schedules(number):
                continue
            if number == 1:
                # Without stages the bound of the placement is the bound of the mesh. A pipeline's
                # is not, so it is named as not bounded, if it might be better.
                self.result.unanswered[title] = placed_mesh.bound_s
            elif placed_mesh.bound_s < self.state.best_s() and title not in self.result.unbounded:
                self.result.unbounded.append(title)


def _title(placed_mesh: PlacedMesh) -> str:
    """The mesh in words, its axes named after what the fastest placement splits."""
    mesh = placed_mesh.fastest.plan.mesh
    return mesh_title(placed_mesh.num_positions, mesh, placed_mesh.pp_place)


def _places_alike(plan: Plan, other: Plan) -> bool:
    return plan.strategies == other.strategies and plan.stored == other.stored


def _within_memory(fastest: PlacedModel, least_s: float) -> PlacedModel:
    """The fastest placement with a bound that heeds the memory. Where nothing fits, that is found
    out by trying: then it is said how much is missing.
    """
    if least_s <= fastest.bound_s or least_s == float("inf"):
        return fastest
    proof = fastest.proof
    if least_s > (1 + BINDS) * fastest.bound_s:
        proof = "Lagrange multiplier of the memory, whatever is computed again"
    return replace(fastest, bound_s=least_s, proof=proof)
