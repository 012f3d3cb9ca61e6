"""How the samples of a step are dealt: to units, and within a unit to microbatches.

An example: ``global_batch: 32`` on 8 ranks with ``plan_ngpus: 2`` is 8 samples for each of 4
units; with ``microbatch: 2`` a unit computes 4 microbatches one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import Policy
from shardwright.runtime.errors import ConfigError

_PIPELINES = ("pp", "hybrid")
"""Policies that make stages unless they are told not to."""

# Options of policies, and what nnScaler calls them.
_NUM_MICROBATCHES = ("num_microbatches", "pipeline_nmicros")
_NUM_STAGES = ("num_stages", "pipeline_nstages", "pp_size")


@dataclass(frozen=True)
class Batches:
    """Ranks of a unit, number of units, samples of a microbatch, and microbatches of a step."""

    plan_ngpus: int
    num_units: int
    microbatch: int
    num_microbatches: int


def policy_of(settings: RunSettings) -> Policy:
    """The policy that is named."""
    name = settings.parallel.policy
    return find_policy(load_target(name) if ":" in name else name)


def check_microbatch(settings: RunSettings) -> None:
    """Raise :class:`ConfigError` for a microbatch that no number of ranks can make a step of."""
    if settings.microbatch is not None and settings.global_batch % settings.microbatch:
        raise ConfigError(
            f"the {settings.global_batch} samples of a step do not divide into microbatches of "
            f"{settings.microbatch}",
            hint="microbatch is a divisor of global_batch, or left out",
        )


def batches_of(settings: RunSettings, num_ranks: int, *, replan: bool = False) -> Batches:
    """How ``num_ranks`` ranks share a step. ``replan``: take smaller units where ``plan_ngpus``
    does not divide the ranks that there are now.

    Raises :class:`ConfigError` for sizes that do not divide.
    """
    parallel = settings.parallel
    plan_ngpus = parallel.plan_ngpus or (1 if parallel.policy == "dp" else num_ranks)
    if num_ranks % plan_ngpus and replan:
        # The largest unit that divides both: what a rank holds grows as little as can be.
        plan_ngpus = math.gcd(num_ranks, plan_ngpus)
    if num_ranks % plan_ngpus:
        raise ConfigError(
            f"{num_ranks} ranks cannot be dealt into units of {plan_ngpus}",
            why="parallel.plan_ngpus ranks share one copy of the model",
            hint="start a multiple of it (num_ranks, where this command starts them), or leave "
            "parallel.plan_ngpus out: all ranks make one unit then",
        )
    num_units = num_ranks // plan_ngpus
    share, rest = divmod(settings.global_batch, num_units)
    if rest:
        raise ConfigError(
            f"global_batch: {settings.global_batch} does not divide over {num_units} units",
            hint=f"use a multiple of {num_units}, or another number of ranks",
        )
    microbatch = settings.microbatch or _share_of_pipeline(settings, share) or share
    num_microbatches, rest = divmod(share, microbatch)
    if rest:
        raise ConfigError(
            f"a unit's {share} samples do not divide into microbatches of {microbatch}",
            why=f"global_batch: {settings.global_batch} over {num_units} units",
            hint="microbatch is a divisor of that, or left out",
        )
    return Batches(plan_ngpus, num_units, microbatch, num_microbatches)


def options_of(settings: RunSettings, batches: Batches) -> Mapping[str, Any]:
    """The options of the policy, with the number of microbatches where it makes a schedule."""
    given = settings.parallel.options
    if not _has_schedule(settings) or "actions" in given:
        return given
    number = next((given[name] for name in _NUM_MICROBATCHES if name in given), None)
    if number not in (None, batches.num_microbatches):
        raise ConfigError(
            f"parallel.options says {number} microbatches, and the batch sizes "
            f"{batches.num_microbatches}",
            why=f"global_batch: {settings.global_batch} over {batches.num_units} units in "
            f"microbatches of {batches.microbatch}",
            hint="leave one of them out",
        )
    rest = {name: value for name, value in given.items() if name not in _NUM_MICROBATCHES}
    return {**rest, "num_microbatches": batches.num_microbatches}


def _share_of_pipeline(settings: RunSettings, share: int) -> int | None:
    """The microbatch that a pipeline's number of microbatches makes; ``None`` without one."""
    if not _has_schedule(settings):
        return None
    given = settings.parallel.options
    number = next((given[name] for name in _NUM_MICROBATCHES if name in given), None)
    if number is None:
        raise ConfigError(
            f"policy {settings.parallel.policy!r} needs microbatch",
            why="a pipeline works on several microbatches of a step at a time",
            hint=f"microbatch: {max(1, share // 4)}, of the {share} samples of a unit",
        )
    return max(1, share // int(number))


def _has_schedule(settings: RunSettings) -> bool:
    """Whether the policy makes a pipeline, whose schedule is for a number of microbatches."""
    given = settings.parallel.options
    stages = next((given[name] for name in _NUM_STAGES if name in given), None)
    if stages is not None:
        return bool(stages != 1)
    return settings.parallel.policy in _PIPELINES
