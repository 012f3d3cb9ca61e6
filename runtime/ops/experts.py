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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.arguments import shown
from shardwright.runtime.errors import ArgumentError
from shardwright.runtime.ops.axes import Axes, communicating
from shardwright.runtime.ops.indices import check_indices
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import piece

TokenDim = tuple[int, int, int]
"""The dim of tokens as ``outer x size x inner``, of which an axis cuts the middle."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How rows came from other ranks, and go back.

    ``position [rows]``: which of the tokens that arrived a row was made of. ``received``: how many
    tokens came from each rank. ``sent``: how many went to each. ``tokens``: which of its own tokens
    this rank sent, by receiver. ``token_dim``: the tokens that they were cut from.
    """

    axis: AxisGroup
    token_dim: TokenDim
    position: Tensor
    received: list[int]
    sent: list[int]
    tokens: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rows a rank holds.

    ``token [rows]``: the token of each row, counted among the ``num_tokens`` that lie on the ranks
    with which this one shares its experts' work. ``counts [experts]``: the rows of each expert
    here. ``choice [rows]``: which of all choices, token by token, each row is, if all ``top_k`` of
    every token are here. ``arrivals``: how rows came from other ranks, if they did.
    """

    token: Tensor
    counts: Tensor
    num_tokens: int
    top_k: int
    choice: Tensor | None = None
    arrivals: Arrivals | None = None


def dispatch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    expert_axes: Axes = (),
    exchange: Axes = (),
    token_dim: TokenDim = (1, 0, 1),
) -> tuple[Any, ...]:
    """The rows of tokens for the experts that were chosen, and of each row its weight.

    ``x [tokens, hidden]``; ``chosen [tokens, top_k]``: expert numbers; ``weights [tokens, top_k]``.
    ``expert_axes``: the axes that cut the experts, major to minor. ``exchange``: the last of them,
    if it cuts the tokens of ``x``; ``token_dim`` then describes the tokens without this cut.
    Returns ``(rows, gains, routing)``, without gains if there are no weights.
    """
    exchange, expert_axes = communicating(exchange), communicating(expert_axes)
    check_indices((chosen >= 0) & (chosen < num_experts), "a chosen expert", num_experts)
    if exchange:
        made = _exchanged(x, chosen, weights, expert_axes, exchange[0], token_dim, num_experts)
    else:
        made = _local(x, chosen, weights, expert_axes, num_experts)
    rows, gains, routing = made
    return (rows, routing) if gains is None else (rows, gains, routing)


def combine(
    rows: Tensor,
    routing: Routing,
    *,
    exchange: Axes = (),
    token_dim: TokenDim = (1, 0, 1),
) -> Tensor:
    """The sum over the rows of each token, ``[tokens, hidden]``. Without some of the experts it is
    a summand.

    ``exchange``, ``token_dim``: as in :func:`dispatch`; each rank then gets the sums of its own
    tokens.
    """
    checked_routing(routing)
    exchange = communicating(exchange)
    if exchange:
        return _returned(rows, routing, exchange[0], token_dim)
    num_tokens, top_k = routing.num_tokens, routing.top_k
    if routing.choice is None:
        return _summed(rows, routing.token, num_tokens)
    # All rows of a token are here: they are summed in the order in which it chose their experts.
    # The sum over one dim of [tokens, top_k, hidden]: added in the same order on every device and
    # under every plan, which index_add does not promise.
    by_token = routing.choice.argsort()
    return rows.index_select(0, by_token).view(num_tokens, top_k, *rows.shape[1:]).sum(1)


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    autocast: bool = False,
) -> Tensor:
    """Each row times the matrix of its expert, plus its bias.

    ``weight [experts, out, in]``, or ``[experts, in, out]`` if ``transposed``; ``bias [experts,
    out]``. ``autocast``: whether it follows autocast as ``F.linear`` does. Otherwise rows are
    converted to the dtype of the weight.
    """
    checked_routing(routing)
    device = rows.device.type
    dtype = weight.dtype
    if autocast and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # [experts, in, out], however the model stores them.
    matrices = weight.to(dtype) if transposed else weight.to(dtype).transpose(-2, -1)
    out = _grouped_product(rows.to(dtype), matrices, routing.counts)
    if bias is not None:
        out = out + torch.repeat_interleave(
            bias.to(out.dtype), routing.counts, dim=0, output_size=rows.shape[0]
        )
    return out


def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.grouped_mm`` of rows ``[rows, in]`` or ``[groups, rows, in]`` and matrices ``[groups, in,
    out]``, also where torch's kernel refuses pieces of rows that are no multiple of 16 bytes.
    """
    if all(width * input.element_size() % 16 == 0 for width in mat2.shape[1:]):
        return F.grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
    if offs is None:
        out = input @ mat2
    else:
        ends = offs.long()
        counts = ends.diff(prepend=ends.new_zeros(1))
        used = int(counts.sum())  # rows beyond are in no group
        out = F.pad(_grouped_product(input[:used], mat2, counts), (0, 0, 0, input.shape[0] - used))
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


