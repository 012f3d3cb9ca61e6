"""Losses and feed-forward layers in pieces, against one device: the same numbers, and logits that
are never whole.
"""

from __future__ import annotations

from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread
from memory_ranks import measured_peaks
from torch import Tensor, nn
from torch.nn import functional as F
from verified import verify_zoo

from shardwright.compiler.compile import Compiled
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.plan.program import Compute, Loop
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ComputeConfig

slow = pytest.mark.slow
BOTH = {"loss_pieces": 3, "mlp_pieces": 3}
END = {"use_end2end": True}
BLOCKS = ["model.layers.*"]


@pytest.mark.parametrize(
    ("name", "policy", "num_ranks", "options", "fields"),
    spread(
        [
            ("llama", "tp", 2, BOTH, {}),
            ("gpt2", "cp", 3, {**BOTH, "recompute": ["transformer.h.*"]}, {}),
            ("llama", "hybrid", 2, {**BOTH, "tp": 1, "num_stages": 2, "recompute": BLOCKS}, END),
            *(
                pytest.param(*case, marks=slow)
                for case in [
                    ("llama", "dp", 1, BOTH, {"runtime_ngpus": 2, "use_zero": 3}),
                    ("llama", "tp", 3, {**BOTH, "sequence_parallel": True}, {}),
                    ("llama", "pp", 2, {**BOTH, "schedule": "zb_h1"}, END),
                    ("gpt2", "tensor", 4, {**BOTH, "mode": "2d"}, {}),
                    ("mistral", "cp", 4, {**BOTH, "cp": [2, 2], "cp_mode": ["ring", "gather"]}, {}),
                    ("t5", "tp", 2, BOTH, {}),
                ]
            ),
        ],
        2,
    ),
)
def test_pieces_compute_what_one_device_does(
    name: str, policy: str, num_ranks: int, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    given = {"plan_ngpus": num_ranks, "runtime_ngpus": num_ranks, **fields}
    report = verify_zoo(name, policy, {**given, "pas_config": options})
    assert report.ok, str(report)


class Weighted(nn.Module):
    """A loss with all that its mean depends on, behind a layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 11)
        self.register_buffer("weight", torch.arange(1.0, 12.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.down(nn.functional.dropout(self.up(x).relu(), 0.3, self.training))
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1),
            y.flatten(),
            weight=self.weight,
            ignore_index=3,
            label_smoothing=0.1,
        )


def test_what_a_mean_divides_by_is_that_of_all_pieces() -> None:
    """Labels that are ignored lie in one piece only; each rank has others."""
    labels = torch.randint(11, (3, 7))
    labels[:, :2] = 3
    sample = {"x": torch.randn(3, 7, 8), "y": labels}
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, rng="plan_independent", pas_config={**BOTH}
    )
    report = verify(Weighted(), sample, "data", config)
    assert report.ok, str(report)


def compiled_gpt2(**options: int) -> tuple[Compiled, nn.Module, dict[str, Any], ComputeConfig]:
    """GPT-2 with a large vocabulary, whose logits are most of what is there."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 512}
    sizes |= {"n_positions": 32, "use_cache": False}
    model = zoo.get("gpt2").make(**sizes)
    ids = torch.randint(512, (2, 32))
    sample = {"input_ids": ids, "labels": ids.clone()}
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config=dict(options)
    )
    graph = plans.traced(model, sample)
    compiled = plans.compile_with(graph, "tp", 2, use_end2end=True, pas_config=dict(options))
    return compiled, model, sample, config


class OneOperator(nn.Module):
    """A loss of torch's one operator for the last product and the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 11)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).flatten(0, 1)
        return F.linear_cross_entropy(
            hidden, self.last.weight, labels.flatten(), linear_bias=self.last.bias
        )


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch 2.11 has no F.linear_cross_entropy"
)
def test_one_operator_of_product_and_loss_runs_in_pieces() -> None:
    """``linear_cross_entropy`` without ``options``, which would loop by itself."""
    torch.manual_seed(0)
    labels = torch.randint(11, (2, 7))
    labels[0, :5] = -100  # a whole piece is ignored: the mean is over the labels of all
    sample = {"x": torch.randn(2, 7, 5), "labels": labels}
    options: dict[str, Any] = {"loss_pieces": 3}
    compiled = plans.compile_with(plans.traced(OneOperator(), sample), "tp", 2, pas_config=options)
    (loop,) = [step for step in compiled.program.body if isinstance(step, Loop)]
    assert [call.original.target for call in loop.calls] == ["linear_cross_entropy"]
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, pas_config=options)
    report = verify(OneOperator(), sample, "tp", config)
    assert report.ok, str(report)


def test_logits_are_never_whole(tmp_path: Any) -> None:
    """Neither in the program, nor in the memory that is predicted or measured."""
    whole, *_ = compiled_gpt2()
    compiled, model, sample, config = compiled_gpt2(loss_pieces=8)
    outside = [
        v for step in compiled.program.body if isinstance(step, Compute) for v in step.op.results
    ]
    assert not any(512 in value.shape for value in outside)
    (loop,) = [step for step in compiled.program.body if isinstance(step, Loop)]
    assert next(call.original.target for call in loop.calls) == "linear"
    predicted, before = (
        program_memory(made.program, config).peak_bytes for made in (compiled, whole)
    )
    # The cost of computing the pieces once more.
    hardware = load_hardware("a100-80gb", 2)
    costs = [audit(made.program, config, hardware) for made in (compiled, whole)]
    assert costs[0].compute_s > costs[1].compute_s
    logits = 2 * 32 * 256 * 4
    assert predicted < before - 2 * logits  # the logits, their softmax or gradient
    measured = measured_peaks(tmp_path, compiled, model, sample, config)
    assert all(abs(predicted / peak - 1) < 0.01 for peak in measured)
