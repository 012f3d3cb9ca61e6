"""Attention of this rank's part of the queries, to keys that are whole or lie on several ranks.

With whole keys a rank computes the tiles that its queries see, wherever in the sequence they lie.

With keys on several ranks (**ring attention**, Liu et al. 2023, "Ring attention with blockwise
transformers for near-infinite context") the keys and values that its queries see come to it one
rank's after the other. In step ``s`` it computes with keys of the rank ``s`` places before it,
while those of the next step are on their way, so it holds the keys of two ranks at most. They come
directly from the rank that has them, and only those that some query sees: of causal attention about
half, of a window few. Backward they come again, and their gradients go straight home, where they
are added in the order of the steps. Nothing that grows with the square of the sequence is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.layout import Run, dealt
from shardwright.runtime.ops.attention_blocks import (
    Block,
    as_bias,
    attend,
    attend_backward,
    hidden_alike,
    kernel_for,
    merge,
    merging_dtype,
)
from shardwright.runtime.ops.axes import Axes, communicating, joined, piece_runs
from shardwright.runtime.ops.visible_keys import (
    Bands,
    Tile,
    all_keys,
    earlier_keys,
    place,
    tiles_between,
)
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.ranks.pending import PendingRows


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
    lengths: tuple[int, int],
    query_unit: int = 1,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of this rank's queries.

    query ``[..., L, E]``, key ``[..., S, E]``, value ``[..., S, Ev]``, attn_mask ``[..., L, keys of
    all ranks]`` or with one row for all queries; ``dropout_p`` is as the operator has it: 0.
    ``query_axes``: the axes that cut the queries, major to minor, in units of ``query_unit``
    queries. ``key_axes``: one of these, if it cuts keys and values, too. ``lengths``: how many
    units of queries, and how many keys, there are without these cuts.
    """
    query_axes, ring = communicating(query_axes), communicating(key_axes)
    if not ring and not is_causal:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa
        )
    num_dims = max(query.ndim, key.ndim, value.ndim)
    query, key, value = _same_heads(_cast(query), _cast(key), _cast(value), enable_gqa)
    leads = _common([x.shape[:-3] for x in (query, key, value)])
    mask = None
    if attn_mask is not None:
        mask = attn_mask[(None,) * max(0, 4 - attn_mask.ndim)]
        if mask.ndim > 4:
            mask = _one_batch(mask, leads)
    axis = ring[0] if ring else None
    places = tuple(_Place(a.size, a.index, a.zigzag, a is axis) for a in query_axes)
    bands = (earlier_keys if is_causal else all_keys)(lengths[0] * query_unit, lengths[1])
    out = cast(
        Tensor,
        _SplitAttention.apply(  # type: ignore[no-untyped-call]
            *(_one_batch(x, leads) for x in (query, key, value)),
            mask,
            axis,
            _steps(places, lengths, query_unit, bands),
            1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        ),
    )
    return out.view(*leads, *out.shape[1:]) if num_dims > 2 else out.view(out.shape[-2:])


def _cast(x: Tensor) -> Tensor:
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
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    heads = max(x.shape[-3] for x in (query, key, value))
    query, key, value = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


# ------------------------------------------------------------------------------------------------
# who sends what, and computes what


@dataclass(frozen=True, slots=True)
class _Part:
    """A tile as a rank has it: ``queries`` among its own, ``keys`` among those at hand in a step.
    ``key_start``: the position of the first of these keys in the sequence.
    """

    tile: Tile
    queries: Run
    keys: Run
    key_start: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What a rank does in one step. ``source``, ``target``: the ranks whose keys come, and to which
    its own go. ``num_keys``: how many come. ``given``: which of its own go. ``is_idle``: no rank
    of the axis sends any.
    """

    source: int
    target: int
    num_keys: int
    given: tuple[Run, ...]
    is_idle: bool
    parts: tuple[_Part, ...]


Steps = tuple[_Step, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place along an axis that cuts queries. ``is_ring``: it cuts keys, too."""

    size: int
    index: int
    zigzag: bool
    is_ring: bool

    def runs(self, count: int) -> tuple[Run, ...]:
        """Where the rank's piece of ``count`` things lies."""
        return dealt(count, self.size, self.index, zigzag=self.zigzag)


