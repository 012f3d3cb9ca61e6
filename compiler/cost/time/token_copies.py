"""What ``dispatch`` and ``combine`` copy: tokens on their way to their experts, and back.

In bytes of one operand, ``t`` for the tokens of a rank and ``r`` for the rows of its experts, one
for each choice of a token. On the rank itself:

| operator | forward | backward |
|---|---|---|
| ``dispatch`` | gather the rows: ``2 r`` | add them up, in zeros: ``t + 3 r`` |
| ``combine``, all experts here | sort the rows by token, sum: ``3 r + t`` | ``t + 5 r`` |
| ``combine``, some experts here | add the rows up, in zeros: ``t + 3 r`` | gather: ``2 r`` |

Each axis along which tokens are exchanged adds, with ``a`` for the tokens that arrive: dispatch
puts what belongs to a token side by side and picks those to be sent (``2 t + 2 a``), and adds the
gradients that come back up at home (``t + 5 a``); combine adds what comes back up at home (``t + 3
a``), and picks gradients to be sent (``2 a``). Where sums are made in a wider dtype than they are
sent in, what is added up counts by that one, and casts are counted: of what is sent, of what has
come, and of the sums at home.

Example: 1,024 tokens with two experts each of 8, half of which are here, of 384 float32 numbers:
``t`` is 1.6 MB. Of 1,024 tokens of each of 2 ranks three quarters come here, so ``a`` is 2.4 MB,
and ``r`` is 3.1 MB. A dispatch copies 6.3 MB here, and 7.9 MB for the message.
"""

from __future__ import annotations

import math

from shardwright.compiler.cost.local_calls import LocalCall, estimated_size, local_call
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import ExchangeKind
from shardwright.compiler.ops.strategy import Assignment, exchange
from shardwright.runtime.layout import Density, Mesh

ROUTED = frozenset(("dispatch", "combine"))
"""Operators that bring tokens to experts and back."""


def density_of(call: LocalCall) -> Density:
    """What is known of the rows of a ``dispatch`` or ``combine``."""
    rule = call.op.rule
    assert rule is not None and rule.densities is not None
    return next(d for side in rule.densities for d in side if d is not None)


def chosen_by_token(call: LocalCall) -> float:
    """How many experts a token chooses."""
    return density_of(call).share * _num_experts(call)


def _num_experts(call: LocalCall) -> int:
    rule = call.op.rule
    assert rule is not None
    return estimated_size(rule.factor(_experts(call)).size)


def _experts(call: LocalCall) -> str:
    """The name of the factor of experts: the dim of the routing."""
    rule = call.op.rule
    assert rule is not None
    position = {"dispatch": -1, "grouped_linear": 2, "combine": 1}[call.op.target]
    routing = (rule.results if call.op.target == "dispatch" else rule.operands)[position]
    (experts,) = routing[0]
    return experts.factor


def sent_tokens(call: LocalCall, num_ranks: int, before: int) -> float:
    """How many tokens a rank sends along an axis of ``num_ranks``: each once to every rank that has
    an expert for it. ``before``: the ranks of the axes along which tokens have gone already.

    2 experts of 4 ranks, as 2 x 2: along the first axis a token goes to 0.75 of 2 ranks, along the
    second to 0.44 of 4.
    """
    tokens, _ = (call.operands[0] if call.op.target == "dispatch" else call.results[0]).shape
    # Of all ranks that a token may be on in the end.
    reached, density = before * num_ranks, density_of(call)
    part = asked_share(reached, chosen_by_token(call), density.groups)
    return tokens * reached * min(1.0, part * density.imbalance)


def asked_share(num_parts: int, choices: float, groups: tuple[int, int]) -> float:
    """How likely a token has chosen an expert of one of so many equal parts of all experts, if it
    chooses evenly: first some of all ``groups`` of experts, and then experts there.

    A group is several parts, or a part several groups. Where neither is so, as with 3 parts and 8
    groups, groups are taken not to count, which makes the share too large.

    8 experts in 4 of 8 groups: one of 8 parts is asked by 45 % of all tokens; without groups, 66 %.
    """
    of_all, chosen = groups
    if num_parts % of_all and of_all % num_parts:
        of_all = chosen = 1
    if num_parts >= of_all:
        missed: float = (1 - of_all / (chosen * num_parts)) ** choices
        return chosen / of_all * (1 - missed)
    here = of_all // num_parts  # groups of a part; of these a token has chosen ``count``
    ways = ((count, math.comb(here, count)) for count in range(1, min(here, chosen) + 1))
    shares: float = sum(
        these
        * math.comb(of_all - here, chosen - count)
        / math.comb(of_all, chosen)
        * (1 - (1 - count / chosen) ** choices)
        for count, these in ways
    )
    return shares


