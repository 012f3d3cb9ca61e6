"""What ``verify`` reports, and what it leaves behind."""

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.verification import verify as verification
from shardwright.frontend.verification.verify import verify
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
        pytest.param(
            "dp",
            {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 2, "use_end2end": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}, marks=pytest.mark.slow
        ),
        pytest.param(
            "pp",
            {
                "plan_ngpus": 2,
                "runtime_ngpus": 2,
                "use_end2end": True,
                "pas_config": {"num_microbatches": 2},
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nothing_stays_alive(policy: str, fields: dict[str, Any]) -> None:
    def objects_left() -> int:
        assert verify(Small(), {"x": torch.ones(4, 8)}, policy, fields).ok
        gc.collect()
        return len(gc.get_objects())

    modules = set(sys.modules)
    counts = [objects_left() for _ in range(6)]
    assert counts[-1] - counts[2] <= 12, counts  # caches of a first call are filled by then
    left = [name for name in set(sys.modules) - modules if name.startswith("shardwright_generated")]
    assert len(left) <= 6, left  # those of the last one go when the next module is loaded


def test_a_pipeline_of_a_policy_by_hand_runs_whole_steps() -> None:
    """Nobody has asked for them, and the reference draws the random numbers of two samples, too."""

    def in_two_stages(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        options = {"num_microbatches": 2}
        asked = replace(config, use_end2end=True, pas_config=options)
        return find_policy("pp").apply(graph, asked)

    config = {"plan_ngpus": 2, "runtime_ngpus": 2}
    report = verify(Small(), {"x": torch.ones(4, 8)}, in_two_stages, config, steps=1)
    assert report.ok and len(report.losses) == 2


def test_a_model_without_a_loss_is_told_so() -> None:
    config = {"plan_ngpus": 2, "runtime_ngpus": 2}
    with pytest.raises(UsageError, match="the model returns no loss whose gradients"):
        verify(nn.Linear(8, 8), {"input": torch.ones(4, 8)}, "tp", config)


class WithSpare(Small):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()
        self.spare, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


def test_gradients_that_one_side_only_has_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    train = verification.train_plan

    def wrong(*args: Any) -> Any:
        ours = train(*args)
        gradients = {"up.bias": None, "spare": torch.full((3,), 0.5), "other": torch.zeros(3)}
        return replace(ours, gradients={**ours.gradients, **gradients})

    config = {"plan_ngpus": 2, "runtime_ngpus": 2}
    torch.manual_seed(0)
    right = verify(WithSpare(), {"x": torch.ones(4, 8)}, "tp", config)
    assert right.ok and not right.lone and "one side" not in str(right)
    monkeypatch.setattr(verification, "train_plan", wrong)
    report = verify(WithSpare(), {"x": torch.ones(4, 8)}, "tp", config)
    assert not report.ok and not any(
        d.excess > 1 for found in report.deviations.values() for d in found
    )
    lines = str(report).splitlines()
    assert "gradients      3 tensors" in lines[3] and lines[3].endswith("equal")
    assert lines[4] == "3 more are there on one side only"
    assert lines[5:7] == [
        "  spare: one device has no gradient, the plan has one of up to 5.00e-01",
        (
            "  other: one device has no gradient, the plan has one of zeros, which weight decay "
            "and momentum see"
        ),
    ]
    assert lines[7].startswith("  up.bias: the plan has no gradient, one device has one of up to ")


class Leaving(nn.Module):
    """Two experts that are modules of their own; after a step of 1 no token chooses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2, bias=False)
        self.router.weight = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 0.1]]))
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        weights, chosen = scores.softmax(-1).topk(1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return y.square().mean() + scores[:, 1].sum()


def test_gradients_that_one_device_has_in_the_first_step_only_are_named() -> None:
    """There the plan has zeros, which momentum sees."""

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    def compared(steps: int) -> verification.VerifyReport:
        torch.manual_seed(0)
        config = {"plan_ngpus": 2, "runtime_ngpus": 2}
        return verify(Leaving(), {"x": torch.eye(2)}, "ep", config, optimizer=momentum, steps=steps)

    report = compared(1)
    assert report.ok and not report.paused and "later step" not in str(report)
    report = compared(2)
    assert report.paused == {"experts.1.weight"} and not report.ok
    assert (
        "of 1 of these one device has no gradient in a later step: experts.1.weight"
        in str(report).splitlines()
    )
