"""The part of a search that goes over meshes: which comes first, what is placed on each, and which
schedules are tried with it.

Example: four ranks and a pipeline allow ``x=4`` and ``x=2 x y=2`` without a pipeline, ``pp=2`` with
``x=2``, and ``pp=4``. The model is placed for speed on the first of them, say ``x=4`` in 2.0 s. If
no plan on ``pp=4`` takes less than 2.1 s, and the plan on ``x=4`` fits, ``pp=4`` is not tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.mesh_requests import (
    LeastStep,
    PipelineMesh,
    PlacedMesh,
)
from shardwright.policies.autodist.candidates.meshes import divisors, inner_places
from shardwright.policies.autodist.candidates.scheduled_plans import (
    INTERLEAVED,
    MOST_CHUNKS,
    NamedSchedule,
    works,
)
from shardwright.policies.autodist.candidates.titles import mesh_title
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.mesh_bounds import MeshBounds
from shardwright.policies.autodist.search.mesh_order import ordered_meshes
from shardwright.policies.autodist.search.mesh_pace import MeshPace
from shardwright.policies.autodist.search.mesh_placing import MeshPlacing
from shardwright.policies.autodist.search.mesh_trials import MeshTrials
from shardwright.policies.autodist.search.search_state import (
    TRIED,
    TRYING_SHARE,
    SearchState,
)
from shardwright.policies.autodist.stages.chain import layer_blocks

FIRST_MESH_SHARES = (0.2, 0.45)
"""The shares of a short limit until which meshes are placed to begin with, and tried."""

FEW_AUDITS = 4
"""The fewest audits that tell how far predictions are above them."""

NUM_VARIED = 3
"""How many of the best plans each time have their placements tried with more stages on a position.
"""


class MeshSearch:
    """The meshes of a search. ``left``: those on which nothing is placed yet, the likely good ones
    first; ``placed``: those on which the model is placed for speed.
    """

    def __init__(self, state: SearchState, audits: Audits, least: LeastStep | None) -> None:
        self.state, self.audits = state, audits
        self.result, self.clock, self.space = state.result, state.clock, state.space
        self.pace = MeshPace(state, audits)
        self.bounds = MeshBounds(state)
        self.trials = MeshTrials(state, audits, self.pace, self.bounds)
        self._place = MeshPlacing(state, self.pace, least)
        self.left: deque[PipelineMesh] = deque()
        self.placed: list[PlacedMesh] = []
        self._inner: list[PlacedMesh] = []  # placed with the pipeline axis further inside
        self._done = set[PipelineMesh]()  # the placed ones that were tried, or refused
        self._num_first = 0  # of the placed ones, tried before others were placed
        self._varied: list[tuple[int, int, Plan]] = []  # what was tried with more stages

    # --------------------------------------------------------------------------------------------
    # placing

    def list_all(self) -> None:
        """Fill ``left`` with all that the space has, the likely good ones first."""
        self.left = deque(ordered_meshes(self.state))

    def put_first(self, where: PipelineMesh | None) -> None:
        """Place the model on this mesh before all others."""
        if where is not None and where in self.left:
            self.left.remove(where)
            self.left.appendleft(where)

    def place_until(self, share: float) -> bool:
        """Place the model on further meshes until a share of the time limit is over. Returns
        whether none are left that there is time for.
        """
        for where in tuple(self.left):
            if not self.state.may_place(where.mesh):
                continue  # there may be time for one of fewer axes
            placed_mesh = self._place(where)
            if placed_mesh is not None:
                self.placed.append(placed_mesh)
            # After that: an interrupt in between leaves the mesh twice, and not nowhere.
            self.left.remove(where)
            if placed_mesh is None:
                continue
            if placed_mesh.fastest.interrupted:
                raise KeyboardInterrupt  # the solver has kept what it had; now the search ends, too
            if self.clock.spent() > share:
                return not self.left
        return True

    def bound_left(self) -> None:
        """Place the model on meshes that time did not reach, for their bounds alone: of most of
        them, and of the same meshes in zigzag, that tells that they cannot be better, sooner than
        the plans of simple policies there do. A steady share of the rest is for those plans: all
        of it in a short search.

        Example: the best plan takes 22.4 s. On ``x=64`` in 4 positions none takes less than 43.2 s,
        which is known after 2 s.
        """
        until = 1.0 - self.clock.steady * (1.0 - self.clock.spent())
        if not self.left or self.clock.spent() >= until:
            return
        num_tried = len(self.placed)
        self.place_until(until)
        for placed_mesh in self.placed[num_tried:]:
            self.bounds.refuse(placed_mesh)

    # --------------------------------------------------------------------------------------------
    # trying

    def try_first(self) -> None:
        """Place the first mesh. Where that shows that there is time for few meshes, go on at once
        to a plan that fits, from the first few.
        """
        # The first mesh tells how long placing takes.
        self.place_until(0.0)
        if not self.pace.is_short:
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
                fits = self.trials.try_one(placed_mesh)
                index = self.placed.index(placed_mesh)
                self.placed[index] = replace(placed_mesh, memory_binds=not fits)
        # One audit, so that there is an answer.
        self.audits.audit_promising(most=1, near=1.0)

    def try_placed(self) -> None:
        """Try the meshes that were placed since the last call."""
        self._try_all(self.placed[self._num_first :])
        self._num_first = len(self.placed)

    def try_further(self) -> None:
        """Try further placements on the meshes whose fastest one fits only with layers computed
        again, while their bound is below the best plan.
        """
        paused, num_known = self.trials.take_paused(), len(self.result.others)
        for index, (placed_mesh, trying) in enumerate(paused):
            if self.pace.may_end(TRYING_SHARE):
                self.state.end_by_time()
                break
            if placed_mesh.bound_s < self.state.out_s(placed_mesh):
                self.pace.num_waiting = len(paused) - index - 1
                with self.clock.timed(TRIED):
                    for _ in trying:
                        pass
        if len(self.result.others) > num_known:
            self._audit()

    def _audit(self) -> None:
        """Audit the promising candidates: those predicted to take more than the best plan as far as
        predictions have been above audits so far.
        """
        self.audits.audit_promising(near=self._near())

    def _near(self) -> float:
        """How many times as long as the best plan others may be predicted to take, to be audited:
        what predictions were of their audits, at most.
        """
        audited = [
            (each, each.cost)
            for each in self.result.audited
            if each.cut_request is not None and each.cost is not None
        ]
        found = [
            candidate.predicted_s / cost.compared_s
            for candidate, cost in (*audited, *self.audits.too_large)
            if not candidate.plan.loops
        ]
        if len(found) < FEW_AUDITS:
            return self.space.near
        least = 1 + self.space.simpler_within
        return min(self.space.near, max(least, *found))

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
        for placed_mesh in sorted(self.placed, key=lambda placed_mesh: placed_mesh.bound_s):
            number, mesh = placed_mesh.num_positions, placed_mesh.mesh
            for pp_place in inner_places(self.state.hardware, mesh, number):
                is_beaten = placed_mesh.bound_s >= self.state.best_s()
                if is_beaten or self.state.is_late() or not self.state.may_place(mesh):
                    break
                if not self.trials.schedules_to_try(replace(placed_mesh, pp_place=pp_place)):
                    self.bounds.leave_untried(replace(placed_mesh, pp_place=pp_place))
                    continue
                found = self._place(PipelineMesh(number, mesh, pp_place))
                if found is not None:
                    self._inner.append(found)
        if self._inner:
            self._try_all(self._inner)

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
                self.trials.try_schedules(replace(asked, title=title), usable)
                is_new = True
        if is_new:
            self._audit()

    def answer_at_once(self) -> None:
        """Find one plan that fits, where there is none yet, from what is known."""
        self.audits.audit_promising(most=1)
        for placed_mesh in sorted(self.placed, key=self._likely_s):
            # As it is, and then with what is most likely to fit.
            for likely in (placed_mesh, replace(placed_mesh, memory_binds=True)):
                if self.result.best is None:
                    self.trials.try_all(likely)
                    self.audits.audit_promising(most=1)

    def leave_untried(self) -> None:
        """Note the meshes that are placed, and that an interrupt has left untried or half tried."""
        for placed_mesh in (*self.placed, *self._inner):
            if placed_mesh.where not in self._done:
                self._refuse(placed_mesh)

    def _refuse(self, placed_mesh: PlacedMesh) -> None:
        self.bounds.refuse(placed_mesh)
        self._done.add(placed_mesh.where)

    def _try_all(self, placed_meshes: Sequence[PlacedMesh]) -> None:
        """Try the meshes that may have the best plan, the most likely first, and audit what they
        give; again while audits leave others that may have it.
        """
        waiting = sorted(placed_meshes, key=self._likely_s)
        hurried: list[PlacedMesh] = []  # and so tried with one request only
        # A mesh whose bound is above the best plan cannot win, but its plans may be simpler.
        while promising := [each for each in waiting if each.bound_s < self.state.out_s(each)]:
            for placed_mesh in promising:
                if self.pace.may_end(TRYING_SHARE):
                    # The mesh may be out of the race by what was found meanwhile.
                    self.state.end_by_time()
                    break
                if placed_mesh.bound_s < self.state.out_s(placed_mesh):
                    hurries = self.pace.hurries()
                    with self.clock.timed(TRIED):
                        self.trials.try_all(placed_mesh)
                    self._done.add(placed_mesh.where)
                    self.pace.num_tried += 1
                    waiting.remove(placed_mesh)
                    self.pace.num_waiting = sum(
                        other.bound_s < self.state.out_s(other) for other in waiting
                    )
                    # An answer, and how long audits take, before the others use up the time. Where
                    # they take long, it soon tells of most schedules on them that they are worse.
                    if not self.result.audited and (self.pace.is_scarce() or self.pace.is_slow()):
                        self.audits.audit_promising(most=1)
                    if hurries:
                        hurried.append(placed_mesh)
                        break
            self._audit()
            # Now that something fits, the others get all their requests.
            if self.result.audited:
                waiting, hurried = hurried + waiting, []
            has_some = self.result.audited or self.result.others
            if self.result.interrupted is not None and (has_some or self.clock.is_over):
                break
        for placed_mesh in waiting:
            self._refuse(placed_mesh)

    def _likely_s(self, placed_mesh: PlacedMesh) -> float:
        """What a step may take on a mesh, with the most common of schedules, if memory does not
        bind.
        """
        share_s = placed_mesh.fastest.bound_s / placed_mesh.num_positions
        return max(placed_mesh.bound_s, share_s * self.state.slower(placed_mesh.num_positions))
