"""Sequences split inside attention: chosen where it pays, called by its name, explained, and
trained like one device.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plans
import pytest
import torch
import torch.nn.functional as F
from planning import slow_machine
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import (
    NOTHING_BINDS,
    Request,
    explain_operator,
    factor_dims,
)
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

INPUTS = {"x": torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(0)).double()}


class Long(nn.Module):
    """Attention with few heads over many positions."""

    def __init__(self, is_causal: bool = False, heads: int = 3, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.is_causal = heads, is_causal
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query, key, value = (
            t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.mixed(x).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal and self.training
        )
        return self.out(attended.transpose(1, 2).reshape(batch, seq, -1)).square().mean()


def graph(is_causal: bool) -> PlannableGraph:
    return plans.annotated(plans.traced(Long(is_causal).double(), INPUTS))


def config_of(num_ranks: int, **options: object) -> ComputeConfig:
    return ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, pas_config=options)


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_sequence_is_split_where_that_is_fastest(is_causal: bool) -> None:
    """Batch and heads do not divide by 4; every rank takes its queries, and keys go round."""
    model, options = graph(is_causal), AutodistOptions(max_axes=1)
    best = search(model, config_of(4), options, slow_machine(4)).best
    assert best is not None and best.title == "sp=4"
    request = Request(model, config_of(4), options, slow_machine(4), best)
    (attention,) = [op.name for op in model.ops if op.target == "scaled_dot_product_attention"]
    assert factor_dims(model, attention)["q"] == "seq"
    told = explain_operator(request, attention)
    assert [choice.name for choice in told.choices if choice.chosen] == ["sp=exchange:k>q"]
    assert min(choice.step_s for choice in told.choices if not choice.chosen) > best.step_s
    assert told.binds == NOTHING_BINDS


def test_a_ring_hides_as_much_as_the_machine_lets_it() -> None:
    """Half of what is hidden on a machine that hides all is hidden by one that hides half."""
    config = config_of(4, cp_mode="ring")
    compiled = compile_graph(graph(False), find_policy("cp").apply, config, policy_name="cp")
    machine = slow_machine(4)

    def step_s(overlap: float) -> float:
        device = replace(machine.device, overlap=overlap)
        return audit(
            compiled.program, config, replace(machine, device=device), gathers_ahead=False
        ).step_s

    all_hidden, half, none = (step_s(overlap) for overlap in (1.0, 0.5, 0.0))
    assert all_hidden < none and half == pytest.approx((all_hidden + none) / 2)


@pytest.mark.slow
def test_zigzag_is_tried_where_attention_is_causal_and_may_be_forbidden() -> None:
    """No plan of ``cp`` is faster, and the next program of the module may not be in zigzag."""
    model = plans.annotated(plans.traced(Long(is_causal=True), {"x": torch.randn(2, 512, 12)}))
    slow = slow_machine(4)
    slow = replace(slow, device=replace(slow.device, tiles=None))
    config, found = config_of(4), []
    for zigzag in (True, False):
        best = search(model, config, AutodistOptions(max_axes=1, zigzag=zigzag), slow).best
        assert best is not None
        found.append(best)
    assert [best.plan.mesh.turns for best in found] == [(("sp", 1),), ()]
    assert found[0].step_s < found[1].step_s
    by_hand = compile_graph(model, find_policy("cp").apply, config_of(4, cp_mode="ring"))
    assert found[0].step_s <= audit(by_hand.program, config, slow, gathers_ahead=False).step_s * (
        1 + 1e-9
    )
    with pytest.raises(PlanError, match="beside one that deals positions in zigzag"):
        find_policy("autodist").following(config, found[0].plan, {})


class Words(nn.Module):
    """Causal attention, and many more words than positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Long(is_causal=True), nn.Linear(12, 4096)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x + self.attention.mixed(x)[..., :12])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + self.attention(x)


