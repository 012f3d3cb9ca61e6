"""Pipelines whose stages differ: how many there are, on how many ranks each may be, and which
placements it is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.candidates.candidates import stage_sizes
from shardwright.policies.autodist.candidates.found import Attempt, Candidate, Offer, Opening
from shardwright.policies.autodist.candidates.space import Placed
from shardwright.policies.autodist.candidates.wishes import wishes
from shardwright.policies.autodist.candidates.words import mesh_title, paced_title
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.bench import Bench
from shardwright.policies.autodist.stages.chain import layer_blocks
from shardwright.policies.autodist.stages.frontier import Array

MAX_POSITIONS = 8
"""The most stages that may differ."""

AUDITS = 2
"""How many of the plans whose stages differ are lowered and audited."""

NEAR = 1.01
"""How much longer than the best of them others may be predicted to take."""

USEFUL = 1e-3
"""A second placement is offered if, block by block, it can take that share less than the first."""


class Mixing:
    """The part of a search that lets stages differ."""

    def __init__(self, bench: Bench, audits: Audits) -> None:
        self.bench, self.audits = bench, audits
        self.graph, self.config, self.space, self.cutter = (
            bench.graph,
            bench.config,
            bench.space,
            bench.cutter,
        )
        self.found, self.offers = bench.found, bench.offers

    def run(self, openings: Sequence[Opening]) -> None:
        """Pipelines whose stages differ, with the placements that others were made of, as far as
        they may be better.
        """
        attempts = self._attempts()
        if not attempts or self.bench.is_late():
            return
        self._offer_more(openings, attempts)
        best, whole = self.found.best, self.config.plan_ngpus
        smaller = [offer for offer in self.offers if offer.walk.mesh.size < whole]
        offers = offered(
            self.graph, smaller, memory_binds=best is None or bool(best.plan.recompute)
        )
        tried: list[Candidate] = []
        for attempt in attempts if len(offers) > 1 else ():
            if self.bench.is_late():
                break
            below = min([attempt.below_s, *(NEAR * candidate.modelled_s for candidate in tried)])
            candidate = self.bench.tried(
                replace(attempt, offers=offers, below_s=below), self.space.memory_bytes
            )
            if candidate is None:
                continue
            if len({id(placed) for placed in candidate.placed}) > 1:
                tried.append(candidate)
            else:  # it is known by now, and none that differ are better
                self.found.bound(replace(attempt, offers=offers), candidate.split_bound_s)
        rest, self.found.others = self.found.others, tried
        try:
            self.audits.best(AUDITS)
        finally:
            self.found.others += rest

    def _attempts(self) -> list[Attempt]:
        """Numbers of stages and schedules, without offers."""
        if not self.space.mixed or not self.bench.may_have(2):
            return []
        most = min(MAX_POSITIONS, self.config.plan_ngpus)
        numbers = (
            range(2, most + 1) if self.space.num_positions is None else (self.space.num_positions,)
        )
        best = self.found.best
        below = self.space.worth_s
        if best is not None:
            below = min(below, max(best.step_s, best.predicted_s, best.modelled_s))
        return [
            Attempt(
                paced_title(f"{number} stages that may differ", pace),
                (),
                number,
                pace,
                below_s=below,
            )
            for number in numbers
            for pace in (self.bench.paces(number) if 1 < number <= self.config.plan_ngpus else ())
            if pace.chunks == 1
        ]

    def _offer_more(self, openings: Sequence[Opening], attempts: Sequence[Attempt]) -> None:
        """Placements that nothing was made of so far, also on numbers of ranks that equal positions
        cannot have: if some as good as the others, in seconds of all their ranks, could help.
        """
        offers, whole = tuple(self.offers), self.config.plan_ngpus
        known = {offer.placed.plan.mesh for offer in offers}
        unused = [
            opening
            for opening in openings
            if opening.mesh.size < whole and opening.free.plan.mesh not in known
        ]
        opened = {opening.mesh.size for opening in openings}
        further = [
            size
            for size in stage_sizes(whole)
            if size not in opened and self.space.meshes.get(size)
        ]
        sizes = sorted({*further, *(opening.mesh.size for opening in unused)})
        if offers and not any(
            self.cutter.could_help(replace(attempt, offers=offers), sizes) for attempt in attempts
        ):
            return
        self._lower_all(opening.free for opening in unused)
        best = self.found.best
        most = (
            2 if best is None or best.plan.recompute else 1
        )  # for the memory too, where that binds
        for mesh in itertools.chain.from_iterable(self.space.meshes[size] for size in further):
            listed = wishes(
                self.graph, self.space, max(2, whole // mesh.size), mesh, tuple(range(mesh.size))
            )
            placed = [
                self.bench.placed(wish, mesh_title(1, mesh))
                for wish in itertools.islice(listed, most)
                if not self.bench.is_late()
            ]
            self._lower_all(filter(None, placed))

    def _lower_all(self, placements: Iterable[Placed]) -> None:
        for placed in placements:
            if not self.bench.is_late():
                self.bench.offer(placed, tuple(range(placed.plan.mesh.size)))


def offered(graph: IRGraph, offers: Sequence[Offer], *, memory_binds: bool) -> tuple[Offer, ...]:
    """By number of ranks the best placement for the whole model; the one that beats it by most
    where each block may choose between the two; and where memory binds the one that holds least.
    """
    starts = layer_blocks(graph)[0]
    found: list[Offer] = []
    by_size: dict[int, list[Offer]] = {}
    for offer in offers:
        by_size.setdefault(offer.walk.mesh.size, []).append(offer)
    for _, listed in sorted(by_size.items()):
        seconds = [_block_seconds(offer, starts) for offer in listed]
        best = min(range(len(listed)), key=lambda index: float(seconds[index].sum()))
        joint = [float(np.minimum(seconds[best], other).sum()) for other in seconds]
        second = min(range(len(listed)), key=lambda index: joint[index])
        chosen = {best: None}
        if joint[second] < (1 - USEFUL) * joint[best]:
            chosen[second] = None
        if memory_binds:
            chosen[min(range(len(listed)), key=lambda index: _held_bytes(listed[index]))] = None
        found += [listed[index] for index in chosen]
    return tuple(found)


def _block_seconds(offer: Offer, starts: Sequence[int]) -> Array:
    """Of one microbatch, with its share of what comes once per step."""
    walk = offer.walk
    times = np.array(walk.forward_s) + np.array(walk.backward_s)
    for parameter in walk.parameters:
        times[parameter.places[0]] += (
            parameter.added_s + parameter.once_s / walk.setting.num_microbatches
        )
    seconds: Array = np.add.reduceat(times, np.array(starts))
    return seconds


def _held_bytes(offer: Offer) -> float:
    walk = offer.walk
    return sum(parameter.held_bytes for parameter in walk.parameters) + walk.kept.first(
        0, len(walk.forward_s)
    )
