"""Attention of this rank's part of the queries, to keys that are whole or lie on several ranks.

With whole keys a rank computes the tiles that its queries see, wherever in the sequence they lie.

With keys on several ranks (**ring attention**, Liu et al. 2023, "Ring attention with blockwise
transformers for near-infinite context") the keys and values that its queries see come to it one
rank's after the other. In step ``s`` it computes with keys of the rank ``s`` places before it,
while those of the next step are on their way, so it holds the keys of two ranks at most. They come
directly from the rank that has them, and only those that some query sees: of causal attention about
half, of a window few. Backward they come again, and their gradients go straight home, where they
are added in the order of the steps. Nothing that grows with the square of the sequence is kept.

Where lengths of documents, known at run time only, leave ranks unequal work, some queries are
computed elsewhere (:mod:`~shardwright.runtime.ops.attention_moves`). They go there while a rank
computes its own; their outputs come home. Backward gradients go the same ways. The rank that
computes them keeps what it needs of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwright.runtime.marks import Marks, Seen
from shardwright.runtime.ops.attend_blocks import (
    CALL_FLOP,
    attend,
    attend_backward,
    kernel_for,
    parts_of_backward,
)
from shardwright.runtime.ops.attention_blocks import (
    Block,
    Flat,
    as_bias,
    common_gradient,
    enough_to_measure,
    hidden_alike,
    merge,
    merging_dtype,
)
from shardwright.runtime.ops.attention_dropout import TileDropout, WeightDropout
from shardwright.runtime.ops.attention_rows import (
    Arrived,
    Home,
    Route,
    Visits,
    arriving,
    bring_home,
)
from shardwright.runtime.ops.attention_steps import Part, Place, Step, steps_of
from shardwright.runtime.ops.axes import Axes, Length, communicating, whole_length
from shardwright.runtime.ops.graph_ends import leave_graph
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import Run
from shardwright.runtime.second_derivatives import differentiable_once
from shardwright.runtime.visible_keys import (
    all_keys,
    earlier_keys,
)


def call_pairs(device: str, heads: int, widths: int) -> int:
    """How many pairs of a query and a key are computed in the time that a call takes; 0 where that
    is not known. ``widths``: that of a key and that of a value, together.
    """
    # Each pair is a product of the width of keys, and one of that of values.
    return CALL_FLOP.get(device, 0) // max(1, 2 * heads * widths)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    query_axes: Axes = (),
    key_axes: Axes = (),
    lengths: tuple[Length, Length],
    query_unit: int = 1,
    dropout: WeightDropout | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of this rank's queries.

    query ``[..., L, E]``, key ``[..., S, E]``, value ``[..., S, Ev]``, attn_mask ``[..., L, keys of
    all ranks]`` or with one row for all queries, or one column for all keys; ``dropout_p`` is 0:
    what weights are dropped by is ``dropout``. ``query_axes``: the axes that cut the queries, major
    to minor, in units of ``query_unit`` queries. ``key_axes``: one of these, if it cuts keys and
    values, too. ``lengths``: how many units of queries, and how many keys, there are without these
    cuts.
    """
    query_axes, ring = communicating(query_axes), communicating(key_axes)
    if not ring and not is_causal and dropout is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa
        )
    # The tiles below have the dims [samples, heads, positions, width]. So leading dims become one,
    # and are taken apart again at the end.
    num_dims = max(query.ndim, key.ndim, value.ndim)
    query, key, value = _same_heads(
        autocasted(query), autocasted(key), autocasted(value), enable_gqa
    )
    leads = _common([x.shape[:-3] for x in (query, key, value)])
    mask = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.ndim <= 4 else _one_batch(attn_mask, leads)
        mask = whole_mask_of(mask, whole_length(lengths[1]))
    bands = (earlier_keys if is_causal else all_keys)(
        whole_length(lengths[0]) * query_unit, whole_length(lengths[1])
    )
    leave_graph(DEPENDS)
    one_batch = [_one_batch(x, leads) for x in (query, key, value)]
    out = attention_in_tiles(
        one_batch[0],
        one_batch[1],
        one_batch[2],
        (Seen((0, math.prod(leads)), bands),),
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        Where(query_axes, ring[0] if ring else None, lengths, query_unit),
        mask=mask,
        dropout=dropout,
    )
    if num_dims == 4:
        return out
    return out.view(*leads, *out.shape[1:]) if num_dims > 2 else out.view(out.shape[-2:])