@lru_cache(maxsize=256)
def _steps(
    places: tuple[_Place, ...], lengths: tuple[int, int], query_unit: int, bands: Bands
) -> Steps:
    """What the rank at ``places`` does; the first step is with its own keys."""
    ring = next((place for place in places if place.is_ring), _Place(1, 0, False, True))
    size, index = ring.size, ring.index
    members = [replace(ring, index=rank) for rank in range(size)]
    queries = [
        piece_runs([member if place.is_ring else place for place in places], lengths[0], query_unit)
        for member in members
    ]
    keys = [joined(member.runs(lengths[1])) for member in members]

    def seen(by: int, of: int) -> tuple[Run, ...]:
        """The keys of rank ``of`` that queries of rank ``by`` see."""
        return joined(tile.keys for tile in tiles_between(bands, queries[by], keys[of]))

    steps = []
    for step in range(size):
        source, target = (index - step) % size, (index + step) % size
        here = keys[index] if step == 0 else seen(index, source)
        parts = tuple(
            _Part(
                tile,
                (place(queries[index], tile.queries[0]), tile.queries[1]),
                (place(here, tile.keys[0]), tile.keys[1]),
                tile.keys[0],
            )
            for tile in tiles_between(bands, queries[index], keys[source])
        )
        given = () if step == 0 else seen(target, index)
        steps.append(
            _Step(
                source,
                target,
                sum(count for _, count in here),
                tuple((place(keys[index], start), count) for start, count in given),
                step == 0 or not any(seen((of + step) % size, of) for of in range(size)),
                parts,
            )
        )
    return tuple(steps)


# ------------------------------------------------------------------------------------------------
# the operator


class _SplitAttention(torch.autograd.Function):
    """query ``[batch, heads, L, E]``, key and value ``[batch, key heads, S, ...]``, mask with dims
    that may be 1 but for the last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        axis: AxisGroup | None,
        steps: Steps,
        scale: float,
    ) -> Tensor:
        kernel = kernel_for(query, value, mask)
        blocks = _Blocks(query, mask, scale)
        dtype = merging_dtype(query.dtype)
        out = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=dtype)
        with torch.autocast(query.device.type, enabled=False):
            for step, keys, values in _arriving(axis, steps, key, value, "forward"):
                for part, block in blocks.of(step, keys, values):
                    here = [x.narrow(2, *part.queries) for x in (out, lse)]
                    merge(here[0], here[1], *attend(kernel, block))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.axis, ctx.steps, ctx.scale, ctx.kernel = axis, steps, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        axis, kernel, steps = ctx.axis, ctx.kernel, ctx.steps
        blocks = _Blocks(query, mask, ctx.scale)
        dtype = lse.dtype
        delta = (grad.to(dtype) * out).sum(-1)
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # of queries that see no key at all
        of_query = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
        of_mask = (
            torch.zeros_like(mask, memory_format=torch.contiguous_format)
            if mask is not None and ctx.needs_input_grad[3]
            else None
        )
        home = _Home(axis, key, value, dtype)
        with torch.autocast(query.device.type, enabled=False):
            for step, keys, values in _arriving(axis, steps, key, value, "backward"):
                of_keys, of_values = home.room(keys, values)
                for part, block in blocks.of(step, keys, values):
                    own = (x.narrow(2, *part.queries) for x in (grad, out, lse, delta))
                    grads = attend_backward(kernel, block, *own)
                    of_query.narrow(2, *part.queries).add_(grads.query)
                    of_keys.narrow(2, *part.keys).add_(grads.key)
                    of_values.narrow(2, *part.keys).add_(grads.value)
                    if of_mask is not None and grads.bias is not None:
                        at = _mask_of(of_mask, part)
                        at.add_(grads.bias.sum_to_size(at.shape))
                home.send(step, of_keys, of_values)
            of_key, of_value = home.all_here()
        return (
            of_query.to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            of_mask,
            None,
            None,
            None,
        )


class _Blocks:
    """What kernels are given, of this rank's queries."""

    def __init__(self, query: Tensor, mask: Tensor | None, scale: float) -> None:
        self._query, self._mask, self._scale = query, mask, scale
        self._alike = None if mask is None else hidden_alike(mask)

    def of(self, step: _Step, keys: Tensor, values: Tensor) -> Iterator[tuple[_Part, Block]]:
        """The blocks of a step."""
        if not (self._query.numel() and keys.numel() and values.numel()):
            return
        for part in step.parts:
            kind, alike = part.tile.kind, self._alike
            if alike is not None and alike.shape[2] > 1:
                alike = alike.narrow(2, *part.queries)
            block = Block(
                self._query.narrow(2, *part.queries),
                keys.narrow(2, *part.keys),
                values.narrow(2, *part.keys),
                self._scale,
                causal=kind == "causal",
                flipped=kind == "flipped",
                bias=self._bias(part),
                alike=alike,
            )
            yield part, block

    def _bias(self, part: _Part) -> Tensor | None:
        dtype = merging_dtype(self._query.dtype)
        if self._mask is not None:
            return as_bias(_mask_of(self._mask, part), dtype)
        if part.tile.kind != "masked":
            return None
        rows, columns = (
            torch.arange(count, device=self._query.device)
            for count in (part.queries[1], part.keys[1])
        )
        passed = columns - rows.unsqueeze(1)
        seen = (passed >= part.tile.low) & (passed < part.tile.end)
        return as_bias(seen, dtype)[None, None]


