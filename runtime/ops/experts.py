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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwright.runtime.ops.axes import Axes, communicating, piece_runs
from shardwright.runtime.ops.exchange_places import (
    dim_axes,
    exchange_places,
    own_numbers,
    ranks_of,
    segments_of,
)
from shardwright.runtime.ops.graph_ends import leave_graph
from shardwright.runtime.ops.indices import check_indices
from shardwright.runtime.ops.routing import Arrivals, Leg, Routing, TokenDims, checked_routing
from shardwright.runtime.ops.token_messages import (
    CHOSEN,
    Move,
    Picked,
    TokenMessage,
    leg_of,
    moved,
    moving,
    summed,
    sums_flight,
)
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import Run

DEPENDS = "how many rows an expert gets is known when its router has run"
"""Why no graph of torch's compiler holds the operators of experts."""


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
    leave_graph(DEPENDS)
    axes = expert_axes, exchange
    found = _now(_dispatched, x, chosen, weights, num_experts, *axes, token_dims, moved)
    return cast(tuple[Any, ...], found)


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
    return _dispatched(x, chosen, weights, num_experts, *axes, token_dims, moving)


def combine(
    rows: Tensor,
    routing: Routing,
    *,
    dtype: torch.dtype | None = None,
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> Tensor:
    """The sum over the rows of each token, ``[tokens, hidden]``. Without some of the experts it is
    a summand.

    ``dtype``: of the result, and of the sums that ranks send each other (default: that of the
    rows). Sums are made in the dtype of the rows. ``exchange``, ``token_dims``: as in
    :func:`dispatch`; each rank then gets the sums of its own tokens.
    """
    leave_graph(DEPENDS)
    return cast(Tensor, _now(_combined, rows, routing, dtype, exchange, token_dims, moved))


def start_combine(
    rows: Tensor,
    routing: Routing,
    *,
    dtype: torch.dtype | None = None,
    exchange: Axes = (),
    token_dims: TokenDims = (),
) -> Callable[[], Tensor]:
    """Begin a :func:`combine`; what is returned waits for it. Along the first axis of an exchange
    sums are under way in between.
    """
    return _combined(rows, routing, dtype, exchange, token_dims, moving)


@_disable_dynamo
def _now(begin: Callable[..., Callable[[], Any]], *args: Any) -> Any:
    return begin(*args)()


def _dispatched(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    num_experts: int,
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    move: Move,
) -> Callable[[], tuple[Any, ...]]:
    exchange, expert_axes = communicating(exchange), communicating(expert_axes)
    chosen = chosen.long()
    if exchange:
        finish = _exchanged(
            x, chosen, weights, expert_axes, exchange, token_dims, num_experts, move
        )
    else:
        check_indices((chosen >= 0) & (chosen < num_experts), CHOSEN, num_experts)
        made = _local(x, chosen, weights, expert_axes, num_experts)
        finish = lambda: made  # noqa: E731

    def result() -> tuple[Any, ...]:
        rows, gains, routing = finish()
        return (rows, routing) if gains is None else (rows, gains, routing)

    return result


def _combined(
    rows: Tensor,
    routing: Routing,
    dtype: torch.dtype | None,
    exchange: Axes,
    token_dims: TokenDims,
    move: Move,
) -> Callable[[], Tensor]:
    checked_routing(routing)
    exchange, sent_as = communicating(exchange), rows.dtype if dtype is None else dtype
    if exchange:
        return _returned(rows, routing, sent_as, exchange, token_dims, move)
    made = _added(rows, routing).to(sent_as)
    return lambda: made


def _added(rows: Tensor, routing: Routing) -> Tensor:
    """The sums of rows that no other rank has."""
    num_tokens, top_k = routing.num_tokens, routing.top_k
    if routing.choice is None:
        return summed(rows, routing.token, num_tokens)
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
    complete = count == num_experts  # then a GPU is not asked how many rows there are
    expert = chosen.reshape(-1)  # [tokens * top_k]
    # Stable, so that the rows of an expert are in the order of the tokens.
    expert, order = (expert if complete else _numbered(expert, runs)).sort(stable=True)
    if not complete:
        here = expert >= 0
        expert, order = expert[here], order[here]
    ends = _ends(expert, torch.arange(1, count + 1, device=expert.device))
    token = order.div(max(1, top_k), rounding_mode="floor")
    gains = None if weights is None else weights.reshape(-1).index_select(0, order)
    routing = Routing(token, ends, num_tokens, top_k, order if complete else None)
    return x.index_select(0, token), gains, routing


def _numbered(expert: Tensor, runs: Sequence[Run]) -> Tensor:
    """Experts counted among those of a rank, which lie in ``runs``; -1 for those of others."""
    numbered, before = torch.full_like(expert, -1), 0
    for start, size in runs:
        inside = (expert >= start) & (expert < start + size)
        numbered = torch.where(inside, expert - (start - before), numbered)
        before += size
    return numbered


def _ends(keys: Tensor, bounds: Tensor) -> Tensor:
    """How many of the sorted ``keys`` are smaller than each bound."""
    return torch.searchsorted(keys, bounds, out_int32=True)


# ------------------------------------------------------------------------------------------------
# rows from and to other ranks


def _exchanged(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    num_experts: int,
    move: Move,
) -> Callable[[], tuple[Tensor, Tensor | None, Routing]]:
    """Send each token to the ranks that have an expert for it, and make the rows there. ``move``:
    what sends them along the last axis.
    """
    device, top_k = x.device, chosen.shape[1]
    places = exchange_places(expert_axes, exchange, token_dims, num_experts, device)
    real: tuple[Tensor, ...] = (x,) if weights is None else (x, weights)
    number, experts, legs = places.own, chosen, list[Leg]()
    last = len(exchange) - 1
    for index in range(last):
        leg, _ = leg_of(experts, exchange[index], places.receivers[index])
        message = TokenMessage(leg, number, experts)
        real = tuple(moved(message.flight, real)())
        number, experts = message.taken()
        legs.append(leg)
    leg, num_rows = leg_of(experts, exchange[last], places.receivers[last])

    def pick(number: Tensor, experts: Tensor) -> Picked:
        """The rows by expert, then by token: the same order as on one device."""
        key = places.keys.index_select(0, experts.reshape(-1)).view(experts.shape).add_(number)
        # Choices of experts of other ranks, which came with their tokens, are sorted behind.
        key, choice = key.view(-1).sort(stable=True)
        key, choice = key[:num_rows], choice[:num_rows]
        position = choice.div(max(1, top_k), rounding_mode="floor")
        token = number.squeeze(1).index_select(0, position)
        return Picked(position, choice, token, _ends(key, places.bounds))

    message = TokenMessage(leg, number, experts, pick)
    come = move(message.flight, real)

    def finish() -> tuple[Tensor, Tensor | None, Routing]:
        rows, *gains = come()
        picked = message.picked
        assert picked is not None
        routing = Routing(
            picked.token,
            picked.ends,
            places.num_tokens,
            top_k,
            arrivals=Arrivals(exchange, token_dims, picked.position, [*legs, leg]),
        )
        return rows, gains[0] if gains else None, routing

    return finish


def _returned(
    rows: Tensor,
    routing: Routing,
    sent_as: torch.dtype,
    exchange: Axes,
    token_dims: TokenDims,
    move: Move,
) -> Callable[[], Tensor]:
    """Add up what this rank's experts made of each token, send it home in the dtype ``sent_as``,
    and add it up there. ``move``: what sends it along the first axis, which is the last one on the
    way home.
    """
    arrivals = routing.arrivals
    # Sums may belong to other ranks than the tokens did.
    if arrivals is None or (arrivals.exchange, arrivals.token_dims) != (exchange, token_dims):
        arrivals = _departures(routing, exchange, token_dims)
    # Summed before they are sent: one row goes back for each token that came, whatever number of
    # experts it had here.
    position: Tensor | None = arrivals.position
    home, *legs = arrivals.legs
    summed_in = rows.dtype
    for leg in reversed(legs):
        (rows,) = moved(sums_flight(leg, position, summed_in, sent_as), [rows])()
        position = None
    come = move(sums_flight(home, position, summed_in, sent_as), [rows])
    return lambda: come()[0]


def _departures(routing: Routing, exchange: Axes, token_dims: TokenDims) -> Arrivals:
    """How rows go to the ranks that their tokens belong to, if they did not come from there."""
    device = routing.token.device
    sizes = tuple(segments_of(dim) for dim in token_dims)
    own = own_numbers(token_dims, device)
    # Rows of one token are added up before they are sent: one message for each token and rank.
    held, position = torch.unique(routing.token, return_inverse=True)
    # The rank of each of all tokens along the axes that cut one of their dims.
    shape, homes = [sum(segments) for segments in sizes], dict[str, Tensor]()
    for index, dim in enumerate(token_dims):
        around = [1] * len(shape)
        around[index] = shape[index]
        for name, ranks in ranks_of(dim_axes(dim), sizes[index], device).items():
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


def _all_to_all(x: Tensor, axis: AxisGroup, send: list[int], receive: list[int]) -> Tensor:
    """Rows of ``x`` to every rank, ``send[i]`` to rank ``i``, and the rows that come, by sender."""
    return axis.communicator.all_to_all_rows(x, send, receive)
