"""Pipelines whose stages differ: on how many ranks a stage may be, and which placements it is offered there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.found import Offer
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


def offered(graph: IRGraph, offers: Sequence[Offer], *, memory_binds: bool) -> tuple[Offer, ...]:
    """By number of ranks the best placement for the whole model; the one that beats it by most where each block may choose
    between the two; and where memory binds the one that holds least.
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
        times[parameter.place] += parameter.added_s + parameter.once_s / walk.setting.num_microbatches
    seconds: Array = np.add.reduceat(times, np.array(starts))
    return seconds


def _held_bytes(offer: Offer) -> float:
    walk = offer.walk
    return sum(parameter.held_bytes for parameter in walk.parameters) + walk.kept.first(0, len(walk.forward_s))
