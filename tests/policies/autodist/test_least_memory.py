"""A model that just fits gets a plan, and where it does not, the message says the least that there is."""

from __future__ import annotations

from typing import Any

import pytest
from plans import zoo_graph

from shardwright.compiler.cost.hardware import load_hardware
from shardwright.compiler.plan.amounts import amount
from shardwright.policies.autodist.found import Found
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.policy import search, settled
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def found_within(name: str, num_ranks: int, limit_bytes: float, use_zero: Any = 0, **options: Any) -> Found:
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_zero=use_zero, use_end2end=True)
    chosen = AutodistOptions(memory_limit_gb=limit_bytes / 1e9, time_limit_s=600.0, **options)
    return search(zoo_graph(name), config, chosen, load_hardware("a100-80gb", num_ranks))


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 2, {}),
    ("llama", 2, {"use_zero": 3}),
    ("t5", 2, {"recompute": ()}),
    ("gpt2", 4, {"num_microbatches": 4, "num_stages": 2}),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [("mlp", 2, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_the_least_that_is_said_is_enough_and_less_is_not(name: str, num_ranks: int, options: dict[str, Any]) -> None:
    nothing = found_within(name, num_ranks, 1000.0, **options)
    assert nothing.best is None
    least_bytes = nothing.least[0]
    above = found_within(name, num_ranks, 1.001 * least_bytes, **options)
    assert above.best is not None and above.best.cost is not None
    assert above.best.cost.peak_bytes <= 1.001 * least_bytes
    below = found_within(name, num_ranks, 0.95 * least_bytes, **options)
    assert below.best is None
    hardware = load_hardware("a100-80gb", num_ranks)
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True)
    with pytest.raises(PlanError) as refusal:
        settled(below, config, hardware)
    said = f"the least of what was tried is {amount(below.least[0], 'B', digits=4)} on a device ({below.least[1]})"
    assert refusal.value.why is not None and refusal.value.why.startswith(said)
    assert 0.95 * least_bytes < below.least[0] <= 1.05 * least_bytes


def test_with_more_memory_the_plan_is_faster() -> None:
    least_bytes = found_within("mlp", 2, 1000.0).least[0]
    steps = []
    for factor in (1.0001, 1.05, 1.5):
        best = found_within("mlp", 2, factor * least_bytes).best
        assert best is not None
        steps.append(best.step_s)
    assert steps == sorted(steps, reverse=True)
