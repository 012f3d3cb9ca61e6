"""A model that just fits gets a plan, and where it does not, the message says the least that there
is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import planning
import pytest
import torch
import torch.nn.functional as F
from plans import annotated, traced, zoo_graph
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.rank_memory import CATEGORIES
from shardwright.compiler.passes.without_gradients import without_gradients
from shardwright.compiler.plan.amounts import amount
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import search, settled
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def found_within(
    name: str, num_ranks: int, limit_bytes: float, use_zero: Any = 0, **options: Any
) -> SearchResult:
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_zero=use_zero, use_end2end=True
    )
    chosen = AutodistOptions(memory_limit_gb=limit_bytes / 1e9, time_limit_s=600.0, **options)
    return search(zoo_graph(name), config, chosen, load_hardware("a100-80gb", num_ranks))


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {"use_zero": 3}),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [("mlp", 2, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_the_least_that_is_said_is_enough_and_less_is_not(
    name: str, num_ranks: int, options: dict[str, Any]
) -> None:
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
    least = amount(below.least[0], "B", digits=4)
    said = f"the least of what was audited is {least} on a device ({below.least[1]}), most of it "
    assert refusal.value.why is not None and refusal.value.why.startswith(said + below.least[2])
    parts = [part.split()[0] for part in below.least[2].split(", ")]
    assert len(parts) == 4 and set(parts) < set(CATEGORIES)
    assert 0.95 * least_bytes < below.least[0] <= 1.05 * least_bytes


def test_with_more_memory_the_plan_is_faster() -> None:
    least_bytes = found_within("mlp", 2, 1000.0).least[0]
    steps = []
    for factor in (1.0001, 1.05, 1.5):
        best = found_within("mlp", 2, factor * least_bytes).best
        assert best is not None
        steps.append(best.step_s)
    assert steps == sorted(steps, reverse=True)


class Named(nn.Module):
    """Blocks that are no list."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.block_a, self.block_b, self.block_c = (
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in (self.block_a, self.block_b, self.block_c):
            x = x + block(x)
        loss: Tensor = self.out(x).square().mean()
        return loss


class Heard(nn.Module):
    """A recurrent layer, whose inner states take more memory for a moment than all that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.told = nn.GRU(6, 8, bidirectional=True, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.told(self.heard(x)[0]).log_softmax(-1).exp().mean(1), y)


@pytest.mark.slow
def test_the_share_of_what_is_momentary_that_fits_first_is_not_the_last() -> None:
    """Weights held in pieces fit too, and need collectives that weighing what is momentary does
    without.
    """
    inputs = {"x": torch.randn(4, 5, 6).double(), "y": torch.randn(4, 5).double()}
    graph = annotated(without_gradients(traced(Heard().double(), inputs)))
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, inference_only=True)
    options, hardware = (
        AutodistOptions(hardware="cpu", mesh={"x": 4}, time_limit_s=3600.0),
        load_hardware("cpu", 4),
    )
    found = search(graph, config, replace(options, memory_limit_gb=16.9e-6), hardware)
    assert found.best is not None
    assert not found.best.is_simple and found.best.step_s < 400e-6, "the next one takes 1.8 ms"


def test_blocks_that_are_no_list_are_computed_again_where_memory_binds() -> None:
    model, inputs, hardware = Named(), {"x": torch.randn(64, 8)}, load_hardware("a100-80gb", 1)
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, use_end2end=True)
    graph = planning.graph_of(model, inputs)
    free = search(graph, config, AutodistOptions(), hardware).best
    assert free is not None and free.cost is not None and not free.plan.recompute
    limit_bytes = 0.7 * free.cost.peak_bytes
    best = search(graph, config, AutodistOptions(memory_limit_gb=limit_bytes / 1e9), hardware).best
    assert best is not None and best.cost is not None and best.cost.peak_bytes <= limit_bytes
    assert any(path.startswith("block_") for path in best.plan.recompute)
    plan = best.plan
    compiled = compile_graph(graph, lambda *_: plan, config)
    step_s = audit(compiled.program, config, hardware).step_s
    assert step_s == best.cost.step_s > free.cost.step_s
    assert verify(model, inputs, lambda *_: plan, config, steps=1).ok


class Classifier(nn.Module):
    """A language model whose peak is in its loss: the logits are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)).view(-1, 4096), labels.view(-1))


def test_what_runs_at_the_peak_is_split_for_its_memory() -> None:
    """Rows of the logits are as many bytes as columns; only of columns is the gradient computed in
    place, so that the least memory needs the operator at the peak to be weighed by itself.
    """
    ids = torch.zeros(8, 64, dtype=torch.long)
    graph = annotated(traced(Classifier(), {"ids": ids, "labels": ids}))
    loss = next(op.name for op in graph.ops if "cross_entropy" in op.target)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True)
    hardware = load_hardware("a100-80gb", 2)

    def least(**options: Any) -> float:
        chosen = AutodistOptions(
            mesh={"c": 2},
            memory_limit_gb=1e-6,
            time_limit_s=600.0,
            recompute=(),
            loss_pieces=False,
            **options,
        )
        return search(graph, config, chosen, hardware).least[0]

    assert least() == least(pin={loss: {"c": "split:c"}}) < least(pin={loss: {"c": "split:n.0"}})
