"""Tokens on their way to the ranks of their experts, along one axis: one message there, and one of
gradients back.

A row of the message is a token with all that its receiver has to know of it:

    x [hidden] | weights [top_k] | number | experts [top_k]

``number`` says which of all tokens of the exchange it is. Experts and weights are those of all its
choices; the receiver picks its own. So one gather fills the message, however many experts a token
has on a rank, and what arrives is read where it lies. On the way back a row has the gradients of
``x`` and of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.runtime.flights import Finish, Flight, arrive, leave
from shardwright.runtime.ops.indices import looked_up
from shardwright.runtime.ops.routing import Leg
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.second_derivatives import differentiable_once


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens on their way to experts, on one rank: ``x [tokens, hidden]``, ``number [tokens, 1]``,
    ``experts [tokens, top_k]``, ``weights [tokens, top_k]``.
    """

    x: Tensor
    number: Tensor
    experts: Tensor
    weights: Tensor | None = None


CHOSEN = "a chosen expert"
"""What is refused if there is no such expert."""

Kind = tuple[torch.dtype, int]
"""The dtype and the number of columns of one part of the rows of a message."""

Begin = Callable[[Tensor, AxisGroup, list[int], list[int], Phase], Callable[[], Tensor]]
"""What begins a message of rows, so and so many to each rank and from it, and returns what waits
for it.
"""

Move = Callable[[Callable[[Begin], Flight], Sequence[Tensor]], Callable[[], Sequence[Tensor]]]
"""What moves tensors, and returns what waits for them: :func:`moved` or :func:`moving`."""


def send_tokens(
    tokens: Tokens, axis: AxisGroup, receivers: Tensor, move: Move
) -> Callable[[], tuple[Tokens, Leg, int]]:
    """Send each token once to every rank of ``axis`` that has an expert for it. Collective.

    ``receivers [experts]``: the rank of every expert along the axis, or ``axis.size`` for those
    that are not to be reached from here. What is returned waits for the tokens that come, and
    returns them, how they came, and how many of their choices are of experts that were to be
    reached.
    """
    num_tokens, device = tokens.x.shape[0], tokens.x.device
    receiver = looked_up(receivers, tokens.experts.reshape(-1), CHOSEN)  # [tokens * top_k]
    # [ranks, tokens]: a token with two experts on one rank goes there once.
    wanted = torch.zeros(axis.size + 1, num_tokens, dtype=torch.bool, device=device)
    wanted.scatter_(0, receiver.view(tokens.experts.shape).T, True)
    wanted = wanted[:-1]
    _, sent = wanted.nonzero(as_tuple=True)
    counts = torch.zeros(axis.size + 1, 2, dtype=torch.long, device=device)
    counts[:, 0].index_add_(0, receiver, torch.ones_like(receiver))
    counts = counts[:-1]
    torch.sum(wanted, 1, out=counts[:, 1])

    # Sizes must be known on the host. On a GPU this waits for the router.
    ones = [1] * axis.size
    came = axis.communicator.all_to_all_rows(counts, ones, ones)
    going = [tokens for _, tokens in counts.tolist()]
    choices, coming = map(list, zip(*came.tolist(), strict=True))
    leg = Leg(axis, coming, going, sent, num_tokens)
    whole = torch.long if tokens.x.element_size() == 8 else torch.int
    parts = [tokens.x, tokens.number, tokens.experts.to(whole)]
    if tokens.weights is not None:
        parts.insert(1, tokens.weights)
    come = move(lambda begin: _tokens_flight(leg, parts, begin), parts)

    def finish() -> tuple[Tokens, Leg, int]:
        x, *weights, number, experts = come()
        return Tokens(x, number, experts, *weights), leg, sum(choices)

    return finish


def _tokens_flight(leg: Leg, parts: Sequence[Tensor], begin: Begin) -> Flight:
    """Tokens to other ranks, and gradients back. ``parts``: what is known of them."""
    kinds = [(part.dtype, part.shape[1]) for part in parts]
    real = [kind for kind in kinds if kind[0].is_floating_point]
    axis = leg.axis

    def there(parts: Sequence[Tensor], phase: Phase) -> Finish:
        sent = _side_by_side(parts).index_select(0, leg.tokens)
        come = begin(sent, axis, leg.sent, leg.received, phase)
        return lambda: _apart(come(), kinds)

    def back(grads: Sequence[Tensor], phase: Phase) -> Finish:
        come = begin(_side_by_side(grads), axis, leg.received, leg.sent, phase)
        return lambda: _summed_parts(come(), real, leg)

    return Flight(there, back)


