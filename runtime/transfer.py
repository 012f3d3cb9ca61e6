"""Who sends which part of a value to whom when it crosses from one stage to another.

The value lies on two meshes, in two layouts without partial axes. Every receiver gets every element
of its piece exactly once; of several senders that hold copies, one is chosen so that the copies
share the work, a rank's own copy first. The same function run the other way tells how gradients
come home: every rank that holds a copy gets the whole gradient of its piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.runtime.layout import Layout, Mesh

Box = tuple[tuple[int, int], ...]
"""A part of a rank's local tensor: ``(start, stop)`` per dim."""


@dataclass(frozen=True)
class Holding:
    """A value as the ranks of a stage hold it."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    def spans(self, index: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim, the global runs that the stage's rank number ``index`` holds."""
        coords = self.mesh.coords(index)
        return tuple(
            self.layout.runs(dim, self.mesh, coords) for dim in range(len(self.layout.dims))
        )


@dataclass(frozen=True)
class End:
    """A value that crosses as one rank sees it. ``shape``: of the local tensor there. ``pieces``:
    which boxes of it come from, or go to, which rank. ``grad_pieces``: the same for the local
    gradient, which travels the other way.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Box], ...]
    grad_pieces: tuple[tuple[int, Box], ...]


def end_of(
    sent: Holding, received: Holding, rank: int, *, arriving: bool, differentiable: bool = True
) -> End:
    """What ``rank`` sees of a value: where it is ``sent`` from, or where it is ``arriving``."""
    # Values go from ``sent`` to ``received``, gradients the other way.
    forward, backward = pieces(sent, received), pieces(received, sent)
    mine = received if arriving else sent
    if arriving:
        come, back = _taken_by(rank, forward), _given_by(rank, backward)
    else:
        come, back = _given_by(rank, forward), _taken_by(rank, backward)
    shape = mine.layout.local_shape(mine.mesh, mine.mesh.coords(mine.ranks.index(rank)))
    return End(shape, tuple(come), tuple(back) if differentiable else ())


Pairs = Mapping[tuple[int, int], Sequence[tuple[Box, Box]]]
"""Sending and receiving rank to pairs of the box at the sender and the box at the receiver."""


def _given_by(rank: int, pairs: Pairs) -> list[tuple[int, Box]]:
    """The boxes that a rank sends, each with the rank that receives it."""
    given = []
    for (sender, receiver), boxes in pairs.items():
        if sender == rank:
            given += [(receiver, here) for here, _ in boxes]
    return given


def _taken_by(rank: int, pairs: Pairs) -> list[tuple[int, Box]]:
    """The boxes that a rank receives, each with the rank that sends it."""
    taken = []
    for (sender, receiver), boxes in pairs.items():
        if receiver == rank:
            taken += [(sender, there) for _, there in boxes]
    return taken


@functools.lru_cache(maxsize=256)
def pieces(source: Holding, target: Holding) -> dict[tuple[int, int], list[tuple[Box, Box]]]:
    """(sending rank, receiving rank) to pairs of (box at the sender, box at the receiver)."""
    # Ranks that hold the same runs are copies of each other, and any one of them may send.
    copies: dict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = {}
    for index, rank in enumerate(source.ranks):
        copies.setdefault(source.spans(index), []).append(rank)
    result: dict[tuple[int, int], list[tuple[Box, Box]]] = {}
    for index, receiver in enumerate(target.ranks):
        wanted = target.spans(index)
        for held, holders in copies.items():
            boxes = list(_overlap(held, wanted))
            if boxes:
                # A rank that has the piece itself sends nothing. Otherwise receivers take turns
                # among the copies, so that no rank sends to all of them.
                sender = receiver if receiver in holders else holders[index % len(holders)]
                result.setdefault((sender, receiver), []).extend(boxes)
    return result


def _overlap(
    held: tuple[tuple[tuple[int, int], ...], ...], wanted: tuple[tuple[tuple[int, int], ...], ...]
) -> list[tuple[Box, Box]]:
    """The boxes both have, in the local coordinates of each."""
    per_dim = [_overlap_runs(a, b) for a, b in zip(held, wanted, strict=True)]

    def both(runs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]) -> tuple[Box, Box]:
        return tuple(x for x, _ in runs), tuple(y for _, y in runs)

    return [both(runs) for runs in itertools.product(*per_dim)]


def _overlap_runs(
    held: tuple[tuple[int, int], ...], wanted: tuple[tuple[int, int], ...]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Intersections of two ascending lists of global runs, as local (start, stop) on both sides."""
    found = []
    # Where the current run begins in the local tensor, in which runs lie end to end.
    held_at = 0
    for start, stop in held:
        wanted_at = 0
        for other_start, other_stop in wanted:
            low, high = max(start, other_start), min(stop, other_stop)
            if low < high:
                a, b = held_at + low - start, wanted_at + low - other_start
                found.append(((a, a + high - low), (b, b + high - low)))
            wanted_at += other_stop - other_start
        held_at += stop - start
    return found