def checked_routing(routing: Any) -> Routing:
    """``routing``, if it is what :func:`dispatch` returned. Raises :class:`ArgumentError`."""
    if not isinstance(routing, Routing):
        raise ArgumentError(
            "the routing of rows is what dispatch returned",
            why=f"it is {shown(routing)}",
        )
    return routing


# ------------------------------------------------------------------------------------------------
# rows of a rank's own tokens


def _experts_of(
    axes: Axes, num_experts: int, index: Mapping[str, int] | None = None
) -> tuple[int, int]:
    """``(start, count)`` of this rank's experts, or those of the rank with another ``index`` along
    the axes named.
    """
    start, count = 0, num_experts
    for axis in axes:
        inner, count = piece(count, axis.size, (index or {}).get(axis.name, axis.index))
        start += inner
    return start, count


def _local(
    x: Tensor, chosen: Tensor, weights: Tensor | None, expert_axes: Axes, num_experts: int
) -> tuple[Tensor, Tensor | None, Routing]:
    start, count = _experts_of(expert_axes, num_experts)
    num_tokens, top_k = chosen.shape
    # [tokens * top_k], counted from this rank's first expert: others are below 0, or too large.
    expert = chosen.reshape(-1) - start
    # Stable, so that the rows of an expert are in the order of the tokens.
    order = expert.argsort(stable=True)
    complete = count == num_experts  # then a GPU is not asked how many rows there are
    if not complete:
        sorted_expert = expert[order]
        order = order[(sorted_expert >= 0) & (sorted_expert < count)]
    counts = _counted(expert[order], count)
    token = order.div(max(1, top_k), rounding_mode="floor")
    gains = None if weights is None else weights.reshape(-1).index_select(0, order)
    routing = Routing(token, counts, num_tokens, top_k, order if complete else None)
    return x.index_select(0, token), gains, routing


def _counted(expert: Tensor, count: int) -> Tensor:
    """The number of rows of each of ``count`` experts."""
    ones = torch.ones_like(expert)
    return torch.zeros(count, dtype=torch.long, device=expert.device).index_add_(0, expert, ones)


