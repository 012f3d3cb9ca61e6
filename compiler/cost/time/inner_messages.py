"""What operators communicate inside: parallel forms, exchanges of the cut of two dims, edges of
one, and queries that other ranks compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardwright.compiler.cost.edge_messages import EdgeMessage, edge_messages
from shardwright.compiler.cost.local_calls import (
    LocalCall,
    estimated_size,
    local_call,
)
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.arithmetic import (
    LINEAR_LOSS,
    arithmetic_s,
    factors_of,
)
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.collectives import axes_collective_s
from shardwright.compiler.cost.time.token_copies import chosen_by_token, sent_tokens
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import ATTENTION, ExchangeKind, OpRule
from shardwright.compiler.ops.seen_keys import is_told_late, seen_bands
from shardwright.compiler.ops.strategy import Assignment, exchange, factor_axes, split_factor
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Mesh
from shardwright.runtime.marks import Seen
from shardwright.runtime.ops.attention_moves import computed_by, moves_of
from shardwright.runtime.runs import Run, dealt, joined
from shardwright.runtime.visible_keys import EVEN, MOST_GUESTS, keys_seen, pairs

_MESSAGES: Mapping[str, tuple[float, float, float]] = {
    # (all-reduces of the forward, of the backward, elements of each relative to the reduced shape)
    "cross_entropy": (2, 0, 1.5),
    "linear_cross_entropy": (2, 0, 1.5),
    "nll_loss": (2, 0, 1.0),
    "softmax": (2, 1, 1.0),
    "log_softmax": (2, 1, 1.0),
    "logsumexp": (2, 0, 1.0),
    "batch_norm": (2, 1, 1.0),
    "layer_norm": (2, 1, 4 / 3),  # the backward sends two sums of a row as one
    "rms_norm": (1, 1, 1.0),
    "group_norm": (2, 1, 1.0),
    # Every rank gets a total of each piece, which an all-reduce of one stands for.
    "cumsum": (1, 1, 1.0),
    "cumprod": (1, 1, 1.0),
    "logcumsumexp": (1, 1, 1.0),
}


def communicates(call: LocalCall, assignment: Assignment, mesh: Mesh) -> bool:
    return bool(_inner_axes(call.op.rule, assignment, mesh))


def _inner_axes(rule: OpRule | None, assignment: Assignment, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the parallel form of the call reduces something."""
    if rule is None or rule.parallel is None or not rule.parallel.keywords:
        return ()
    cut = factor_axes(assignment, mesh)
    found = [
        axis
        for factor in rule.parallel.keywords
        for axis in cut.get(factor, ())
        if mesh.axis_size(axis) > 1
    ]
    return tuple(found)