@pytest.mark.slow
def test_zigzag_has_its_loss_in_pieces_where_memory_binds() -> None:
    """The plan of a simple policy does not fit as it is, and is the fastest with the loss in
    pieces. What it needs without is said.
    """
    inputs = {"x": torch.randn(2, 512, 12), "labels": torch.randint(4096, (2, 512))}
    model, slow = plans.annotated(plans.traced(Words(), inputs)), slow_machine(4)
    slow = replace(slow, device=replace(slow.device, tiles=None))
    options = AutodistOptions(degrees={"sp": 4}, memory_limit_gb=0.004)
    best = search(model, config_of(4, memory_limit_gb=0.004), options, slow).best
    assert best is not None and best.cost is not None
    assert best.title == "sp=4 zigzag, as cp (ring) has it, loss in 16 pieces"
    assert best.plan.mesh.turns == (("sp", 1),) and set(best.plan.loops) == {"loss"}
    assert best.cost.peak_bytes <= 0.004e9
    assert any("pieces: whole, the plan needs" in note.reason for note in best.plan.notes)


class Layer(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(12), nn.Linear(12, 36)
        self.mlp = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12))

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.view(2, 512, 3, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(2, 512, 12)
        return x + self.mlp(x)


class Layers(nn.Module):
    """Such layers, and the mean square of what they make."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_zigzag_computes_as_much_again_as_memory_asks_for() -> None:
    """Less than all layers, each whole or without its attention, and so in less time."""
    model, inputs = Layers(4), {"x": torch.randn(2, 512, 12)}
    traced, slow = plans.annotated(plans.traced(model, inputs)), slow_machine(4)
    slow = replace(slow, device=replace(slow.device, tiles=None))
    found = {}
    for memory_gb in (1.0, 0.0006):
        options = AutodistOptions(degrees={"sp": 4}, memory_limit_gb=memory_gb)
        best = search(traced, config_of(4, memory_limit_gb=memory_gb), options, slow).best
        assert best is not None and best.cost is not None
        assert best.plan.mesh.turns == (("sp", 1),)
        assert best.cost.peak_bytes <= memory_gb * 1e9
        found[memory_gb] = best
    assert not found[1.0].plan.recompute
    assert found[1.0].cost is not None and found[1.0].cost.peak_bytes > 0.0006e9
    mixed = found[0.0006]
    assert mixed.plan.recompute and "layers.*" not in mixed.plan.recompute
    auditor = Auditor(traced, config_of(4), slow, 1)
    every = auditor(replace(mixed.plan, recompute=("layers.*",)))
    assert found[1.0].step_s < mixed.step_s < every.step_s


@pytest.mark.parametrize(
    ("num_ranks", "is_causal"),
    [
        (2, True),
        *(
            pytest.param(n, c, marks=pytest.mark.slow)
            for n, c in ((2, False), (4, False), (4, True))
        ),
    ],
)
def test_it_trains_like_one_device(num_ranks: int, is_causal: bool, tmp_path: Path) -> None:
    (tmp_path / "slow.json").write_text(slow_machine(num_ranks).dumps())
    options = {"hardware": str(tmp_path / "slow.json"), "save_plan": str(tmp_path / "plan.json")}
    config = config_of(num_ranks, degrees={"sp": num_ranks}, **options)
    report = verify(Long(is_causal), INPUTS, "autodist", config, steps=2)
    assert report.ok, str(report)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {"sp": "exchange:k>q"} in plan["strategies"].values()


def test_attention_that_is_causal_in_training_is_not_in_evaluation(tmp_path: Path) -> None:
    (tmp_path / "slow.json").write_text(slow_machine(2).dumps())
    config = config_of(2, degrees={"sp": 2}, hardware=str(tmp_path / "slow.json"))
    report = verify(Long(is_causal=True).eval(), INPUTS, "autodist", config, steps=1)
    assert report.ok, str(report)
