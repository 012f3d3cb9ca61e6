"""What no plan takes less than, whatever mesh, stages and schedule it has: the arithmetic of the
model, dealt out evenly.

Each rank does at least its share of the products of a step, none at a better rate than the best
there is in the description of the device, and ranks that do more than their share only make a step
longer. This bound needs no search: it is stated where the time for one was too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.machine.efficiency import EfficiencyTable
from shardwright.compiler.cost.time.arithmetic import arithmetic_s
from shardwright.compiler.cost.time.operator_time import OperatorTimes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

FLOOR = "the arithmetic of the model at the best rate of the device, dealt out evenly to the ranks"
"""What certificates call it."""


def floor_s(
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
        tables = {
            dtype: EfficiencyTable((1,), (1,), (1,), (max(table.fractions),))
            for dtype, table in efficiency.items()
        }
        return replace(device, matmul_efficiency=tables)
    tiles = 1.0 if device.tiles is None else max(fraction for *_, fraction in device.tiles.shapes)
    return replace(device, matmul_efficiency=efficiency * tiles, tiles=None)