DEPENDS = "attention in blocks depends on values, such as lengths of documents"
"""Why no graph of torch's compiler holds it: which blocks there are, and what is sent."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where the queries and keys of a rank lie. ``query_axes``: the axes that cut the queries,
    major to minor, in units of ``query_unit`` queries. ``ring``: one of these, if it cuts keys and
    values, too. ``lengths``: how many units of queries, and how many keys, there are without these
    cuts.
    """

    query_axes: Axes
    ring: AxisGroup | None
    lengths: tuple[Length, Length]
    query_unit: int = 1


@_disable_dynamo
def attention_in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: tuple[Seen, ...],
    scale: float,
    where: Where,
    *,
    mask: Tensor | None = None,
    marks: Marks | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    dropout: WeightDropout | None = None,
    evens_out: bool = False,
    flat: Flat = "mean",
) -> Tensor:
    """Attention of this rank's queries, ``[samples, heads, L, E]``, of which ``seen`` says what
    they see; key and value ``[samples, key heads, S, ...]``.

    ``mask``: ``[samples or 1, heads or 1, L or 1, keys of all ranks]``. ``marks``: what tells which
    keys are seen where ``seen`` is not exact. ``sinks``: by head, a score that takes its part of
    the weights, and has no value. ``cap``: scores ``s`` become ``cap * tanh(s / cap)``.
    ``dropout``: which weights are dropped. ``evens_out``: some queries may be computed by ranks
    that have less to do; there is no ``mask`` then. ``flat``: what queries get whose bands are
    flat, as they see no key.
    """
    places = tuple(Place(a.size, a.index, a.turns, a is where.ring) for a in where.query_axes)
    of_call = 0
    if mask is None:
        widths = query.shape[3] + value.shape[3]
        of_call = call_pairs(query.device.type, query.shape[1], widths)
    steps = steps_of(places, where.lengths, where.query_unit, seen, of_call, evens_out=evens_out)
    axis = where.ring or next(iter(where.query_axes), None)
    attention = _Attention(Route(axis, steps), scale, marks, cap, dropout, flat)
    out = _SplitAttention.apply(query, key, value, mask, sinks, attention)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def whole_mask_of(mask: Tensor, num_keys: int) -> Tensor:
    """A mask with up to four dims as one with four, and a column for each key."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(*mask.shape[:-1], num_keys)


def autocasted(x: Tensor) -> Tensor:
    """What autocast makes of an operand, as of one of torch's operator."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _common(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that these are broadcast to."""
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _one_batch(x: Tensor, leads: tuple[int, ...]) -> Tensor:
    """``[..., heads, rows, columns]`` with one dim for what ``leads`` are in front of it."""
    if x.ndim == 4 and x.shape[:1] == leads:
        return x
    return x.expand(*leads, *x.shape[-3:]).reshape(math.prod(leads), *x.shape[-3:])


def _same_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """All with a dim of heads, keys and values with the same number of them."""
    query, key, value = (x if x.ndim > 2 else x.unsqueeze(0) for x in (query, key, value))
    heads = query.shape[-3]
    if enable_gqa and key.shape[-3] == value.shape[-3]:
        return query, key, value
    if enable_gqa:
        # Keys and values with different numbers of heads: both are spread to those of the queries.
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    heads = max(x.shape[-3] for x in (query, key, value))
    if query.shape[-3] == key.shape[-3] == value.shape[-3]:
        return query, key, value
    query, key, value = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


