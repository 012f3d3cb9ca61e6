"""Partial sums that ``tp`` passes on: experts' results are weighted and summed, branches are added,
and then all-reduced once.

Counted while a step runs, and against the same plan with every sum reduced at once. Elements are
those of the whole tensor a collective works on; B batch, S sequence, H hidden, L layers, K chosen
experts of a token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.ir.graph import IRGraph

B, S, H, L, K = 4, 8, 16, 2, 2
ACTIVATION = B * S * H
LOSS = 3 * B * S
"""What a loss over a split vocabulary sends: maximum, sum of exponentials, the target's logit of
each token.
"""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": K, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": K}


@dataclass(frozen=True)
class Model:
    """A model of transformers, and what each layer all-reduces in units of [B, S, H]: forward with
    every sum reduced at once and with sums deferred, and backward. ``routing``: the elements that
    it sends of the routing weights' gradients; 0 where the gradient of the router is reduced in
    their place, with those of the other parameters.
    """

    name: str
    at_once: int
    deferred: int
    backward: int
    sizes: dict[str, Any]
    routing: int = 0


MODELS = {
    "mixtral": Model("Mixtral", 1 + K, 2, 2, LOCAL_EXPERTS),
    "qwen3-moe": Model("Qwen3Moe", 1 + K, 2, 2, {**EXPERTS, "head_dim": 4}),
    "gpt-oss": Model(
        "GptOss", 1 + K, 2, 2, {**LOCAL_EXPERTS, "head_dim": 4, "rope_scaling": None}, B * S * K
    ),
    "shared expert": Model(
        "Qwen2Moe", 2 + K, 2, 2, {**EXPERTS, "shared_expert_intermediate_size": 24}
    ),
    "parallel branches": Model("Cohere", 2, 1, 1, {}),
}


@functools.cache
def prepared(name: str) -> tuple[nn.Module, dict[str, Any], IRGraph, Any]:
    found = MODELS[name]
    make = zoo.hf(f"{found.name}ForCausalLM", f"{found.name}Config", **zoo.LLAMA, **found.sizes)
    entry = zoo.ZooModel(name, make, zoo.causal_lm(32))
    model, inputs = entry.build(), entry.inputs(batch=B, seq=S)
    return model, inputs, plans.traced(model, inputs), plans.reference_run(model, [inputs], steps=1)


def reduced_at_once(graph: IRGraph, compiled: Compiled) -> Compiled:
    """The plan without sums passed on."""
    strategies = {
        op: {
            axis: "R" if strategy.startswith("linear:") else strategy
            for axis, strategy in found.items()
        }
        for op, found in compiled.plan.strategies.items()
    }
    plan = replace(compiled.plan, strategies=strategies)
    return plans.compile_with(graph, lambda *_: plan, plan.mesh.size, outputs="loss")


def sent(outcome: plans.Outcome, phase: str) -> int:
    assert all(traffic == outcome.traffic[0] for traffic in outcome.traffic), (
        "ranks send different amounts"
    )
    return sum(volume.elements for key, volume in outcome.traffic[0].items() if key.phase == phase)


@pytest.mark.parametrize("name", spread(MODELS, 2))
def test_sums_are_deferred_until_they_are_small(name: str, tmp_path: Path) -> None:
    """Besides what layers send: the embedding forward, the head backward, the loss."""
    found, (model, inputs, graph, reference) = MODELS[name], prepared(name)
    deferred = plans.compile_with(graph, "tp", 2, outputs="loss")
    now = plans.check(model, inputs, deferred, tmp_path / "deferred", reference)
    before = plans.check(
        model, inputs, reduced_at_once(graph, deferred), tmp_path / "at once", reference
    )
    assert sent(before, "forward") == (1 + L * found.at_once) * ACTIVATION + LOSS
    assert sent(now, "forward") == (1 + L * found.deferred) * ACTIVATION + LOSS
    for outcome in (now, before):
        assert (
            sent(outcome, "backward") == (1 + L * found.backward) * ACTIVATION + L * found.routing
        )


@pytest.mark.parametrize("name", spread(MODELS, 2))
def test_three_ranks_have_pieces_of_different_size(name: str, tmp_path: Path) -> None:
    model, inputs, graph, reference = prepared(name)
    compiled = plans.compile_with(graph, "tp", 3, outputs="loss")
    assert passed_on(compiled)
    plans.check(model, inputs, compiled, tmp_path, reference)


def passed_on(compiled: Compiled) -> set[str]:
    """The operators that pass a partial sum on."""
    return {
        op
        for op, found in compiled.plan.strategies.items()
        if any(s.startswith("linear:") for s in found.values())
    }


class Residual(nn.Module):
    """A branch that is scaled and added to what is whole on every rank; then pairs are summed, and
    some are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        branch = self.down(torch.relu(self.up(x))) * torch.sigmoid(self.gate(x))
        both = (x.tanh() + 0.5 * branch).transpose(0, 1)  # [S, B, H]
        pairs = both.unflatten(0, (-1, 2)).sum(1)[:, :2]  # [S/2, 2, H]
        return torch.tanh(pairs).square().mean()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_whole_is_added_to_a_partial_sum_once(num_ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 8, 6, dtype=torch.float64, requires_grad=True)}
    compiled, outcome = plans.check_policy(Residual().double(), inputs, "tp", num_ranks, tmp_path)
    targets = {op.name: op.target for op in compiled.program.graph.ops}
    assert {targets[name] for name in passed_on(compiled)} == {
        "mul",
        "add",
        "transpose",
        "unflatten",
        "sum",
        "getitem",
    }
    added = {
        adapter.step.kind
        for adapter in compiled.program.adapters()
        if targets.get(adapter.of.name) == "tanh"
    }
    assert added == {"keep_one"}
    assert sent(outcome, "forward") == 4 * 2 * 6