def bytes_copied_here(call: LocalCall, differentiated: bool) -> tuple[float, float]:
    """Bytes read and written on the rank itself, forward and backward."""
    there = call.op.target == "dispatch"
    tokens, rows = (call.operands[0], call.results[0])[:: 1 if there else -1]
    t, r = tokens.num_bytes, rows.num_bytes
    routing = sum(x.num_bytes for x in (*call.operands[1:], *call.results[1:]))
    if not there:
        t *= max(1, rows.dtype.itemsize // tokens.dtype.itemsize)
    if there:
        both = 2 * r, t + 3 * r
    elif call.factors[_experts(call)] == _num_experts(call):
        both = t + 3 * r, t + 5 * r
    else:
        both = t + 3 * r, 2 * r
    return both[0] + routing, both[1] if differentiated else 0.0


LAUNCHES = {"dispatch": (11, 4), "combine": (6, 3)}
"""The operators that each of them is made of, forward and backward."""

LAUNCHES_OF_EXCHANGE = {"dispatch": (32, 9), "combine": (5, 3)}
"""The same, where tokens are exchanged."""


def launches(op: IROp, assignment: Assignment, mesh: Mesh, device: Device) -> tuple[int, int]:
    """The operators that a call is made of, forward and backward: 1 of any that is not routed, and
    as many as experts here where their products are launched one by one.
    """
    if op.target == "grouped_linear" and device.experts_one_by_one:
        here = local_call(op, assignment, mesh)
        num_experts = here.factors[_experts(here)]
        return num_experts, num_experts
    if op.target not in ROUTED:
        return 1, 1
    exchanges = bool(_axes_of_exchange(op, assignment, mesh))
    return (LAUNCHES_OF_EXCHANGE if exchanges else LAUNCHES)[op.target]


def _axes_of_exchange(op: IROp, assignment: Assignment, mesh: Mesh) -> list[str]:
    """The axes along which a ``dispatch`` or ``combine`` exchanges tokens."""
    rule, found = op.rule, []
    assert rule is not None
    for axis in mesh.names if rule.parallel is not None else ():
        pair = exchange(assignment.get(axis, "R"))
        exchanged = pair and rule.exchange_of(pair)
        if exchanged and exchanged.kind is ExchangeKind.TOKENS and mesh.axis_size(axis) > 1:
            found.append(axis)
    return found


def further_time(call: LocalCall, assignment: Assignment, mesh: Mesh, device: Device) -> OpTime:
    """Seconds of a ``dispatch`` or ``combine`` beyond its own copies: those around messages, and
    launches beyond one. 0 of any other call.
    """
    if call.op.target not in ROUTED:
        return OpTime()
    there = call.op.target == "dispatch"
    tokens = call.operands[0] if there else call.results[0]
    num_tokens, hidden = tokens.shape
    # How many times as wide sums are as messages.
    wider = 1.0 if there else call.operands[0].dtype.itemsize / tokens.dtype.itemsize
    forward = backward = 0.0
    arrived, before = float(num_tokens), 1
    for axis in _axes_of_exchange(call.op, assignment, mesh):
        num_ranks = mesh.axis_size(axis)
        sent = sent_tokens(call, num_ranks, before)
        forward += 2 * arrived + 2 * sent if there else wider * (arrived + 3 * sent)
        if wider > 1:
            forward += (1 + wider) * (arrived + 2 * sent)
        backward += arrived + 5 * sent if there else 2 * sent
        arrived, before = sent, before * num_ranks
    token_bytes = hidden * tokens.dtype.itemsize
    forward_s, backward_s = (device.memory_s(x * token_bytes) for x in (forward, backward))
    # What was measured by itself, on a device that waits for its host, has its launches.
    if call.op.target not in device.rates:
        forwards, backwards = launches(call.op, assignment, mesh, device)
        forward_s += device.launch_s * (forwards - 1)
        backward_s += device.launch_s * (backwards - 1)
    return OpTime(forward_s, backward_s if call.differentiated else 0.0)
