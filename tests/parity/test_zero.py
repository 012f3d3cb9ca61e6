"""Models trained with a distributed optimizer against one device: loss, gradients, and parameters after clipped steps.

The product of plans, stages, options and optimizers by a pairwise cover; the rest of it in the slow tests.
"""

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
import zoo
from zero_training import OPTIMIZERS

from shardwright.compiler.verification.verify import verify
from shardwright.runtime.optimizer import ParallelOptimizer

FACTORS: dict[str, list[Any]] = {
    "model": ["gpt2", "resnet"],
    "plan": [
        ("dp", 1, 2, False),
        ("dp", 1, 4, True),
        ("tp", 2, 4, False),
        ("data", 2, 4, False),
        ("data", 3, 3, True),
        ("pp", 2, 4, True),
        ("hybrid", 4, 8, True),
    ],
    "zero": [
        {"use_zero": 1},
        {"use_zero": 1, "zero_use_reduce_scatter": True},
        {"use_zero": 2},
        {"distributed_optimizer": {"overlap_param_sync": True}},
        {"distributed_optimizer": {"contiguous_param_buffer": True}, "use_zero": 0},
        {"distributed_optimizer": {"contiguous_param_buffer": True, "contiguous_grad_buffer": False}, "use_zero": 2},
    ],
    "groups": [1, 2],
    "overlap": [False, True],
    "cap_mb": [1e-6, 3e-3, 100],
    "optimizer": list(OPTIMIZERS),
}
"""``plan``: policy, ranks of a unit, ranks in all, whether a step is one of ``train_step`` with several samples."""

Case = dict[str, Any]


def is_possible(case: Case) -> bool:
    _, plan_ngpus, num_ranks, _ = case["plan"]
    undivided = case["zero"].get("use_zero") == 0 and case["groups"] > 1
    return num_ranks // plan_ngpus % case["groups"] == 0 and not undivided


def pairwise() -> list[Case]:
    """Cases in which every possible pair of values of two factors occurs; the same in every process."""
    rng = random.Random(0)
    cases = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    cases = [case for case in cases if is_possible(case)]
    missing = {pair for case in cases for pair in pairs(case)}
    cover = []
    while missing:
        best = max(rng.sample(cases, 300), key=lambda case: len(missing & pairs(case)))
        if missing & pairs(best):
            cover.append(best)
            missing -= pairs(best)
    return cover


def pairs(case: Case) -> set[tuple[str, str]]:
    return set(itertools.combinations([f"{name}={value}" for name, value in case.items()], 2))


def clipped(optimizer: str) -> Any:
    """A factory of optimizers that clip the global norm at the beginning of their step."""

    def clip(stepper: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(stepper, ParallelOptimizer):
            stepper.clip_gnorm(0.5)
        else:
            torch.nn.utils.clip_grad_norm_([p for group in stepper.param_groups for p in group["params"]], 0.5)

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](parameters)
        made.register_step_pre_hook(clip)
        return made

    return make


def check(case: Case) -> None:
    policy, plan_ngpus, num_ranks, end2end = case["plan"]
    config: dict[str, Any] = {"plan_ngpus": plan_ngpus, "runtime_ngpus": num_ranks, "use_end2end": end2end, **case["zero"]}
    if "distributed_optimizer" in config:
        table = {"bucket_cap_mb": case["cap_mb"], "overlap_grad_sync": case["overlap"]}
        config["distributed_optimizer"] = {**config["distributed_optimizer"], **table}
    else:
        config |= {"reducer_bucket_cap_mb": case["cap_mb"], "use_async_reducer": case["overlap"]}
    config["zero_ngroups"] = case["groups"]
    entry = zoo.get(case["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(entry.build(), entry.inputs(), policy, config, optimizer=clipped(case["optimizer"]))
    assert report.ok, f"{case}\n{report}"


COVER = pairwise()


@pytest.mark.parametrize("index", range(len(COVER)))
def test_models(index: int) -> None:
    check(COVER[index])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_models_at_random(seed: int) -> None:
    """The whole product has some five thousand cases; another forty of them for each seed."""
    rng = random.Random(seed)
    for _ in range(40):
        case = {name: rng.choice(values) for name, values in FACTORS.items()}
        if is_possible(case):
            check(case)
