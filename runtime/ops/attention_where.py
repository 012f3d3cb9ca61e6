"""Attention of queries to the keys that they see by their marks: windows, documents, padding.

Short sequences on one rank take torch's operator with a mask, which all layers share. Where the
queries are cut, keys go round, or the sequence is long, blocks of what is seen are computed, and no
mask of all pairs is made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwright.runtime.marks import Mark, Marks, Seen, marks_of, remembered, seen
from shardwright.runtime.ops.attention_blocks import Flat
from shardwright.runtime.ops.attention_dropout import WeightDropout
from shardwright.runtime.ops.axes import Axes, Length, communicating, whole_length
from shardwright.runtime.ops.graph_ends import leave_graph
from shardwright.runtime.ops.random import Draw
from shardwright.runtime.ops.split_attention import (
    DEPENDS,
    Where,
    attention_in_tiles,
    autocasted,
    whole_mask_of,
)
from shardwright.runtime.visible_keys import MOST_MASKED, Band, Bands, all_keys

Answer = TypeVar("Answer")


def attention_where(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_marks: Sequence[Mark] = (),
    key_marks: Sequence[Mark] = (),
    comparisons: Sequence[str] = (),
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    bands: Sequence[tuple[int, int, int, int, int, int]] | None = None,
    scale: float | None = None,
    cap: float | None = None,
    blind: str = "zeros",
    dropout_p: float = 0.0,
    query_axes: Axes = (),
    key_axes: Axes = (),
    lengths: tuple[Length, Length] | None = None,
    query_unit: int = 1,
    draw: Draw | None = None,
) -> Tensor:
    """Attention in which query ``i`` sees key ``j`` where ``key_marks[n]`` of the key, compared by
    ``comparisons[n]``, holds against ``query_marks[n]`` of the query, for all ``n``.

    query ``[samples, heads, L, E]``, key ``[samples, key heads, S, E]``, value ``[samples, key
    heads, S, Ev]``; each key head serves a run of query heads. Marks are of the whole sequence,
    ``[samples or 1, 1, L or 1, 1]`` and ``[samples or 1, 1, 1, S or 1]``, or numbers.
    ``bands``: what is seen besides by sizes alone, as fields of
    :class:`~shardwright.runtime.visible_keys.Band`. ``sinks`` ``[heads]``: a score that takes
    its part of the weights, and has no value. ``attn_mask``, in the place of marks and bands: what
    is added to scores, or which of them count, ``[samples or 1, heads or 1, L or 1, S or 1]``, with
    a row for each of this rank's queries and a column for each key. ``cap``: scores ``s`` become
    ``cap * tanh(s / cap)``. ``blind``: what a query that sees no key gives, ``"zeros"``, or
    what :data:`~shardwright.runtime.ops.attention_blocks.Flat` says. ``query_axes``,
    ``key_axes``, ``lengths``, ``query_unit``: as in
    :func:`~shardwright.runtime.ops.split_attention`, if the rank has a part of the queries.
    ``dropout_p``, ``draw``: which weights are dropped, as in
    :func:`~shardwright.runtime.ops.scaled_dot_product_attention`.
    """
    query_axes, ring = communicating(query_axes), communicating(key_axes)
    if lengths is None or not query_axes:
        lengths, query_unit = (query.shape[-2], key.shape[-2]), 1
    positions = (whole_length(lengths[0]) * query_unit, whole_length(lengths[1]))
    static = None if bands is None else tuple(Band(*fields) for fields in bands)
    asked = _Question(
        tuple(query_marks), tuple(key_marks), tuple(comparisons), static, positions, query.device
    )
    heads, key_heads = query.shape[1], key.shape[1]
    pairs = math.prod(positions)
    # A mask of all pairs costs little while they are few, and torch's kernel is then the fastest.
    is_plain = all(x is None for x in (sinks, cap, attn_mask)) and blind == "zeros"
    is_plain = is_plain and dropout_p == 0
    if not query_axes and is_plain and pairs <= MOST_MASKED:

        def whole_mask() -> Tensor:
            return asked.marks().mask(
                (0, query.shape[0]), ((0, positions[0]),), ((0, positions[1]),)
            )

        # A graph of torch's compiler holds its operators, not what an earlier call has found.
        if torch.compiler.is_compiling():
            mask = whole_mask()
        else:
            mask = asked.remembered(("mask",), whole_mask)
        key, value = (x.repeat_interleave(heads // key_heads, 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    samples, dropped = query.shape[0], None
    if dropout_p:
        assert draw is not None, "lowering says by what weights are dropped"
        shape = (samples, heads, query.shape[-2], positions[1])
        dropped = WeightDropout.of(dropout_p, shape, draw)
    leave_graph(DEPENDS)
    return _in_tiles(
        autocasted(query),
        autocasted(key),
        autocasted(value),
        asked,
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        Where(query_axes, ring[0] if ring else None, lengths, query_unit),
        None if blind == "zeros" else cast(Flat, blind),
        mask=None if attn_mask is None else whole_mask_of(attn_mask, positions[1]),
        sinks=sinks,
        cap=cap,
        dropout=dropped,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """What tells which keys are seen: the arguments of :func:`attention_where`, and how many
    queries and keys there are.
    """

    query_marks: tuple[Mark, ...]
    key_marks: tuple[Mark, ...]
    comparisons: tuple[str, ...]
    bands: Bands | None
    positions: tuple[int, int]
    device: torch.device

    @property
    def given(self) -> tuple[Mark, ...]:
        """All marks."""
        return (*self.query_marks, *self.key_marks)

    def marks(self) -> Marks:
        """The marks, bands included."""
        return marks_of(
            self.query_marks,
            self.key_marks,
            self.comparisons,
            self.bands,
            self.positions,
            self.device,
        )

    def remembered(self, kind: tuple[Any, ...], find: Callable[[], Answer]) -> Answer:
        """What ``find`` gives, once for all layers that ask the same."""
        question = (*kind, self.comparisons, self.bands, self.positions)
        return remembered(self.given, question, find)


def _is_uneven(asked: _Question, where: Where) -> bool:
    """Whether ranks may have unequal work, as documents and windows leave it, that is to be evened
    out. What sizes alone tell is not, where each rank has one run of the queries.
    """
    return any(isinstance(mark, Tensor) for mark in asked.given) or any(
        axis.turns for axis in where.query_axes
    )


@_disable_dynamo
def _in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: _Question,
    scale: float,
    where: Where,
    flat: Flat | None,
    *,
    mask: Tensor | None,
    sinks: Tensor | None,
    cap: float | None,
    dropout: WeightDropout | None,
) -> Tensor:
    """Attention in blocks; see :func:`~shardwright.runtime.ops.split_attention.attention_in_tiles`.
    ``flat``: what queries that see no key get, if it is not zeros.
    """
    samples, positions = query.shape[0], asked.positions
    blind_see_all = flat is not None

    def found_seen() -> tuple[tuple[Seen, ...], Marks | None]:
        if not asked.given and asked.bands is not None and not blind_see_all:
            return (Seen((0, samples), asked.bands),), None
        if mask is not None:
            return (Seen((0, samples), all_keys(*positions)),), None
        marks = asked.marks()
        return seen(marks, samples, blind_see_all=blind_see_all), marks

    sees, marks = asked.remembered(("seen", samples, blind_see_all), found_seen)
    if math.prod(positions) > MOST_MASKED and not all(some.exact for some in sees):
        warnings.warn(
            "attention makes masks for parts of its scores: what a query sees is no interval of "
            "keys, so that kernels cannot skip what it does not see",
            stacklevel=3,
        )
    return attention_in_tiles(
        query,
        key,
        value,
        sees,
        scale,
        where,
        mask=mask,
        marks=marks,
        sinks=sinks,
        cap=cap,
        dropout=dropout,
        evens_out=mask is None and _is_uneven(asked, where),
        flat=flat or "mean",
    )
