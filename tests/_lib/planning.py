"""Requests for placements of small models, and machines on which splitting them pays."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from plans import annotated, traced
from torch import nn

from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.time.after_backward import Reduction
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.stages.step_ends import StepEnds
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


@functools.cache
def slow_machine(num_devices: int, *, bytes_per_s: float = 1e8) -> Hardware:
    """Devices that take long to compute and no time to start, with links of any rate and messages
    that take nothing from products beside them: tiny models are worth splitting.
    """
    found = load_hardware("a100-80gb", num_devices)
    device = replace(
        found.device,
        flops_per_s=dict.fromkeys(found.device.flops_per_s, 1e7),
        bytes_per_s=1e7,
        launch_s=1e-9,
        overlap=1.0,
    )
    tiers = tuple(
        replace(
            tier,
            latency_s=1e-9,
            bytes_per_s=bytes_per_s,
            kinds={},
            uplink_bytes_per_s=None,
            fabric_bytes_per_s=None,
        )
        for tier in found.tiers
    )
    return replace(found, name="slow", device=device, tiers=tiers)


@functools.cache
def two_nodes(num_devices: int = 4, *, bytes_per_s: float) -> Hardware:
    """Such devices in two nodes, and between these links of some rate."""
    found = slow_machine(num_devices)
    inside = replace(found.tiers[0], name="inside", sizes=(num_devices // 2,) * 2)
    outside = replace(inside, name="between", sizes=(num_devices,), bytes_per_s=bytes_per_s)
    return replace(found, name="two nodes", tiers=(inside, outside))


def mesh_of(text: str) -> Mesh:
    """``"2x2"`` as a mesh of axes x, y, z."""
    return Mesh(tuple(zip("xyz", map(int, text.split("x")), strict=False)))


def graph_of(module: nn.Module, inputs: dict[str, Any]) -> PlannableGraph:
    return annotated(traced(module, inputs))


def request(
    graph: PlannableGraph, mesh: Mesh, hardware: Hardware | None = None, **options: Any
) -> PlacementRequest:
    """A request on all ranks of a job that is one unit."""
    config = options.pop("config", None) or ComputeConfig(
        plan_ngpus=mesh.size, runtime_ngpus=mesh.size
    )
    return PlacementRequest(
        graph, mesh, tuple(range(mesh.size)), hardware or slow_machine(mesh.size), config, **options
    )


def audited_s(
    graph: PlannableGraph, plan: Plan, wanted: PlacementRequest, *, as_counted: bool = False
) -> float:
    """What a plan takes by its lowered program: what the audit adds up, without the walk of its
    memory. ``as_counted``: as a search counts it, with each gradient paying its share of one
    message of the model.
    """
    program = lower(graph, plan)
    body = body_time(program, wanted.hardware, wanted.ranks, gathers_ahead=False)
    reduction = Reduction.of(
        program.declarations, wanted.mesh, wanted.config, wanted.hardware, wanted.optimizer,
        alone=as_counted,
    )  # fmt: skip
    return body.forward_s + body.backward_s + reduction.end_s


def more_at_end_s(program: Program, wanted: PlacementRequest) -> float:
    """What the messages of a program's gradients take longer than a search counts for them."""
    setting = Setting(
        wanted.hardware,
        wanted.config,
        wanted.ranks,
        wanted.optimizer,
        num_microbatches=wanted.microbatches,
    )
    (more_s,) = StepEnds(Walk(program, setting)).more_s(
        [wanted.ranks], [[(0, len(program.graph.ops))]]
    )
    return more_s
