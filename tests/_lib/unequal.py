"""A policy that gives each pipeline stage a mesh of its own."""

from __future__ import annotations

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.compiler.schedule.published import generate
from shardwright.policies.choice import choose_dims
from shardwright.policies.data import batch_classes
from shardwright.policies.partition import stage_starts
from shardwright.policies.policy import PolicyFunction
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


def unequal(
    meshes: list[dict[str, int]],
    placement: list[int],
    num_microbatches: int,
    schedule: str = "1f1b",
) -> PolicyFunction:
    """``meshes``: of each position in the pipeline, of the axes ``dp`` and ``tp``. ``placement``:
    each stage's position.
    """

    def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        positions = [Mesh.of(mesh) for mesh in meshes]
        first = [sum(mesh.size for mesh in positions[:index]) for index in range(len(positions))]
        order = generate(
            schedule, len(positions), num_microbatches, len(placement) // len(positions)
        )
        starts = stage_starts(
            graph, Plan(Mesh(())), order, config, load_hardware("a100-80gb", config.runtime_ngpus)
        )
        stages = tuple(
            StagePlan(op, positions[at], tuple(range(first[at], first[at] + positions[at].size)))
            for op, at in zip(["", *starts], placement, strict=True)
        )
        whole = Mesh.of({"rank": sum(mesh.size for mesh in positions)})
        plan = Plan(whole, stages=stages, schedule=schedule, num_microbatches=num_microbatches)
        strategies = {}
        for op, stage in stage_of_ops(graph, plan).items():
            strategies[op] = _strategies(graph, stages[stage].mesh)[op]
        return Plan(
            whole, strategies, stages=stages, schedule=schedule, num_microbatches=num_microbatches
        )

    cache: dict[Mesh, dict[str, dict[str, str]]] = {}

    def _strategies(graph: PlannableGraph, mesh: Mesh) -> dict[str, dict[str, str]]:
        if mesh not in cache:
            builder = graph.builder(mesh)
            if "dp" in mesh.names:
                split_dims(builder, "dp", batch_classes(graph))
            if "tp" in mesh.names:
                split_dims(builder, "tp", choose_dims(graph, mesh.axis_size("tp")))
            found = builder.plan("by mesh").strategies
            cache[mesh] = {op.name: dict(found.get(op.name, {})) for op in graph.ops}
        return cache[mesh]

    return apply
