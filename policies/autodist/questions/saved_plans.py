"""Questions about a plan that is there already: it is audited, and nothing is searched.

Example: ``plan.json`` says ``tp=2`` for four ranks in two units. Its audit takes 12.1 ms and 9 GB.
With ZeRO-1 the same plan takes 12.2 ms and 7 GB, with all layers computed again 15.8 ms and 4 GB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.after_backward import all_gradients_bytes
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import TIE, Choice, Request
from shardwright.policies.autodist.stages.chain import layer_blocks
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError
from shardwright.runtime.zero.settings import ReductionSettings

FELT = 0.002
"""Relative: what larger buckets gain at least where they are told of."""

NOT_SEARCHED = "the plan of a file"
"""What is said of its placement, of which no bound is known."""


def request_of_plan(
    graph: PlannableGraph,
    config: ComputeConfig,
    options: AutodistOptions,
    hardware: Hardware,
    plan: Plan,
) -> Request:
    """What questions are asked of: the plan and its audit, in the place of a search's answer."""
    # The samples of a step are the plan's own, if it says how many.
    count = plan.num_microbatches if plan.stages else options.microbatches_of_step
    if plan.batch is not None:
        count = plan.batch.num_microbatches
    options = replace(options, num_microbatches=count)
    placed = tuple(PlacedModel(own, 0.0, NOT_SEARCHED, "") for own in _of_stages(plan))
    best = Candidate(NOT_SEARCHED, plan, 0.0, placed)
    request = Request(graph, config, options, hardware, best)
    cost = request.auditor(plan)
    return replace(request, best=replace(best, predicted_s=cost.step_s, cost=cost))


def _of_stages(plan: Plan) -> list[Plan]:
    """The placement behind each stage, or one where all stages have the same mesh."""
    if not plan.stages:
        return [plan]
    whole = replace(plan, stages=(), schedule="", num_microbatches=1, actions=())
    meshes = [stage.mesh for stage in plan.stages]
    different = meshes if len(set(meshes)) > 1 else meshes[:1]
    return [replace(whole, mesh=mesh) for mesh in different]


def audited_levers(request: Request) -> list[Choice]:
    """What would help this very plan: ZeRO, larger buckets of gradients, other numbers of
    microbatches, recomputation. The plan itself comes first; of the others those that take less
    time or less memory, and lower stages of ZeRO that take about as long.
    """
    best = request.best
    assert best.cost is not None
    found = [Choice("the plan", best.step_s, best.cost.peak_bytes, chosen=True)]
    asked = _with_zero, _with_larger_buckets, _with_microbatches, _recomputed
    for choice in itertools.chain.from_iterable(question(request) for question in asked):
        is_faster = choice.step_s < best.step_s * (1 - TIE)
        is_smaller = choice.peak_bytes < best.cost.peak_bytes * (1 - TIE)
        if is_faster or is_smaller:
            found.append(choice)
    found += _with_lower_zero(request)
    return found


def _choice(request: Request, name: str, plan: Plan, steps: float = 1.0) -> Iterator[Choice]:
    """The plan as it is audited, if it can be. ``steps``: how many steps' samples it has."""
    try:
        cost = request.auditor(plan)
    except (PlanError, ConfigError):
        return
    fits = cost.peak_bytes <= request.memory_limit_bytes
    yield Choice(name, cost.step_s / steps, cost.peak_bytes, fits)


def _with_zero(request: Request) -> Iterator[Choice]:
    """More of optimizer state, gradients and parameters in pieces over the units."""
    yield from _with_stages(request, range(request.config.zero_stage + 1, 4))


def _with_lower_zero(request: Request) -> Iterator[Choice]:
    """Lower stages of ZeRO that fit and are faster, or as fast as a search takes a simpler plan."""
    most_s = (1 + request.options.simpler_within) * request.best.step_s
    for choice in _with_stages(request, range(request.config.zero_stage)):
        if choice.fits and choice.step_s <= most_s:
            yield choice


def _with_stages(request: Request, stages: Iterable[int]) -> Iterator[Choice]:
    """The plan with other stages of ZeRO, where there are several units."""
    config, plan = request.config, request.best.plan
    if config.num_units == 1:
        return
    for stage in stages:
        try:
            changed = config.with_zero(stage)
        except ConfigError:
            continue
        asked = replace(request, config=changed)
        # The plan names the stage that it was searched for, and another one is asked about.
        other = replace(plan, zero=units_of_storage(changed), zero_stage=stage)
        yield from _choice(asked, f"use_zero={stage}", other)


def _with_larger_buckets(request: Request) -> Iterator[Choice]:
    """Gradients in fewer and larger messages, up to one for all, where that is felt: over many
    ranks a ring waits for each of its hops, however small the message is.
    """
    config, best = request.config, request.best
    if config.inference_only:
        return
    cap_mb = ReductionSettings.of(config, config.num_units).bucket_cap_mb
    all_mb = all_gradients_bytes(config, request.graph.used_parameters) / 2**20
    sizes = {min(times * cap_mb, float(math.ceil(all_mb))) for times in (4, 16)}
    for size in sorted(sizes) if cap_mb < all_mb else ():
        asked = replace(request, config=config.with_bucket_cap(size))
        for choice in _choice(asked, f"{config.bucket_cap_name}={size:g}", best.plan):
            if choice.step_s < best.step_s * (1 - FELT):
                yield choice


def _with_microbatches(request: Request) -> Iterator[Choice]:
    """More and fewer microbatches of the same size in a step: what all the samples of a step of
    now take then.
    """
    plan = request.best.plan
    if not plan.stages or plan.actions:
        return
    for times, words in ((2.0, "twice"), (0.5, "half")):
        count = int(plan.num_microbatches * times)
        if count < 1:
            continue
        name = f"{words} as many microbatches ({count}), time for as many samples as now"
        batch = None if plan.batch is None else replace(plan.batch, num_microbatches=count)
        changed = replace(plan, num_microbatches=count, batch=batch)
        yield from _choice(request, name, changed, times)


def _recomputed(request: Request) -> Iterator[Choice]:
    """All layers computed again, or none."""
    plan = request.best.plan
    layers = tuple(sorted(set(layer_blocks(request.graph)[1].values())))
    if plan.recompute:
        yield from _choice(request, "nothing computed again", replace(plan, recompute=()))
    elif layers:
        name = f"all {len(layers)} layers computed again"
        yield from _choice(request, name, replace(plan, recompute=layers))
