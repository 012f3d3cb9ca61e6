"""What ``verify`` leaves behind."""

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.verification.verify import verify


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
        ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 2, "use_end2end": True}),
        ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}),
        ("pp", {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True, "pas_config": {"num_microbatches": 2}}),
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
    assert not [name for name in set(sys.modules) - modules if name.startswith("shardwright_generated")]
