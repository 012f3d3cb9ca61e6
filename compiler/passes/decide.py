"""Ask the policy for a plan. From here on the plan travels with the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardwright.compiler.passes.unify_dims import warn_of_lost_batch
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import check_mesh
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

PolicyFunction = Callable[[Any, ComputeConfig], Any]


@dataclass(frozen=True)
class Decide:
    """The pass ``policy``: the graph with the plan that ``policy`` makes for it.

    ``plan``: one that is there already; the policy is then not asked. The plan gets the names of
    the dims that it splits, for people to read.

    Raises :class:`PlanError` for a policy that returns something else than a plan, and for a plan
    on another number of ranks.
    """

    name: ClassVar[str] = "policy"
    policy: PolicyFunction
    policy_name: str
    config: ComputeConfig
    plan: Plan | None = None

    def __call__(self, graph: PlannableGraph) -> PlannableGraph:
        if self.config.plan_ngpus > 1:
            warn_of_lost_batch(graph)
        plan = self.plan
        if plan is None:
            plan = plan_of(self.policy(graph, self.config), self.policy_name)
        check_mesh(plan, self.config)
        return replace(graph, plan=replace(plan, dims=split_dim_names(graph, plan)))


def plan_of(returned: Any, policy_name: str) -> Plan:
    """The plan in what a policy returned."""
    plan = returned.plan if isinstance(returned, PlannableGraph) else returned
    if not isinstance(plan, Plan):
        raise PlanError(
            f"policy {policy_name!r} returned no plan",
            why=f"it returned {type(returned).__name__}",
            hint="return what builder.build() gives, or a Plan",
        )
    return plan
