"""Where ``pp`` and ``hybrid`` begin stages."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from planning import slow_machine
from torch import Tensor, nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies import partition
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.stages import kept
from shardwright.policies.known_policies import find_policy
from shardwright.policies.stage_places import cut_traffic
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError

NUM_MICROBATCHES = 4


class Layer(nn.Module):
    """Six operators and more, so that it counts as a repeated layer. ``fast``: the cheap half of it
    comes first.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * 0.5


class Layers(nn.Module):
    """``num_layers`` repeated layers, and a head that is ``head`` times as wide."""

    def __init__(self, num_layers: int, head: int = 1, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(num_layers))
        self.head = nn.Linear(size, head * size)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def graph_of(module: nn.Module, size: int = 32) -> PlannableGraph:
    return plans.annotated(plans.traced(module, {"x": torch.randn(16, size)}))


def planned(graph: PlannableGraph, num_ranks: int, policy: str = "pp", **options: Any) -> Plan:
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True, pas_config=options
    )
    made = find_policy(policy).apply(graph, config)
    assert isinstance(made, Plan)
    return made


def machine(folder: Path, num_devices: int, bytes_per_s: float = 1e9) -> str:
    """A hardware file of slow devices, on which stages of tiny models differ, with links of any
    rate.
    """
    path = folder / f"slow-{bytes_per_s:g}.json"
    path.write_text(slow_machine(num_devices, bytes_per_s=bytes_per_s).dumps())
    return str(path)


def layers_of(graph: IRGraph) -> list[str]:
    """The layer of each operator."""
    return [
        ".".join(op.module_path.split(".")[:2]) if "layers." in op.module_path else ""
        for op in graph.ops
    ]


def stages_inside(graph: IRGraph, plan: Plan) -> list[str]:
    """The layers that a stage begins inside of."""
    layers, places = layers_of(graph), {op.name: index for index, op in enumerate(graph.ops)}
    starts = [places[stage.first_op] for stage in plan.stages[1:]]
    return [
        layers[start] for start in starts if layers[start] and layers[start] == layers[start - 1]
    ]


