"""Experts: each token's row goes to the experts that a router chose for it, and what they make of
it is added up.

    rows, gains, routing = dispatch(x, chosen, weights, num_experts=8)
    rows = grouped_linear(rows, up, routing)             # each row by the matrix of its expert
    rows = grouped_linear(F.silu(rows), down, routing)
    y = combine(rows * gains.unsqueeze(-1), routing)

``rows`` are sorted by expert, and by token within an expert. They are what is stored of a tensor
with a row for every pair of an expert and a token; how many there are, the router says at run time.
Nothing is dropped. An expert, and a rank, may get no row: its weights then have a gradient of
zeros, and the rank takes part in every collective.

Over ranks, either of the two dims of these pairs may be cut:

- tokens: a rank has the rows of its own tokens, for all experts;
- experts (``expert_axes``): a rank has the rows of all tokens for its own experts, and
  :func:`combine` gives a summand;
- from the one to the other (``exchange``): ranks hold pieces of the tokens outside, and of the
  experts inside. A token goes once to each rank that has an expert for it, and one row comes back.

Several axes exchange one after the other, the outermost first. Over 2 nodes of 4 ranks a token
crosses to the other node once, to the rank that has the place of its own there, and goes on from it
to the ranks that have its experts. The sums come back the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.flights import Finish, Flight, arrive, leave
from shardwright.runtime.ops.axes import Axes, communicating, piece_runs
from shardwright.runtime.ops.indices import check_indices
from shardwright.runtime.ops.routing import Arrivals, Leg, Routing, TokenDims, checked_routing
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import Run, dealt, within


def dispatch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    expert_axes: Axes = (),
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> tuple[Any, ...]:
    """The rows of tokens for the experts that were chosen, and of each row its weight.

    ``x [tokens, hidden]``; ``chosen [tokens, top_k]``: expert numbers; ``weights [tokens, top_k]``.
    ``expert_axes``: the axes that cut the experts, major to minor. ``exchange``: those of them that
    cut the tokens of ``x``; ``token_dims`` then describes the tokens.
    Returns ``(rows, gains, routing)``, without gains if there are no weights.
    """
    axes = expert_axes, exchange
    return _dispatched(x, chosen, weights, num_experts, *axes, token_dims, _moved)()


def start_dispatch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    expert_axes: Axes = (),
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> Callable[[], tuple[Any, ...]]:
    """Begin a :func:`dispatch`; what is returned waits for it. Along the last axis of an exchange
    tokens are under way in between.
    """
    axes = expert_axes, exchange
    return _dispatched(x, chosen, weights, num_experts, *axes, token_dims, _moving)


def combine(
    rows: Tensor,
    routing: Routing,
    *,
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> Tensor:
    """The sum over the rows of each token, ``[tokens, hidden]``. Without some of the experts it is
    a summand.

    ``exchange``, ``token_dims``: as in :func:`dispatch`; each rank then gets the sums of its own
    tokens.
    """
    return _combined(rows, routing, exchange, token_dims, _moved)()


def start_combine(
    rows: Tensor,
    routing: Routing,
    *,
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> Callable[[], Tensor]:
    """Begin a :func:`combine`; what is returned waits for it. Along the first axis of an exchange
    sums are under way in between.
    """
    return _combined(rows, routing, exchange, token_dims, _moving)


def _dispatched(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    num_experts: int,
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    move: _Move,
) -> Callable[[], tuple[Any, ...]]:
    exchange, expert_axes = communicating(exchange), communicating(expert_axes)
    check_indices((chosen >= 0) & (chosen < num_experts), "a chosen expert", num_experts)
    if exchange:
        finish = _exchanged(
            x, chosen, weights, expert_axes, exchange, token_dims, num_experts, move
        )
    else:
        made = _local(x, chosen, weights, expert_axes, num_experts)
        finish = lambda: made  # noqa: E731

    def result() -> tuple[Any, ...]:
        rows, gains, routing = finish()
        return (rows, routing) if gains is None else (rows, gains, routing)

    return result


def _combined(
    rows: Tensor, routing: Routing, exchange: Axes, token_dims: TokenDims, move: _Move
) -> Callable[[], Tensor]:
    checked_routing(routing)
    exchange = communicating(exchange)
    if exchange:
        return _returned(rows, routing, exchange, token_dims, move)
    made = _added(rows, routing)
    return lambda: made


def _added(rows: Tensor, routing: Routing) -> Tensor:
    """The sums of rows that no other rank has."""
    num_tokens, top_k = routing.num_tokens, routing.top_k
    if routing.choice is None:
        return _summed(rows, routing.token, num_tokens)
    # All rows of a token are here: they are summed in the order in which it chose their experts.
    # The sum over one dim of [tokens, top_k, hidden]: added in the same order on every device and
    # under every plan, which index_add does not promise.
    by_token = routing.choice.argsort()
    return rows.index_select(0, by_token).view(num_tokens, top_k, *rows.shape[1:]).sum(1)


# ------------------------------------------------------------------------------------------------
# rows of a rank's own tokens


def _local(
    x: Tensor, chosen: Tensor, weights: Tensor | None, expert_axes: Axes, num_experts: int
) -> tuple[Tensor, Tensor | None, Routing]:
    runs = piece_runs(expert_axes, num_experts)
    count = sum(size for _, size in runs)
    num_tokens, top_k = chosen.shape
    expert = _numbered(chosen.reshape(-1), runs)  # [tokens * top_k]
    # Stable, so that the rows of an expert are in the order of the tokens.
    order = expert.argsort(stable=True)
    complete = count == num_experts  # then a GPU is not asked how many rows there are
    if not complete:
        order = order[expert[order] >= 0]
    counts = _counted(expert[order], count)
    token = order.div(max(1, top_k), rounding_mode="floor")
    gains = None if weights is None else weights.reshape(-1).index_select(0, order)
    routing = Routing(token, counts, num_tokens, top_k, order if complete else None)
    return x.index_select(0, token), gains, routing


def _numbered(expert: Tensor, runs: Sequence[Run]) -> Tensor:
    """Experts counted among those of a rank, which lie in ``runs``; -1 for those of others."""
    numbered, before = torch.full_like(expert, -1), 0
    for start, size in runs:
        inside = (expert >= start) & (expert < start + size)
        numbered = torch.where(inside, expert - (start - before), numbered)
        before += size
    return numbered


def _counted(expert: Tensor, count: int) -> Tensor:
    """The number of rows of each of ``count`` experts."""
    ones = torch.ones_like(expert)
    return torch.zeros(count, dtype=torch.long, device=expert.device).index_add_(0, expert, ones)


def _summed(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """Rows added up by their places."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, place, rows)