def _mask_of(mask: Tensor, part: _Part) -> Tensor:
    """The part of a mask ``[..., queries or 1, all keys]`` for a tile, as a view."""
    mask = mask.narrow(3, part.key_start, part.keys[1])
    return mask.narrow(2, *part.queries) if mask.shape[2] > 1 else mask


def _arriving(
    axis: AxisGroup | None, steps: Steps, key: Tensor, value: Tensor, phase: Phase
) -> Iterator[tuple[_Step, Tensor, Tensor]]:
    """The steps, each with the keys and values that it needs. Those of the next step are on their
    way while the caller computes.
    """
    coming: PendingRows | None = None
    for number, step in enumerate(steps):
        here = (key, value) if number == 0 else _received(coming, key, value, step.num_keys)
        following = steps[number + 1] if number + 1 < len(steps) else None
        coming = None
        if following is not None and not following.is_idle:
            message = _message((key, value), following.given)
            width = _width(key, value)
            coming = _start(
                axis, message, following.target, following.source, following.num_keys * width, phase
            )
        yield step, *here


def _width(key: Tensor, value: Tensor) -> int:
    """The elements of one key and its value, of all heads and samples."""
    return key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])


def _message(tensors: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
    """Runs along dim 2 of the tensors, end to end."""
    parts = [x.narrow(2, *run).reshape(-1) for x in tensors for run in runs]
    if len(runs) > 1:
        parts = [torch.cat([x.narrow(2, *run) for run in runs], 2).reshape(-1) for x in tensors]
    return torch.cat(parts) if parts else tensors[0].new_empty(0)


def _start(
    axis: AxisGroup | None, message: Tensor, to: int, source: int, num_elements: int, phase: Phase
) -> PendingRows:
    """Begin to send a message to one rank of the axis while another one comes."""
    assert axis is not None
    send, receive = [0] * axis.size, [0] * axis.size
    send[to], receive[source] = message.numel(), num_elements
    return axis.communicator.all_to_all_rows_async(message, send, receive, phase=phase)


def _received(
    coming: PendingRows | None, key: Tensor, value: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """What has come, as keys and values."""
    shapes = [(*x.shape[:2], num_keys, x.shape[3]) for x in (key, value)]
    flat = key.new_empty(0) if coming is None else coming.wait()
    sizes = [math.prod(shape) for shape in shapes]
    keys, values = (
        part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)
    )
    return keys, values


class _Home:
    """Gradients of keys and values on their way to the rank that has these. They are added in the
    order of the steps.
    """

    def __init__(
        self, axis: AxisGroup | None, key: Tensor, value: Tensor, dtype: torch.dtype
    ) -> None:
        self._axis, self._key, self._value, self._dtype = axis, key, value, dtype
        self._own: list[Tensor] = []
        self._coming: list[tuple[_Step, PendingRows]] = []

    def room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros for the gradients of one step."""
        keys, values = (
            torch.zeros_like(x, dtype=self._dtype, memory_format=torch.contiguous_format)
            for x in (keys, values)
        )
        return keys, values

    def send(self, step: _Step, of_keys: Tensor, of_values: Tensor) -> None:
        """Begin to send the gradients of a step home; the first are those of this rank."""
        if not self._own:
            self._own = [of_keys, of_values]
        elif not step.is_idle:
            message = torch.cat([of_keys.reshape(-1), of_values.reshape(-1)])
            count = sum(size for _, size in step.given) * _width(self._key, self._value)
            self._coming.append(
                (step, _start(self._axis, message, step.source, step.target, count, "backward"))
            )

    def all_here(self) -> list[Tensor]:
        """The gradients of this rank's keys and values, when all have come."""
        for step, coming in self._coming:
            count = sum(size for _, size in step.given)
            grads = _received(coming, self._key, self._value, count)
            for total, grad in zip(self._own, grads, strict=True):
                sizes = [size for _, size in step.given]
                for run, part in zip(step.given, torch.split(grad, sizes, 2), strict=False):
                    total.narrow(2, *run).add_(part)
        return self._own