@dataclass(frozen=True, slots=True)
class _Attention:
    """What the operator is told beside its tensors; see :func:`attention_in_tiles`."""

    route: Route
    scale: float
    marks: Marks | None
    cap: float | None
    dropout: WeightDropout | None
    flat: Flat


# ------------------------------------------------------------------------------------------------
# the operator


class _SplitAttention(torch.autograd.Function):
    """query ``[samples, heads, L, E]``, key and value ``[samples, key heads, S, ...]``, mask with
    dims that may be 1 but for the last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        attention: _Attention,
    ) -> Tensor:
        drops = attention.dropout is not None
        kernel = kernel_for(query, key, value, mask, attention.cap, drops=drops)
        blocks = _Blocks(query, mask, attention, has_sinks=sinks is not None)
        coming = Visits(attention.route, query, "forward")
        outputs = _OfAll(
            _Output.of(query, value, sinks),
            lambda: [_Output.of(visitor, value, sinks) for visitor in coming.here()],
        )
        with torch.autocast(query.device.type, enabled=False):
            for step, arrived in arriving(attention.route, key, value, "forward"):
                for part in blocks.parts(step, arrived):
                    its = outputs.of(part)
                    found = attend(kernel, blocks.block(part, its.query, arrived))
                    own_out, own_lse = _own(its.out, part), _own(its.lse, part)
                    # Nothing to merge with, unless there are sinks.
                    if part.begins and sinks is None:
                        own_out.copy_(found[0])
                        own_lse.copy_(found[1])
                    else:
                        merge(own_out, own_lse, *found)
        out, lse = outputs.own.out.to(query.dtype), outputs.own.lse
        kept: list[Tensor] = []
        if attention.route.steps.moves:
            of_guests = [guest.out.to(query.dtype) for guest in outputs.guests]
            bring_home(attention.route, of_guests, out, "forward")
            for guest, its_out in zip(outputs.guests, of_guests, strict=True):
                kept += (guest.query, its_out, guest.lse)
            # Backward a sink has no weight here for queries that were computed elsewhere.
            for lent in attention.route.steps.away:
                for run in lent.places:
                    lse.narrow(0, *lent.samples).narrow(2, *run).fill_(math.inf)
        ctx.save_for_backward(query, key, value, mask, sinks, out, lse, *kept)
        ctx.attention, ctx.kernel = attention, kernel
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, lse, *kept = ctx.saved_tensors
        attention, kernel = ctx.attention, ctx.kernel
        wants_mask = mask is not None and ctx.needs_input_grad[3]
        has_sinks = sinks is not None
        blocks = _Blocks(query, mask, attention, has_sinks=has_sinks, wants_mask=wants_mask)
        coming = Visits(attention.route, grad, "backward")
        gradients = _OfAll(
            _Gradient.of(query, grad, out, lse),
            lambda: [
                _Gradient.of(kept[3 * i], visitor, *kept[3 * i + 1 : 3 * i + 3])
                for i, visitor in enumerate(coming.here())
            ],
        )
        of_mask = None
        if wants_mask:
            of_mask = torch.zeros_like(mask, memory_format=torch.contiguous_format)
        home = Home(attention.route, key, value, lse.dtype)
        with torch.autocast(query.device.type, enabled=False):
            for step, arrived in arriving(attention.route, key, value, "backward"):
                rooms = home.rooms(arrived)
                for part in blocks.parts(step, arrived):
                    its = gradients.of(part)
                    block = blocks.block(part, its.query, arrived)
                    own = [_own(x, part) for x in (its.grad, its.out, its.lse)]
                    of_queries = _own(its.of_query, part)
                    of_keys, of_values = (_taken_run(x, 2, part.keys) for x in rooms[part.samples])
                    for some in parts_of_backward(kernel, block):
                        given = (_taken_run(x, 2, some.queries) for x in own)
                        grads = attend_backward(kernel, some.block, *given)
                        _taken_run(of_queries, 2, some.queries).add_(grads.query)
                        _taken_run(of_keys, 2, some.keys).add_(grads.key)
                        _taken_run(of_values, 2, some.keys).add_(grads.value)
                        if of_mask is not None and grads.bias is not None:
                            _add_to_mask(of_mask, part, grads.bias)
                home.send(step, rooms)
            of_key, of_value = home.all_here()
        of_query = gradients.own.of_query.to(query.dtype)
        if attention.route.steps.moves:
            of_guests = [guest.of_query.to(query.dtype) for guest in gradients.guests]
            bring_home(attention.route, of_guests, of_query, "backward")
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            everyone = (gradients.own, *gradients.guests)
            of_sinks = torch.stack([its.of_sinks(sinks) for its in everyone]).sum(0)
            of_sinks = of_sinks.to(sinks.dtype).view_as(sinks)
        return (of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_mask, of_sinks, None)


@dataclass(frozen=True, slots=True)
class _Output:
    """Queries ``[samples, heads, queries, E]``, and what they have got so far: the output, and its
    lse ``[samples, heads, queries]``.
    """

    query: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, query: Tensor, value: Tensor, sinks: Tensor | None) -> _Output:
        """Make those of queries that have seen no key."""
        dtype = merging_dtype(query.dtype)
        # [samples, queries, heads, Ev] in memory, as kernels have it: models join heads and width
        # behind it, which copies nothing then.
        samples, heads, length = query.shape[:3]
        out = query.new_zeros(samples, length, heads, value.shape[-1], dtype=dtype).transpose(1, 2)
        if sinks is None:
            return cls(query, out, query.new_full(query.shape[:3], -math.inf, dtype=dtype))
        # A sink is a key that all queries see, whose value is zero.
        lse = sinks.to(dtype).view(1, -1, 1).expand(query.shape[:3])
        # A copy even of a single query: it is written into.
        return cls(query, out, lse.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True, slots=True)
class _Gradient:
    """What backward has of queries ``[samples, heads, queries, E]``. ``grad``, ``out``, ``lse``: of
    the merged output. ``of_query``: their gradient so far.
    """

    query: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    of_query: Tensor

    @classmethod
    def of(cls, query: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> _Gradient:
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # of queries that see no key at all
        of_query = torch.zeros_like(query, dtype=lse.dtype, memory_format=torch.contiguous_format)
        return cls(query, grad, out, lse, of_query)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of sinks, ``[heads]``: one has the weight of its score and the value zero,
        so it is -weight * sum(grad * out).
        """
        weights = (sinks.to(self.lse.dtype).view(1, -1, 1) - self.lse).exp()
        return -(weights * common_gradient(self.grad, self.out, self.lse)).sum((0, 2))


