"""Whether a plan waits for launches and latencies rather than for work.

Example: on 64 ranks each operator of a small model has a microsecond of work, and the least time of
an operator is 5 µs. A step takes 9.1 ms, of which 2.4 ms would be left if operators took the time
of their work alone, and messages that of their bytes. Fewer ranks then use their devices better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware, Link, Tier
from shardwright.compiler.plan.amounts import amount

MOST_LAUNCHES = 0.5
"""The part of a step from which it is said to be bound by launches."""


def bound_by_launches(
    step_s: float, hardware: Hardware, step_on: Callable[[Hardware], float], num_ranks: int
) -> str | None:
    """What is said of a plan of which launches and latencies are half of a step or more; ``None``
    of others.

    ``step_s``: its step on ``hardware``; ``step_on``: its step on another machine; ``num_ranks``:
    of all units.
    """
    work_s = step_on(_without_waiting(hardware))
    if work_s > (1 - MOST_LAUNCHES) * step_s:
        return None
    text = (
        f"bound by launches: of {amount(step_s, 's')} a step {amount(work_s, 's')} are arithmetic "
        "and bytes, the rest is the least time of operators and the latency of messages"
    )
    if num_ranks == 1:
        return f"{text}; larger microbatches cost little more"
    return f"{text}; use fewer ranks, or larger microbatches"


def _without_waiting(hardware: Hardware) -> Hardware:
    """The machine on which operators take the time of their work, and messages that of their
    bytes.
    """
    device = replace(hardware.device, launch_s=0.0, queue_s=(0.0, 0.0), host_s=(0.0, 0.0))

    def tier(item: Tier) -> Tier:
        kinds = {name: Link(0.0, link.bytes_per_s) for name, link in item.kinds.items()}
        return replace(item, latency_s=0.0, kinds=kinds)

    return replace(hardware, device=device, tiers=tuple(map(tier, hardware.tiers)))
