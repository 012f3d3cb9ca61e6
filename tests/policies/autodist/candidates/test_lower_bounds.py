"""What no plan takes less than: by hand, below everything that can be made, and stated where a
search had no time.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import planning
import plans
import pytest
import torch
from covers import spread
from torch import nn

from shardwright.compiler.cost.machine.device import Tiling
from shardwright.compiler.cost.machine.efficiency import EfficiencyTable
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Batch, Plan, StagePlan
from shardwright.compiler.plan.plan_file import check_plan_file
from shardwright.frontend.cli.searches import candidate_rows
from shardwright.policies.autodist.autodist_policy import search, search_each, settled
from shardwright.policies.autodist.candidates.lower_bounds import ARITHMETIC, arithmetic_bound_s
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.results import NotCompared, SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.search.simple_policies import NO_BOUND
from shardwright.policies.autodist.search.subsearches import Subsearches
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.relu(self.up(x))
        return {"loss": self.down(y).sum(), "other": y @ y.T}


def config_of(num_ranks: int, **fields: object) -> ComputeConfig:
    return ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, **fields)


PRODUCT = 2 * 8 * 32 * 64
"""Operations of either layer for eight rows."""


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        ({"outputs": "loss"}, 5),  # the gradient of the input is not needed
        ({"outputs": "loss", "inference_only": True}, 2),
        (
            {"outputs": "all"},
            5 + 3 * 8 / 32,
        ),  # and [8, 64] x [64, 8], forward and for both of its factors
    ],
)
def test_by_hand(fields, products):
    graph = planning.graph_of(Two(), {"x": torch.ones(8, 32)})
    device = load_hardware("a100-80gb", 4).device
    rate = device.flops_per_s["float32"] * device.matmul_efficiency
    found = arithmetic_bound_s(graph, config_of(4, **fields), device, 3)
    assert found == pytest.approx(3 * products * PRODUCT / rate / 4)


def test_the_best_rate_of_a_device():
    graph, config = planning.graph_of(Two(), {"x": torch.ones(8, 32)}), config_of(1, outputs="loss")
    plain = replace(load_hardware("a100-80gb", 1).device, matmul_efficiency=1.0, tiles=None)
    ideal = arithmetic_bound_s(graph, config, plain, 1)
    tables = {"float32": EfficiencyTable((8, 64), (64,), (32,), (0.25, 0.5))}
    assert arithmetic_bound_s(
        graph, config, replace(plain, matmul_efficiency=tables), 1
    ) == pytest.approx(2 * ideal)
    tiles = Tiling(4, ((64, 64, 0.5), (128, 128, 0.8)))
    assert arithmetic_bound_s(
        graph, config, replace(plain, matmul_efficiency=0.5, tiles=tiles), 1
    ) == pytest.approx(ideal / 0.4)
    assert (
        arithmetic_bound_s(graph, config, plain, 1, OperatorTimes({"linear": OpTime(1.0, 1.0)}))
        == 0.0
    )


def only_arithmetic(preset: str, num_devices: int) -> Hardware:
    """A machine on which nothing else takes time."""
    found = load_hardware(preset, num_devices)
    device = replace(
        found.device,
        bytes_per_s=1e18,
        streams=None,
        rates={},
        fetch_bytes_per_s=None,
        launch_s=0.0,
        host_s=(0.0, 0.0),
    )
    tiers = tuple(
        replace(
            tier,
            latency_s=0.0,
            bytes_per_s=1e18,
            kinds={},
            uplink_bytes_per_s=None,
            fabric_bytes_per_s=None,
        )
        for tier in found.tiers
    )
    return replace(found, device=device, tiers=tiers)


@pytest.mark.parametrize("name", spread(["gpt2", "llama-uneven", "resnet"], 2))
@pytest.mark.parametrize("preset", ["a100-80gb", "cpu"])
def test_no_random_plan_is_below(name, preset):
    graph, rng = plans.zoo_graph(name), random.Random(name)
    for sizes in ({"a": 2}, {"a": 2, "b": 2}, {"a": 3}):
        mesh = Mesh.of(sizes)
        hardware, config = only_arithmetic(preset, mesh.size), config_of(mesh.size)
        least = arithmetic_bound_s(graph, config, hardware.device, 1)
        assert least > 0
        for _ in range(3):
            plan, wanted = (
                plans.random_plan(graph, mesh, rng),
                planning.request(graph, mesh, hardware),
            )
            assert planning.audited_s(graph, plan, wanted) >= least


@pytest.mark.parametrize("policy", spread(["tp", "data", "pp", "hybrid"], 2, first=1))
def test_no_plan_of_a_policy_is_below(policy):
    graph = plans.zoo_graph("gpt2")
    pipeline = (
        {"use_end2end": True, "pas_config": {"pipeline_nmicros": 4}}
        if policy in ("pp", "hybrid")
        else {}
    )
    config, hardware = config_of(4, outputs="loss", **pipeline), only_arithmetic("a100-80gb", 4)
    applied, count = find_policy(policy).apply(graph, config), 4 if pipeline else 1
    plan = applied if isinstance(applied, Plan) else applied.plan
    assert plan is not None
    cost = Auditor(graph, config, hardware, count, ADAM, None)(plan)
    assert 0 < arithmetic_bound_s(graph, config, hardware.device, count) <= cost.step_s


def test_what_is_said_of_a_plan_on_a_mesh_that_was_not_searched():
    """Such is a search that ends with the plan of a simple policy, before anything was placed on
    its mesh.
    """
    graph, config, hardware = plans.zoo_graph("mlp"), config_of(2), planning.slow_machine(2)
    found = search(graph, config, AutodistOptions(), hardware)
    least = arithmetic_bound_s(graph, config, hardware.device, 1)
    assert found.best is not None and found.arithmetic_bound_s == least > 0
    searched = settled(found, config, hardware).certificate
    assert searched is not None and searched.bound_s > least
    assert searched.covers == "any plan on one mesh, without pipelines"
    sizes = {"pas_config": {"unit_sizes": (1, 2)}}
    for changed, words in (
        ({}, " in units of 2 ranks, without ZeRO and without pipelines"),
        ({"use_zero": 1}, " in units of 2 ranks, with ZeRO-1 and without pipelines"),
        ({"use_zero": "auto"}, " in units of 2 ranks, without pipelines"),
        (sizes, ", without ZeRO and without pipelines"),
        ({**sizes, "use_zero": "auto"}, ", without pipelines"),
    ):
        of_units = replace(config, runtime_ngpus=4, **changed)
        units = settled(found, of_units, hardware).certificate
        assert units is not None and units.covers == f"any plan on one mesh{words}"
    assert f"no plan at all takes less than {amount(least, 's')}, {ARITHMETIC}" in searched.proof

    unplaced = replace(
        found.best, placed=(PlacedModel(found.best.plan, 0.0, NO_BOUND, ""),), is_simple=True
    )
    ended = SearchResult(
        audited=[unplaced],
        interrupted="the time limit of 1 s",
        num_left=3,
        not_compared=[NotCompared("x=4")],
        arithmetic_bound_s=least,
    )
    stated = settled(ended, config, hardware).certificate
    assert stated is not None and stated.bound_s == least
    assert stated.proof == (
        ARITHMETIC,
        "the search was ended by the time limit of 1 s",
        "the simple policies may have a better plan: there was no time to compare it with "
        "those on 4 ranks; none of their plans was compared",
    )
    assert stated.covers == "any plan at all on so many ranks"
    cost, bound = (amount(seconds, "s", digits=6) for seconds in (stated.cost_s, least))
    assert stated.claim == (
        f"{cost} per step on {hardware.name}: {found.best.title}. It is a plan by the fixed rules "
        "of a policy, and the only one that the search looked at until it was ended by the "
        f"time limit of 1 s. Others may be faster; none takes less than {bound}, the arithmetic of "
        f"the model alone (gap {stated.gap:.2%})"
    )
    written = json.loads(settled(ended, config, hardware).dumps())
    check_plan_file(written)
    assert Plan.from_json(written).certificate == stated
    ended.others = [replace(unplaced, title="x=4", cost=None, predicted_s=9.0)]
    several = settled(ended, config, hardware).certificate
    assert several is not None
    assert "the best of the 2 that the search looked at until" in several.claim
    ended.others = []
    assert stated.found[0].endswith(f", at least {amount(least, 's', digits=6)}")
    assert candidate_rows(ended)[0][2] == amount(least, "s")

    # Beside a plan with a bound of its own it takes nothing away from that bound.
    beside = replace(unplaced, title="x=4, as a simple policy has it", cost=None, predicted_s=9.0)
    ended.audited = [found.best, beside]
    stated = settled(ended, config, hardware).certificate
    assert stated is not None and stated.bound_s == found.best.bound_s > least
    assert (
        stated.covers == "any plan on the one mesh that the search came to, without pipelines, but "
        "not on 3 other meshes"
    )
    assert f"no plan at all takes less than {amount(least, 's')}, {ARITHMETIC}" in stated.proof
    # Nor does a pipeline: it is not in that bound either.
    stages = tuple(StagePlan(str(rank), Mesh(()), (rank,)) for rank in range(2))
    pipeline = replace(beside.plan, mesh=Mesh((("pp", 2),)), stages=stages, schedule="1f1b")
    unbounded = replace(beside, title="pp=2, as pp has it", plan=pipeline, split_bound_s=0.0)
    ended.audited = [found.best, unbounded]
    again = settled(ended, config, hardware).certificate
    assert again is not None and again.covers == stated.covers


def test_several_searches_have_the_least_of_their_floors():
    """Searches are of microbatches of one and of two samples: the products of a step are the same,
    and so is what they take at best.
    """
    graphs = {size: planning.graph_of(Two(), {"x": torch.ones(size, 32)}) for size in (1, 2)}
    config, hardware = config_of(1, outputs="loss"), load_hardware("a100-80gb", 1)
    listed = Subsearches.of(
        {Batch(size, 4 // size, {"x": 0}): graph for size, graph in graphs.items()}, config, None
    )
    found = search_each(listed, AutodistOptions(), hardware)
    floors = [
        arithmetic_bound_s(graph, config, hardware.device, 4 // size)
        for size, graph in graphs.items()
    ]
    assert found.arithmetic_bound_s == min(floors) > 0
