"""The outer search: meshes, pipeline stages, schedules, and what is computed again.

    where the limit leaves time for very little: audit the plan of a simple policy that is likely the best    (rivals.py)
    for every number of pipeline positions, and every mesh of one, what is likely good first:          (scouting.py)
        place the whole model on that mesh for speed alone                    (placement/: every operator, exact or bounded)
        after the first few, where the limit leaves time for few: audit the best plan that they give at once
    for each of them, the most likely first, as long as that is below the best plan so far:
        place the model within the memory too, where it does not fit, and at the price of computing again (wishes.py)
        for every schedule: cut the chain of blocks into stages               (stages/: exact under its model of 1F1B)
                            move their begins, if it is another than 1F1B     (moving.py: as long as a simulation gets shorter)
    lower the most promising plans and audit them: adapters, messages and actions that are really emitted
        one that takes more memory than was predicted is cut into stages again, with as much less to be used
    nothing fits: place the model on every mesh for the least memory, then for less and less of it    (sparing.py)
    the same with the pipeline axis further inside, where the machine has tiers           (tiers.py)
    for every number of stages: cut the chain again, where each stage may choose its placement   (mixing.py, messages.py)
    audit the plans of the simple policies that may still be better             (rivals.py, simple.py)
    the best that fits the memory is the answer
    bound better what might still be better, as far as bounds tell               (tightening.py: pipelines, by their schedules)

Costs that decide are audited ones. What the search covers exactly and what it restricts is in the
certificate: placements are the best for the whole model, and stages choose between those that were
offered.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.time.operator_time import OperatorTimes
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.candidates import (
    FURTHER_AXIS,
    Pace,
    divisors,
    inner_places,
    position_ranks,
    unlikely,
)
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.floor import floor_s
from shardwright.policies.autodist.candidates.found import (
    INTERRUPT,
    Attempt,
    Candidate,
    Found,
    Opening,
    Whereabouts,
)
from shardwright.policies.autodist.candidates.hidden import left_in_bound
from shardwright.policies.autodist.candidates.space import Least, Placed, Placer, Space, Wish
from shardwright.policies.autodist.candidates.wishes import wishes
from shardwright.policies.autodist.candidates.words import mesh_title, paced_title
from shardwright.policies.autodist.search.auditing import Auditor, Audits
from shardwright.policies.autodist.search.bench import MORE_AXES, SCOUT, TRIED, TRYING_SHARE, Bench
from shardwright.policies.autodist.search.mixing import Mixing
from shardwright.policies.autodist.search.rivals import Rivals
from shardwright.policies.autodist.search.sparing import Sparing
from shardwright.policies.autodist.search.tightening import tighten
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

BINDS = 1e-3
"""How much of the time of a step the memory must cost at least to be said to bind."""

OPENING_SHARES = (0.3, 0.5, 0.7)
"""The shares of the time limit at which meshes that were placed for speed are tried before more
are.
"""

SHORT, SCOUTED = 60.0, 120.0
"""A limit of less than that many times what it takes to place the model on a mesh of one axis
leaves time for few of them; the same of what it takes to scout.
"""

BEGINNING_SHARES = (0.2, 0.45)
"""The shares of a short limit until which meshes are placed to begin with, and tried."""

SURE_SHARES = (0.93, 1.0)
"""Of the memory, what the first plan may take by the model of stages, which leaves out some per
cent of what programs take; and what it may take where that is too little.
"""

LAST_SHARE = 0.9
"""The share after which also the mesh that is being tried is left, if there is something to
audit.
"""


class Search:
    """One search. ``found`` is valid at any time, so an interrupted search still has an answer."""

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        hardware: Hardware,
        space: Space,
        place: Placer,
        *,
        optimizer: OptimizerMemory = ADAM,
        times: OperatorTimes | None = None,
        clock: Clock | None = None,
        least: Least | None = None,
    ) -> None:
        self.graph, self.config, self.space, self.least = graph, config, space, least
        self.clock = clock or Clock()
        self.bench = Bench(graph, config, hardware, space, place, optimizer, times, self.clock)
        self.found = self.bench.found
        self.audited = Auditor(graph, config, hardware, space.num_microbatches, optimizer, times)
        self.audits = Audits(self.bench, self.audited)
        self._num_tried = 0  # meshes
        self._is_short: bool | None = (
            None  # the limit, for a model of this size; None before it is known
        )
        self._left: deque[Whereabouts] = deque()  # the meshes that nothing is placed on yet
        self._rivals = Rivals(self.bench, self.audited)
        self._made: list[tuple[Opening, Placed]] = []  # the placements that meshes were tried with

    def run(self) -> Found:
        """Search until done, out of time, or interrupted from the keyboard: then with what is known
        by then, or, with nothing known, on to the first plan that fits; a second interrupt ends
        that, too.

        Raises:
            KeyboardInterrupt: interrupted with no plan known.
        """
        openings: list[Opening] = []
        try:
            self._search(openings)
        except KeyboardInterrupt:
            self.clock.end()
            self.found.interrupted = INTERRUPT
            with contextlib.suppress(KeyboardInterrupt):
                self._answer_with(openings)
            if self.found.best is None and not self.found.refused:
                raise
        self._rivals.note(openings, self._left)
        self._bound_unanswered()
        try:
            tighten(self.bench)
        except KeyboardInterrupt:
            self.found.interrupted = INTERRUPT
        self.found.seconds = self.clock.seconds
        device, times = self.bench.hardware.device, self.bench.times
        self.found.floor_s = floor_s(
            self.graph, self.config, device, self.space.num_microbatches, times
        )
        return self.found

    def _search(self, openings: list[Opening]) -> None:
        """``openings``: takes in what is placed."""
        left = self._left = self._meshes()
        self._rivals.keep_time(len(left))
        is_first = self.space.simple and self.space.worth_s == float("inf")
        if is_first and self.clock.limit_s < SCOUTED * self.clock.longest_s(SCOUT):
            self._rivals.begin(left)
            best = self._rivals.best_where
            if best is not None and best in left:  # there something better still is the most likely
                left.remove(best)
                left.appendleft(best)
        tried = self._begin(left, openings)
        for share in OPENING_SHARES:
            ended = self._open(left, share, openings)
            self._try_all(openings[tried:])
            tried = len(openings)
            if ended or (self.bench.is_late() and (self.found.audited or self.clock.is_over)):
                break
        else:
            self.bench.end_by_time()
        if not self.found.audited and self.space.worth_s == float(
            "inf"
        ):  # no other search has a plan either
            self._spare(openings)
        if not self.bench.is_late():
            self._try_inner(openings)
            Mixing(self.bench, self.audits).run(openings)
        self._rivals.end_reserve()
        if self.found.audited:
            self.audits.best(most=1, near=1.0)
        self._rivals.run(openings, left)

    def _begin(self, left: deque[Whereabouts], openings: list[Opening]) -> int:
        """Where there is time for few meshes, as the first shows, go on at once to a plan that
        fits, and to what else the first few may give. How many of the openings were tried.
        """
        self._open(left, 0.0, openings)
        if not self._is_short:
            return 0
        while (
            left
            and self.clock.spent(self.bench.placing_s(len(left[0][1].axes))) < BEGINNING_SHARES[0]
        ):
            self._open(left, 0.0, openings)
        for opening in sorted(openings, key=self._likely_s):
            in_time = not self.found.others or self.clock.spent() < BEGINNING_SHARES[1]
            if in_time and opening.bound_s < self.bench.best_s():
                fits = self._try_first(opening)
                openings[openings.index(opening)] = replace(opening, binds=not fits)
        self.audits.best(most=1, near=1.0)
        self._try_all(openings)
        return len(openings)

    def _try_first(self, opening: Opening) -> bool:
        """The first schedule on a mesh that is placed for speed, with so little memory that it is
        most likely to fit.
        """
        number, place = opening.num_positions, opening.pp_place
        offer = self.bench.offer(opening.free, position_ranks(opening.mesh, number, place)[0])
        for pace in self.bench.paces(number)[:1]:
            title = paced_title(mesh_title(number, opening.free.plan.mesh, place), pace)
            for share in SURE_SHARES:
                candidate = self.bench.tried(
                    Attempt(title, (offer,), number, pace, place), share * self.space.memory_bytes
                )
                if candidate is not None:
                    self.found.others.append(candidate)
                    return True
        return False

    def _is_first(self, candidate: Candidate) -> bool:
        """Whether it is a plan that was among those to begin with."""
        known = [*self.found.audited, *self.found.others] if self._is_short else []
        return any(
            candidate.title == other.title and candidate.plan == other.plan for other in known
        )

    def _spare(self, openings: Sequence[Opening]) -> None:
        if not Sparing(self.bench, self.audits).run(openings):
            self.bench.end_by_time()

    def _answer_with(self, openings: Sequence[Opening]) -> None:
        """One plan that fits, where there is none yet, from what is known."""
        self.audits.best(most=1)
        for opening in sorted(openings, key=self._likely_s):
            for likely in (
                opening,
                replace(opening, binds=True),
            ):  # as it is, and then what is most likely to fit
                if self.found.best is None:
                    self._try_mesh(likely)
                    self.audits.best(most=1)

    def _open(self, left: deque[Whereabouts], share: float, openings: list[Opening]) -> bool:
        """Place the model on further meshes until a share of the time limit is over; whether none
        are left that there is time for.
        """
        for where in tuple(left):
            number, mesh, place = where
            if not self.bench.may_place(mesh):
                continue  # there may be time for one of fewer axes
            left.remove(where)
            opening = self._opening(number, mesh, place)
            if opening is None:
                continue
            openings.append(opening)
            if opening.free.interrupted:
                raise KeyboardInterrupt  # the solver has kept what it had; now the search ends, too
            if self.clock.spent() > share:
                return not left
        return True

    def _may_end(self, share: float) -> bool:
        """Whether a share of the time is over, with no time for more, and there is something to
        audit, or overtime is over; never before the first mesh was tried.
        """
        has_some = bool(self.found.others or self.found.audited or self.audits.sure)
        over = self.clock.spent() > share and not self.bench.may_try()
        return over and (has_some or (self._num_tried > 0 and self.clock.is_over))

    def _hurries(self) -> bool:
        """Whether there is time for little more than one plan that fits, and none yet."""
        return bool(self._is_short or self.clock.spent() > LAST_SHARE) and not self.found.audited

    def _likely_s(self, opening: Opening) -> float:
        """What a step may take on a mesh, with the most common of schedules, if memory does not
        bind.
        """
        share_s = opening.free.bound_s / opening.num_positions
        return max(opening.bound_s, share_s * self.bench.slower(opening.num_positions))

    def _try_all(self, openings: Sequence[Opening]) -> None:
        """Try the meshes that may have the best plan, the most likely first, and audit what they
        give; again while audits leave others that may have it.
        """
        waiting = sorted(openings, key=self._likely_s)
        hurried: list[Opening] = []  # and so tried with one wish only
        while promising := [
            opening for opening in waiting if opening.bound_s < self.bench.best_s()
        ]:
            for opening in promising:
                if self._may_end(TRYING_SHARE):
                    self.bench.end_by_time()
                    break
                if opening.bound_s < self.bench.best_s():
                    hurries = self._hurries()
                    with self.clock.timed(TRIED):
                        self._try_mesh(opening)
                    self._num_tried += 1
                    waiting.remove(opening)
                    if hurries:
                        hurried.append(opening)
                        break
            self.audits.best()
            if self.found.audited:
                waiting, hurried = hurried + waiting, []
            has_some = self.found.audited or self.found.others
            if self.found.interrupted is not None and (has_some or self.clock.is_over):
                break
        for opening in waiting:
            title = mesh_title(opening.num_positions, opening.free.plan.mesh, opening.pp_place)
            words = f"every plan on it takes at least {amount(opening.bound_s, 's')}"
            if opening.bound_s < self.bench.best_s():
                self.found.unanswered[title] = opening.bound_s
                words = f"there was no time to try it further; {words}"
            self.found.refused[title] = words

    def _bound_unanswered(self) -> None:
        """Keep the bounds of meshes that were tried and left nothing that fits. Without a pipeline
        they are of all placements, and another one may. A pipeline's are of the placements chosen,
        no split of which fits: it is said to be in no bound.
        """
        known = {id(candidate.placed[0]) for candidate in self.found.tried}
        answered = {
            opening.where
            for opening, placed in self._made
            if known & {id(placed), id(opening.free)}
        }
        for opening, _ in self._made:
            if (
                opening.hopeless
                or opening.where in answered
                or not self.bench.paces(opening.num_positions)
            ):
                continue
            title = mesh_title(opening.num_positions, opening.free.plan.mesh, opening.pp_place)
            if opening.num_positions == 1:
                self.found.unanswered[title] = opening.bound_s
            elif opening.bound_s < self.bench.best_s() and title not in self.found.unbounded:
                self.found.unbounded.append(title)

    # ---------------------------------------------------------------------------------------------
    # candidates

    def _meshes(self) -> deque[Whereabouts]:
        """All that the space has; what is likely good and soon placed comes first: by what simple
        policies take on it, then by rule of thumb.
        """
        found = [
            (number, mesh, min(self.space.pp_place or 0, len(mesh.axes)) if number > 1 else 0)
            for number in divisors(self.config.plan_ngpus)
            if number == (self.space.num_positions or number)
            and self.bench.may_have(number)
            and self.bench.paces(number)
            for mesh in self.space.meshes.get(self.config.plan_ngpus // number, ())
        ]
        node = self.bench.hardware.tiers[0].sizes[0]
        found.sort(key=lambda where: unlikely(where[1], node) * self.bench.slower(where[0]))
        if len(found) > 1:
            found.sort(
                key=lambda where: (
                    FURTHER_AXIS ** max(0, len(where[1].axes) - 1) * self.bench.likely_s(where)
                )
            )
        return deque(found)

    def _opening(self, num_positions: int, mesh: Mesh, pp_place: int) -> Opening | None:
        ranks = position_ranks(mesh, num_positions, pp_place)[0]
        first, *others = wishes(self.graph, self.space, num_positions, mesh, ranks)
        free = self.bench.placed(first, mesh_title(num_positions, mesh, pp_place), keeps=True)
        if self._is_short is None:
            one_axis_s = self.bench.placing_s(len(mesh.axes)) / MORE_AXES ** max(
                0, len(mesh.axes) - 1
            )
            self._is_short = self.clock.limit_s < SHORT * one_axis_s
        if free is None:
            return None
        binds, least_s = False, 0.0
        worth = not self._is_short and free.share_s(num_positions) < self.bench.beaten_s()
        if others and self.least is not None and worth and not free.interrupted:
            try:
                least_s = self.least(others[0])
                binds = least_s > (1 + BINDS) * free.bound_s
                free = _bounded(free, least_s)
            except KeyboardInterrupt:
                free, binds = replace(free, interrupted=True), True  # for all that is known
        free, hopeless = self._shown(free, num_positions), least_s == float("inf")
        return Opening(num_positions, mesh, pp_place, free, tuple(others), binds, hopeless)

    def _shown(self, free: Placed, num_positions: int) -> Placed:
        """With a bound that heeds what of sums and gatherings may be hidden."""
        most_chunks = max((pace.chunks for pace in self.bench.paces(num_positions)), default=1)
        share = left_in_bound(self.config, num_positions, most_chunks, self.space.num_microbatches)
        if share == 1.0:
            return free
        proof = (
            f"{free.proof}; what passes may hide of sums and gatherings beside them is taken off"
        )
        return replace(free, bound_s=share * free.bound_s, proof=proof)

    def _try_inner(self, openings: Sequence[Opening]) -> None:
        """The pipeline axis further inside, wherever that puts some ranks on other tiers of the
        machine. Meshes are tried whose bound is below the best plan: their own axes lie on no
        slower tiers where the pipeline axis is outermost.
        """
        inner: list[Opening] = []
        for opening in sorted(openings, key=lambda opening: opening.bound_s):
            places = (
                inner_places(self.bench.hardware, opening.mesh, opening.num_positions)
                if self.space.pp_place is None
                else ()
            )
            for place in places:
                if (
                    opening.bound_s >= self.bench.best_s()
                    or self.bench.is_late()
                    or not self.bench.may_place(opening.mesh)
                ):
                    break
                found = self._opening(opening.num_positions, opening.mesh, place)
                inner += [] if found is None else [found]
        if inner:
            self._try_all(inner)

    def _try_mesh(self, opening: Opening) -> None:
        """All schedules on one mesh: placed for speed alone first, and for the memory too if that
        does not fit, or only with layers computed again.
        """
        num_positions, mesh = opening.num_positions, opening.mesh
        place, ranks = opening.pp_place, position_ranks(mesh, num_positions, opening.pp_place)[0]
        title = mesh_title(num_positions, mesh, place)
        seen: list[Plan] = []
        for wish in self._wishes(opening):
            placed = opening.free if wish is None else self.bench.placed(wish, title)
            if placed is None or any(
                placed.plan.strategies == plan.strategies and placed.plan.stored == plan.stored
                for plan in seen
            ):
                continue
            seen.append(placed.plan)
            # what is computed again, and when, is free
            placed = replace(placed, bound_s=opening.free.bound_s, proof=opening.free.proof)
            self._made.append((opening, placed))
            title = mesh_title(
                num_positions, placed.plan.mesh, place
            )  # its axes may have better names by now
            if (
                wish is not None and wish.hurried and num_positions == 1
            ):  # as it is placed, for the program to tell
                again = ", all layers computed again" if placed.plan.recompute else ""
                sure = Candidate(
                    title + again,
                    placed.plan,
                    placed.cost_s,
                    (placed,),
                    used_bytes=self.space.memory_bytes,
                )
                return self.audits.sure.append(sure)
            offer = self.bench.offer(placed, ranks)
            if self._try_paces(Attempt(title, (offer,), num_positions, Pace("", 1), place)):
                return

    def _wishes(self, opening: Opening) -> Iterator[Wish | None]:
        """What a mesh is tried with, ``None`` for the placement for speed alone; in a hurry only
        what is likely to fit.
        """
        if not (self._hurries() and opening.binds and opening.others):
            yield None
        for wish in opening.others:
            if self._may_end(LAST_SHARE) or not self.bench.may_place(opening.mesh):
                return self.bench.end_by_time()
            if not self._hurries():
                yield wish
            elif wish is opening.others[-1]:
                yield replace(wish, hurried=True)

    def _try_paces(self, attempt: Attempt) -> bool:
        """All schedules for what an attempt has; whether one of them fits with nothing computed
        again.
        """
        fits = False
        for pace in self.bench.paces(attempt.num_positions):
            if self._may_end(LAST_SHARE):
                self.bench.end_by_time()
                break
            paced = replace(attempt, title=paced_title(attempt.title, pace), pace=pace)
            candidate = self.bench.tried(paced, self.space.memory_bytes)
            if candidate is not None:
                if not self._is_first(candidate):
                    self.found.others.append(candidate)
                fits = fits or not candidate.plan.recompute
        return fits


def _bounded(free: Placed, least_s: float) -> Placed:
    """A placement for speed alone with a bound that heeds the memory. Where nothing fits, that is
    found out by trying: then it is said how much is missing.
    """
    if least_s <= free.bound_s or least_s == float("inf"):
        return free
    binds = least_s > (1 + BINDS) * free.bound_s
    proof = "Lagrange multiplier of the memory, whatever is computed again" if binds else free.proof
    return replace(free, bound_s=least_s, proof=proof)
