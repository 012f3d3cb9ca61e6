"""Stages that are alike are walked once, and hold what a walk of each of them tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plans import annotated, traced
from torch import Tensor, nn

from shardwright.compiler.cost.memory import pipeline_memory as tested
from shardwright.compiler.cost.memory.alike_stages import Signature, signature
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.runtime.config import ComputeConfig

NUM_LAYERS, WIDTH = 8, 16


class Tower(nn.Module):
    """An embedding, layers, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        # One layer keeps less than the others, of the same sizes.
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 64),
                nn.ReLU() if index == 1 else nn.GELU(),
                nn.Linear(64, WIDTH),
            )
            for index in range(NUM_LAYERS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return (x @ self.table.weight.t()).square().mean()


def program_of(named: NamedSchedule, num_positions: int, again: tuple[str, ...]) -> PipelineProgram:
    graph = annotated(traced(Tower(), {"tokens": torch.zeros(8, 4, dtype=torch.long)}))
    plan = replace(graph.builder(mesh={"x": 2}).split("batch", "x").plan(), recompute=again)
    num_stages = num_positions * named.chunks
    firsts = [
        next(op.name for op in graph.ops if op.module_path.startswith(f"layers.{index}."))
        for index in range(NUM_LAYERS // num_stages, NUM_LAYERS, NUM_LAYERS // num_stages)
    ]
    return lower_stages(graph, staged(plan, firsts, num_positions, named, 4, 0))


@pytest.mark.parametrize(
    ("name", "chunks", "again", "zero"),
    [
        ("1f1b", 1, (), {}),
        ("1f1b_interleaved", 2, ("layers.1", "layers.5", "layers.6"), {"use_zero": 1}),
        ("1f1b_interleaved", 2, (), {"distributed_optimizer": {"contiguous_grad_buffer": False}}),
        ("zb_v", 2, (), {"use_zero": 2}),
        ("zb_v", 2, ("layers.*",), {"use_zero": 3}),
    ],
)
def test_one_walk_tells_of_all_stages_alike(
    name: str,
    chunks: int,
    again: tuple[str, ...],
    zero: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = program_of(NamedSchedule(name, chunks), 4, again)
    config = ComputeConfig(plan_ngpus=8, runtime_ngpus=16, use_end2end=True, **zero)  # type: ignore[arg-type]
    num_walks = _count_walks(monkeypatch)
    found = (
        tested.pipeline_memory(program, config),
        tested.pipeline_memory_over_time(program, config),
    )
    shared = num_walks()

    def unlike(*given: object) -> Signature:
        return replace(signature(*given), key=object())  # type: ignore[arg-type]

    monkeypatch.setattr(tested, "signature", unlike)
    each = (
        tested.pipeline_memory(program, config),
        tested.pipeline_memory_over_time(program, config),
    )
    assert found == each
    assert shared < num_walks() - shared


def _count_walks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count = 0
    walk = tested.BodyMemory.forward

    def counted(body: tested.BodyMemory) -> None:
        nonlocal count
        count += 1
        walk(body)

    monkeypatch.setattr(tested.BodyMemory, "forward", counted)
    return lambda: count
