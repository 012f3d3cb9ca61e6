"""The two parts of a backward: what each operator's share of them is, and what schedules make of
it.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.cost.time.pipeline_time import addition_s, stage_times
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.schedule.planned import planned_schedule
from shardwright.compiler.schedule.simulate import StageTimes
from shardwright.compiler.trace.entry import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.schedule_actions import ActionKind

FLOPS, BYTES = 1e9, 1e9
HARDWARE = Hardware(
    "toy", Device("toy", 10**9, {"float32": FLOPS}, BYTES, 0.0), (Tier("link", (8,), 0.0, 1e12),)
)
HOSTED = Hardware(
    "host",
    Device("host", 10**9, {"float32": FLOPS}, BYTES, 0.0, host_s=(1e-3, 2e-3)),
    HARDWARE.tiers,
)

M, K, N = 64, 96, 128
"""x [M, K], the second layer's weight [N, K]."""


class Net(nn.Module):
    """Two layers. The second: a product, a norm, an activation and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, K, bias=False), nn.Linear(K, N, bias=False)
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.layer_norm(self.second(self.first(x)), (N,), self.scale)).sum()


def parts(hardware: Hardware, schedule: str = "zb_h1") -> tuple[PipelineProgram, list[StageTimes]]:
    """The times of one microbatch by stage."""
    options = {"num_microbatches": 2, "schedule": schedule, "stage_starts": ("second",)}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config=options)
    found = compile_graph(
        trace(Net(), {"x": torch.zeros(M, K)}), find_policy("pp").apply, config, policy_name="pp"
    ).program
    assert isinstance(found, PipelineProgram)
    times: list[StageTimes] = []
    for index, (program, stage) in enumerate(zip(found.programs, found.plan.stages, strict=True)):
        body = body_time(program, hardware, stage.ranks)
        added = addition_s(program, 2, config, hardware, ADAM)
        times.append(
            stage_times(found, index, body, planned_schedule(found.plan), hardware.device, added)
        )
    return found, times


def added_s(num_elements: int) -> float:
    """Seconds of adding to gradients in one of two microbatches, spread over both: read, read,
    write.
    """
    return 3 * 4 * num_elements / BYTES / 2


def test_weights_of_products_take_what_their_product_takes() -> None:
    _, (first, second) = parts(HARDWARE)
    product_s = 2 * M * K * N / FLOPS
    scaled, scale = 4 * M * N, 4 * N
    # Of the norm both parts read what came in and what was scaled; one reads the scale too and
    # makes a whole gradient.
    norm_s, scale_s = (3 * scaled + scale) / BYTES, (2 * scaled + scale) / BYTES
    assert second.weight_gradient_s == pytest.approx(
        product_s + scale_s + added_s(N * K + N), rel=1e-9
    )
    total_s, sigmoid_s = (scaled + 4) / BYTES, 3 * scaled / BYTES
    assert second.input_gradient_s == pytest.approx(
        total_s + sigmoid_s + norm_s + product_s, rel=1e-9
    )
    # Nobody waits for the gradients of the first stage's inputs: it has but one part.
    assert first.input_gradient_s == 0.0
    assert first.weight_gradient_s == first.of(ActionKind.BACKWARD) > 2 * M * K * K / FLOPS


def test_a_backward_that_is_not_split_takes_no_more_than_its_parts() -> None:
    _, split = parts(HOSTED)
    _, whole = parts(HOSTED, "1f1b")
    for two, one in zip(split, whole, strict=True):
        assert two.of(ActionKind.BACKWARD) == one.of(ActionKind.BACKWARD)
        assert two.input_gradient_s + two.weight_gradient_s >= one.of(ActionKind.BACKWARD)
    # The product and the norm run again for their weights: the host has two operators more.
    again = (
        split[1].input_gradient_s + split[1].weight_gradient_s - whole[1].of(ActionKind.BACKWARD)
    )
    assert again > 2 * HOSTED.device.host_s[1]


def test_times_that_were_measured_are_shared_alike() -> None:
    found, _ = parts(HARDWARE)
    program = found.programs[1]
    body = body_time(program, HARDWARE, found.plan.stages[1].ranks)
    slower: Any = type(body)(
        tuple((step, type(time)(time.forward_s, 10 * time.backward_s)) for step,
            time in body.instructions),
        body.compute_s, body.comm_s, 0.0, False,
    )  # fmt: skip
    schedule = planned_schedule(found.plan)
    added = added_s(N * K + N)
    once, ten = (
        stage_times(found, 1, each, schedule, HARDWARE.device, added) for each in (body, slower)
    )
    assert ten.input_gradient_s == pytest.approx(10 * once.input_gradient_s)
    assert ten.weight_gradient_s - added == pytest.approx(10 * (once.weight_gradient_s - added))


def test_what_is_computed_again_is_not_split() -> None:
    options = {
        "num_microbatches": 2,
        "schedule": "zb_h1",
        "stage_starts": ("second",),
        "recompute": ("second",),
    }
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config=options)
    found = compile_graph(
        trace(Net(), {"x": torch.zeros(M, K)}), find_policy("pp").apply, config, policy_name="pp"
    ).program
    assert isinstance(found, PipelineProgram)
    body = body_time(found.programs[1], HARDWARE, found.plan.stages[1].ranks)
    times = stage_times(
        found, 1, body, planned_schedule(found.plan), HARDWARE.device, added_s(N * K + N)
    )
    assert (
        times.weight_gradient_s == 0.0
        and times.input_gradient_s == times.of(ActionKind.BACKWARD) > body.backward_s
    )
    cost = audit(found, config, HARDWARE)
    for rank in cost.ranks:
        assert rank.compute_s + rank.communication_s + rank.idle_s == pytest.approx(cost.step_s)