def _summed(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """Rows added up by their places."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, place, rows)


# ------------------------------------------------------------------------------------------------
# rows from and to other ranks


def _exchanged(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    expert_axes: Axes,
    axis: AxisGroup,
    token_dim: TokenDim,
    num_experts: int,
) -> tuple[Tensor, Tensor | None, Routing]:
    """Send each token once to every rank that has an expert for it, and make the rows there."""
    num_tokens, top_k = chosen.shape
    owners, starts, count = _owners(expert_axes, axis, num_experts)
    # [tokens, top_k]: the rank of this axis that has the chosen expert.
    owner = owners.to(x.device)[chosen]
    inside = owner >= 0

    # What goes where: a token once to each owner, and of each choice its expert and its token.
    wanted = torch.zeros(axis.size, num_tokens, dtype=torch.bool, device=x.device)
    number = torch.arange(num_tokens, device=x.device)
    pairs = inside.reshape(-1).nonzero().squeeze(1)
    pair_owner, pair_token = owner.reshape(-1)[pairs], pairs.div(top_k, rounding_mode="floor")
    # [ranks, tokens]: a token with two experts on one rank goes there once.
    wanted[pair_owner, pair_token] = True
    receiver, sent_token = wanted.nonzero(as_tuple=True)
    pairs_by_owner = pair_owner.argsort(stable=True)
    pairs, pair_owner = pairs[pairs_by_owner], pair_owner[pairs_by_owner]
    pair_token = pair_token[pairs_by_owner]
    # Where each sent token stands in the whole message; less what goes to ranks before the
    # receiver, where it stands among those that the receiver gets from this rank.
    sent_before = wanted.reshape(-1).cumsum(0).view_as(wanted) - 1
    tokens_to = torch.bincount(receiver, minlength=axis.size)
    pairs_to = torch.bincount(pair_owner, minlength=axis.size)
    place = sent_before[pair_owner, pair_token] - (tokens_to.cumsum(0) - tokens_to)[pair_owner]
    local_expert = chosen.reshape(-1)[pairs] - starts.to(x.device)[pair_owner]

    # Counts go first, then numbers in one message, then what has gradients.
    counts = torch.stack([tokens_to, pairs_to], 1)
    ones = [1] * axis.size
    came = _all_to_all(counts, axis, ones, ones)
    (tokens_in, pairs_in), (tokens_out, pairs_out) = came.T.tolist(), counts.T.tolist()
    told = (number[sent_token], local_expert, place)
    token_in, local, position = _together(
        told, axis, (tokens_out, pairs_out, pairs_out), (tokens_in, pairs_in, pairs_in)
    )
    given = x.index_select(0, sent_token)
    pair_weights = None if weights is None else weights.reshape(-1).index_select(0, pairs)
    if pair_weights is not None and pair_weights.dtype == given.dtype:
        counts_out, counts_in = (tokens_out, pairs_out), (tokens_in, pairs_in)
        arrived, came_weights = _exchange((given, pair_weights), axis, counts_out, counts_in)
    else:
        arrived = exchange_rows(given, axis, tokens_out, tokens_in)
        came_weights = None
        if pair_weights is not None:
            came_weights = exchange_rows(pair_weights, axis, pairs_out, pairs_in)

    # The rows, sorted by expert; where tokens stand among those of all ranks of the axis.
    offset = torch.tensor(list(itertools.accumulate([0, *tokens_in]))[:-1], device=x.device)
    position = position + _repeated(offset, pairs_in)
    whole = _positions(token_dim, axis, x.device)
    parts = token_in.split_with_sizes(tokens_in)
    joined = torch.cat([place[part] for place, part in zip(whole, parts, strict=True)])
    # By expert, then by token: the same order as on one device.
    total = token_dim[0] * token_dim[1] * token_dim[2]
    order = (local * total + joined[position]).argsort(stable=True)
    position = position[order]
    gains = None if came_weights is None else came_weights.index_select(0, order)
    arrivals = Arrivals(axis, token_dim, position, tokens_in, tokens_out, sent_token, num_tokens)
    routing = Routing(
        joined[position],
        _counted(local[order], count),
        total,
        top_k,
        arrivals=arrivals,
    )
    return arrived.index_select(0, position), gains, routing


def _owners(axes: Axes, axis: AxisGroup, num_experts: int) -> tuple[Tensor, Tensor, int]:
    """Which rank of ``axis`` has each expert, -1 where ranks beyond this axis have it; the first
    expert of each rank; and how many experts this one has.
    """
    owners = torch.full((num_experts,), -1)
    starts = []
    for index in range(axis.size):
        start, count = _experts_of(axes, num_experts, {axis.name: index})
        owners[start : start + count] = index
        starts.append(start)
    return owners, torch.tensor(starts), _experts_of(axes, num_experts)[1]


def _returned(rows: Tensor, routing: Routing, axis: AxisGroup, token_dim: TokenDim) -> Tensor:
    """Add up what this rank's experts made of each token, send it home, and add it up there."""
    arrivals = routing.arrivals
    if (
        arrivals is None
        or arrivals.axis.communicator is not axis.communicator
        or arrivals.token_dim != token_dim  # the sums belong to other ranks than the tokens
    ):
        arrivals = _departures(routing, axis, token_dim)
    # Summed before they are sent: one row goes home for each token that came, whatever number of
    # experts it had here.
    made = _summed(rows, arrivals.position, sum(arrivals.received))
    back = exchange_rows(made, axis, arrivals.received, arrivals.sent)
    return _summed(back, arrivals.tokens, arrivals.num_tokens)


def _departures(routing: Routing, axis: AxisGroup, token_dim: TokenDim) -> Arrivals:
    """How rows go to the ranks that their tokens belong to, if they did not come from there."""
    device = routing.token.device
    whole = _positions(token_dim, axis, device)
    # By token: the rank it belongs to, and its number among the tokens of that rank.
    owner = torch.empty(routing.num_tokens, dtype=torch.long, device=device)
    number = torch.empty_like(owner)
    for index, positions in enumerate(whole):
        owner[positions] = index
        number[positions] = torch.arange(positions.numel(), device=device)
    # Rows of one token are added up before they are sent: one message for each token and rank.
    present, position = torch.unique(routing.token, return_inverse=True)
    by_owner = owner[present].argsort(stable=True)
    present, place = present[by_owner], by_owner.argsort()
    going = torch.bincount(owner[present], minlength=axis.size)
    came = _all_to_all(going, axis, [1] * axis.size, [1] * axis.size)
    # Sizes must be known on the host. On a GPU this waits for the router.
    received, sent = going.tolist(), came.tolist()
    tokens = _all_to_all(number[present], axis, received, sent)
    return Arrivals(
        axis, token_dim, place[position], received, sent, tokens, whole[axis.index].numel()
    )


def _positions(token_dim: TokenDim, axis: AxisGroup, device: torch.device) -> list[Tensor]:
    """Where the tokens of each rank of the axis stand among those of all of them."""
    outer, size, inner = token_dim
    whole = torch.arange(outer * size * inner, device=device).view(outer, size, inner)
    pieces = [piece(size, axis.size, index) for index in range(axis.size)]
    return [whole[:, start : start + count].reshape(-1) for start, count in pieces]


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
    phase: Phase = "forward",
) -> list[Tensor]:
    """:func:`_all_to_all` of several tensors of one dtype, in one message."""
    if len(tensors) == 1:
        return [_all_to_all(tensors[0], axis, send[0], receive[0], phase)]
    # A rank's part of the message is the parts of all tensors, end to end.
    widths = [math.prod(x.shape[1:]) for x in tensors]
    out, into = (
        [[width * rows for rows in counts] for width, counts in zip(widths, sizes, strict=True)]
        for sizes in (send, receive)
    )
    parts = [x.reshape(-1).split_with_sizes(sizes) for x, sizes in zip(tensors, out, strict=True)]
    message = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
    to_ranks, from_ranks = ([sum(of) for of in zip(*side, strict=True)] for side in (out, into))
    came = _all_to_all(message, axis, to_ranks, from_ranks, phase)
    chunks = came.split_with_sizes(
        [size for from_rank in zip(*into, strict=True) for size in from_rank]
    )
    return [
        torch.cat(chunks[index :: len(tensors)]).view(sum(receive[index]), *x.shape[1:])
        for index, x in enumerate(tensors)
    ]


