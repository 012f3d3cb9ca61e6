"""What a certificate is of: the plan as it was found, for parameters and inputs of these shapes and
dtypes on so many ranks; dynamic sizes are those of the dummy arguments. Of an edited plan, or of
one used for another model, batch or cluster, it says nothing.
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
"""Parts of a plan that people or the config say again: they decide nothing of its cost."""


def certified(plan: Plan, graph: IRGraph, config: ComputeConfig) -> Plan:
    """The plan with a certificate that is known to be of it."""
    assert plan.certificate is not None
    return replace(
        plan, certificate=replace(plan.certificate, digest=certified_digest(plan, graph, config))
    )


def checked_certificate(plan: Plan, graph: IRGraph, config: ComputeConfig) -> Plan:
    """The plan without its certificate, if that is of something else."""
    if plan.certificate is None or plan.certificate.digest == certified_digest(plan, graph, config):
        return plan
    return replace(plan, certificate=None)


def certified_digest(plan: Plan, graph: IRGraph, config: ComputeConfig) -> str:
    """Of what a certificate is of."""
    covered = {key: value for key, value in plan.to_json().items() if key not in NOT_COVERED}
    # A step runs the same program whether an output is dropped, or left out of training.
    covered["outputs"] = {
        path: None if wish == "eval" else wish for path, wish in covered["outputs"].items()
    }
    given = (*graph.inputs, *graph.parameters)
    tensors = [
        (value.name, [str(size) for size in value.shape], str(value.dtype), value.requires_grad)
        for value in given
    ]
    counted = {
        size.name: size.example
        for value in given
        for expression in value.shape
        for size in dynamic_sizes(expression)
    }
    text = json.dumps([covered, tensors, config.runtime_ngpus, counted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
