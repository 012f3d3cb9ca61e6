"""The bytes that an audit says are exchanged are those that ranks count when they run."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import plans
import pytest
import torch
import zoo
from mlp_training import adamw
from precision import float64_casts
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import load_hardware
from shardwright.policies.registry import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.optimizer import build_optimizer

FOUR = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)


class Net(nn.Module):
    """Inputs without gradient, and no bias: its value is not needed in the backward, where the model gathers it again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return (x + self.down(self.up(x).relu())).square().sum()


@pytest.mark.parametrize("seed", range(2))
def test_of_adapters(seed: int, tmp_path: Path) -> None:
    inputs = {"tokens": torch.arange(32).view(8, 4) % 16}
    graph = plans.annotated(plans.traced(Net().double(), inputs))
    plan = plans.random_plan(graph, Mesh((("x", 2), ("y", 2))), random.Random(seed))
    compiled = compile_graph(graph, lambda graph, config: plan, FOUR)
    plans.write(tmp_path, compiled, Net().double())
    counted: Counter[str] = Counter()
    for key, volume in plans.run_once(tmp_path, compiled, inputs).traffic[0].items():
        counted[f"{key.axis} {key.collective}"] += volume.num_bytes
    told = audit(compiled.program, FOUR, load_hardware("cpu", 4)).ranks[0].comm_bytes
    assert {name: num_bytes for name, num_bytes in told.items() if not name.endswith(" gradients")} == counted


@pytest.mark.parametrize("zero", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_of_messages_and_gradients(zero: int, tmp_path: Path) -> None:
    """Two stages of two ranks each, two units."""
    options = {"num_microbatches": 2, "tp": 2, "num_stages": 2}
    zeros = {"use_zero": zero, "zero_use_reduce_scatter": True} if zero else {}
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=8, use_end2end=True, pas_config=options, **zeros)
    entry = zoo.get("gpt2")
    compiled = compile_graph(plans.zoo_traced("gpt2"), find_policy("hybrid").apply, config, policy_name="hybrid")
    plans.write(tmp_path, compiled, entry.build())

    def on_rank(rank: int) -> Counter[str]:
        module = load_class(tmp_path)()
        optimizer = build_optimizer(module, adamw, config)
        with count_communication() as volume:
            module.train_step([entry.inputs()] * 2)
            optimizer.step()
        counted: Counter[str] = Counter()
        for key, found in volume.items():
            counted[f"{key.phase} {key.axis} {key.collective}"] += found.num_bytes
        return counted

    with float64_casts():
        counted = run_ranks(8, on_rank)
    cost = audit(compiled.program, config, load_hardware("cpu", 8))
    told, seen = cost.ranks[0].comm_bytes, counted[0]
    assert told["tp all_reduce"] == seen["forward tp all_reduce"] + seen["backward tp all_reduce"]
    kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
    summed = sum(seen[f"gradients {over} {kind}"] for over in ("units", "stages+units") for kind in kinds)
    assert told["stages+units gradients"] == pytest.approx(summed, rel=0.01)  # beside them the flags of what has gradients
    received = sum(counted[rank][f"{phase} stages receive"] for rank in range(4) for phase in ("forward", "backward"))
    assert sum(cost.message_bytes.values()) == received and set(cost.message_bytes) == {"stage 0 to 1", "stage 1 to 0"}
