"""The outer search: meshes, pipeline stages, schedules, and what is computed again.

    for every number of pipeline positions, and every mesh of the ranks of one position:
        place the whole model on that mesh for speed alone                    (placement/: every operator, exact or bounded)
    for each of them, the least bound first, as long as that is below the best plan so far:
        place the model within the memory too, where it does not fit
        for every schedule: cut the chain of blocks into stages               (stages/: exact under its model of 1F1B)
                            move their begins, if it is another than 1F1B     (moving.py: as long as a simulation gets shorter)
    lower the most promising plans and audit them: adapters, messages and actions that are really emitted
        one that takes more memory than was predicted is cut into stages again, with as much less to be used
    nothing fits: place the model on every mesh for the least memory, then for less and less of it    (sparing.py)
    the same with the pipeline axis further inside, where the machine has tiers           (tiers.py)
    for every number of stages: cut the chain again, where each stage may choose its placement   (mixing.py, messages.py)
    audit the plans of the simple policies that may still be better                       (simple.py)
    the best that fits the memory is the answer

Costs that decide are audited ones. What the search covers exactly and what it restricts is in the certificate: placements are
the best for the whole model, and stages choose between those that were offered.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.cost.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.auditing import Auditor, is_same
from shardwright.policies.autodist.candidates import Pace, divisors, inner_places, paces, position_ranks, stage_sizes
from shardwright.policies.autodist.clock import Clock
from shardwright.policies.autodist.cutting import Cutter
from shardwright.policies.autodist.found import INTERRUPT, Attempt, Candidate, Found, Offer, Opening
from shardwright.policies.autodist.mixing import AUDITS, MAX_POSITIONS, NEAR, offered
from shardwright.policies.autodist.simple import SIMPLE, SIMPLE_SLACK, simple_plans
from shardwright.policies.autodist.space import Least, Placed, Placer, Space, Wish
from shardwright.policies.autodist.sparing import Sparing
from shardwright.policies.autodist.stages.split import NoFit, NoGain
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.autodist.wishes import wishes
from shardwright.policies.autodist.words import mesh_title, paced_title, too_large
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

BINDS = 1e-3
"""How much of the time of a step the memory must cost at least to be said to bind."""

MAX_CORRECTIONS = 3
"""How often the stages of a schedule are cut again because the audit finds more memory used than the model of stages."""

LATE_AUDITS = 2
"""How many audits a search makes in any case that has no plan yet."""

CORRECTION, LATE_CORRECTION = 1.05, 2.0
"""By how much of that the limit is lowered; and where time is over and nothing fits yet."""

OPENING_SHARES, TRYING_SHARE = (0.3, 0.5, 0.7), 0.8
"""The shares of the time limit at which meshes that were placed for speed are tried before more are; and after which none is
tried: the rest is for audits.
"""

SHORT = 5.0
"""A limit of less than that many times what it takes to place the model on a mesh leaves time for one plan that fits."""

LAST_SHARE = 0.9
"""The share after which also the mesh that is being tried is left, if there is something to audit."""


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
        self.graph, self.config, self.space, self.place, self.least = graph, config, space, place, least
        self.hardware, self.optimizer, self.times = hardware, optimizer, times
        self.audited = Auditor(graph, config, hardware, space.num_microbatches, optimizer, times)
        self.clock = clock or Clock()
        self.cutter = Cutter(graph, space)
        self.offers: list[Offer] = []
        self.found = Found()
        self._seen: list[Candidate] = []  # what was audited
        self._sure: list[Candidate] = []  # placed to fit, where time is short
        self._num_tried = 0  # meshes
        self._longest_s = 0.0  # of placing the model on a mesh

    def run(self) -> Found:
        """Search until done, out of time, or interrupted from the keyboard: then with what is known by then, or, with nothing
        known, on to the first plan that fits; a second interrupt ends that, too.

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
        self.found.seconds = self.clock.seconds
        return self.found

    def _search(self, openings: list[Opening]) -> None:
        """``openings``: takes in what is placed."""
        left = iter(self._openings())
        for share in OPENING_SHARES:
            known = len(openings)
            ended = self._open(left, share, openings)
            self._try_all(openings[known:])
            if ended or (self._is_late() and (self.found.audited or self.clock.is_over)):
                break
        else:
            self._end_by_time()
        if not self.found.audited and self.space.worth_s == float("inf"):  # no other search has a plan either
            self._spare(openings)
        if not self._is_late():
            self._try_inner(openings)
            self._try_mixed(openings)
            self._try_simple(openings)

    def _spare(self, openings: Sequence[Opening]) -> None:
        sparing = Sparing(self.found, self.clock, self.cutter, self._placed, self._offer, self._paces, self._audit)
        if not sparing.run(openings):
            self._end_by_time()

    def _answer_with(self, openings: Sequence[Opening]) -> None:
        """One plan that fits, where there is none yet, from what is known."""
        self._audit_best(most=1)
        for opening in sorted(openings, key=lambda opening: opening.bound_s):
            for likely in (opening, replace(opening, binds=True)):  # as it is, and then what is most likely to fit
                if self.found.best is None:
                    self._try_mesh(likely)
                    self._audit_best(most=1)

    def _open(self, left: Iterator[Opening], share: float, openings: list[Opening]) -> bool:
        """Place the model on further meshes until a share of the time limit is over; whether none are left."""
        began = self.clock.seconds
        for opening in left:
            openings.append(opening)
            began, placed = self.clock.seconds, self.clock.seconds - began
            self._longest_s = max(self._longest_s, placed)
            if opening.free.interrupted:
                raise KeyboardInterrupt  # the solver has kept what it had; now the search ends, too
            if self.clock.spent() > share:
                return False
        return True

    def _end_by_time(self) -> None:
        if self.found.interrupted is None:
            self.found.interrupted = f"the time limit of {self.clock.limit_s:.0f} s"

    def _may_end(self, share: float) -> bool:
        """Whether a share of the time is over, and there is something to audit, or overtime is over; never before the first
        mesh was tried.
        """
        has_some = bool(self.found.others or self.found.audited or self._sure)
        return self.clock.spent() > share and (has_some or (self._num_tried > 0 and self.clock.is_over))

    def _hurries(self) -> bool:
        """Whether there is time for little more than one plan that fits, and none yet."""
        short = self.clock.limit_s < SHORT * self._longest_s or self.clock.spent() > LAST_SHARE
        return short and not self.found.audited

    def _try_all(self, openings: Sequence[Opening]) -> None:
        """Try the meshes that may have the best plan, the least bound first, and audit what they give; again while audits leave
        others that may have it.
        """
        waiting = sorted(openings, key=lambda opening: opening.bound_s)
        hurried: list[Opening] = []  # and so tried with one wish only
        while promising := [opening for opening in waiting if opening.bound_s < self._best_s()]:
            for opening in promising:
                if self._may_end(TRYING_SHARE):
                    self._end_by_time()
                    break
                if opening.bound_s < self._best_s():
                    hurries = self._hurries()
                    self._try_mesh(opening)
                    self._num_tried += 1
                    waiting.remove(opening)
                    if hurries:
                        hurried.append(opening)
                        break
            self._audit_best()
            if self.found.audited:
                waiting, hurried = hurried + waiting, []
            has_some = self.found.audited or self.found.others
            if self.found.interrupted is not None and (has_some or self.clock.is_over):
                break
        for opening in waiting:
            title = mesh_title(opening.num_positions, opening.free.plan.mesh, opening.pp_place)
            words = f"every plan on it takes at least {opening.bound_s * 1e3:.6g} ms"
            if opening.bound_s < self._best_s():
                self.found.untried[title] = opening.bound_s
                words = f"there was no time to try it further; {words}"
            self.found.refused[title] = words

    def _best_s(self) -> float:
        """Of a step of the best plan so far: audited, or predicted where nothing is."""
        return min((c.step_s for c in self.found.audited or self.found.others), default=self.space.worth_s)

    # -------------------------------------------------------------------------------------------- candidates

    def _meshes(self) -> Iterable[tuple[int, Mesh, int]]:
        """Numbers of positions, the meshes of one, and where the pipeline axis stands; without a pipeline first."""
        for number in divisors(self.config.plan_ngpus):
            if number == (self.space.num_positions or number) and self._may_have(number):
                for mesh in self.space.meshes.get(self.config.plan_ngpus // number, ()):
                    yield number, mesh, min(self.space.pp_place or 0, len(mesh.axes)) if number > 1 else 0

    def _may_have(self, num_positions: int) -> bool:
        return num_positions == 1 or (self.config.use_end2end and num_positions <= len(self.graph.ops))

    def _openings(self) -> Iterable[Opening]:
        """Every mesh with the model placed on it for speed alone."""
        return filter(None, itertools.starmap(self._opening, self._meshes()))

    def _opening(self, num_positions: int, mesh: Mesh, pp_place: int) -> Opening | None:
        ranks = position_ranks(mesh, num_positions, pp_place)[0]
        first, *others = wishes(self.graph, self.space, num_positions, mesh, ranks)
        binds = False
        free = self._placed(first, mesh_title(num_positions, mesh, pp_place), keeps=True)
        if free is not None and others and self.least is not None and not free.interrupted:
            try:
                least_s = self.least(others[0])
                binds = least_s > (1 + BINDS) * free.bound_s
                free = _bounded(free, least_s)
            except KeyboardInterrupt:
                free, binds = replace(free, interrupted=True), True  # for all that is known
        return None if free is None else Opening(num_positions, mesh, pp_place, free, tuple(others), binds)

    def _try_inner(self, openings: Sequence[Opening]) -> None:
        """The pipeline axis further inside, wherever that puts some ranks on other tiers of the machine. Meshes are tried whose
        bound is below the best plan: their own axes lie on no slower tiers where the pipeline axis is outermost.
        """
        inner: list[Opening] = []
        for opening in sorted(openings, key=lambda opening: opening.bound_s):
            places = inner_places(self.hardware, opening.mesh, opening.num_positions) if self.space.pp_place is None else ()
            for place in places:
                if opening.bound_s >= self._best_s() or self._is_late():
                    break
                found = self._opening(opening.num_positions, opening.mesh, place)
                inner += [] if found is None else [found]
        if inner:
            self._try_all(inner)

    def _placed(self, wish: Wish, title: str, *, keeps: bool = False) -> Placed | None:
        """The placement that is wished for; None, and why it cannot be among what is refused. ``keeps``: whether it is of use
        to the caller also where it is all that an interrupted solver had.
        """
        try:
            placed = self._over_units(self.place(wish))
            if placed.interrupted and not keeps:
                raise KeyboardInterrupt
            return placed
        except PlanError as error:
            self.found.refused[title] = f"{error.what}: {error.why}" if error.why else error.what
            return None

    def _try_mesh(self, opening: Opening) -> None:
        """All schedules on one mesh: placed for speed alone first, and for the memory too if that does not fit, or only with
        layers computed again.
        """
        num_positions, mesh = opening.num_positions, opening.mesh
        place, ranks = opening.pp_place, position_ranks(mesh, num_positions, opening.pp_place)[0]
        title = mesh_title(num_positions, mesh, place)
        seen: list[Plan] = []
        for wish in self._wishes(opening):
            placed = opening.free if wish is None else self._placed(wish, title)
            if placed is None or any(
                placed.plan.strategies == plan.strategies and placed.plan.stored == plan.stored for plan in seen
            ):
                continue
            seen.append(placed.plan)
            # what is computed again, and when, is free
            placed = replace(placed, bound_s=opening.free.bound_s, proof=opening.free.proof)
            title = mesh_title(num_positions, placed.plan.mesh, place)  # its axes may have better names by now
            if wish is not None and wish.hurried and num_positions == 1:  # as it is placed, for the program to tell
                again = ", all layers computed again" if placed.plan.recompute else ""
                sure = Candidate(title + again, placed.plan, placed.cost_s, (placed,), used_bytes=self.space.memory_bytes)
                return self._sure.append(sure)
            offer = self._offer(placed, ranks)
            if self._try_paces(Attempt(title, (offer,), num_positions, Pace("", 1), place)):
                return

    def _wishes(self, opening: Opening) -> Iterator[Wish | None]:
        """What a mesh is tried with, ``None`` for the placement for speed alone; in a hurry only what is likely to fit."""
        if not (self._hurries() and opening.binds and opening.others):
            yield None
        for wish in opening.others:
            if self._may_end(LAST_SHARE):
                return self._end_by_time()
            if not self._hurries():
                yield wish
            elif wish is opening.others[-1]:
                yield replace(wish, hurried=True)

    def _try_paces(self, attempt: Attempt) -> bool:
        """All schedules for what an attempt has; whether one of them fits with nothing computed again."""
        fits = False
        for pace in self._paces(attempt.num_positions):
            if self._may_end(LAST_SHARE):
                self._end_by_time()
                break
            paced = replace(attempt, title=paced_title(attempt.title, pace), pace=pace)
            candidate = self._try(paced, self.space.memory_bytes)
            if candidate is not None:
                self.found.others.append(candidate)
                fits = fits or not candidate.plan.recompute
        return fits

    def _try_mixed(self, openings: Sequence[Opening]) -> None:
        """Pipelines whose stages differ, with the placements that others were made of, as far as they may be better."""
        attempts = self._mixed_attempts()
        if not attempts or self._is_late():
            return
        self._offer_more(openings, attempts)
        best, whole = self.found.best, self.config.plan_ngpus
        smaller = [offer for offer in self.offers if offer.walk.mesh.size < whole]
        offers = offered(self.graph, smaller, memory_binds=best is None or bool(best.plan.recompute))
        tried: list[Candidate] = []
        for attempt in attempts if len(offers) > 1 else ():
            if self._is_late():
                break
            below = min([attempt.below_s, *(NEAR * candidate.predicted_s for candidate in tried)])
            candidate = self._try(replace(attempt, offers=offers, below_s=below), self.space.memory_bytes)
            if candidate is not None and len({id(placed) for placed in candidate.placed}) > 1:  # else it is known by now
                tried.append(candidate)
        rest, self.found.others = self.found.others, tried
        try:
            self._audit_best(AUDITS)
        finally:
            self.found.others += rest

    def _try_simple(self, openings: Sequence[Opening]) -> None:
        """The plans of the simple policies, on meshes whose bound is below the best plan; those that beat it are candidates."""
        for opening in sorted(openings if self.space.simple else (), key=lambda opening: opening.bound_s):
            if opening.bound_s >= self._beaten_s() or self._is_late():
                return
            number, place = opening.num_positions, opening.pp_place
            setting = self._setting(position_ranks(opening.mesh, number, place)[0])
            paces = [*self._paces(number), *self._left_out(number)]
            found = simple_plans(self.graph, opening.mesh, paces, number, place, self.space, setting)
            for simple in sorted(found, key=lambda simple: simple.least_s):
                if SIMPLE_SLACK * simple.least_s >= self._beaten_s() or self._is_late():
                    break
                cost = self.audited(simple.plan)
                title = paced_title(mesh_title(number, simple.whole.mesh, place), simple.pace) + SIMPLE
                if cost.peak_bytes > self.space.memory_bytes:
                    self.found.least = min(self.found.least, (cost.peak_bytes, title))
                elif cost.step_s < self._beaten_s():
                    placed = replace(opening.free, plan=simple.whole)
                    self.found.audited.insert(
                        0, Candidate(title, simple.plan, cost.step_s, (placed,), cost=cost, is_simple=True)
                    )

    def _left_out(self, num_positions: int) -> Sequence[Pace]:
        """What policies run and a search of several schedules leaves out: it holds more than 1F1B and seldom takes less."""
        several = num_positions > 1 and len(self.space.schedules) > 1 and self.space.chunks in (None, 1)
        return [Pace("gpipe", 1)] if several else []

    def _beaten_s(self) -> float:
        """Of a step of the best plan that was audited, here or in another search."""
        return min(self.space.worth_s, self.found.best.step_s if self.found.best else float("inf"))

    def _is_late(self) -> bool:
        """Whether nothing further is tried; then that is noted."""
        if self.found.interrupted is None and self.clock.spent() > TRYING_SHARE:
            self._end_by_time()
        return self.found.interrupted is not None

    def _mixed_attempts(self) -> list[Attempt]:
        """Numbers of stages and schedules, without offers."""
        if not self.space.mixed or not self._may_have(2):
            return []
        most = min(MAX_POSITIONS, self.config.plan_ngpus)
        numbers = range(2, most + 1) if self.space.num_positions is None else (self.space.num_positions,)
        best = self.found.best
        below = self.space.worth_s if best is None else min(self.space.worth_s, max(best.step_s, best.predicted_s))
        return [
            Attempt(paced_title(f"{number} stages that may differ", pace), (), number, pace, below_s=below)
            for number in numbers
            for pace in (self._paces(number) if 1 < number <= self.config.plan_ngpus else ())
            if pace.chunks == 1
        ]

    def _offer_more(self, openings: Sequence[Opening], attempts: Sequence[Attempt]) -> None:
        """Placements that nothing was made of so far, also on numbers of ranks that equal positions cannot have: if some as
        good as the others, in seconds of all their ranks, could help.
        """
        offers, whole = tuple(self.offers), self.config.plan_ngpus
        known = {offer.placed.plan.mesh for offer in offers}
        unused = [opening for opening in openings if opening.mesh.size < whole and opening.free.plan.mesh not in known]
        opened = {opening.mesh.size for opening in openings}
        further = [size for size in stage_sizes(whole) if size not in opened and self.space.meshes.get(size)]
        sizes = sorted({*further, *(opening.mesh.size for opening in unused)})
        if offers and not any(self.cutter.could_help(replace(attempt, offers=offers), sizes) for attempt in attempts):
            return
        self._lower_all(opening.free for opening in unused)
        best = self.found.best
        most = 2 if best is None or best.plan.recompute else 1  # for the memory too, where that binds
        for mesh in itertools.chain.from_iterable(self.space.meshes[size] for size in further):
            listed = wishes(self.graph, self.space, max(2, whole // mesh.size), mesh, tuple(range(mesh.size)))
            placed = [self._placed(wish, mesh_title(1, mesh)) for wish in itertools.islice(listed, most) if not self._is_late()]
            self._lower_all(filter(None, placed))

    def _lower_all(self, placements: Iterable[Placed]) -> None:
        for placed in placements:
            if not self._is_late():
                self._offer(placed, tuple(range(placed.plan.mesh.size)))

    def _offer(self, placed: Placed, ranks: tuple[int, ...]) -> Offer:
        """A placement lowered; if it is for the first ranks, to be offered again where stages differ."""
        offer = Offer(placed, Walk(lower(self.graph, placed.plan), self._setting(ranks)))
        if ranks == tuple(range(placed.plan.mesh.size)):
            self.offers.append(offer)
        return offer

    def _setting(self, ranks: tuple[int, ...]) -> Setting:
        return Setting(self.hardware, self.config, ranks, self.optimizer, self.times, self.space.num_microbatches)

    def _over_units(self, placed: Placed) -> Placed:
        """With parameters stored over the units where the config has ZeRO-3: so the program will be."""
        return replace(placed, plan=replace(placed.plan, zero=units_of_storage(self.config)))

    def _paces(self, num_positions: int) -> Sequence[Pace]:
        if num_positions == 1:
            return (Pace("", 1),)
        space = self.space
        return paces(num_positions, space.num_microbatches, space.schedules, space.chunks, most=len(self.graph.ops))

    def _try(self, attempt: Attempt, memory_bytes: float) -> Candidate | None:
        """The best stages for a schedule, if any fit."""
        found = self.cutter.cut(attempt, memory_bytes)
        if isinstance(found, NoGain):
            self.found.bounds[attempt.title] = found.bound_s
            return None
        if isinstance(found, NoFit):
            self.found.refused[attempt.title] = too_large(found.needed_bytes, self.space.memory_bytes)
            return None
        self.found.refused.pop(attempt.title, None)
        return found

    # -------------------------------------------------------------------------------------------- audits

    def _audit_best(self, most: int | None = None) -> None:
        """Lower and audit the most promising candidates; what does not fit is cut again for less memory, or refused. What is
        the same as another with its axes in another order stays as it is predicted.
        """
        waiting = [(candidate, 0) for candidate in self.found.others]
        if not self.found.audited and self._sure:
            waiting.append((self._sure.pop(), 0))
        wanted = self.space.audits if most is None else most
        same: list[Candidate] = []
        audits, longest_s = 0, 0.0
        while waiting and (audits < wanted or not self.found.audited):
            late = not self.found.audited and self.clock.spent() > 1.0  # then what is most likely to fit is the answer
            waiting.sort(key=lambda item: _by_fit(item[0]) if late else (True, item[0].predicted_s))
            if waiting[0][0].predicted_s > self.space.worth_s:
                return
            if self.found.audited:
                if waiting[0][0].predicted_s > self.space.near * self._best_s():
                    return
                if self.clock.spent(longest_s) > 1.0:
                    return self._end_by_time()
            elif late and audits >= LATE_AUDITS and self.clock.is_over:
                return self._end_by_time()
            began = self.clock.seconds
            candidate, corrections = waiting.pop(0)
            if any(is_same(candidate, other) for other in self._seen):
                same.append(candidate)
                continue
            self._seen.append(candidate)
            audits += 1
            cost = self._audit(candidate)
            if cost.peak_bytes > self.space.memory_bytes:
                mended = self._mended(candidate, cost.peak_bytes) if corrections < MAX_CORRECTIONS else None
                if mended is not None:
                    self.found.refused.pop(candidate.title, None)
                    waiting.append((mended, corrections + 1))
            self.found.others = [*same, *(candidate for candidate, _ in waiting)]
            longest_s = max(longest_s, self.clock.seconds - began)

    def _audit(self, candidate: Candidate) -> PlanCost:
        """The cost of a candidate, which is noted among those that were audited, or refused."""
        cost = self.audited(candidate.plan)
        if cost.peak_bytes <= self.space.memory_bytes:
            self.found.refused.pop(candidate.title, None)
            self.found.audited.append(replace(candidate, cost=cost))
            self.found.audited.sort(key=lambda candidate: candidate.step_s)
        else:
            self.found.refused[candidate.title] = too_large(cost.peak_bytes, self.space.memory_bytes)
            self.found.least = min(self.found.least, (cost.peak_bytes, candidate.title))
        return cost

    def _mended(self, candidate: Candidate, peak_bytes: float) -> Candidate | None:
        """The candidate cut again, for as much less memory as it took too much; None if that leaves nothing else. Where time is
        over, for less than that, so that it is the last time.
        """
        attempt = candidate.attempt
        if attempt is None:
            return None
        over = peak_bytes - self.space.memory_bytes
        for by in (LATE_CORRECTION, CORRECTION) if self.clock.spent() > 1.0 else (CORRECTION,):
            found = self.cutter.cut(attempt, candidate.used_bytes - by * over)
            if isinstance(found, NoGain):
                self.found.bounds[attempt.title] = found.bound_s
            elif isinstance(found, Candidate) and found.plan != candidate.plan:
                return found
        return None


def _by_fit(candidate: Candidate) -> tuple[bool, float]:
    """What is placed to fit first, then what takes least memory."""
    return candidate.attempt is not None, candidate.used_bytes


def _bounded(free: Placed, least_s: float) -> Placed:
    """A placement for speed alone with a bound that heeds the memory. Where nothing fits, that is found out by trying: then it
    is said how much is missing.
    """
    if least_s <= free.bound_s or least_s == float("inf"):
        return free
    binds = least_s > (1 + BINDS) * free.bound_s
    proof = "Lagrange multiplier of the memory, whatever is computed again" if binds else free.proof
    return replace(free, bound_s=least_s, proof=proof)