def exchange_rows(rows: Tensor, axis: AxisGroup, send: list[int], receive: list[int]) -> Tensor:
    """The rows that other ranks send, in the order of the ranks; gradients go back."""
    return _exchange((rows,), axis, (send,), (receive,))[0]


def _exchange(
    tensors: Sequence[Tensor],
    axis: AxisGroup,
    send: Sequence[list[int]],
    receive: Sequence[list[int]],
) -> tuple[Tensor, ...]:
    """:func:`exchange_rows` of several tensors of one dtype, in one message each way."""
    return cast(
        tuple[Tensor, ...],
        _Exchange.apply(axis, send, receive, *tensors),  # type: ignore[no-untyped-call]
    )


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
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return tuple(_together(tensors, axis, send, receive))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _together(grads, ctx.axis, ctx.receive, ctx.send, "backward")
        return None, None, None, *back


# ------------------------------------------------------------------------------------------------
# products


def _grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """``rows [rows, in]`` times ``matrices [experts, in, out]``, by groups of ``counts`` rows."""
    return cast(Tensor, _GroupedProduct.apply(rows, matrices, counts))  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """One product for each expert. The weights of an expert without rows have gradients of
    zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, counts)
        return _by_expert(rows, matrices, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[0]:
            grad_rows = _by_expert(grad, matrices.mT, counts)
        if ctx.needs_input_grad[1]:
            # In the order in which the weight lies in memory, so that nobody has to copy it.
            turned = not matrices.is_contiguous()
            left, right = (grad, rows) if turned else (rows, grad)
            grad_matrices = _by_expert(left.T, right, counts)
            grad_matrices = grad_matrices.mT if turned else grad_matrices
        return grad_rows, grad_matrices, None


def _by_expert(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Products by groups of ``counts``: of the rows of ``left [rows, k]`` with ``right [experts, k,
    n]``, or of the columns of ``left [k, rows]`` with the rows of ``right [rows, n]``, which gives
    ``[experts, k, n]``.
    """
    if _has_kernel(left, right, counts):
        return F.grouped_mm(left, right, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    if right.dim() == 3:
        out = left.new_empty(left.shape[0], right.shape[2])
        operands, outs = (left.split_with_sizes(sizes), right.unbind()), out.split_with_sizes(sizes)
    else:
        out = left.new_empty(len(sizes), left.shape[0], right.shape[1])
        operands, outs = (
            (left.split_with_sizes(sizes, 1), right.split_with_sizes(sizes)),
            out.unbind(),
        )
    for a, b, result in zip(*operands, outs, strict=True):
        if result.numel() > 0:
            torch.mm(a, b, out=result)  # zeros where there are no rows to sum over
    return out


_KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def _has_kernel(left: Tensor, right: Tensor, counts: Tensor) -> bool:
    """Whether torch has one kernel for all groups. It wants rows of whole 16 bytes, in memory that
    begins at a multiple of 16 bytes.
    """
    if left.dtype not in _KERNEL_DTYPES.get(left.device.type, ()):
        return False
    sizes = (counts.shape[0], *left.shape, *right.shape)
    whole = right.shape[-1] * right.element_size() % 16 == 0  # rows of the result
    return min(sizes) > 0 and whole and _is_aligned(left) and _is_aligned(right)


def _is_aligned(x: Tensor) -> bool:
    small, large = sorted(x.stride()[-2:])
    return small == 1 and large * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
