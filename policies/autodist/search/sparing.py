"""Where no plan fits: the plans that take least memory, on every mesh, and from those that fit on
faster ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.candidates import position_ranks
from shardwright.policies.autodist.candidates.found import Attempt, Opening
from shardwright.policies.autodist.candidates.space import Wish
from shardwright.policies.autodist.candidates.words import mesh_title, paced_title
from shardwright.policies.autodist.placement.lean import Weight
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.bench import Bench

MOMENTARY, HEAVY, LIGHT, STEPS = (0.0, 0.05, 1.0), 1e6, 1e-3, 6
"""The shares of what is momentary that are weighed; the weights of memory between which placements
are made faster, and in how many steps.
"""


@dataclass(frozen=True)
class Sparing:
    """Tries placements that spare memory, all of whose candidates are audited: what does not fit by
    the model of stages may.
    """

    bench: Bench
    audits: Audits
    _known: list[tuple[Plan, bool]] = field(default_factory=list)

    def run(self, openings: Sequence[Opening]) -> bool:
        """Whether there was time for all of it, or nothing more to find out."""
        has_some = False
        for opening in sorted(openings, key=lambda opening: opening.num_positions):
            asked = [wish for wish in reversed(opening.others) if wish.lean is None]
            for wish, share in itertools.product(asked, MOMENTARY):
                if self.bench.clock.is_over or (
                    self.bench.found.least[1] and self.bench.clock.spent() > 1.0
                ):
                    return False
                if has_some and opening.bound_s >= self.bench.best_s():
                    break
                if has_some and not self.bench.may_place(opening.mesh):
                    return False
                if self._fits(opening, wish, Weight(HEAVY, share)):
                    has_some = True
                    if not self._lighten(opening, wish, share):
                        return False
        return True

    def _lighten(self, opening: Opening, wish: Wish, share: float) -> bool:
        """The lightest weight of memory that something fits with still, nearer and nearer; whether
        there was time.
        """
        light, heavy = LIGHT, HEAVY
        for _ in range(STEPS):
            if self.bench.clock.spent() > 1.0:
                return False
            weight = (light * heavy) ** 0.5
            fits = self._fits(opening, wish, Weight(weight, share))
            light, heavy = (light, weight) if fits else (weight, heavy)
        return True

    def _fits(self, opening: Opening, wish: Wish, weight: Weight) -> bool:
        """Audit what a placement for this weight of memory gives; whether something fits."""
        number, at = opening.num_positions, opening.pp_place
        placed = self.bench.placed(replace(wish, lean=weight), mesh_title(number, opening.mesh, at))
        if placed is None:
            return False
        for plan, fits in self._known:
            if plan == placed.plan:
                return fits
        placed = replace(placed, bound_s=opening.free.bound_s, proof=opening.free.proof)
        offer = self.bench.offer(placed, position_ranks(opening.mesh, number, at)[0])
        title, before = mesh_title(number, placed.plan.mesh, at), len(self.bench.found.audited)
        for pace in self.bench.paces(number)[:1]:
            for candidate in self.bench.cutter.saving(
                Attempt(paced_title(title, pace), (offer,), number, pace, at)
            ):
                if not self.bench.clock.is_over:
                    self.audits.audit(candidate)
        self._known.append((placed.plan, len(self.bench.found.audited) > before))
        return self._known[-1][1]