# ------------------------------------------------------------------------------------------------
# rows from and to other ranks


@dataclass(frozen=True, slots=True)
class _Held:
    """Tokens on their way to experts, on one rank. ``number [tokens]``: which of all tokens of the
    exchange they are. ``token``, ``expert``, ``weights`` ``[choices]``: of each choice that is here
    which of these tokens made it, of which expert, with which weight.
    """

    x: Tensor
    number: Tensor
    token: Tensor
    expert: Tensor
    weights: Tensor | None = None


def _exchanged(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    num_experts: int,
    move: _Move,
) -> Callable[[], tuple[Tensor, Tensor | None, Routing]]:
    """Send each token to the ranks that have an expert for it, and make the rows there. ``move``:
    what sends them along the last axis.
    """
    device, top_k = x.device, chosen.shape[1]
    ranks = _ranks_of(expert_axes, (num_experts,), device)
    # Choices of experts that lie beyond the axes of the exchange belong to other ranks.
    expert = chosen.reshape(-1)
    reached = torch.ones(num_experts, dtype=torch.bool, device=device)
    for axis in expert_axes:
        if axis not in exchange:
            reached &= ranks[axis.name] == axis.index
    choices = reached[expert].nonzero().squeeze(1)
    held = _Held(
        x,
        _own_numbers(token_dims, device),
        choices.div(top_k, rounding_mode="floor"),
        expert[choices],
        None if weights is None else weights.reshape(-1).index_select(0, choices),
    )
    legs = []
    *axes, last = exchange
    for axis in axes:
        held, leg = _sent_along(axis, held, ranks[axis.name], _moved)()
        legs.append(leg)
    come = _sent_along(last, held, ranks[last.name], move)

    def finish() -> tuple[Tensor, Tensor | None, Routing]:
        held, leg = come()
        # By expert, then by token: the same order as on one device.
        runs = piece_runs(expert_axes, num_experts)
        total = math.prod(sum(_segments(dim)) for dim in token_dims)
        local, number = _numbered(held.expert, runs), held.number[held.token]
        order = (local * total + number).argsort(stable=True)
        position = held.token[order]
        gains = None if held.weights is None else held.weights.index_select(0, order)
        routing = Routing(
            number[order],
            _counted(local, sum(size for _, size in runs)),
            total,
            top_k,
            arrivals=Arrivals(exchange, token_dims, position, [*legs, leg]),
        )
        return held.x.index_select(0, position), gains, routing

    return finish


