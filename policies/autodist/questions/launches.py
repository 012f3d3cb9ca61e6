"""Whether a plan has more ranks than it has work for, and whether it may wait for a host of which
the machine's description says nothing.

Example: on 64 ranks each operator of a small model has a microsecond of work, and the least time of
an operator is 5 µs. A step takes 9.1 ms, of which 2.4 ms would be left if operators took the time
of their work alone, and messages that of their bytes. With twice the work for each rank it takes
9.3 ms: fewer ranks use their devices better.

Sums of gradients in many small messages wait, too, and the longer the more ranks there are. There
larger buckets help.

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
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import MOST_BUCKET_CAP_MB, ReductionSettings

MOST_LAUNCHES = 0.5
"""The part of a step from which it is said to be bound by launches."""

LITTLE_LONGER = 0.25
"""How much longer a step may take with twice the work for each rank, as a part of it, if fewer
ranks are advised. Half of the ranks take less than that: not all of their work is twice as much.
"""

FELT = 0.1
"""The part of a step that larger buckets save at least where they are told of."""

TYPICAL_LAUNCH_S = 20e-6
"""The seconds in which a host launches an operator of eager PyTorch, where nothing is known of it:
the slower of two hosts of H100 on which a calibration measured it took 19.4 µs, the other 10.9
(benchmarks/RESULTS.md, One GPU).
"""

LEAST_LONGER = 0.1
"""How much longer than predicted a step is by such a host, as a part of it, if it is said."""


def bound_by_launches(
    plan: Plan,
    step_s: float,
    hardware: Hardware,
    config: ComputeConfig,
    step_on: Callable[[Hardware, ComputeConfig], float],
) -> str | None:
    """What is said of a plan of which launches and latencies are half of a step or more; ``None``
    of others.

    ``step_s``: its step on ``hardware`` with ``config``; ``step_on``: its step on another machine,
    or with another config.
    """
    work_s = step_on(_waiting(hardware, 0.0), config)
    if not _is_bound(work_s, step_s):
        return None
    text = (
        f"bound by launches: of {amount(step_s, 's')} a step {amount(work_s, 's')} are arithmetic "
        "and bytes, the rest is the least time of operators and the latency of messages"
    )
    if config.runtime_ngpus == 1:
        return f"{text}; larger microbatches cost little more"
    ways = []
    larger = _with_largest_buckets(config)
    larger_s = step_s if larger is None else step_on(hardware, larger)
    if larger is not None and larger_s < (1 - FELT) * step_s:
        setting = f"{config.bucket_cap_name}={MOST_BUCKET_CAP_MB:g}"
        ways.append(f"larger buckets of gradients ({setting}: {amount(larger_s, 's')})")
        step_s, config = larger_s, larger
    # What larger buckets cure has work enough.
    if _is_bound(work_s, step_s):
        # With waits half as long, and links twice as fast, all takes half as long as with twice the
        # work, and messages that are as large as now.
        twice_s = 2 * step_on(_waiting(hardware, 0.5, 2.0), config)
        if _may_share(plan, config) and twice_s <= (1 + LITTLE_LONGER) * step_s:
            ways.append("fewer ranks")
        ways.append("larger microbatches")
    return f"{text}; use {', or '.join(ways)}"


def _is_bound(work_s: float, step_s: float) -> bool:
    return work_s <= (1 - MOST_LAUNCHES) * step_s


def _with_largest_buckets(config: ComputeConfig) -> ComputeConfig | None:
    """The config with the largest buckets of gradients; ``None`` if it has none, or no smaller."""
    if config.inference_only:
        return None
    settings = ReductionSettings.of(config, config.num_units)
    if settings.bucket_cap_mb >= MOST_BUCKET_CAP_MB:
        return None
    return config.with_bucket_cap(MOST_BUCKET_CAP_MB)


def _may_share(plan: Plan, config: ComputeConfig) -> bool:
    """Whether fewer ranks would launch no more operators each: where ranks do parts of the same
    operators. The ranks of a pipeline alone have operators of their own.
    """
    return config.num_units > 1 or any(mesh.size > 1 for mesh in _meshes(plan))


def _meshes(plan: Plan) -> list[Mesh]:
    """The mesh of each part of the ranks; stages on the same ranks have the same mesh."""
    meshes = {stage.ranks: stage.mesh for stage in plan.stages}
    return list(meshes.values()) or [plan.mesh]


def repeated_work(plan: Plan, num_units: int) -> str | None:
    """What is said of a plan some of whose ranks do and hold exactly what others do; ``None`` of
    others. ``num_units``: how often it runs side by side.

    Example: of ``tp=8 x copies=8`` in one unit, 56 of 64 ranks do what others do.
    """
    copying = copying_axes(plan)
    meshes = _meshes(plan)
    own, needed = sum(mesh.size for mesh in meshes), num_needed(plan)
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


def num_needed(plan: Plan) -> int:
    """The ranks of a unit that do what no other rank does: as many do all the work of the plan."""
    copying = copying_axes(plan)
    return sum(mesh.size // _num_copies(mesh, copying) for mesh in _meshes(plan))


def _num_copies(mesh: Mesh, copying: frozenset[str]) -> int:
    """How many ranks of a mesh do each part of its work."""
    return math.prod(size for name, size in mesh.axes if name in copying)


def host_unknown(
    step_s: float, hardware: Hardware, step_on: Callable[[Hardware], float]
) -> str | None:
    """What is said of a plan whose step is longer by a tenth or more with a typical host, on a
    machine that was not measured and does not say how long its host takes; ``None`` of others.

    ``step_s``: its step on ``hardware``; ``step_on``: its step on another machine.
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


def _waiting(hardware: Hardware, times: float, links: float = 1.0) -> Hardware:
    """The machine on which launches and latencies are so many times as long; 0: operators take the
    time of their work, and messages that of their bytes. ``links``: how many times their rates.
    """

    def both(seconds: tuple[float, float]) -> tuple[float, float]:
        return times * seconds[0], times * seconds[1]

    def link(item: Link) -> Link:
        return Link(times * item.latency_s, links * item.bytes_per_s)

    def tier(item: Tier) -> Tier:
        whole, shared = link(item.link("")), (item.uplink_bytes_per_s, item.fabric_bytes_per_s)
        uplink, fabric = (None if rate is None else links * rate for rate in shared)
        return replace(
            item,
            latency_s=whole.latency_s,
            bytes_per_s=whole.bytes_per_s,
            kinds={name: link(each) for name, each in item.kinds.items()},
            uplink_bytes_per_s=uplink,
            fabric_bytes_per_s=fabric,
        )

    device = hardware.device
    device = replace(
        device,
        launch_s=times * device.launch_s,
        queue_s=both(device.queue_s),
        host_s=both(device.host_s),
    )
    tiers = tuple(map(tier, hardware.tiers))
    return replace(hardware, device=device, tiers=tiers, late_s=times * hardware.late_s)