def _summed_parts(came: Tensor, kinds: Sequence[Kind], leg: Leg) -> list[Tensor]:
    """The gradients of what was sent, from those that every receiver has: of the weights of its own
    experts, and zeros for the others.
    """
    if all(dtype == came.dtype for dtype, _ in kinds):
        return _apart(_at_home(came, leg), kinds)
    return [_at_home(part, leg) for part in _apart(came, kinds)]


def _at_home(came: Tensor, leg: Leg) -> Tensor:
    sums = came.new_zeros(leg.num_tokens, came.shape[1])
    return sums.index_add_(0, leg.tokens, came)


_ALIGNED_BYTES = 8  # the largest element


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of ``[rows, columns]`` as one tensor of the first part's dtype, each part at a
    multiple of 8 bytes.
    """
    if len(parts) == 1:
        return parts[0]
    first, columns = parts[0], []
    per_step = _ALIGNED_BYTES // first.element_size()
    for part in parts:
        if part.dtype != first.dtype:
            # Smaller elements than those of the first part are widened: that loses nothing.
            part = _viewed(part.to(_at_least(part.dtype, first.dtype)), first.dtype)
        columns.append(part)
        if gap := -part.shape[1] % per_step:
            columns.append(first.new_zeros(len(first), gap))
    return torch.cat(columns, 1)


def _apart(rows: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """What :func:`_side_by_side` has put into rows."""
    if len(kinds) == 1:
        return [rows]
    own, own_bytes = rows.dtype, rows.element_size()
    per_step = _ALIGNED_BYTES // own_bytes
    sizes: list[int] = []  # of parts, and of gaps behind them
    places = []
    for kind, columns in kinds:
        size = columns * _at_least(kind, own).itemsize // own_bytes
        places.append(len(sizes))
        sizes.append(size)
        if gap := -size % per_step:
            sizes.append(gap)
    columns_of = rows.split_with_sizes(sizes, 1)
    found = []
    for place, (kind, _) in zip(places, kinds, strict=True):
        part = columns_of[place]
        found.append(part if kind == own else _viewed(part, _at_least(kind, own)).to(kind))
    return found


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``, or its bytes as elements of another dtype."""
    return x if x.dtype == dtype else x.view(dtype)


def _at_least(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype, or a wider one that has at least as many bytes as ``other``."""
    return dtype if dtype.itemsize >= other.itemsize else torch.promote_types(dtype, other)


def rows_flight(axis: AxisGroup, send: list[int], receive: list[int]) -> Callable[[Begin], Flight]:
    """Rows to other ranks, so and so many to each and from it, and gradients back."""

    def flight(begin: Begin) -> Flight:
        def there(rows: Sequence[Tensor], phase: Phase) -> Finish:
            come = begin(rows[0], axis, send, receive, phase)
            return lambda: [come()]

        def back(grads: Sequence[Tensor], phase: Phase) -> Finish:
            come = begin(grads[0], axis, receive, send, phase)
            return lambda: [come()]

        return Flight(there, back)

    return flight


def moved(
    flight: Callable[[Begin], Flight], tensors: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """Tensors of other ranks, which are here at once."""
    came = cast(
        tuple[Tensor, ...],
        _Moved.apply(flight(_done), *tensors),  # type: ignore[no-untyped-call]
    )
    return lambda: came


def moving(
    flight: Callable[[Begin], Flight], tensors: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """Tensors of other ranks, which are under way until what is returned is called."""
    under_way = flight(_begun)
    token = leave(under_way, tensors)
    return lambda: arrive(under_way, token)


def _begun(
    x: Tensor, axis: AxisGroup, send: list[int], receive: list[int], phase: Phase
) -> Callable[[], Tensor]:
    return axis.communicator.all_to_all_rows_async(x, send, receive, phase=phase).wait


def _done(
    x: Tensor, axis: AxisGroup, send: list[int], receive: list[int], phase: Phase
) -> Callable[[], Tensor]:
    came = axis.communicator.all_to_all_rows(x, send, receive, phase=phase)
    return lambda: came


class _Moved(torch.autograd.Function):
    """A flight that nothing runs beside. Every rank takes part in both directions, whether it has
    rows or not.
    """

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        came = tuple(flight.there(tensors, "forward")())
        ctx.flight, ctx.real = flight, [x.is_floating_point() for x in tensors]
        ctx.mark_non_differentiable(*(x for x in came if not x.is_floating_point()))
        return came

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = iter(ctx.flight.back(list(itertools.compress(grads, ctx.real)), "backward")())
        return None, *(next(back) if one else None for one in ctx.real)