def _sent_along(
    axis: AxisGroup, held: _Held, ranks: Tensor, move: _Move
) -> Callable[[], tuple[_Held, Leg]]:
    """Send each token once to every rank of an axis that has an expert for it, and its choices of
    these experts. ``ranks``: of every expert the index of its rank.
    """
    num_tokens, owner = held.x.shape[0], ranks[held.expert]
    # [ranks, tokens]: a token with two experts on one rank goes there once.
    wanted = torch.zeros(axis.size, num_tokens, dtype=torch.bool, device=owner.device)
    wanted[owner, held.token] = True
    receiver, sent_token = wanted.nonzero(as_tuple=True)
    by_owner = owner.argsort(stable=True)
    owner, expert, token = owner[by_owner], held.expert[by_owner], held.token[by_owner]
    # Where each sent token stands in the whole message; less what goes to ranks before the
    # receiver, where it stands among those that the receiver gets from this rank.
    sent_before = wanted.reshape(-1).cumsum(0).view_as(wanted) - 1
    tokens_to = torch.bincount(receiver, minlength=axis.size)
    choices_to = torch.bincount(owner, minlength=axis.size)
    place = sent_before[owner, token] - (tokens_to.cumsum(0) - tokens_to)[owner]

    # Counts go first, then all else in one message.
    counts = torch.stack([tokens_to, choices_to], 1)
    ones = [1] * axis.size
    came = _all_to_all(counts, axis, ones, ones)
    (tokens_in, choices_in), (tokens_out, choices_out) = came.T.tolist(), counts.T.tolist()
    of_tokens = [held.x.index_select(0, sent_token), held.number[sent_token]]
    of_choices = [expert, place]
    if held.weights is not None:
        of_choices.append(held.weights.index_select(0, by_owner))
    come = move(
        of_tokens + of_choices,
        axis,
        [tokens_out] * len(of_tokens) + [choices_out] * len(of_choices),
        [tokens_in] * len(of_tokens) + [choices_in] * len(of_choices),
    )

    def finish() -> tuple[_Held, Leg]:
        arrived, number, expert, place, *weights = come()
        # Places are counted by each sender from 0.
        offset = torch.tensor(list(itertools.accumulate([0, *tokens_in]))[:-1], device=place.device)
        token = place + _repeated(offset, choices_in)
        leg = Leg(axis, tokens_in, tokens_out, sent_token, num_tokens)
        return _Held(arrived, number, token, expert, *weights), leg

    return finish


def _returned(
    rows: Tensor, routing: Routing, exchange: Axes, token_dims: TokenDims, move: _Move
) -> Callable[[], Tensor]:
    """Add up what this rank's experts made of each token, send it home, and add it up there.
    ``move``: what sends it along the first axis, which is the last one on the way home.
    """
    arrivals = routing.arrivals
    # Sums may belong to other ranks than the tokens did.
    if arrivals is None or (arrivals.exchange, arrivals.token_dims) != (exchange, token_dims):
        arrivals = _departures(routing, exchange, token_dims)
    # Summed before they are sent: one row goes back for each token that came, whatever number of
    # experts it had here.
    made = _summed(rows, arrivals.position, sum(arrivals.legs[-1].received))
    home, *legs = arrivals.legs
    for leg in reversed(legs):
        back = exchange_rows(made, leg.axis, leg.received, leg.sent)
        made = _summed(back, leg.tokens, leg.num_tokens)
    come = move([made], home.axis, [home.received], [home.sent])
    return lambda: _summed(come()[0], home.tokens, home.num_tokens)


