"""What is said of simple plans on every mesh from the program of one."""

from __future__ import annotations

import plans
import pytest
import torch
import zoo
from planning import slow_machine

from shardwright.policies.autodist.candidates.meshes import divisors, meshes
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.search.simple_plans import simple_plans
from shardwright.policies.autodist.search.step_estimates import StepEstimates
from shardwright.policies.autodist.stages.walk import Setting
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

NUM_MICROBATCHES = 4
CONFIG = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss")


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_without_a_pipeline_it_is_what_the_best_plan_takes(model: str) -> None:
    """Nearly: where splits differ by size, or adapters may be saved, it is not."""
    graph, hardware = plans.zoo_graph(model), slow_machine(4, bytes_per_s=1e9)
    estimates, audited = (
        StepEstimates(graph, CONFIG),
        Auditor(graph, CONFIG, hardware, NUM_MICROBATCHES),
    )
    space = SearchSpace(meshes={}, num_microbatches=NUM_MICROBATCHES)
    for mesh in meshes(4):
        setting = Setting(hardware, CONFIG, tuple(range(4)), num_microbatches=NUM_MICROBATCHES)
        found = filter(
            None, simple_plans(graph, mesh, [NamedSchedule("", 1)], 1, 0, space, setting)
        )
        best_s = min(audited(simple.plan).step_s for simple in found)
        assert estimates.step_s(mesh, 1, 0, setting) == pytest.approx(best_s, rel=0.02), mesh


def test_meshes_in_zigzag_have_estimates_of_their_own() -> None:
    """Also where one row of tokens has no batch to split."""
    tokens = torch.zeros(1, 64, dtype=torch.long)
    model = plans.traced(zoo.get("gpt2").build(), {"input_ids": tokens, "labels": tokens})
    graph, hardware = plans.annotated(model), slow_machine(4, bytes_per_s=1e9)
    with pytest.raises(PlanError, match="no batch"):
        StepEstimates(graph, CONFIG)
    estimates = StepEstimates(graph, CONFIG, in_zigzag=True)
    auditor = Auditor(graph, CONFIG, hardware, NUM_MICROBATCHES)
    space = SearchSpace(meshes={}, num_microbatches=NUM_MICROBATCHES)
    for mesh in (
        Mesh((("x", 4),), (("x", 1),)),
        Mesh((("x", 2), ("y", 2)), (("x", 1),)),
        Mesh((("x", 2), ("y", 2)), (("y", 1),)),
    ):
        setting = Setting(hardware, CONFIG, tuple(range(4)), num_microbatches=NUM_MICROBATCHES)
        found = filter(
            None, simple_plans(graph, mesh, [NamedSchedule("", 1)], 1, 0, space, setting)
        )
        seconds = [
            auditor(simple.plan).step_s for simple in found if simple.whose.startswith("cp (ring)")
        ]
        assert estimates.step_s(mesh, 1, 0, setting) == pytest.approx(min(seconds), rel=0.05), mesh


def test_positions_share_the_work_and_what_no_policy_has_is_infinite() -> None:
    graph, hardware = plans.zoo_graph("mlp"), slow_machine(4, bytes_per_s=1e9)
    estimates, setting = (
        StepEstimates(graph, CONFIG),
        Setting(hardware, CONFIG, (), num_microbatches=NUM_MICROBATCHES),
    )
    alone = estimates.step_s(
        Mesh(()), 1, 0, Setting(hardware, CONFIG, (0,), num_microbatches=NUM_MICROBATCHES)
    )
    for number in divisors(4):
        assert estimates.step_s(Mesh(()), number, 0, setting) <= alone / number * (1 + 1e-9)
    assert estimates.step_s(Mesh((("x", 2), ("y", 2), ("z", 2))), 1, 0, setting) == float("inf")