Item = TypeVar("Item")


class _OfAll(Generic[Item]):
    """Something of this rank's own queries, and the same of each guest. ``make`` waits for guests,
    so it is called when the first is asked for.
    """

    def __init__(self, own: Item, make: Callable[[], list[Item]]) -> None:
        self.own, self._make = own, make
        self._guests: list[Item] | None = None

    # Python 3.11 computes a cached property under a lock of the class. Ranks may be threads, and
    # one that waits for guests would keep the others from sending them.
    @property
    def guests(self) -> list[Item]:
        """What belongs to each guest."""
        if self._guests is None:
            self._guests = self._make()
        return self._guests

    def of(self, part: Part) -> Item:
        """Where the queries of a part are."""
        return self.own if part.guest is None else self.guests[part.guest]


def _own(x: Tensor, part: Part) -> Tensor:
    """The queries of a part, of a tensor ``[samples, heads, queries, ...]`` of all that are where
    they are.
    """
    # Guests are of the samples of the part alone.
    its = x if part.guest is not None else _taken_run(x, 0, part.samples)
    return _taken_run(its, 2, part.queries)


def _taken_run(x: Tensor, dim: int, run: Run) -> Tensor:
    """A run along a dim, as a view; ``x`` itself where that is all of it."""
    return x if run == (0, x.shape[dim]) else x.narrow(dim, *run)