def _departures(routing: Routing, exchange: Axes, token_dims: TokenDims) -> Arrivals:
    """How rows go to the ranks that their tokens belong to, if they did not come from there."""
    device = routing.token.device
    sizes = tuple(_segments(dim) for dim in token_dims)
    own = _own_numbers(token_dims, device)
    # Rows of one token are added up before they are sent: one message for each token and rank.
    held, position = torch.unique(routing.token, return_inverse=True)
    # The rank of each of all tokens along the axes that cut one of their dims.
    shape, homes = [sum(segments) for segments in sizes], dict[str, Tensor]()
    for index, dim in enumerate(token_dims):
        around = [1] * len(shape)
        around[index] = shape[index]
        for name, ranks in _ranks_of(_dim_axes(dim), sizes[index], device).items():
            homes[name] = ranks.view(around).expand(shape).reshape(-1)
    legs: list[Leg] = []
    for axis in reversed(exchange):
        owner = homes[axis.name][held]
        by_owner = owner.argsort(stable=True)
        going = torch.bincount(owner, minlength=axis.size)
        came = _all_to_all(going, axis, [1] * axis.size, [1] * axis.size)
        # Sizes must be known on the host. On a GPU this waits for the router.
        received, sent = going.tolist(), came.tolist()
        arrived = _all_to_all(held[by_owner], axis, received, sent)
        # A rank sends the sums of its tokens in the order of their receivers.
        in_message = by_owner.argsort()
        if legs:
            legs[-1] = replace(legs[-1], tokens=in_message[legs[-1].tokens])
        else:
            position = in_message[position]
        # At home each token has its place, whether a sum of it came or not.
        if axis is exchange[0]:
            held, tokens = own, torch.searchsorted(own, arrived)
        else:
            held, tokens = torch.unique(arrived, return_inverse=True)
        legs.append(Leg(axis, received, sent, tokens, held.shape[0]))
    return Arrivals(exchange, token_dims, position, legs[::-1])


def _segments(dim: tuple[int | AxisGroup, ...]) -> tuple[int, ...]:
    return tuple(size for size in dim if isinstance(size, int))


def _dim_axes(dim: tuple[int | AxisGroup, ...]) -> Axes:
    return tuple(axis for axis in dim if isinstance(axis, AxisGroup))


def _own_numbers(token_dims: TokenDims, device: torch.device) -> Tensor:
    """Which of all tokens are this rank's, ascending."""
    number = torch.zeros(1, dtype=torch.long, device=device)
    for dim in token_dims:
        segments, axes, places, before = _segments(dim), _dim_axes(dim), [], 0
        for segment in segments:
            for start, size in piece_runs(axes, segment):
                places.append(torch.arange(start, start + size, device=device) + before)
            before += segment
        place = torch.cat(places) if places else number.new_zeros(0)
        number = (number.unsqueeze(1) * before + place).reshape(-1)
    return number


