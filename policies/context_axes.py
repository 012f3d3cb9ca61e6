"""Axes along which the sequence is split from the inputs to the loss: context parallelism.

Every operator that has the sequence is split along it, so that a rank computes its positions of
everything. Attention alone needs all keys for each query, and does so in one of these modes:

- ``gather``: queries stay cut; keys and values are gathered.
- ``ulysses``: heads are cut in the place of positions (Jacobs et al. 2023, "DeepSpeed Ulysses"):
  one all-to-all each of queries, keys, values and result. Where there are fewer groups of heads
  than ranks, the heads of a group are cut, and keys and values are gathered.
- ``ring``: queries stay cut; keys and values travel around in blocks, a block being computed while
  the next is under way (Liu et al. 2023, "Ring Attention"). What no query of a rank sees is not
  sent to it.
- ``auto``: for each kind of attention in the model, the mode by which a step is the fastest.

Two axes may do it in two modes: 8 ranks as ``ring`` over 2 and, within, ``ulysses`` over 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardwright.compiler.cost.local_calls import estimated_size
from shardwright.compiler.cost.time.arithmetic import PRODUCTS
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.ops.seen_keys import grows
from shardwright.compiler.ops.strategy import (
    Strategy,
    exchange_strategy,
    has_factor,
    placements,
    split_factor,
)
from shardwright.compiler.plan.builder import PlanBuilder
from shardwright.policies.expert_axes import exchange_of, runs_experts
from shardwright.policies.labels import label, num_bytes
from shardwright.policies.sequence_cut import cut_of_free
from shardwright.policies.sequences import (
    attends,
    heads_factor,
    heads_of,
    position_split,
    positional,
    ring_of,
    sequence_classes,
)
from shardwright.policies.splits import InsideExperts, add_strategies, note_fallback, split_of
from shardwright.runtime.errors import PlanError
from shardwright.runtime.mesh import MOST_RANKS

MODES = ("auto", "gather", "ulysses", "ring")
"""What ``cp_mode`` may be."""

_MOVING = frozenset(
    ("expand", "repeat", "repeat_interleave", "view", "reshape", "unsqueeze", "squeeze", "getitem")
    + ("transpose", "permute", "contiguous", "flatten", "unflatten", "movedim", "swapaxes")
)
"""Operators that compute nothing. Before heads are repeated keys and values are smaller, and are
gathered there.
"""

Kind = tuple[int, ...]
"""The kind of an attention operator: see :func:`kind_of`."""

Modes = Mapping[tuple[str, Kind], str]
"""The mode of every kind of attention along every axis."""


@dataclass(frozen=True, slots=True)
class ContextAxis:
    """An axis that splits the sequence, and how attention does along it."""

    name: str
    size: int
    mode: str


def context_axes(
    sizes: int | tuple[int, ...], modes: str | tuple[str, ...], policy: str
) -> list[ContextAxis]:
    """The axes of these sizes, from the outermost: ``cp`` and ``cp2``. One mode is that of both.

    Raises :class:`PlanError` for sizes and modes that do not fit, in words.
    """
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    modes = (modes,) * len(sizes) if isinstance(modes, str) else modes
    if any(size < 1 for size in sizes) or not 1 <= len(sizes) <= 2:
        raise PlanError(
            f"policy {policy!r} cannot place cp={_text(sizes)} on ranks",
            hint="pass a number of ranks, or the sizes of two axes",
        )
    for mode in modes:
        if mode not in MODES:
            raise PlanError(
                f"policy {policy!r} has no cp_mode {mode!r}",
                hint=f"one of {', '.join(map(repr, MODES))}, or one for each size of cp",
            )
    if len(modes) != len(sizes):
        raise PlanError(
            f"policy {policy!r} has {len(modes)} modes for {len(sizes)} axes",
            why=f"cp={_text(sizes)}, cp_mode={list(modes)}",
            hint='give cp a size for each mode, as in cp=[2, 4] with cp_mode=["gather", "ulysses"]',
        )
    # An axis of one rank cuts nothing.
    found = [(size, mode) for size, mode in zip(sizes, modes, strict=True) if size > 1]
    # Along the second all ranks would compute the same blocks, which nobody asks for.
    if [mode for _, mode in found].count("ring") > 1:
        raise PlanError(
            f"policy {policy!r} has a ring along one axis alone",
            why=f"cp={_text(sizes)}, cp_mode={list(modes)}",
            hint=f"cp={math.prod(sizes)} is one ring of all these ranks; for two axes "
            'cp_mode=["ring", "ulysses"] or ["ring", "gather"]',
        )
    return [
        ContextAxis("cp" if index == 0 else f"cp{index + 1}", size, mode)
        for index, (size, mode) in enumerate(found)
    ]


def turns_of_axes(
    graph: IRGraph, axes: Sequence[ContextAxis], wanted: int | None, policy: str
) -> tuple[tuple[str, int], ...]:
    """The axes that deal positions in zigzag, and in how many turns: in each, a rank gets an early
    and a late piece, so that attention is as much work for all. ``wanted=None``: as many as
    :func:`balancing_turns` says. Where heads are cut, every rank has all positions.

    Raises :class:`PlanError` for a number that none can be.
    """
    if wanted is not None and not 0 <= wanted <= MOST_RANKS:
        raise PlanError(
            f"policy {policy!r} cannot deal positions in cp_turns={wanted} turns",
            hint="0 gives each rank one piece of the sequence, 1 an early and a late one",
        )
    kernels = [op for op in graph.ops if op.target in ATTENTION]
    found = max(map(balancing_turns, kernels), default=0)
    turns = found if wanted is None else wanted
    if not turns:
        return ()
    return tuple((axis.name, turns) for axis in axes if axis.mode != "ulysses")


def balancing_turns(op: IROp) -> int:
    """The turns in which an attention operator is balanced as far as sizes tell: one if later
    queries see more keys, else none. What windows and documents leave uneven is evened out at run
    time, when lengths are known (:mod:`~shardwright.runtime.ops.attention_moves`).
    """
    num_queries, num_keys = (estimated_size(x.shape[-2]) for x in op.operands[:2])
    return int(grows(op, num_queries, num_keys))


def split_context(
    builder: PlanBuilder,
    axes: Sequence[ContextAxis],
    modes: Modes,
    named: Sequence[str] = (),
    inside: Mapping[str, InsideExperts] | None = None,
) -> None:
    """Split the sequence over axes, in all operators that have it, the evaluation body included.
    ``modes``: of axes whose mode is ``auto``. ``named``: the sequence's dims, if the user says.
    ``inside``: by axis, what it splits of experts instead.
    """
    for axis in axes:
        of_experts = (inside or {}).get(axis.name)
        for graph in builder.graph.bodies:
            own = of_experts.of(graph, builder.graph) if of_experts else None
            strategies = _split_body(builder, graph, axis, modes, named, own)
            add_strategies(builder, axis.name, strategies)


def cheapest_modes(
    graph: IRGraph,
    axes: Sequence[ContextAxis],
    seconds: Callable[[Modes], float],
    named: Sequence[str] = (),
) -> Modes:
    """The mode of each kind of attention along axes whose mode is ``auto``: one after the other is
    given the mode by which a step takes the least ``seconds``, the others keeping theirs.
    """
    kinds = sorted({kind for body in graph.bodies for kind in _kinds(body, named)})
    open_ones = list(product((axis.name for axis in axes if axis.mode == "auto"), kinds))
    modes = dict.fromkeys(open_ones, "gather")
    if not open_ones:
        return modes
    least = seconds(modes)
    for place in open_ones:
        for mode in MODES[2:]:
            tried = {**modes, place: mode}
            try:
                found = seconds(tried)
            except PlanError:  # some attention of this kind cannot be split so
                continue
            if found < least:
                modes, least = tried, found
    return modes


def kind_of(op: IROp, graph: IRGraph, sequence: set[int]) -> Kind:
    """What attention is told apart by: the sequences of its queries and keys, and whether it has a
    mask, as layers with a window have, or is causal.
    """
    assert op.rule is not None and graph.dims is not None
    classes = (graph.dims.factors.get((op.name, factor.name)) for factor in op.rule.factors)
    positions = sorted({index for index in classes if index in sequence})
    is_kernel = op.target in ATTENTION
    return (
        *positions,
        *((len(op.operands), int(bool(op.arg("is_causal", False)))) if is_kernel else ()),
    )


def _kinds(graph: IRGraph, named: Sequence[str]) -> set[Kind]:
    sequence, heads = sequence_classes(graph, named), heads_of(graph)
    return {kind_of(op, graph, sequence) for op in graph.ops if attends(op, graph, sequence, heads)}


def _split_body(
    builder: PlanBuilder,
    graph: IRGraph,
    axis: ContextAxis,
    modes: Modes,
    named: Sequence[str],
    inside: InsideExperts | None,
) -> dict[str, Strategy]:
    """The strategies of the operators of one body along one axis."""
    sequence, heads, masks = sequence_classes(graph, named), heads_of(graph), positional(graph)
    splits: dict[str, Strategy] = {}
    free: dict[str, Strategy] = {}
    is_served = False  # whether some attention is computed as the axis' mode says
    for op in graph.ops:
        assert op.rule is not None
        # What outer axes have cut already: an axis within them has fewer heads left.
        cut, split = builder.pieces(op), None
        if inside is not None and runs_experts(op, graph, inside.experts):
            split = exchange_of(op, graph, inside.tokens, inside.experts)
            split = split or split_of(op, graph, inside.classes, axis.size, cut)
            if split is not None:
                splits[op.name] = split
            continue
        if attends(op, graph, sequence, heads):
            mode = axis.mode
            if mode == "auto":
                mode = modes.get((axis.name, kind_of(op, graph, sequence)), "gather")
            if mode == "ulysses":
                factor = heads_factor(op, graph, heads, axis.size, cut)
                split = f"split:{factor}" if factor else None
                is_served = is_served or factor is not None
                # What is computed from positions alone, as a mask is, has no heads.
                if split is None and op.name not in masks:
                    raise _no_heads(op, graph, heads, axis, cut)
            elif mode == "ring" and op.target in (*ATTENTION, "softmax"):
                split = _ring(op)
                is_served = True
        # Everything but attention treats positions one by one, or says so by its edges.
        split = split or position_split(op, graph, sequence, axis.size, cut)
        if split is not None and not builder.allows(op, axis.name, split):
            split = None
        if split is None:
            note_fallback(builder, op, graph, axis.name, sequence)
        # Such operators are cheap either way: they are split where their readers are, which a cut
        # of least cost finds.
        elif set(placements(op.rule, split)[1]) == {"S"} and (
            op.name in masks or op.target in _MOVING
        ):
            free[op.name] = split
        else:
            splits[op.name] = split
    if axis.mode in MODES[2:] and not is_served:
        _check_that_nothing_attends(graph, axis.mode, sequence)
    repeated = _repeated_heads(builder, graph, axis, splits, free, heads)
    splits |= repeated
    free = {name: split for name, split in free.items() if name not in repeated}
    splits |= cut_of_free(graph, splits, free, axis.size, "G")
    return label(graph, splits, axis.size) | splits


def _repeated_heads(
    builder: PlanBuilder,
    graph: IRGraph,
    axis: ContextAxis,
    splits: Mapping[str, Strategy],
    free: Mapping[str, Strategy],
    heads: set[int],
) -> dict[str, Strategy]:
    """The operators that repeat heads of keys and values for attention that has heads cut: they cut
    heads, too, so that what is sent is not repeated yet.
    """
    uses, producers = graph.uses(), graph.producers()
    by_heads: dict[str, Strategy] = {}  # computes nothing, and only attention over heads reads it
    for op in reversed(graph.ops):
        factor = heads_factor(op, graph, heads, axis.size, builder.pieces(op))
        readers = [reader for value in op.results for reader, _ in uses.get(value.name, [])]
        moves = op.target in _MOVING and op.name in free and factor is not None
        if (
            moves
            and readers
            and all(
                reader.name in by_heads or _cuts(reader, splits, graph, heads) for reader in readers
            )
        ):
            by_heads[op.name] = f"split:{factor}"
    kept: dict[str, Strategy] = {}
    for op in graph.ops:
        if op.name in by_heads:
            made_by = [producers[v.name][0].name for v in op.operands if v.name in producers]
            if _grows(op) or any(name in kept for name in made_by):
                kept[op.name] = by_heads[op.name]
    return kept


def _cuts(op: IROp, splits: Mapping[str, Strategy], graph: IRGraph, classes: set[int]) -> bool:
    """Whether an operator is split along one of the classes."""
    assert graph.dims is not None
    factor = split_factor(splits.get(op.name, "R"))
    return factor is not None and graph.dims.factors.get((op.name, factor)) in classes


def _grows(op: IROp) -> bool:
    """Whether an operator makes more bytes than it reads."""
    return sum(map(num_bytes, op.results)) > sum(map(num_bytes, op.operands))


def _ring(op: IROp) -> Strategy:
    """The strategy by which keys and values travel around."""
    found = ring_of(op)
    if found is None:
        why = (
            "its positions are a product, such as rows times columns of patches, and a ring takes "
            "those of one dim"
        )
        if op.target not in ATTENTION:
            why = (
                "this is attention written out, in operators of which each needs all keys, and in "
                "no form that is known here: softmax(query @ key.T * scale + bias), some scores "
                "filled with minus infinity or torch.finfo(dtype).min, and times value"
            )
        raise PlanError(
            f"cp_mode 'ring' has no ring for {op.name} ({op.target})",
            where=op.place,
            why=why,
            hint="torch.nn.functional.scaled_dot_product_attention in its place, or cp_mode "
            "'gather' or 'ulysses'",
        )
    return exchange_strategy(found.pair)


def _check_that_nothing_attends(graph: IRGraph, mode: str, sequence: set[int]) -> None:
    """Raise :class:`PlanError` if some product sums over positions, as attention does that has no
    softmax.
    """
    assert graph.dims is not None
    for op in graph.ops:
        if op.target not in PRODUCTS or not any(value.takes_gradient for value in op.results):
            continue
        assert op.rule is not None
        for factor in op.rule.factors:
            is_position = graph.dims.factors.get((op.name, factor.name)) in sequence
            if is_position and not has_factor(op.rule.results[0], factor.name):
                raise PlanError(
                    f"cp_mode {mode!r} finds no attention, and {op.name} ({op.target}) sums over "
                    "positions",
                    where=op.place,
                    why="attention is known by the softmax between two products: a ring merges "
                    "what it gives, and heads are told by its queries",
                    hint="cp_mode 'gather'",
                )


def _no_heads(
    op: IROp, graph: IRGraph, heads: set[int], axis: ContextAxis, cut: Mapping[str, int]
) -> PlanError:
    assert op.rule is not None and graph.dims is not None
    found = [
        factor
        for factor in op.rule.factors
        if graph.dims.factors.get((op.name, factor.name)) in heads
    ]
    # Grouped heads are two factors: 4 groups x 2 heads.
    numbers = " x ".join(
        f"{factor.size}" + (f" in {cut[factor.name]} pieces" if factor.name in cut else "")
        for factor in found
    )
    return PlanError(
        f"cp_mode 'ulysses' cannot cut the heads of {op.name} over {axis.size} ranks",
        where=op.place,
        why=f"the heads are {numbers}, and every rank needs one of its own",
        hint="a smaller cp, two axes (cp=[2, 2] cuts groups of heads over the first and the heads "
        "of a group over the second), or cp_mode 'gather'",
    )


def _text(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(list(sizes))
