"""Whether products of odd sizes slow a plan down: of rows that are no multiple of 16 bytes.

Example: GPT-2 knows 50,257 words. In bfloat16 its head takes three times as long on an A100 as one
of 50,304 rows, and a step on eight of them 13.4 ms in the place of 11.3.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.plan.amounts import amount
from shardwright.policies.autodist.questions.explain import Request

LEAST_SLOWED = 0.03
"""The part of a step from which it is said."""


def slowed_by_odd_sizes(request: Request) -> str | None:
    """What is said of a plan whose step products of odd sizes make longer by 3 % or more; ``None``
    of others.
    """
    device = request.hardware.device
    if device.unaligned_efficiency == 1.0:
        return None
    even = replace(request.hardware, device=replace(device, unaligned_efficiency=1.0))
    even_s = request.step_on(even)
    step_s = request.best.step_s
    if even_s > (1 - LEAST_SLOWED) * step_s:
        return None
    name = _worst(request, even)
    sizes = next(op.results[0].shape for op in request.graph.ops if op.name == name)
    return (
        f"slowed by odd sizes: {amount(step_s, 's')} a step would be {amount(even_s, 's')} if rows "
        f"of products were multiples of 16 bytes; most goes to {name}, whose result is "
        f"[{', '.join(map(str, sizes))}]; make the odd dim a multiple of 64 (a vocabulary by "
        "model.resize_token_embeddings(..., pad_to_multiple_of=64))"
    )


def _worst(request: Request, even: Hardware) -> str:
    """The operator that would gain most."""

    def lost_s(name: str) -> float:
        placed = request.best.placed[request.placed_at(name)].plan
        op, assignment = ops[name], placed.strategies.get(name, {})
        slow, fast = (
            op_time(op, assignment, placed.mesh, hardware) for hardware in (request.hardware, even)
        )
        return slow.forward_s + slow.backward_s - fast.forward_s - fast.backward_s

    ops = {op.name: op for op in request.graph.ops}
    return max(ops, key=lost_s)