def _ranks_of(axes: Axes, segments: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """The rank of each thing in segments that ``axes`` cut: its index along every axis."""
    places = _places_of(tuple((axis.size, axis.turns) for axis in axes), segments)
    return {
        axis.name: torch.tensor(indices, dtype=torch.long, device=device)
        for axis, indices in zip(axes, places, strict=True)
    }


@functools.lru_cache(maxsize=256)
def _places_of(
    axes: tuple[tuple[int, int], ...], segments: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """:func:`_ranks_of` along axes of these sizes and turns of zigzag."""
    found = [[0] * sum(segments) for _ in axes]

    def cut(runs: tuple[Run, ...], depth: int) -> None:
        """Deal the things of some runs along the axes from this depth on."""
        if depth == len(axes):
            return
        size, turns = axes[depth]
        count = sum(length for _, length in runs)
        for index in range(size):
            own = within(runs, dealt(count, size, index, turns=turns))
            for start, length in own:
                found[depth][start : start + length] = [index] * length
            cut(own, depth + 1)

    before = 0
    for segment in segments:
        cut(((before, segment),), 0)
        before += segment
    return tuple(map(tuple, found))


def _repeated(values: Tensor, counts: list[int]) -> Tensor:
    return values.repeat_interleave(torch.tensor(counts, device=values.device))


def _all_to_all(
    x: Tensor, axis: AxisGroup, send: list[int], receive: list[int], phase: Phase = "forward"
) -> Tensor:
    """Rows of ``x`` to every rank, ``send[i]`` to rank ``i``, and the rows that come, by sender."""
    return axis.communicator.all_to_all_rows(x, send, receive, phase=phase)


def _together(
    tensors: Sequence[Tensor],
    axis: AxisGroup,
    send: Sequence[list[int]],
    receive: Sequence[list[int]],
    begin: Callable[..., Callable[[], Tensor]],
    phase: Phase,
) -> Finish:
    """:func:`_all_to_all` of several tensors, in one message: their bytes, as numbers of the
    smallest of their dtypes. ``begin``: what begins a message, and returns what waits for it.
    """
    if len(tensors) == 1:
        alone = begin(tensors[0], axis, send[0], receive[0], phase)
        return lambda: [alone()]
    # A rank's part of the message is the parts of all tensors, end to end.
    dtype = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    widths = [math.prod(x.shape[1:]) * x.dtype.itemsize // dtype.itemsize for x in tensors]
    out, into = (
        [[width * rows for rows in counts] for width, counts in zip(widths, sizes, strict=True)]
        for sizes in (send, receive)
    )
    parts = [
        x.reshape(-1).view(dtype).split_with_sizes(sizes)
        for x, sizes in zip(tensors, out, strict=True)
    ]
    message = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
    to_ranks, from_ranks = ([sum(of) for of in zip(*side, strict=True)] for side in (out, into))
    come = begin(message, axis, to_ranks, from_ranks, phase)
    kinds = [(x.dtype, (sum(n), *x.shape[1:])) for x, n in zip(tensors, receive, strict=True)]

    def finish() -> list[Tensor]:
        chunks = come().split_with_sizes(
            [size for from_rank in zip(*into, strict=True) for size in from_rank]
        )
        return [
            torch.cat(chunks[index :: len(kinds)]).view(dtype).view(shape)
            for index, (dtype, shape) in enumerate(kinds)
        ]

    return finish


def exchange_rows(rows: Tensor, axis: AxisGroup, send: list[int], receive: list[int]) -> Tensor:
    """The rows that other ranks send, in the order of the ranks; gradients go back."""
    return _moved((rows,), axis, (send,), (receive,))()[0]


# Two ways to move several tensors in one message each way. Integers have no gradients, which need
# not go back.

_Move = Callable[
    [Sequence[Tensor], AxisGroup, Sequence[list[int]], Sequence[list[int]]],
    Callable[[], Sequence[Tensor]],
]
"""What moves rows along an axis, so and so many to each rank and from it, and returns what waits
for them.
"""


def _moved(
    tensors: Sequence[Tensor],
    axis: AxisGroup,
    send: Sequence[list[int]],
    receive: Sequence[list[int]],
) -> Callable[[], Sequence[Tensor]]:
    """Rows of other ranks, which are here at once."""
    came = cast(
        tuple[Tensor, ...],
        _Exchange.apply(axis, send, receive, *tensors),  # type: ignore[no-untyped-call]
    )
    return lambda: came


def _moving(
    tensors: Sequence[Tensor],
    axis: AxisGroup,
    send: Sequence[list[int]],
    receive: Sequence[list[int]],
) -> Callable[[], Sequence[Tensor]]:
    """Rows of other ranks, which are under way until what is returned is called."""
    real = [x.is_floating_point() for x in tensors]
    send_home, receive_home = (list(itertools.compress(sizes, real)) for sizes in (receive, send))
    flight = Flight(
        lambda xs, phase: _together(xs, axis, send, receive, _begun, phase),
        lambda xs, phase: _together(xs, axis, send_home, receive_home, _begun, phase),
    )
    token = leave(flight, tensors)
    return lambda: arrive(flight, token)


def _begun(
    x: Tensor, axis: AxisGroup, send: list[int], receive: list[int], phase: Phase
) -> Callable[[], Tensor]:
    return axis.communicator.all_to_all_rows_async(x, send, receive, phase=phase).wait


def _done(
    x: Tensor, axis: AxisGroup, send: list[int], receive: list[int], phase: Phase
) -> Callable[[], Tensor]:
    came = _all_to_all(x, axis, send, receive, phase)
    return lambda: came


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back. Every rank takes part in both, rows or not."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: AxisGroup,
        send: Sequence[list[int]],
        receive: Sequence[list[int]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        came = _together(tensors, axis, send, receive, _done, "forward")()
        real = [x.is_floating_point() for x in tensors]
        ctx.mark_non_differentiable(*itertools.compress(came, (not one for one in real)))
        ctx.axis, ctx.real = axis, real
        ctx.send, ctx.receive = (list(itertools.compress(n, real)) for n in (send, receive))
        return tuple(came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads = tuple(itertools.compress(grads, ctx.real))
        back = iter(_together(grads, ctx.axis, ctx.receive, ctx.send, _done, "backward")())
        return None, None, None, *(next(back) if one else None for one in ctx.real)
