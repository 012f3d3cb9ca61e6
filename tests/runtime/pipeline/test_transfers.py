"""What crosses between stages."""

import pytest
import torch

from shardwright.runtime.errors import UsageError
from shardwright.runtime.pipeline.segment import Transfer
from shardwright.runtime.pipeline.transfers import Exchange, Routes
from shardwright.runtime.ranks.messages import Messages
from shardwright.runtime.ranks.world import SoloWorld
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction


def test_a_value_that_another_device_casts_and_the_cpu_does_not() -> None:
    messages: Messages = SoloWorld().connect([])
    exchange = Exchange(
        0, [Routes(0, {})], {0: []}, messages, lambda rank: rank, torch.device("meta")
    )
    transfer = Transfer("norm", 1, torch.bfloat16, (2,), pieces=((1, ((0, 2),)),))
    with pytest.raises(UsageError) as error:
        exchange.send(
            ScheduleAction(ActionKind.FORWARD, 0, 0), transfer, torch.zeros(2, device="meta")
        )
    assert str(error.value) == (
        "'norm', which 0F0 sends to another stage, is float32 on meta and was traced as bfloat16\n"
        "  why:   autocast computes more operators in float32 on meta than on a CPU, whose "
        "list tracing knows\n"
        "  try:   settle its dtype in the model, as with `.to(torch.float32)`, or cut the "
        "stages elsewhere"
    )
