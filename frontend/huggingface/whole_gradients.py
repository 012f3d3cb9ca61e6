"""Plans that leave whole gradients behind.

Parameters of an initialized model are stored without G, the placement of a tensor whose gradient is
a summand: where a plan would store ``[768] G(tp)``, it stores ``[768]``, and the program sums the
gradient itself, in backward. So what backward leaves in ``grad`` is the gradient on every rank, as
``DistributedDataParallel`` and optimizers of torch take for granted.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.passes.decide import plan_of
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.policy import Policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout


def with_whole_gradients(policy: Policy) -> Policy:
    """``policy``, whose plans store every tensor without G."""

    def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        plan = plan_of(policy.apply(graph, config), policy.name)
        stored = _stored(graph, config, plan)
        whole = {name: replace(one, grad_partial=()) for name, one in stored.items()}
        # A certificate is of the plan that was searched.
        certificate = plan.certificate if whole == stored else None
        return replace(plan, stored=whole, certificate=certificate)

    # Files are recognised by the name of the policy, among other things.
    return replace(policy, name=f"{policy.name}, with whole gradients", apply=apply)


def _stored(graph: PlannableGraph, config: ComputeConfig, plan: Plan) -> dict[str, Layout]:
    """The layouts in which lowering would store the tensors."""
    program = lower(
        PlannableGraph.of(needed(graph, config)),
        replace(plan, outputs=training_wishes(graph, config)),
    )
    programs = [program] if program.eval_program is None else [program.eval_program, program]
    return {
        declaration.value.fqn: declaration.layout
        for one in programs
        for declaration in one.declarations
        if declaration.value.fqn
    }
