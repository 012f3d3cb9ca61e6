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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.runtime.flights import Finish, Flight, arrive, leave
from shardwright.runtime.ops.indices import looked_up
from shardwright.runtime.ops.routing import Leg
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.second_derivatives import differentiable_once

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


@dataclass(frozen=True, slots=True)
class Picked:
    """The rows that are made of tokens: row ``i`` of token ``position[i]``, for the choice
    ``choice[i]`` of all ``tokens * top_k``. ``token``, ``ends``: see :class:`Routing`.
    """

    position: Tensor
    choice: Tensor
    token: Tensor
    ends: Tensor


Pick = Callable[[Tensor, Tensor], Picked]
"""What tells the rows that tokens are made into, from their numbers and their experts."""


def leg_of(experts: Tensor, axis: AxisGroup, receivers: Tensor) -> tuple[Leg, int]:
    """How tokens go along ``axis``: each one once to every rank that has an expert for it; and how
    many choices of those that come are of experts that were to be reached. Collective.

    ``experts [tokens, top_k]``; ``receivers [experts]``: the rank of every expert along the axis,
    or ``axis.size`` for those that are not to be reached from here.
    """
    num_tokens, device, size = experts.shape[0], experts.device, axis.size
    receiver = looked_up(receivers, experts.reshape(-1), CHOSEN)  # [tokens * top_k]
    # [ranks, tokens]: a token with two experts on one rank goes there once.
    wanted = torch.zeros(size + 1, num_tokens, dtype=torch.bool, device=device)
    wanted.scatter_(0, receiver.view(experts.shape).T, True)
    wanted = wanted[:-1]
    _, sent = wanted.nonzero(as_tuple=True)
    counts = torch.zeros(size + 1, 2, dtype=torch.long, device=device)
    counts[:, 0].index_add_(0, receiver, torch.ones_like(receiver))
    counts = counts[:-1]
    torch.sum(wanted, 1, out=counts[:, 1])

    # Sizes must be known on the host. On a GPU this waits for the router.
    ones = [1] * size
    came = axis.communicator.all_to_all_rows(counts, ones, ones)
    going = [tokens for _, tokens in counts.tolist()]
    choices, coming = map(list, zip(*came.tolist(), strict=True))
    return Leg(axis, coming, going, sent, num_tokens), sum(choices)


class TokenMessage:
    """Tokens to other ranks along one leg, and gradients back.

    ``number [tokens, 1]``, ``experts [tokens, top_k]``: of the tokens of this rank. ``pick``: what
    tells the rows that tokens are made into where they have come, if they do not go on; ``picked``
    are these. It lives until backward, and lets go of what it does not need there: a part of a
    message is a view that keeps all of it.
    """

    def __init__(self, leg: Leg, number: Tensor, experts: Tensor, pick: Pick | None = None) -> None:
        self.leg = leg
        self.picked: Picked | None = None
        self._top_k = experts.shape[1]
        self._pick = pick
        self._number_and_experts: tuple[Tensor, Tensor] | None = (number, experts)

    def taken(self) -> tuple[Tensor, Tensor]:
        """The number and the experts of each token, of those here or, once they are, of those that
        have come. The second call has nothing more to give.
        """
        assert self._number_and_experts is not None, "nothing has come, or it has been taken"
        found, self._number_and_experts = self._number_and_experts, None
        return found

    def flight(self, begin: Begin) -> Flight:
        """What moves ``x [tokens, hidden]`` and, if there are any, ``weights [tokens, top_k]``.
        They come as those of tokens, or of the rows that are picked.
        """
        return Flight(partial(self._there, begin), partial(self._back, begin))

    def _there(self, begin: Begin, real: Sequence[Tensor], phase: Phase) -> Finish:
        leg, x = self.leg, real[0]
        number, experts = self.taken()
        whole = torch.long if x.element_size() == 8 else torch.int
        parts = [*real, number, experts.to(whole)]
        columns = columns_of(parts)
        sent = columns.joined(parts).index_select(0, leg.tokens)
        come = begin(sent, leg.axis, leg.sent, leg.received, phase)

        def finish() -> list[Tensor]:
            *came, number, experts = columns.apart(come())
            if self._pick is None:
                self._number_and_experts = number, experts
                return came
            return self._rows(came, self._pick(number, experts))

        return finish

    def _rows(self, came: list[Tensor], picked: Picked) -> list[Tensor]:
        self.picked = picked
        x, *weights = came
        gains = [part.reshape(-1).index_select(0, picked.choice) for part in weights]
        return [x.index_select(0, picked.position), *gains]

    def _back(self, begin: Begin, grads: Sequence[Tensor], phase: Phase) -> Finish:
        leg = self.leg
        if self.picked is not None:
            grads = self._of_tokens(grads, self.picked)
        columns = columns_of(grads)
        come = begin(columns.joined(grads), leg.axis, leg.received, leg.sent, phase)

        def finish() -> list[Tensor]:
            # Every receiver has gradients of the weights of its own experts, and zeros for the
            # others.
            if columns.are_alike:
                return columns.apart(summed(come(), leg.tokens, leg.num_tokens))
            return [summed(part, leg.tokens, leg.num_tokens) for part in columns.apart(come())]

        return finish

    def _of_tokens(self, grads: Sequence[Tensor], picked: Picked) -> list[Tensor]:
        """The gradients of the tokens that came, from those of the rows made of them."""
        count, top_k = sum(self.leg.received), self._top_k
        x, *weights = grads
        found = [summed(x, picked.position, count)]
        for part in weights:
            # Each choice has one row.
            placed = part.new_zeros(count * top_k).scatter_(0, picked.choice, part)
            found.append(placed.view(count, top_k))
        return found


