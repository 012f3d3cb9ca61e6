"""The outer search: meshes, pipeline stages, schedules, and what is computed again.

    for every number of pipeline positions, and every mesh of the ranks of one position:
        place the whole model on that mesh for speed alone                    (placement/: every operator, exact or bounded)
    for each of them, the least bound first, as long as that is below the best plan so far:
        place the model within the memory too, where it does not fit
        for every schedule: cut the chain of blocks into stages               (stages/: exact under its model of 1F1B)
                            move their begins, if it is another than 1F1B     (moving.py: as long as a simulation gets shorter)
    lower the most promising plans and audit them: adapters, messages and actions that are really emitted
        one that takes more memory than was predicted is cut into stages again, with as much less to be used
    the same with the pipeline axis further inside, where the machine has tiers           (tiers.py)
    for every number of stages: cut the chain again, where each stage may choose its placement   (mixing.py, messages.py)
    the best that fits the memory is the answer

Costs that decide are audited ones. What the search covers exactly and what it restricts is in the certificate: placements are
the best for the whole model, and stages choose between those that were offered.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.cost.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.recompute import mark_recompute
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.candidates import Pace, divisors, paces, position_ranks, stage_sizes
from shardwright.policies.autodist.cutting import Cutter
from shardwright.policies.autodist.found import INTERRUPT, Attempt, Candidate, Found, Offer, Opening
from shardwright.policies.autodist.mixing import AUDITS, MAX_POSITIONS, NEAR, offered
from shardwright.policies.autodist.space import Least, Placed, Placer, Space, Wish
from shardwright.policies.autodist.stages.split import NoFit, NoGain
from shardwright.policies.autodist.stages.tiers import lie
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.autodist.wishes import wishes
from shardwright.policies.autodist.words import mesh_title, paced_title, too_large
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

MAX_CORRECTIONS = 3
"""How often the stages of a schedule are cut again because the audit finds more memory used than the model of stages."""

CORRECTION = 1.05
"""By how much of that the limit is lowered."""

OPENING_SHARES, TRYING_SHARE = (0.3, 0.5, 0.7), 0.8
"""The shares of the time limit at which meshes that were placed for speed are tried before more are; and after which none is
tried: the rest is for audits.
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
        time_limit_s: float = float("inf"),
        least: Least | None = None,
    ) -> None:
        self.graph, self.config, self.space, self.place, self.least = graph, config, space, place, least
        self.hardware, self.optimizer, self.times = hardware, optimizer, times
        self.time_limit_s = time_limit_s
        self.cutter = Cutter(graph, space)
        self.offers: list[Offer] = []
        self.found = Found()
        self._began = time.monotonic()

    def run(self) -> Found:
        """Search until done, out of time, or interrupted from the keyboard."""
        self._began = time.monotonic()
        openings: list[Opening] = []
        try:
            left = iter(self._openings())
            for share in OPENING_SHARES:
                known = len(openings)
                ended = self._open(left, share, openings)
                self._try_all(openings[known:])
                if ended or self._is_late():
                    break
            else:
                self._end_by_time()
            if not self._is_late():
                self._try_inner(openings)
                self._try_mixed(openings)
        except KeyboardInterrupt:
            if not openings:
                raise
            self.found.interrupted = INTERRUPT
            for opening in openings:
                if not self.found.others and not self.found.audited:
                    self._try_mesh(opening)
            self._audit_best(most=1)
        self.found.seconds = time.monotonic() - self._began
        return self.found

    def _open(self, left: Iterator[Opening], share: float, openings: list[Opening]) -> bool:
        """Place the model on further meshes until a share of the time limit is over; whether none are left."""
        for opening in left:
            openings.append(opening)
            if self._spent() > share:
                return False
        return True

    def _spent(self, more_s: float = 0.0) -> float:
        """The share of the time limit that is over, or will be after ``more_s``."""
        return (time.monotonic() - self._began + more_s) / max(self.time_limit_s, 1e-9)

    def _end_by_time(self) -> None:
        self.found.interrupted = f"the time limit of {self.time_limit_s:.0f} s"

    def _try_all(self, openings: Sequence[Opening]) -> None:
        """Try the meshes that may have the best plan, the least bound first, and audit what they give; again while audits leave
        others that may have it.
        """
        waiting = sorted(openings, key=lambda opening: opening.bound_s)
        while promising := [opening for opening in waiting if opening.bound_s < self._best_s()]:
            for opening in promising:
                if self._spent() > TRYING_SHARE and (self.found.others or self.found.audited):
                    self._end_by_time()
                    break
                if opening.bound_s < self._best_s():
                    self._try_mesh(opening)
                    waiting.remove(opening)
            self._audit_best()
            if self.found.interrupted is not None:
                break
        for opening in waiting:
            title = mesh_title(opening.num_positions, opening.free.plan.mesh, opening.pp_place)
            self.found.refused[title] = f"every plan on it takes at least {opening.bound_s * 1e3:.6g} ms"

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
        free = self._placed(first, mesh_title(num_positions, mesh, pp_place))
        if free is not None and others and self.least is not None:
            free = _bounded(free, self.least(others[0]))
        return None if free is None else Opening(num_positions, mesh, pp_place, free, tuple(others))

    def _try_inner(self, openings: Sequence[Opening]) -> None:
        """The pipeline axis further inside, wherever that puts some ranks on other tiers of the machine. Meshes are tried whose
        bound is below the best plan: their own axes lie on no slower tiers where the pipeline axis is outermost.
        """
        inner: list[Opening] = []
        for opening in sorted(openings, key=lambda opening: opening.bound_s):
            for place in self._inner_places(opening) if self.space.pp_place is None else ():
                if opening.bound_s >= self._best_s() or self._is_late():
                    break
                found = self._opening(opening.num_positions, opening.mesh, place)
                inner += [] if found is None else [found]
        if inner:
            self._try_all(inner)

    def _inner_places(self, opening: Opening) -> list[int]:
        """One for every way in which the ranks of all positions can lie on the tiers, but for the outermost."""
        number, mesh = opening.num_positions, opening.mesh
        found: dict[bytes, int] = {}
        for place in range(len(mesh.axes) + 1 if number > 1 else 1):
            ranks = itertools.chain.from_iterable(position_ranks(mesh, number, place))
            found.setdefault(lie(self.hardware, tuple(ranks)), place)
        return [place for place in found.values() if place]

    def _placed(self, wish: Wish, title: str) -> Placed | None:
        """The placement that is wished for; None, and why it cannot be among what is refused."""
        try:
            return self._over_units(self.place(wish))
        except PlanError as error:
            self.found.refused[title] = f"{error.what}: {error.why}" if error.why else error.what
            return None

    def _try_mesh(self, opening: Opening) -> None:
        """All schedules on one mesh: placed for speed alone first, and for the memory too if that does not fit, or only with
        layers computed again.
        """
        space, num_positions, mesh = self.space, opening.num_positions, opening.mesh
        place, ranks = opening.pp_place, position_ranks(mesh, num_positions, opening.pp_place)[0]
        title = mesh_title(num_positions, mesh, place)
        seen: list[Plan] = []
        for wish in (None, *opening.others):
            placed = opening.free if wish is None else self._placed(wish, title)
            if placed is None or any(
                placed.plan.strategies == plan.strategies and placed.plan.stored == plan.stored for plan in seen
            ):
                continue
            seen.append(placed.plan)
            # what is computed again, and when, is free
            placed = replace(placed, bound_s=opening.free.bound_s, proof=opening.free.proof)
            title = mesh_title(num_positions, placed.plan.mesh, place)  # its axes may have better names by now
            offer = self._offer(placed, ranks)
            tried = [
                self._try(Attempt(paced_title(title, pace), (offer,), num_positions, pace, place), space.memory_bytes)
                for pace in self._paces(num_positions)
            ]
            self.found.others += filter(None, tried)
            if any(candidate is not None and not candidate.plan.recompute for candidate in tried):
                return

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

    def _is_late(self) -> bool:
        """Whether nothing further is tried; then that is noted."""
        if self.found.interrupted is None and self._spent() > TRYING_SHARE:
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
        setting = Setting(self.hardware, self.config, ranks, self.optimizer, self.times, self.space.num_microbatches)
        offer = Offer(placed, Walk(lower(self.graph, placed.plan), setting))
        if ranks == tuple(range(placed.plan.mesh.size)):
            self.offers.append(offer)
        return offer

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
        """Lower and audit the most promising candidates; what does not fit is cut again for less memory, or refused."""
        waiting = [(candidate, 0) for candidate in self.found.others]
        wanted = self.space.audits if most is None else most
        audits, longest_s = 0, 0.0
        while waiting and (audits < wanted or not self.found.audited):
            late = not self.found.audited and self._spent() > 1.0  # then what is most likely to fit is the answer
            waiting.sort(key=lambda item: item[0].used_bytes if late else item[0].predicted_s)
            if waiting[0][0].predicted_s > self.space.worth_s:
                return
            if self.found.audited:
                if waiting[0][0].predicted_s > self.space.near * self._best_s():
                    return
                if self._spent(longest_s) > 1.0:
                    return self._end_by_time()
            began = time.monotonic()
            candidate, corrections = waiting.pop(0)
            audits += 1
            cost = self.audited(candidate.plan)
            if cost.peak_bytes <= self.space.memory_bytes:
                self.found.audited.append(replace(candidate, cost=cost))
            else:
                self.found.refused[candidate.title] = too_large(cost.peak_bytes, self.space.memory_bytes)
                mended = self._mended(candidate, cost.peak_bytes) if corrections < MAX_CORRECTIONS else None
                if mended is not None:
                    self.found.refused.pop(candidate.title, None)
                    waiting.append((mended, corrections + 1))
            self.found.audited.sort(key=lambda candidate: candidate.step_s)
            self.found.others = [candidate for candidate, _ in waiting]
            longest_s = max(longest_s, time.monotonic() - began)

    def _mended(self, candidate: Candidate, peak_bytes: float) -> Candidate | None:
        """The candidate cut again, for as much less memory as it took too much; None if that leaves nothing else."""
        attempt = candidate.attempt
        if attempt is None:
            return None
        found = self._try(attempt, candidate.used_bytes - CORRECTION * (peak_bytes - self.space.memory_bytes))
        return None if found is None or found.plan == candidate.plan else found

    def audited(self, plan: Plan) -> PlanCost:
        """The cost of a plan, from the program that is really emitted."""
        graph: IRGraph = self.graph
        if plan.recompute:
            graph = mark_recompute(graph, plan.recompute, stage_of_ops(graph, plan) if plan.stages else {})
        if plan.stages:
            return audit(lower_stages(graph, plan), self.config, self.hardware, optimizer=self.optimizer, times=self.times)
        return audit(
            lower(graph, plan), self.config, self.hardware,
            optimizer=self.optimizer, times=self.times, num_microbatches=self.space.num_microbatches,
        )  # fmt: skip


def _bounded(free: Placed, least_s: float) -> Placed:
    """A placement for speed alone with a bound that heeds the memory. Where nothing fits, that is found out by trying: then it
    is said how much is missing.
    """
    if least_s <= free.bound_s or least_s == float("inf"):
        return free
    return replace(free, bound_s=least_s, proof="Lagrange multiplier of the memory, whatever is computed again")
