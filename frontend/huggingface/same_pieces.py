"""Plans of which all store the same pieces: several programs run on one set of parameters.

The first program of a model decides how each parameter is stored; the plan of every later one, for
another kind of call or for the encoder alone, is given these layouts. Where it would use a
parameter otherwise, lowering converts it.

Parameters are stored without G, the placement of a tensor whose gradient is a summand: where a
plan would store ``[768] G(tp)``, it stores ``[768]``, and the program sums the gradient itself, in
backward. So what backward leaves in ``grad`` is the gradient on every rank, as
``DistributedDataParallel`` and optimizers of torch take for granted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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

Layouts = Mapping[str, str]
"""The text of the layout of each parameter and buffer, by name."""


def with_same_pieces(policy: Policy, layouts: Layouts | None) -> Policy:
    """``policy``, whose plans store tensors as ``layouts`` says; the first one, without any, as it
    likes, but for G.
    """

    def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        plan = plan_of(policy.apply(graph, config), policy.name)
        chosen = {} if layouts is None else {n: Layout.parse(t) for n, t in layouts.items()}
        names = {value.fqn for value in (*graph.parameters, *graph.buffers)}
        known = {name: layout for name, layout in chosen.items() if name in names}
        stored = {**_stored(graph, config, plan), **known}
        return replace(
            plan, stored={name: replace(one, grad_partial=()) for name, one in stored.items()}
        )

    # Files are recognised by the name of the policy, among other things.
    text = json.dumps(layouts, sort_keys=True)
    name = f"{policy.name}, stored as {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return replace(policy, name=name, apply=apply)


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