def sums_flight(
    leg: Leg, position: Tensor | None, summed_in: torch.dtype, sent_as: torch.dtype
) -> Callable[[Begin], Flight]:
    """Rows to the ranks that their tokens came from, and the sums of those of each token; gradients
    back. ``position``: the place of each row in the message, where rows of one token are added up
    before they are sent. ``summed_in``: the dtype of sums; ``sent_as``: that of messages, and of
    what comes out.
    """

    def there(begin: Begin, rows: Sequence[Tensor], phase: Phase) -> Finish:
        made = rows[0] if position is None else summed(rows[0], position, sum(leg.received))
        come = begin(made.to(sent_as), leg.axis, leg.received, leg.sent, phase)

        def finish() -> list[Tensor]:
            return [summed(come().to(summed_in), leg.tokens, leg.num_tokens).to(sent_as)]

        return finish

    def back(begin: Begin, grads: Sequence[Tensor], phase: Phase) -> Finish:
        sent = grads[0].index_select(0, leg.tokens)
        come = begin(sent, leg.axis, leg.sent, leg.received, phase)

        def finish() -> list[Tensor]:
            if position is None:
                return [come()]
            return [come().index_select(0, position).to(summed_in)]

        return finish

    return lambda begin: Flight(partial(there, begin), partial(back, begin))


def summed(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """Rows added up by their places."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, place, rows)


_ALIGNED_BYTES = 8  # the largest element


@dataclass(frozen=True, slots=True)
class Columns:
    """How parts ``[rows, columns]`` lie side by side in rows of the first part's dtype, each at a
    multiple of 8 bytes.

    ``parts``: the number of each part among the pieces of a row, its dtype there, and its own; no
    dtypes where they are those of the rows. ``sizes``: the columns of the pieces: parts, and gaps
    behind them.
    """

    parts: tuple[tuple[int, torch.dtype | None, torch.dtype | None], ...]
    sizes: list[int]

    @property
    def are_alike(self) -> bool:
        """Whether all parts have one dtype."""
        return all(held is None for _, held, _ in self.parts)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The bytes of the parts as one tensor."""
        first = parts[0]
        if len(parts) == 1:
            return first
        pieces = [first] * len(self.sizes)
        if len(parts) < len(self.sizes):
            gaps = set(range(len(self.sizes))).difference(place for place, _, _ in self.parts)
            for gap in gaps:
                pieces[gap] = first.new_zeros(len(first), self.sizes[gap])
        for part, (place, held, _) in zip(parts, self.parts, strict=True):
            pieces[place] = part if held is None else part.to(held).view(first.dtype)
        return torch.cat(pieces, 1)

    def apart(self, rows: Tensor) -> list[Tensor]:
        """What :meth:`joined` has put into rows."""
        if len(self.parts) == 1:
            return [rows]
        pieces = rows.split_with_sizes(self.sizes, 1)
        return [
            pieces[place] if held is None else pieces[place].view(held).to(own)
            for place, held, own in self.parts
        ]


def columns_of(parts: Sequence[Tensor]) -> Columns:
    """How the rows of these parts lie in a message."""
    return _columns(tuple([(part.dtype, part.shape[1]) for part in parts]))


@functools.lru_cache(maxsize=256)
def _columns(kinds: tuple[Kind, ...]) -> Columns:
    rows = kinds[0][0]
    sizes: list[int] = []
    parts: list[tuple[int, torch.dtype | None, torch.dtype | None]] = []
    for own, columns in kinds:
        # Smaller elements than those of the first part are widened: that loses nothing.
        held = own if own.itemsize >= rows.itemsize else torch.promote_types(own, rows)
        size = columns * held.itemsize // rows.itemsize
        parts.append((len(sizes), None, None) if own == rows else (len(sizes), held, own))
        sizes.append(size)
        if gap := -size % (_ALIGNED_BYTES // rows.itemsize):
            sizes.append(gap)
    return Columns(tuple(parts), sizes)


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
        ctx.flight = flight
        return tuple(flight.there(tensors, "forward")())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.flight.back(grads, "backward")()