def test_stages_begin_between_layers_where_that_is_about_as_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of half a layer: 12 layers on each of two ranks leave one of them 2 % more than cuts
    inside a layer do.
    """
    graph, hardware = graph_of(Layers(24, head=4)), machine(tmp_path, 2)
    plan = planned(graph, 2, hardware=hardware, num_microbatches=4 * NUM_MICROBATCHES)
    assert not stages_inside(graph, plan)
    monkeypatch.setattr(partition, "CLEARLY", 0.0)
    assert stages_inside(
        graph, planned(graph, 2, hardware=hardware, num_microbatches=4 * NUM_MICROBATCHES)
    )


def test_a_stage_begins_inside_a_layer_where_that_is_clearly_faster(tmp_path: Path) -> None:
    """Three layers on two ranks. A cut at a layer leaves one rank two thirds of the work."""
    graph, hardware, count = (
        graph_of(Layers(3)),
        slow_machine(2, bytes_per_s=1e9),
        4 * NUM_MICROBATCHES,
    )
    plan = planned(graph, 2, hardware=machine(tmp_path, 2), num_microbatches=count)
    assert stages_inside(graph, plan) == ["layers.1"]
    audited = Auditor(
        graph, ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True), hardware, count
    )
    at_layers = (
        planned(graph, 2, stage_starts=[f"layers.{i}"], num_microbatches=count) for i in (1, 2)
    )
    assert audited(plan).step_s < 0.97 * min(audited(other).step_s for other in at_layers)


@pytest.mark.parametrize("bytes_per_s", [1e9, 100.0])
def test_a_slow_link_is_part_of_the_price(tmp_path: Path, bytes_per_s: float) -> None:
    """What passes between ``up`` and ``down`` is 16 times as wide as elsewhere: over a fast link
    that is worth it.
    """

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.down(self.up(self.first(x)))).square().mean()

    graph = graph_of(Wide())
    plan = planned(
        graph, 2, hardware=machine(tmp_path, 2, bytes_per_s), num_microbatches=4 * NUM_MICROBATCHES
    )
    is_wide = plan.stages[1].first_op == "down"
    assert is_wide == (bytes_per_s > 1e6), plan.stages[1].first_op


def test_modules_that_are_computed_again_stay_whole(tmp_path: Path) -> None:
    graph = graph_of(Layers(3))
    options = {"hardware": machine(tmp_path, 2), "num_microbatches": 4 * NUM_MICROBATCHES}
    assert stages_inside(graph, planned(graph, 2, **options))
    plan = planned(graph, 2, **options, recompute=["layers.*"])
    assert not stages_inside(graph, plan)


def test_positions_written_by_hand_may_run_any_number_of_stages() -> None:
    actions = ["0F0 2F0 2B0 0B0", "1F0 1B0"]
    assert len(planned(graph_of(Layers(3)), 2, actions=actions).stages) == 3


def test_too_few_places_to_cut() -> None:
    with pytest.raises(PlanError) as error:
        planned(graph_of(Layers(0)), 8)
    assert str(error.value) == (
        "the graph cannot be cut into 8 stages\n  why:   it has 2 places where a stage may "
        "begin\n  try:   ask for fewer stages"
    )


def test_unknown_hardware() -> None:
    with pytest.raises(ConfigError, match="there is no hardware 'h1000'"):
        planned(graph_of(Layers(2)), 2, hardware="h1000")


@pytest.mark.parametrize("policy", ["pp", "hybrid"])
def test_another_hardware_file_is_another_request(tmp_path: Path, policy: str) -> None:
    path = Path(machine(tmp_path, 2))
    path.with_suffix(".operators.json").write_text(json.dumps({"format": 1, "operators": {}}))
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config={"hardware": str(path)}
    )
    files = find_policy(policy).files
    assert list(files(config)) == [path, path.with_suffix(".operators.json")]
    assert not files(replace(config, pas_config={"hardware": "h100"}))


def test_gradients_go_back_over_a_cut_behind_the_first_parameter_only() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    graph = plans.annotated(plans.traced(model, {"input": torch.randn(2, 4)}))
    assert [op.target for op in graph.ops] == ["tanh", "linear", "tanh"]
    assert cut_traffic(graph, set())[1:] == [8.0, 16.0]


class Average(nn.Module):
    """Reads an average at the beginning that it updates later. Evaluation reads it at the end,
    too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.steps[0](x)) - self.mean
        x = torch.tanh(self.steps[1](x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = torch.tanh(self.steps[2](x))
        return F.mse_loss(
            self.steps[3](x) if self.training else self.steps[3](x) + self.mean, torch.zeros_like(x)
        )


def test_no_stage_begins_between_the_uses_of_a_buffer_that_changes() -> None:
    graph = plans.annotated(plans.traced(Average(), {"x": torch.randn(2, 4)}))
    traffic = cut_traffic(graph, set())
    uses = [
        index
        for index, op in enumerate(graph.ops)
        if any(value.name == "mean" for value in op.operands)
    ]
    ends = [
        index
        for index, op in enumerate(graph.ops)
        if any(v.name == graph.buffer_updates[0][1].name for v in op.results)
    ]
    assert len(uses) == 2 and len(ends) == 1
    blocked = [index for index, elements in enumerate(traffic) if elements == float("inf")]
    assert blocked[0] == uses[0] + 1 and blocked[-1] >= ends[0]
    assert all(b - a == 1 for a, b in itertools.pairwise(blocked))
    assert traffic[-1] != float("inf")


def test_cutting_a_pipeline_does_not_ask_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pp`` cuts by time alone: no operator is run to see what its backward keeps."""

    def refused(*_: Any) -> None:
        raise AssertionError("asked what an operator keeps")

    monkeypatch.setattr(kept, "saved_for_backward", refused)
    assert len(planned(graph_of(Layers(4)), 2).stages) == 2
