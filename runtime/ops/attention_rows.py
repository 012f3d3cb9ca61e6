"""Rows of split attention on their way: keys and values to the queries that see them, and their
gradients home; queries to the ranks that compute them, and what was computed home.

Example: 2 ranks have 4 positions each, and attention is causal. In step 0 each computes with its
own keys, while the first sends its keys to the second, which computes with them in step 1. Backward
they are sent once more, and the second sends their gradients back.

What goes where is said by :mod:`~shardwright.runtime.ops.attention_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime.ops.attention_steps import Lent, Step, Steps
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.ranks.pending import PendingRows
from shardwright.runtime.runs import Run

Arrived = dict[Run, tuple[Tensor, Tensor]]
"""Keys and values, by the samples that they are of."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of rows. ``axis``: the axis along which keys go round, and queries move, if any.
    ``steps``: what this rank does.
    """

    axis: AxisGroup | None
    steps: Steps


def arriving(
    route: Route, key: Tensor, value: Tensor, phase: Phase
) -> Iterator[tuple[Step, Arrived]]:
    """The steps, each with the keys and values that it needs. Those of the next step are on their
    way while the caller computes.
    """
    coming: PendingRows | None = None
    steps, shapes = route.steps.steps, _Shapes(key, value)
    for number, step in enumerate(steps):
        # The first step is with the rank's own keys; nothing has to come.
        if number == 0:
            arrived = {
                share.samples: (key.narrow(0, *share.samples), value.narrow(0, *share.samples))
                for share in step.shares
            }
        else:
            flat = key.new_empty(0) if coming is None else coming.wait()
            counts = [(share.samples, share.num_keys) for share in step.shares]
            arrived = shapes.unpacked(flat, counts)
        # The next message leaves before this step's keys are given to the caller: it travels while
        # the caller computes.
        following = steps[number + 1] if number + 1 < len(steps) else None
        coming = None
        if following is not None and not following.is_idle:
            parts = [
                part
                for share in following.shares
                for x in (key, value)
                for part in _taken(x.narrow(0, *share.samples), share.given)
            ]
            message = _end_to_end(parts, key)
            count = sum(shapes.width(share.samples) * share.num_keys for share in following.shares)
            axis, to, source = route.axis, following.target, following.source
            coming = _start(axis, message, to, source, count, phase)
        yield step, arrived


@dataclass(frozen=True, slots=True)
class _Shapes:
    """How keys and values of some samples lie in a message: share by share, keys before values."""

    key: Tensor
    value: Tensor

    def width(self, samples: Run) -> int:
        """The elements of one key and its value, of all heads."""
        return samples[1] * self.key.shape[1] * (self.key.shape[3] + self.value.shape[3])

    def unpacked(self, flat: Tensor, counts: Sequence[tuple[Run, int]]) -> Arrived:
        """What a message holds: ``counts`` keys of these samples."""
        shapes = [
            (samples[1], x.shape[1], count, x.shape[3])
            for samples, count in counts
            for x in (self.key, self.value)
        ]
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        # Keys and values come in turns.
        pairs = zip(views[::2], views[1::2], strict=True)
        return {samples: pair for (samples, _), pair in zip(counts, pairs, strict=True)}


class Visits:
    """Rows of queries on their way to the ranks that compute them. x ``[samples, heads, queries,
    width]``: queries, or their gradients.
    """

    def __init__(self, route: Route, x: Tensor, phase: Phase) -> None:
        self._x, self._guests = x, route.steps.guests
        self._coming: PendingRows | None = None
        if route.steps.moves:
            rows = [
                part
                for lent in route.steps.away
                for part in _taken(x.narrow(0, *lent.samples), lent.places)
            ]
            message = _end_to_end(rows, x)
            away, guests = route.steps.away, route.steps.guests
            self._coming = _exchanged(route, message, away, guests, x, phase)

    def here(self) -> list[Tensor]:
        """Wait for them. Returns those of each guest."""
        if self._coming is None:
            return []
        return _unpacked(self._coming.wait(), self._guests, self._x)


def bring_home(route: Route, of_guests: Sequence[Tensor], into: Tensor, phase: Phase) -> None:
    """Send what was computed for guests home, and write what others computed for this rank into
    ``into``, ``[samples, heads, queries, width]``.
    """
    away, guests = route.steps.away, route.steps.guests
    message = _end_to_end(of_guests, into)
    coming = _exchanged(route, message, guests, away, into, phase)
    for lent, rows in zip(away, _unpacked(coming.wait(), away, into), strict=True):
        sizes = [size for _, size in lent.places]
        for run, part in zip(lent.places, torch.split(rows, sizes, 2), strict=True):
            into.narrow(0, *lent.samples).narrow(2, *run).copy_(part)


def _exchanged(
    route: Route,
    message: Tensor,
    sent: Sequence[Lent],
    received: Sequence[Lent],
    like: Tensor,
    phase: Phase,
) -> PendingRows:
    """Begin to exchange rows like those of a tensor ``[samples, heads, queries, width]``."""
    axis = route.axis
    assert axis is not None
    counts = []
    for rows in (sent, received):
        by_rank = [0] * axis.size
        for lent in rows:
            by_rank[lent.rank] += lent.samples[1] * like.shape[1] * lent.count * like.shape[3]
        counts.append(by_rank)
    return axis.communicator.all_to_all_rows_async(message, counts[0], counts[1], phase=phase)


def _unpacked(flat: Tensor, received: Sequence[Lent], like: Tensor) -> list[Tensor]:
    """The rows that a message holds, ``[samples, heads, queries, width]``."""
    shapes = [(lent.samples[1], like.shape[1], lent.count, like.shape[3]) for lent in received]
    parts = torch.split(flat, [math.prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _taken(x: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """Runs along dim 2, as one tensor; none if there are none."""
    parts = [x.narrow(2, *run) for run in runs]
    return parts if len(parts) < 2 else [torch.cat(parts, 2)]


def _start(
    axis: AxisGroup | None, message: Tensor, to: int, source: int, num_elements: int, phase: Phase
) -> PendingRows:
    """Begin to send a message to one rank of the axis while another one comes."""
    assert axis is not None
    # An all-to-all in which each rank sends to one rank alone: NCCL and gloo both have it, and it
    # needs no groups of two.
    send, receive = [0] * axis.size, [0] * axis.size
    send[to], receive[source] = message.numel(), num_elements
    return axis.communicator.all_to_all_rows_async(message, send, receive, phase=phase)


class Home:
    """Gradients of keys and values on their way to the rank that has these. They are added in the
    order of the steps.
    """

    def __init__(self, route: Route, key: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        self._axis, self._shapes = route.axis, _Shapes(key, value)
        self._own = [
            torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
            for x in (key, value)
        ]
        self._dtype = dtype
        self._has_begun = False
        self._coming: list[tuple[Step, PendingRows]] = []

    def rooms(self, arrived: Arrived) -> Arrived:
        """Where the gradients of the next step are added: zeros; for the first step, those of this
        rank's own keys.
        """
        if not self._has_begun:
            key, value = self._own
            return {at: (key.narrow(0, *at), value.narrow(0, *at)) for at in arrived}

        def zeros(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=self._dtype, device=x.device)

        return {at: (zeros(keys), zeros(values)) for at, (keys, values) in arrived.items()}

    def send(self, step: Step, rooms: Arrived) -> None:
        """Begin to send the gradients of a step home; those of the first are there."""
        if self._has_begun and not step.is_idle:
            message = _end_to_end([x for pair in rooms.values() for x in pair], self._own[0])
            count = sum(self._shapes.width(s.samples) * _length(s.given) for s in step.shares)
            sent = _start(self._axis, message, step.source, step.target, count, "backward")
            self._coming.append((step, sent))
        self._has_begun = True

    def all_here(self) -> list[Tensor]:
        """The gradients of this rank's keys and values, when all have come."""
        for step, coming in self._coming:
            counts = [(share.samples, _length(share.given)) for share in step.shares]
            arrived = self._shapes.unpacked(coming.wait(), counts)
            for share in step.shares:
                for total, grad in zip(self._own, arrived[share.samples], strict=True):
                    sizes = [size for _, size in share.given]
                    for run, part in zip(share.given, torch.split(grad, sizes, 2), strict=False):
                        total.narrow(0, *share.samples).narrow(2, *run).add_(part)
        return self._own


def _end_to_end(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The elements of all parts in one message, which may be empty."""
    return torch.cat([x.reshape(-1) for x in parts]) if parts else like.new_empty(0)


def _length(runs: Sequence[Run]) -> int:
    return sum(size for _, size in runs)
