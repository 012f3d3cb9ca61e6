"""Every policy by name computes modules again and runs operators in pieces, where it is told to."""

from __future__ import annotations

from typing import Any

import plans
import pytest
from expert_models import verify_experts

from shardwright.compiler.plan.program import Compute
from shardwright.policies.memory_options import MemoryOptions
from shardwright.runtime.errors import PlanError

SAVING = {"recompute": ["model.layers.*"], "loss_pieces": 3}


@pytest.mark.parametrize(
    ("policy", "num_ranks", "options"),
    [
        ("dp", 1, {}),
        ("data", 2, {}),
        ("tp", 2, {"sequence_parallel": True}),
        ("cp", 2, {"cp_mode": "ring"}),
        ("tensor", 4, {"mode": "2d"}),
    ],
)
def test_layers_are_computed_again(policy: str, num_ranks: int, options: dict[str, Any]) -> None:
    traced = plans.zoo_traced("llama")
    compiled = plans.compile_with(traced, policy, num_ranks, pas_config={**options, **SAVING})
    steps = [step for step in compiled.program.body if isinstance(step, Compute)]
    layers = {step.op.region for step in steps if step.op.module_path.startswith("model.layers.")}
    assert layers == {"recompute_model_layers_0", "recompute_model_layers_1"}
    assert compiled.plan.loops["loss"].count == 3


def test_pipelines_have_the_same_options() -> None:
    for policy in ("pp", "hybrid", "tensor"):
        assert issubclass(plans.find_policy(policy).options, MemoryOptions)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(PlanError) as caught:
        plans.compile_with(
            plans.zoo_traced("llama"), "cp", 2, pas_config={"recompute": ["model.layer.*"]}
        )
    assert str(caught.value) == (
        "recompute names 'model.layer.*', but no operator belongs to such a module\n"
        "  try:   give module paths as in named_modules(), with * for any one name: "
        "'model.layers.*'"
    )


def test_experts_are_computed_again() -> None:
    """Tokens travel to them a second time."""
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "pas_config": SAVING}
    report = verify_experts("qwen3_moe", "ep", config)
    assert report.ok, str(report)
