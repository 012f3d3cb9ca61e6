"""Where no plan fits: the plans that take least memory, on every mesh, and from those that fit on
faster ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.mesh_requests import MeshRequest, PlacedMesh
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.placement.least_memory import MemoryWeight
from shardwright.policies.autodist.search.auditing import Audits, fullest
from shardwright.policies.autodist.search.search_state import SearchState

MOMENTARY, HEAVY, LIGHT, STEPS = (0.0, 0.05, 1.0), 1e6, 1e-3, 6
"""The shares of what is momentary that are weighed; the weights of memory between which placements
are made faster, and in how many steps.
"""

MOST_PEAKS = 4
"""How often a placement is made again with one more operator that ran at the peak."""


@dataclass(frozen=True)
class Tried:
    """What audits say of a placement: whether a plan fits, and the operator that runs at the peak
    of the one that takes least memory.
    """

    fits: bool
    at_peak: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LeastMemory:
    """The part of a search that comes where nothing has fitted: placements with a price on memory.

    All of their candidates are audited, since what does not fit by the model of stages may.
    """

    state: SearchState
    audits: Audits
    _known: list[tuple[Plan, Tried]] = field(default_factory=list)

    def run(self, placed_meshes: Sequence[PlacedMesh]) -> None:
        """Place the model on every mesh for the least memory. From a placement that fits on, lower
        the price of memory as long as one fits still, and so on every mesh that may be faster.
        """
        if not self._try_all(placed_meshes):
            self.state.end_by_time()

    def _try_all(self, placed_meshes: Sequence[PlacedMesh]) -> bool:
        """Whether there was time for all of it, or nothing more to find out."""
        has_some = False
        for placed_mesh in sorted(placed_meshes, key=lambda placed_mesh: placed_mesh.num_positions):
            # Computing layers again first, then not; fewer bytes for what is momentary, then more.
            # Those with all layers computed again first: they take least memory.
            # What lies in pieces to save memory is gathered for its price.
            requests = [
                replace(request, hides_gathers=False)
                for request in reversed(placed_mesh.further)
                if request.memory_weight is None
            ]
            for request, share in itertools.product(requests, MOMENTARY):
                has_told_least = self.state.result.least[1] and self.state.clock.spent() > 1.0
                if self.state.clock.is_over or has_told_least:
                    return False
                # Something fits, and this mesh cannot be better.
                if has_some and placed_mesh.bound_s >= self.state.best_s():
                    break
                if has_some and not self.state.may_place(placed_mesh.mesh):
                    return False
                # Something fits here: look for a faster plan that does.
                fitting = self._fitting(placed_mesh, request, MemoryWeight(HEAVY, share))
                if fitting is not None:
                    has_some = True
                    if not self._lighten(placed_mesh, request, fitting):
                        return False
        return True

    def _fitting(
        self, placed_mesh: PlacedMesh, request: MeshRequest, weight: MemoryWeight
    ) -> MemoryWeight | None:
        """The weight itself, or with operators at the peak, with which a placement fits. Each
        placement that does not says which operator runs at its peak, and the next one weighs what
        that operator needs.
        """
        for _ in range(1 + MOST_PEAKS):
            tried = self._try(placed_mesh, request, weight)
            if tried.fits:
                return weight
            # Nothing new is known of the peak, or there is no time to use it.
            known = tried.at_peak <= weight.at_peak
            if known or self.state.clock.spent() > 1.0:
                return None
            weight = replace(weight, at_peak=weight.at_peak | tried.at_peak)
        return None

    def _lighten(
        self, placed_mesh: PlacedMesh, request: MeshRequest, fitting: MemoryWeight
    ) -> bool:
        """Find the lightest weight of memory with which something fits still, by halving the
        interval on a logarithmic scale. Returns whether there was time.
        """
        light, heavy = LIGHT, fitting.heavy
        for _ in range(STEPS):
            if self.state.clock.spent() > 1.0:
                return False
            middle = (light * heavy) ** 0.5
            fits = self._try(placed_mesh, request, replace(fitting, heavy=middle)).fits
            light, heavy = (light, middle) if fits else (middle, heavy)
        return True

    def _try(self, placed_mesh: PlacedMesh, request: MeshRequest, weight: MemoryWeight) -> Tried:
        """Audit what a placement for this weight of memory gives."""
        number, place = placed_mesh.num_positions, placed_mesh.pp_place
        weighted = replace(request, memory_weight=weight)
        placed = self.state.placed(weighted, mesh_title(number, placed_mesh.mesh, place))
        if placed is None:
            return Tried(fits=False)
        # Another request may give the same plan.
        for plan, tried in self._known:
            if plan == placed.plan:
                return tried
        fastest = placed_mesh.fastest
        placed = replace(placed, bound_s=fastest.bound_s, proof=fastest.proof)
        ranks = position_ranks(placed_mesh.mesh, number, place)[0]
        lowered = self.state.lowered(placed, ranks)
        title, before = mesh_title(number, placed.plan.mesh, place), len(self.state.result.audited)
        costs: list[PlanCost] = []
        # One schedule is enough to know what fits.
        for named_schedule in self.state.named_schedules(number)[:1]:
            scheduled = scheduled_title(title, named_schedule)
            cut_request = CutRequest(scheduled, (lowered,), number, named_schedule, place)
            for candidate in self.state.cutter.saving(cut_request):
                if not self.state.clock.is_over:
                    cost = self.audits.audit(candidate)
                    costs += [cost] if cost is not None else []
        fits = len(self.state.result.audited) > before
        leanest = min(costs, key=lambda cost: cost.peak_bytes, default=None)
        at_peak = frozenset() if leanest is None else frozenset({fullest(leanest).operator})
        found = Tried(fits, at_peak)
        self._known.append((placed.plan, found))
        return found
