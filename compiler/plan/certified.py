"""Bind a plan's certificate to what it certifies.

A certificate is about one plan as the search found it, for parameters and inputs of certain shapes
and dtypes, on a certain number of ranks that sum gradients in a certain way. Dynamic sizes count as
in the dummy arguments. It says nothing of an edited plan, nor of a plan used for another model,
batch or cluster.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import dynamic_sizes
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig

NOT_COVERED = ("certificate", "dims", "notes", "policy", "zero")
"""Parts of a plan that do not decide its cost, as people or the config say them again."""

SETTINGS = (
    "zero_ngroups",
    "zero_use_reduce_scatter",
    "use_async_reducer",
    "reducer_bucket_cap_mb",
    "distributed_optimizer",
    "overlap_communication",
)
"""Fields of a config that decide the cost of a plan, and are no part of it: how gradients are
summed, and which messages are hidden.
"""


def settings_of(config: ComputeConfig) -> dict[str, Any]:
    """The :data:`SETTINGS` of a config that are not as by default, as JSON values."""
    own, usual = config.to_json(), ComputeConfig(plan_ngpus=1, runtime_ngpus=1).to_json()
    return {name: own[name] for name in SETTINGS if own[name] != usual[name]}


def certified(plan: Plan, graph: IRGraph, config: ComputeConfig, num_microbatches: int) -> Plan:
    """The plan with its certificate bound to it, and with the stage of ZeRO that it was searched
    for: time and memory are those of that stage. A plan without ZeRO names none, and goes with any;
    its certificate does not.

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
        settings=settings_of(_with_own_zero(whole, config)),
    )
    return replace(whole, certificate=bound)


def checked_certificate(plan: Plan, graph: IRGraph, config: ComputeConfig) -> Plan:
    """The plan, without its certificate if that certifies something else."""
    known = plan.certificate
    if known is None:
        return plan
    # A plan that names no stage was searched without ZeRO, and may be used with any.
    is_its_stage = config.leaves_zero_to_plan or config.zero_stage == (plan.zero_stage or 0)
    # A file without settings is of an older version: whatever is set goes with it.
    is_alike = known.settings in (None, settings_of(_with_own_zero(plan, config)))
    if is_its_stage and is_alike and known.digest == certified_digest(plan, graph, config):
        return plan
    return replace(plan, certificate=None)


def _with_own_zero(plan: Plan, config: ComputeConfig) -> ComputeConfig:
    """The config with the stage of ZeRO that the plan has chosen, where it leaves that open."""
    return config.with_zero(plan.zero_stage or 0) if config.leaves_zero_to_plan else config


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
