"""Bind a plan's certificate to what it certifies.

A certificate is about one plan as the search found it, for parameters and inputs of certain shapes
and dtypes, on a certain number of ranks. Dynamic sizes count as in the dummy arguments. It says
nothing of an edited plan, nor of a plan used for another model, batch or cluster.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import dynamic_sizes
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig

NOT_COVERED = ("certificate", "dims", "notes", "policy", "zero")
"""Parts of a plan that do not decide its cost, as people or the config say them again."""


def certified(plan: Plan, graph: IRGraph, config: ComputeConfig, num_microbatches: int) -> Plan:
    """The plan with its certificate bound to it, and with the stage of ZeRO that it was searched
    for: time and memory are those of that stage. A plan without ZeRO names none, and goes with any.

    ``num_microbatches``: those of the step that is certified, where the plan itself has none.
    """
    assert plan.certificate is not None
    stage = plan.zero_stage
    if stage is None and not config.leaves_zero_to_plan:
        stage = config.zero_stage or None
    ranks = config.runtime_ngpus
    whole = replace(plan, zero_stage=stage)
    digest = certified_digest(whole, graph, config)
    own = bool(plan.stages) or plan.batch is not None
    bound = replace(
        plan.certificate,
        digest=digest,
        runtime_ngpus=ranks,
        num_microbatches=None if own else num_microbatches,
    )
    return replace(whole, certificate=bound)


def checked_certificate(plan: Plan, graph: IRGraph, config: ComputeConfig) -> Plan:
    """The plan, without its certificate if that certifies something else."""
    if plan.certificate is None or plan.certificate.digest == certified_digest(plan, graph, config):
        return plan
    return replace(plan, certificate=None)


def certified_digest(plan: Plan, graph: IRGraph, config: ComputeConfig) -> str:
    """The digest of everything that a certificate depends on."""
    covered = {key: value for key, value in plan.to_json().items() if key not in NOT_COVERED}
    # A step runs the same program whether an output is dropped, or left out of training.
    covered["outputs"] = {
        path: None if wish == "eval" else wish for path, wish in covered["outputs"].items()
    }
    # A model of other shapes, or another number of ranks, has other costs.
    given = (*graph.inputs, *graph.parameters)
    tensors = [
        (value.name, [str(size) for size in value.shape], str(value.dtype), value.requires_grad)
        for value in given
    ]
    # Dynamic sizes are costed with their examples.
    expressions = (expression for value in given for expression in value.shape)
    counted = {
        size.name: size.example for expression in expressions for size in dynamic_sizes(expression)
    }
    text = json.dumps([covered, tensors, config.runtime_ngpus, counted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
