"""Whether a plan has more ranks than it has work for, and whether it may wait for a host of which
the machine's description says nothing.

Example: on 64 ranks each operator of a small model has a microsecond of work, and the least time of
an operator is 5 µs. A step takes 9.1 ms, of which 2.4 ms would be left if operators took the time
of their work alone, and messages that of their bytes. Fewer ranks then use their devices better.

A search of such a model may also answer ``tp=8 x copies=8``: groups of eight ranks do the same
work, since every further split would cost more than it saves. Eight ranks are then as fast as 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware, Link, Tier
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.axis_roles import copying_axes
from shardwright.runtime.layout import Mesh

MOST_LAUNCHES = 0.5
"""The part of a step from which it is said to be bound by launches."""

TYPICAL_LAUNCH_S = 20e-6
"""The seconds in which a host launches an operator of eager PyTorch, where nothing is known of it:
the slower of two hosts of H100 on which a calibration measured it took 19.4 µs, the other 10.9
(benchmarks/RESULTS.md, One GPU).
"""

LEAST_LONGER = 0.1
"""How much longer than predicted a step is by such a host, as a part of it, if it is said."""


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


def repeated_work(plan: Plan, num_units: int) -> str | None:
    """What is said of a plan some of whose ranks do and hold exactly what others do; ``None`` of
    others. ``num_units``: how often it runs side by side.

    Example: of ``tp=8 x copies=8`` in one unit, 56 of 64 ranks do what others do.
    """
    copying = copying_axes(plan)
    # Stages on the same ranks have the same mesh.
    meshes = {stage.ranks: stage.mesh for stage in plan.stages}.values() or (plan.mesh,)
    own = sum(mesh.size for mesh in meshes)
    needed = sum(mesh.size // _num_copies(mesh, copying) for mesh in meshes)
    if needed == own:
        return None
    axes = {
        f"{name}={size}": None
        for mesh in meshes
        for name, size in mesh.axes
        if size > 1 and name in copying
    }
    splits = "splits" if len(axes) == 1 else "split"
    return (
        f"repeated work: {(own - needed) * num_units} of {own * num_units} ranks do what others do "
        f"already, as {' and '.join(axes)} {splits} nothing; the plan on {needed * num_units} "
        f"{'rank' if needed * num_units == 1 else 'ranks'} is as fast: use fewer ranks, or more "
        f"units (plan_ngpus={needed})"
    )


def _num_copies(mesh: Mesh, copying: frozenset[str]) -> int:
    """How many ranks of a mesh do each part of its work."""
    return math.prod(size for name, size in mesh.axes if name in copying)


def host_unknown(
    step_s: float, hardware: Hardware, step_on: Callable[[Hardware], float]
) -> str | None:
    """What is said of a plan whose step is longer by a tenth or more with a typical host, on a
    machine that was not measured and does not say how long its host takes; ``None`` of others.

    ``step_s``, ``step_on``: as in :func:`bound_by_launches`.
    """
    device = hardware.device
    if hardware.measurements or any(device.queue_s) or any(device.host_s):
        return None
    both = (TYPICAL_LAUNCH_S, TYPICAL_LAUNCH_S)
    hosted_s = step_on(replace(hardware, device=replace(device, queue_s=both)))
    if hosted_s < (1 + LEAST_LONGER) * step_s:
        return None
    return (
        f"host not counted: {hardware.name} does not say how long a host takes to launch an "
        f"operator; at {amount(TYPICAL_LAUNCH_S, 's')} each, as measured elsewhere, a step takes "
        f"{amount(hosted_s, 's')} and not {amount(step_s, 's')}; measure yours with shardwright "
        "calibrate, or give queue_s in a hardware file"
    )


def _without_waiting(hardware: Hardware) -> Hardware:
    """The machine on which operators take the time of their work, and messages that of their
    bytes.
    """
    device = replace(hardware.device, launch_s=0.0, queue_s=(0.0, 0.0), host_s=(0.0, 0.0))

    def tier(item: Tier) -> Tier:
        kinds = {name: Link(0.0, link.bytes_per_s) for name, link in item.kinds.items()}
        return replace(item, latency_s=0.0, kinds=kinds)

    return replace(hardware, device=device, tiers=tuple(map(tier, hardware.tiers)))
