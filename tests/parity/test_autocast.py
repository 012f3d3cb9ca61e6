"""Training under autocast: no farther from float64 than twice what the module itself is on one device."""

from pathlib import Path
from typing import Any

import pytest
from half_precision import compared

from shardwright.runtime.config import ComputeConfig

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2}),
    ("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("data", {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 2}),
    ("pp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
]


@pytest.mark.parametrize(("policy", "options"), PLANS, ids=[policy for policy, _ in PLANS])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_errors_are_at_most_twice_those_of_one_device(tmp_path: Path, name: str, policy: str, options: dict[str, Any]) -> None:
    ours, eager = compared(name, policy, ComputeConfig(use_end2end=True, **options), tmp_path)
    assert eager["gradients"] > 1e-4, "nothing was computed in bfloat16"
    worse = {key: (error, eager[key]) for key, error in ours.items() if not error <= 2 * eager[key]}
    assert not worse, "\n".join(f"{key}: {error:.2e}, on one device {alone:.2e}" for key, (error, alone) in worse.items())
