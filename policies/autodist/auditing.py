"""What a candidate costs by the program that is really emitted, and which candidates are one program."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.cost.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.recompute import mark_recompute
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates import renamed
from shardwright.policies.autodist.found import Candidate
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True)
class Auditor:
    """Audits plans of one graph, for steps of so many microbatches."""

    graph: IRGraph
    config: ComputeConfig
    hardware: Hardware
    num_microbatches: int
    optimizer: OptimizerMemory = ADAM
    times: OperatorTimes | None = None

    def __call__(self, plan: Plan) -> PlanCost:
        """The cost of a plan, from the program that is really emitted."""
        graph = self.graph
        if plan.recompute:
            graph = mark_recompute(graph, plan.recompute, stage_of_ops(graph, plan) if plan.stages else {})
        if plan.stages:
            return audit(lower_stages(graph, plan), self.config, self.hardware, optimizer=self.optimizer, times=self.times)
        return audit(
            lower(graph, plan), self.config, self.hardware,
            optimizer=self.optimizer, times=self.times, num_microbatches=self.num_microbatches,
        )  # fmt: skip


def is_same(candidate: Candidate, other: Candidate) -> bool:
    """Whether two candidates are one plan with its axes in another order, on links of the same kinds: what is predicted of
    them is equal then, too.
    """
    alike = math.isclose(candidate.predicted_s, other.predicted_s, rel_tol=1e-9) and math.isclose(
        candidate.used_bytes, other.used_bytes, rel_tol=1e-9, abs_tol=1.0
    )
    return alike and _in_order(candidate.plan) == _in_order(other.plan)


def _in_order(plan: Plan) -> Plan:
    """The plan with axes named after what they split and their sizes, in the order of these names, and no ranks."""
    names = {axis: f"{axis.rstrip('0123456789')}@{size}" for axis, size in plan.mesh.axes}
    if len(set(names.values())) == len(names):
        plan = renamed(plan, names)

    def ordered(mesh: Mesh) -> Mesh:
        return Mesh(tuple(sorted(mesh.axes)))

    stages = tuple(replace(stage, mesh=ordered(stage.mesh), ranks=tuple(sorted(stage.ranks))) for stage in plan.stages)
    return replace(plan, mesh=ordered(plan.mesh), stages=stages, notes=())