def messages_time(
    call: LocalCall,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    ranks: Sequence[int] | None,
) -> OpTime:
    """What the parallel form of the call communicates."""
    target = call.op.target
    # Tokens to experts, keys that go round, edges of pieces; other forms sum along their axes.
    sent = _exchanges(call, assignment, mesh, hardware, ranks)
    if sent:
        return sum((exchange.time for exchange in sent), OpTime())
    axes = _inner_axes(call.op.rule, assignment, mesh) if target in _MESSAGES else ()
    if not axes:
        return OpTime()
    on = tuple(range(mesh.size)) if ranks is None else tuple(ranks)
    forwards, backwards, share = _MESSAGES[target]
    total = OpTime()
    for axis in axes:
        # Sums are made in 4 bytes at least.
        num_bytes = (
            share
            * _reduced_elements(call, axis, assignment)
            * max(4, call.operands[0].dtype.itemsize)
        )
        seconds = axes_collective_s(hardware, "all_reduce", num_bytes, mesh, (axis,), on)
        total += OpTime(forwards * seconds, backwards * seconds if call.differentiated else 0.0)
    return total


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an operator sends along an axis where it exchanges the cut of two dims, edges of a dim,
    or queries: seconds, of which the time of the operator has a part, and bytes. ``counts_s``: the
    part of the forward in which ranks tell each other how much they will send.
    """

    axis: str
    time: OpTime
    forward_bytes: float
    backward_bytes: float
    counts_s: float = 0.0


def exchanges_in(
    op: IROp,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    *,
    ranks: Sequence[int] | None = None,
) -> tuple[Exchange, ...]:
    """What ``op`` sends under strategies that exchange two dims, or edges of one. ``ranks``: as for
    :func:`op_time`, whose answer has these seconds.
    """
    rule = op.rule
    assert rule is not None
    if rule.parallel is None or not any(map(split_factor, assignment.values())):
        return ()
    return _exchanges(local_call(op, assignment, mesh), assignment, mesh, hardware, ranks)


def _exchanges(
    call: LocalCall,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    ranks: Sequence[int] | None,
) -> tuple[Exchange, ...]:
    on = tuple(range(mesh.size)) if ranks is None else tuple(ranks)
    assert call.op.rule is not None
    if call.op.rule.parallel is None:
        return ()
    found: list[Exchange] = []
    for axis in mesh.names:
        pair = exchange(assignment.get(axis, "R"))
        exchanged = pair and call.op.rule.exchange_of(pair)
        if not exchanged or mesh.axis_size(axis) == 1:
            continue
        if exchanged.kind is ExchangeKind.RING:
            found.append(_keys_sent(call, axis, mesh, hardware, on))
        elif exchanged.kind is ExchangeKind.TOKENS:
            before = math.prod(mesh.axis_size(sent.axis) for sent in found)
            found.append(_tokens_sent(call, axis, before, mesh, hardware, on))
    found += _queries_sent(call, assignment, mesh, hardware, on)
    # What exchanges tokens, keys or queries has no edges. Edges are told by the call itself, as a
    # dim that keeps its length is not exchanged and has some, too.
    return tuple(found) or tuple(
        _edges_sent(call, message, mesh, hardware, on)
        for message in edge_messages(call.op, assignment, mesh)
    )


def _edges_sent(
    call: LocalCall,
    message: EdgeMessage,
    mesh: Mesh,
    hardware: Hardware,
    ranks: tuple[int, ...],
) -> Exchange:
    """Edges of a dim on their way to the ranks that read them, and their gradients on the way
    home.
    """
    num_ranks = mesh.axis_size(message.axis)
    backward = bool(call.differentiated) and 0 in call.differentiated

    def sent_s(num_bytes: float) -> float:
        if not num_bytes:
            return 0.0
        # An all-to-all of n bytes keeps one part of n / num_ranks; of edges nothing stays.
        whole = num_bytes * num_ranks / (num_ranks - 1)
        return axes_collective_s(
            hardware, "all_to_all", whole, mesh, (message.axis,), ranks
        ) + hardware.device.memory_s(2 * message.copied_bytes)

    backward_bytes = message.backward_bytes if backward else 0.0
    time = OpTime(sent_s(message.forward_bytes), sent_s(backward_bytes))
    return Exchange(message.axis, time, message.forward_bytes, backward_bytes)


def _keys_sent(
    call: LocalCall, axis: str, mesh: Mesh, hardware: Hardware, ranks: tuple[int, ...]
) -> Exchange:
    """Keys and values that go round, and backward their gradients, too. What a rank receives for a
    step is on its way while it computes the step before; the seconds are those for which it still
    has to wait.
    """
    num_ranks = mesh.axis_size(axis)
    _, key, value = call.operands[:3]
    block = (key.num_elements + value.num_elements) * _share_sent(call, axis, mesh)
    differentiated = bool(call.differentiated)
    forward_s, backward_s = (
        seconds / num_ranks for seconds in arithmetic_s(call, call.differentiated, hardware.device)
    )

    def step_s(num_bytes: float) -> float:
        # One rank's block to one other: an all-to-all of which the other parts are empty.
        whole = num_bytes * num_ranks / (num_ranks - 1)
        return axes_collective_s(hardware, "all_to_all", whole, mesh, (axis,), ranks)

    keys_bytes = block * key.dtype.itemsize
    # Gradients are added in 4 bytes at least.
    home_bytes = block * max(4, key.dtype.itemsize)
    steps = num_ranks - 1
    hidden_s = hardware.device.hidden_s
    keys_s = step_s(keys_bytes)
    waits_s = steps * (keys_s - hidden_s(keys_s, forward_s))
    back_s = 0.0
    if differentiated:
        home_s = step_s(home_bytes)
        # The gradients of the last step have nothing to hide behind.
        back_s = steps * (keys_s + home_s - hidden_s(keys_s + home_s, backward_s)) + home_s
    return Exchange(
        axis,
        OpTime(waits_s, back_s),
        steps * keys_bytes,
        steps * (keys_bytes + home_bytes) if differentiated else 0.0,
    )


def _queries_sent(
    call: LocalCall,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    ranks: tuple[int, ...],
) -> list[Exchange]:
    """Queries on their way to ranks that have less to do, and their outputs on the way home;
    backward the gradients of both.
    """
    if call.op.target not in ATTENTION:
        return []
    assert call.op.rule is not None
    queries = call.op.rule.operands[0][-2]
    if not queries:  # a single one, as where tokens are generated one by one
        return []
    cutting = factor_axes(assignment, mesh).get(queries[0].factor, ())
    axes = [axis for axis in cutting if mesh.axis_size(axis) > 1]
    if not axes:
        return []
    # They move along the ring, or the outermost axis.
    ring = next((axis for axis in axes if exchange(assignment.get(axis, "R"))), None)
    axis, num_steps = ring or axes[0], mesh.axis_size(ring) if ring else 1
    num_ranks = mesh.axis_size(axis)
    guests = _share_handed_on(call, axis, axes, mesh)
    if not guests:
        return []
    query, output = (
        guests * x.num_elements * x.dtype.itemsize for x in (call.operands[0], call.results[0])
    )

    def sent_s(num_bytes: float) -> float:
        # An all-to-all of n bytes keeps one part of n / num_ranks; of guests nothing stays.
        whole = num_bytes * num_ranks / (num_ranks - 1)
        return axes_collective_s(hardware, "all_to_all", whole, mesh, (axis,), ranks)

    def both_ways_s(there: float, home: float, busy_s: float) -> float:
        # A rank computes its own queries while those of others come. Nothing is left to compute
        # when outputs go home.
        there_s = sent_s(there)
        return there_s - hardware.device.hidden_s(there_s, busy_s / num_steps) + sent_s(home)

    forward_s, backward_s = arithmetic_s(call, call.differentiated, hardware.device)
    time, backward_bytes = OpTime(both_ways_s(query, output, forward_s)), 0.0
    if call.differentiated:
        time += OpTime(0.0, both_ways_s(output, query, backward_s))
        backward_bytes = query + output
    return [Exchange(axis, time, query + output, backward_bytes)]


def _share_handed_on(call: LocalCall, axis: str, cutting: Sequence[str], mesh: Mesh) -> float:
    """The queries of others that a rank computes, as a part of its own, at most. They move along
    one of the axes that are ``cutting`` queries.

    Which ones go may be known at run time only, from the lengths of documents: then they are half
    of its own, the most there ever are. What sizes tell is evened out where positions are dealt in
    zigzag. A window of 2 over 8 positions, on 2 ranks in one turn: these have positions 0, 1, 6, 7
    and 2 to 5, with 7 and 8 pairs. The second hands on no more than half a pair, of a query with 2:
    0.06 of its 4 queries.
    """
    if is_told_late(call.op):
        return MOST_GUESTS
    if call.op.target != "attention_where" or call.op.has_arg("attn_mask"):
        return 0.0
    if not any(map(mesh.turns_of, cutting)):
        return 0.0
    num_queries, num_keys = (estimated_size(x.shape[-2]) for x in call.op.operands[:2])
    bands = seen_bands(call.op, num_queries, num_keys)
    whole, moved = Atom((num_queries,), tuple(cutting)), 0.0
    others = [other for other in cutting if other != axis]
    for places in product(*(range(mesh.axis_size(other)) for other in others)):
        here = {**dict.fromkeys(mesh.names, 0), **dict(zip(others, places, strict=True))}
        work = [
            pairs(bands, joined(whole.pieces(mesh, {**here, axis: rank})))
            for rank in range(mesh.axis_size(axis))
        ]
        mean = sum(work) / len(work)
        if max(work) > EVEN * mean:
            moved = max(moved, max(work) - mean, mean - min(work))
    # Queries that see the most keys go first.
    ends = [
        (band.end - band.low, (band.end_step - band.low_step) * (band.stop - 1 - band.start))
        for band in bands
    ]
    widest = max((first + max(0, more) for first, more in ends), default=1)
    return min(MOST_GUESTS, moved / widest / max(1, call.operands[0].shape[-2]))


def _share_sent(call: LocalCall, axis: str, mesh: Mesh) -> float:
    """The share of the keys of other ranks that come to the rank that needs the most of them, for
    its own queries and for those of others that it computes.

    Of documents, which are known late, it needs no more than of a single one: there the rank with
    the last positions gets all keys.
    """
    if call.op.target == "scaled_dot_product_attention":
        # In zigzag a rank sees, on average, half of the last runs of the others, and all before.
        turns = mesh.turns_of(axis) if call.op.arg("is_causal", False) else 0
        return 1 - 1 / (4 * turns) if turns else 1.0
    num_queries, num_keys = (estimated_size(x.shape[-2]) for x in call.op.operands[:2])
    bands, num_ranks = seen_bands(call.op, num_queries, num_keys), mesh.axis_size(axis)

    def runs(count: int, rank: int) -> tuple[Run, ...]:
        return dealt(count, num_ranks, rank, turns=mesh.turns_of(axis))

    queries = tuple(joined(runs(num_queries, rank)) for rank in range(num_ranks))
    if call.op.target == "attention_where" and not is_told_late(call.op) and mesh.turns_of(axis):
        moves = moves_of((Seen((0, 1), bands),), queries, 0)
        queries = tuple(
            joined(itertools.chain(*computed_by(rank, own, moves)))
            for rank, own in enumerate(queries)
        )
    by_rank = [
        sum(keys_seen(bands, own, runs(num_keys, of)) for of in range(num_ranks) if of != by)
        for by, own in enumerate(queries)
    ]
    return min(1.0, max(by_rank) / max(1.0, num_keys * (num_ranks - 1) / num_ranks))


def _tokens_sent(
    call: LocalCall,
    axis: str,
    before: int,
    mesh: Mesh,
    hardware: Hardware,
    ranks: tuple[int, ...],
) -> Exchange:
    """Tokens that go to the ranks of their experts, or come back. The number of a token, its
    experts and weights go with it. ``before``: as for :func:`sent_tokens`.
    """
    num_ranks, there = mesh.axis_size(axis), call.op.target == "dispatch"
    _, hidden = (call.operands[0] if there else call.results[0]).shape
    rows, top_k = sent_tokens(call, num_ranks, before), chosen_by_token(call)
    item = (call.operands[0] if there else call.results[0]).dtype.itemsize

    def sent_s(num_bytes: float) -> float:
        return axes_collective_s(hardware, "all_to_all", num_bytes, mesh, (axis,), ranks)

    forward_bytes = backward_bytes = rows * hidden * item
    counts_s = counts_bytes = 0.0
    if there:
        if len(call.operands) > 2:  # the weights of the choices, and their gradients
            weight_bytes = rows * top_k * max(item, call.operands[2].dtype.itemsize)
            forward_bytes += weight_bytes
            backward_bytes += weight_bytes
        # Counts go first; the number of each token, and its experts, with its row.
        counts_bytes = 16.0 * num_ranks
        counts_s = sent_s(counts_bytes)
        forward_bytes += rows * (8 + max(4, item) * top_k)
    if not call.differentiated:
        backward_bytes = 0.0
    time = OpTime(
        counts_s + sent_s(forward_bytes), sent_s(backward_bytes) if backward_bytes else 0.0
    )
    return Exchange(axis, time, forward_bytes + counts_bytes, backward_bytes, counts_s)


def _reduced_elements(call: LocalCall, axis: str, assignment: Assignment) -> float:
    """The elements that one all-reduce of a parallel form sums: those of the first operand without
    its split factor; one for a loss whose rows are split; one per channel for batch norm,
    one per sample and group for group norm.
    """
    rule = call.op.rule
    assert rule is not None
    factor = split_factor(assignment[axis], 0)
    assert factor is not None
    # The labels have the factor, so rows are split: what is summed is the number of rows that
    # count.
    if call.op.target in ("cross_entropy", "nll_loss") and factor in factors_of(rule.operands[1]):
        return 1.0
    if call.op.target == LINEAR_LOSS:
        rows = factors_of(rule.operands[0])
        return 1.0 if factor in rows else float(math.prod(call.operands[0].shape[:-1]))
    if call.op.target == "batch_norm":
        return float(call.operands[0].shape[1])
    if call.op.target == "group_norm":
        return float(call.operands[0].shape[0] * estimated_size(call.op.arg("num_groups")))
    # A softmax over a split dim exchanges one maximum and one sum for each row of the rest.
    return call.operands[0].num_elements / max(1, call.factors[factor])
