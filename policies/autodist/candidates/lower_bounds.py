"""What no plan takes less than: the arithmetic of the model, and what is left of other bounds where
collectives run beside passes.

**Arithmetic.** Each rank does at least its share of the products of a step, none at a better rate
than the best there is in the description of the device, and ranks that do more than their share
only make a step longer. This bound needs no search, whatever mesh, stages and schedule a plan has:
it is stated where the time for a search was too short. Example: 8e15 operations on four ranks of at
most 2e14 per second take at least 10 s.

**Overlap.** Placements are found, and bounded, for a step whose parts come one after the other:
``W`` s of forwards and backwards, ``R`` s of sums of gradients and gatherings of parameters, ``O``
s of the optimizer. With ``use_async_reducer``, ``overlap_grad_sync`` or ``overlap_param_sync`` some
of ``R`` runs beside the passes. No plan avoids what is left:

- On one position gatherings run beside the first of ``m`` forwards and sums beside the last of
  ``m`` backwards, which together take no more than ``W / m``. At most ``min(R, W / m)`` is hidden,
  so that the step takes at least ``m / (m + 1)`` of ``W + R + O``. With ZeRO-2 sums run beside
  every backward, and ``min(R, W)`` may be hidden: half. Where ``R`` is at most ``r`` in all plans,
  no more than ``r`` is hidden: with the bound ``b`` of ``W + R + O`` the step takes at least
  ``W + O``, which is at least ``b - r`` (``mesh_placing.most_summed_s``).
- On a position with several stages the sums and gatherings of one run beside the others' actions.
  The step takes at least ``max(W, R) + O``, half of all.
- On a position with one stage no sums are hidden: it ends with its last backward. Its parameters
  are gathered while it waits for its first microbatch, which bounds of pipelines count, too. The
  step takes at least as long as either: half of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.machine.efficiency import EfficiencyTable
from shardwright.compiler.cost.time.arithmetic import arithmetic_s
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import ReductionSettings

ARITHMETIC = (
    "the arithmetic of the model at the best rate of the device, dealt out evenly to the ranks"
)
"""What certificates call it."""


def arithmetic_bound_s(
    graph: IRGraph,
    config: ComputeConfig,
    device: Device,
    num_microbatches: int,
    times: OperatorTimes | None = None,
) -> float:
    """Seconds per step that no plan of ``config.plan_ngpus`` ranks is below. 0 with measured
    ``times`` of operators, which are not bounded by any rate.
    """
    if times is not None and times.entries:
        return 0.0
    best, total_s = _at_best(device), 0.0
    for op in needed(graph, config).ops:
        call = local_call(op, {}, Mesh(()))
        forward_s, backward_s = arithmetic_s(call, call.differentiated, best)
        total_s += forward_s + (0.0 if config.inference_only else backward_s)
    return num_microbatches * total_s / config.plan_ngpus


def _at_best(device: Device) -> Device:
    """A device that does all products at the best rate that this one has for any."""
    efficiency = device.matmul_efficiency
    if isinstance(efficiency, Mapping):
        # A table of one point is the same fraction for products of all sizes.
        tables = {
            dtype: EfficiencyTable((1,), (1,), (1,), (max(table.fractions),))
            for dtype, table in efficiency.items()
        }
        return replace(device, matmul_efficiency=tables)
    tiles = 1.0 if device.tiles is None else max(fraction for *_, fraction in device.tiles.shapes)
    return replace(device, matmul_efficiency=efficiency * tiles, tiles=None)


def share_despite_overlap(
    config: ComputeConfig, num_positions: int, most_chunks: int, num_microbatches: int
) -> float:
    """The share of a bound that holds in any case. ``most_chunks``: the stages that a position has
    at most.
    """
    settings = ReductionSettings.of(config, config.num_units)
    if not (settings.asynchronous or settings.overlaps_parameters):
        return 1.0
    if num_positions == 1:
        in_every_pass = settings.asynchronous and settings.frees_gradients
        return 0.5 if in_every_pass else num_microbatches / (num_microbatches + 1)
    return 0.5 if most_chunks > 1 or settings.overlaps_parameters else 1.0