class _Blocks:
    """What kernels are given."""

    def __init__(
        self,
        query: Tensor,
        mask: Tensor | None,
        attention: _Attention,
        *,
        has_sinks: bool,
        wants_mask: bool = False,
    ) -> None:
        self._query, self._mask, self._attention = query, mask, attention
        self._wants_mask = wants_mask
        # Beside what is taken off all keys alike a sink would lose its weight: it gets all of it.
        self._alike = None if mask is None or has_sinks else hidden_alike(mask)

    def parts(self, step: Step, arrived: Arrived) -> Iterator[Part]:
        """The tiles of a step for which there is something to compute."""
        if not self._query.shape[:2].numel() or not self._query.shape[3]:
            return
        parts = [part for share in step.shares for part in share.parts]
        for part in enough_to_measure(self._query, parts, _form):
            keys, values = arrived[part.samples]
            # A rank may have no keys for these samples: there is nothing to add.
            if keys.numel() and values.numel():
                yield part

    def block(self, part: Part, query: Tensor, arrived: Arrived) -> Block:
        """The block of a tile, whose queries are some of these."""
        keys, values = arrived[part.samples]
        kind, alike = part.tile.kind, self._alike
        if alike is not None:
            alike = _mask_rows(alike, part)
        return Block(
            _own(query, part),
            _taken_run(keys, 2, part.keys),
            _taken_run(values, 2, part.keys),
            self._attention.scale,
            # The marks tell all that there is to know of a tile.
            causal=kind == "causal" and not part.asks,
            flipped=kind == "flipped" and not part.asks,
            bias=self._bias(part),
            alike=alike,
            cap=self._attention.cap,
            flat=self._attention.flat if kind == "flat" else None,
            dropout=self._dropout(part),
            wants_bias=self._wants_mask,
        )

    def _dropout(self, part: Part) -> TileDropout | None:
        dropout = self._attention.dropout
        if dropout is None:
            return None
        return TileDropout(dropout, part.samples, part.queries_at, part.keys_at)

    def _bias(self, part: Part) -> Tensor | None:
        dtype = merging_dtype(self._query.dtype)
        if self._mask is not None:
            return as_bias(torch.cat(_mask_of(self._mask, part), 3), dtype)
        if part.asks and part.tile.kind != "flat":
            assert self._attention.marks is not None
            seen = self._attention.marks.mask(part.samples, part.queries_at, part.keys_at)
            return as_bias(seen, dtype)
        if part.tile.kind != "masked":
            return None
        # [queries, 2]: the first key that each query of the tile sees, and the end of those.
        ends = torch.tensor(part.tile.ends, device=self._query.device)
        columns = torch.arange(part.keys[1], device=self._query.device)
        seen = (columns >= ends[:, :1]) & (columns < ends[:, 1:])
        return as_bias(seen, dtype)[None, None]


def _form(part: Part) -> object:
    """What the memory that a tile takes depends on."""
    tile = part.tile
    sizes = part.samples[1], tile.queries[1], tile.keys[1], len(part.keys_at)
    return sizes, tile.kind, part.asks, part.begins, part.guest


def _mask_of(mask: Tensor, part: Part) -> list[Tensor]:
    """The parts of a mask ``[..., queries or 1, all keys]`` for a tile, as views, one for each run
    of its keys.
    """
    rows = _mask_rows(mask, part)
    return [rows.narrow(3, *run) for run in part.keys_at]


def _add_to_mask(of_mask: Tensor, part: Part, of_bias: Tensor) -> None:
    """Add the gradient of a tile's bias to that of the mask, of which dims may be 1."""
    views = _mask_of(of_mask, part)
    pieces = torch.split(of_bias, [view.shape[3] for view in views], 3)
    for view, more in zip(views, pieces, strict=True):
        view.add_(more.sum_to_size(view.shape))


def _mask_rows(mask: Tensor, part: Part) -> Tensor:
    """The part of a mask for the samples and queries of a tile, as a view."""
    if mask.shape[0] > 1:
        mask = mask.narrow(0, *part.samples)
    return mask.narrow(2, *part.queries) if mask.shape[2] > 1 else mask
