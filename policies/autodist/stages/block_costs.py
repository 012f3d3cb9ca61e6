"""What each block of a chain takes in seconds and bytes, added up from the program of the whole
model on a stage's mesh.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.policies.autodist.stages.chain import Part
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, Repeated, Unshared
from shardwright.policies.autodist.stages.walk import Walk

MAX_WAYS = 8
"""The most ways to compute a block again that are told apart, the ones that save most in their time
first.
"""


@dataclass(frozen=True)
class Way:
    """Modules of a block that are computed again, and what that takes and saves."""

    parts: tuple[Part, ...]
    again: Again


@dataclass(frozen=True)
class BlockCosts:
    """The blocks without anything computed again, and what they have in common; ``ways[block]``:
    the ways to do so, none better than another in both. ``computes_again[block]``: whether some of
    it is in any case.
    """

    blocks: list[Block]
    ways: list[tuple[Way, ...]]
    repeated: tuple[Repeated, ...]
    unshared: tuple[Unshared, ...]
    computes_again: list[bool]
    _placed: dict[tuple[int, bool], PlacedBlocks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def placed(self, num_devices: int, *, shares: bool = True) -> PlacedBlocks:
        """The blocks with all their ways. ``shares``: stages have meshes alike, so that ZeRO shares
        out the optimizer state of what several of them hold. The same is returned each time.
        """
        if (num_devices, shares) not in self._placed:
            self._placed[num_devices, shares] = self._blocks_on(num_devices, shares)
        return self._placed[num_devices, shares]

    def _blocks_on(self, num_devices: int, shares: bool) -> PlacedBlocks:
        found = zip(self.blocks, self.ways, strict=True)
        blocks = [replace(block, again=tuple(way.again for way in ways)) for block, ways in found]
        if shares:
            return PlacedBlocks(num_devices, blocks, self.repeated, self.unshared)
        # No sharing: what only shared parameters would save is held by each stage.
        repeated = list(self.repeated)
        for part in self.unshared:
            first = part.blocks[0]
            blocks[first] = replace(
                blocks[first], held_bytes=blocks[first].held_bytes + part.held_bytes
            )
            repeated += [
                Repeated(*pair, held_bytes=part.held_bytes) for pair in pairwise(part.blocks)
            ]
        return PlacedBlocks(num_devices, blocks, repeated)


def block_costs(
    walk: Walk,
    starts: Sequence[int],
    parts: Mapping[int, Sequence[Part]],
    only: Callable[[Part], bool] | None = None,
) -> BlockCosts:
    """The blocks that begin at the positions ``starts`` of the graph's operators. ``parts``: by
    block, what may be computed again; with ``only``, what it names is, and nothing else may be.

    Adapters count to the block that needs them, and what the model itself computes again to its
    backward; what every stage has for itself (a parameter with its gradient, optimizer state,
    reduction and update; a value made from nothing) to the first block that uses it, and once more
    to stages that begin later.
    """
    own, repeated, unshared = _own_costs(walk, starts)

    def again(spans: Iterable[tuple[int, int]]) -> Again:
        found = [walk.again(start, stop) for start, stop in spans]
        return Again(sum(one.time_s for one in found), sum(one.saved_bytes for one in found))

    blocks, ways, computes_again = [], [], []
    # A block is a range of operators.
    for block, (start, stop) in enumerate(
        zip(starts, [*starts[1:], len(walk.forward_s)], strict=True)
    ):
        inside = parts.get(block, ())
        # What is computed again in any case: what ``only`` names, and the model's own regions.
        wanted = [
            (part.start, part.stop)
            for part in _outermost(part for part in inside if only and only(part))
        ]
        wanted += [region for region in walk.regions if start <= region[0] < stop]
        fixed = again(wanted)
        computes_again.append(bool(wanted))
        forward_s, backward_s, once_s, held_bytes = own[block]
        kept = walk.kept.first(start, stop) - fixed.saved_bytes
        blocks.append(Block(forward_s, backward_s + fixed.time_s, once_s, held_bytes, kept))
        # The ways that stages may choose from.
        ways.append(
            ()
            if only
            else useful_ways([Way((part,), walk.again(part.start, part.stop)) for part in inside])
        )
    return BlockCosts(blocks, ways, repeated, unshared, computes_again)


Amounts = tuple[float, float, float, float]
"""Seconds forward, backward and once per step, and bytes held."""


def _own_costs(
    walk: Walk, starts: Sequence[int]
) -> tuple[list[Amounts], tuple[Repeated, ...], tuple[Unshared, ...]]:
    """The costs of every block without recompute, what blocks have in common, and what of that
    stages share.
    """
    found = [(0.0, 0.0, 0.0, 0.0)] * len(starts)
    common: dict[tuple[int, int], Amounts] = {}
    unshared: list[Unshared] = []
    # Each cost has places: the operators that use what it is for.
    for places, amounts, shared_bytes in _costs(walk):
        blocks = sorted({bisect.bisect_right(starts, place) - 1 for place in places})
        forward_s, backward_s, once_s, held_bytes = amounts
        # Bytes that several stages share out are told apart.
        if len(blocks) > 1 and shared_bytes < held_bytes:
            amounts = forward_s, backward_s, once_s, shared_bytes
            unshared.append(Unshared(tuple(blocks), held_bytes - shared_bytes))
        found[blocks[0]] = _sum(found[blocks[0]], amounts)
        # Each further block has it again, in case the stage begins there.
        for pair in pairwise(blocks):
            common[pair] = _sum(common.get(pair, (0.0, 0.0, 0.0, 0.0)), amounts)
    return (
        found,
        tuple(Repeated(*pair, *amounts) for pair, amounts in common.items() if any(amounts)),
        tuple(unshared),
    )


def _costs(walk: Walk) -> Iterator[tuple[Sequence[int], Amounts, float]]:
    """What each thing takes, by the places that it is there for, and the bytes of that where stages
    share it.
    """
    for place, (forward_s, backward_s) in enumerate(
        zip(walk.forward_s, walk.backward_s, strict=True)
    ):
        yield walk.free_uses.get(place) or (place,), (forward_s, backward_s, 0.0, 0.0), 0.0
    for parameter in walk.parameters:
        amounts = 0.0, parameter.added_s, parameter.once_s, parameter.held_bytes
        yield parameter.places, amounts, parameter.shared_bytes


def _sum(a: Amounts, b: Amounts) -> Amounts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _outermost(parts: Iterable[Part]) -> list[Part]:
    """The parts that are not inside another."""
    listed = sorted(parts, key=lambda part: (part.start, -part.stop))
    found: list[Part] = []
    for part in listed:
        if not found or part.start >= found[-1].stop:
            found.append(part)
    return found


def useful_ways(single: Sequence[Way]) -> tuple[Way, ...]:
    """Each module by itself; and together, the one that saves most in its time first, as far as
    they do not overlap.
    """
    # The most saved per second first.
    useful = [way for way in single if way.again.saved_bytes > 0]
    useful.sort(key=lambda way: (way.again.time_s / way.again.saved_bytes, way.parts[0].start))
    found, joined = list(useful), Way((), Again(0.0, 0.0))
    for way in useful:
        (part,) = way.parts
        if all(part.stop <= other.start or other.stop <= part.start for other in joined.parts):
            time, saved = (
                joined.again.time_s + way.again.time_s,
                joined.again.saved_bytes + way.again.saved_bytes,
            )
            joined = Way((*joined.parts, part), Again(time, saved))
            found.append(joined)
    # Of ways that take longer only those that save more are of use.
    found.sort(key=lambda way: (way.again.time_s, -way.again.saved_bytes, len(way.parts)))
    best: list[Way] = []
    for way in found:
        if not best or way.again.saved_bytes > best[-1].again.saved_bytes:
            best.append(way)
    # Few are enough: those that save most per second, and the one that saves most.
    if len(best) > MAX_WAYS:
        cheapest = sorted(best[:-1], key=lambda way: way.again.time_s / way.again.saved_bytes)
        kept = {id(way) for way in (*cheapest[: MAX_WAYS - 1], best[-1])}
        best = [way for way in best if id(way) in kept]
    return tuple(best)


def operator_times(walk: Walk) -> dict[str, float]:
    """Seconds of every operator of the graph, forward and backward, with the adapters in front of
    it; 0 for those that every stage makes for itself.
    """
    graph, free = walk.program.graph, walk.free
    both = zip(graph.ops, walk.forward_s, walk.backward_s, strict=True)
    return {
        op.name: 0.0 if op.name in free else forward + backward for op, forward, backward in both
    }
