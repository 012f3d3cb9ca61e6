"""Models trained under all ways to reduce gradients and to keep optimizer state, against one
device.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from verified import verify_zoo
from zero_training import OPTIMIZERS

from shardwright.frontend.verification.verify import VerifyReport
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

FACTORS: dict[str, list[Any]] = {
    "model": ["gpt2", "resnet"],
    "plan": [
        ("dp", 1, 2),
        ("dp", 1, 4),
        ("tp", 2, 4),
        ("data", 2, 4),
        ("data", 3, 3),
        ("pp", 2, 4),
        ("hybrid", 4, 8),
    ],
    "zero": [
        {},
        {"use_zero": 1},
        {"use_zero": 1, "zero_use_reduce_scatter": True},
        {"use_zero": 2},
        {"use_zero": 3},
        {"distributed_optimizer": {"overlap_param_sync": True}},
        {"distributed_optimizer": {"contiguous_param_buffer": True}, "use_zero": 0},
        {
            "distributed_optimizer": {
                "contiguous_param_buffer": True,
                "contiguous_grad_buffer": False,
            },
            "use_zero": 2,
        },
    ],
    "groups": [1, 2],
    "overlap": [False, True],
    "cap_mb": [1e-6, 3e-3, 100],
    "optimizer": list(OPTIMIZERS),
    "accumulate": [1, 4],
}
"""``plan``: policy, ranks of a unit, ranks in all. ``cap_mb``: from buckets of one parameter to one
bucket. ``accumulate``: how many samples, or microbatches, a step has.
"""

Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """All that exist."""
    found = (
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    )
    return (case for case in found if is_possible(case))


def is_possible(case: Case) -> bool:
    """Groups divide the units, and the state that stages split among them."""
    _, plan_ngpus, num_ranks = case["plan"]
    splits = bool(case["zero"].get("use_zero", "distributed_optimizer" in case["zero"]))
    return num_ranks // plan_ngpus % case["groups"] == 0 and (splits or case["groups"] == 1)


def train(case: Case) -> VerifyReport:
    """Loss, gradients, and parameters after three clipped steps."""
    policy, plan_ngpus, num_ranks = case["plan"]
    has_stages = policy in ("pp", "hybrid")
    config: dict[str, Any] = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": num_ranks,
        "zero_ngroups": case["groups"],
    }
    config |= {"use_end2end": has_stages or case["accumulate"] > 1, **case["zero"]}
    if has_stages:
        config["pas_config"] = {"num_stages": 2, "num_microbatches": case["accumulate"]}
    if "distributed_optimizer" in config:
        table = {"bucket_cap_mb": case["cap_mb"], "overlap_grad_sync": case["overlap"]}
        config["distributed_optimizer"] = {**config["distributed_optimizer"], **table}
    else:
        config |= {"reducer_bucket_cap_mb": case["cap_mb"], "use_async_reducer": case["overlap"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = clipped(case["optimizer"])
        num_samples = None if has_stages else case["accumulate"]
        return verify_zoo(
            case["model"], policy, config, optimizer=optimizer, num_samples=num_samples
        )


def clipped(optimizer: str) -> Any:
    """A factory of optimizers that clip the global norm at the beginning of their step."""

    def clip(stepper: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(stepper, ParallelOptimizer):
            stepper.clip_gnorm(0.5)
        else:
            torch.nn.utils.clip_grad_norm_(
                [p for group in stepper.param_groups for p in group["params"]], 0.5
            )

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](parameters)
        made.register_step_pre_hook(clip)
        return made

    return make
