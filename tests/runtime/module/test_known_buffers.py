"""Buffers whose values decide what forward computes: compiled in, and compared in calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright import parallelize
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import TraceError, UsageError
from shardwright.runtime.ranks.threads import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:forward reads the values of the buffers")


class Sliced(nn.Module):
    """Slices by sizes, and branches on a flag, that buffers of a checkpoint hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
        self.register_buffer("length", torch.tensor(3))
        self.register_buffer("bounds", torch.tensor([2, 5]))
        self.register_buffer("rate", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        hidden = hidden[:, : self.length] + hidden[:, self.bounds[0] : self.bounds[1]]
        if self.rate < 1:
            hidden = hidden * torch.rand_like(hidden)
        return self.down(hidden).square().mean()


X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("policy", "options"),
    [("tp", {}), ("data", {}), ("pp", {"use_end2end": True})],
    ids=["tp", "data", "pp"],
)
def test_sizes_and_branches_follow_small_buffers(policy: str, options: dict[str, bool]) -> None:
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, **options}
    report = verify(Sliced(), {"x": X}, policy, config, steps=2)
    assert report.ok, report


def test_other_values_are_refused_when_a_call_begins(tmp_path: Path) -> None:
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    def run(rank: int) -> str:
        module = parallelize(Sliced(), {"x": X}, "tp", config, gen_savedir=tmp_path)
        loss = module(X)
        # The same values are fine, however they came.
        module.load_state_dict(module.state_dict())
        assert torch.equal(module(X), loss)
        state = module.state_dict()
        module.load_state_dict({**state, "length": torch.tensor(2)})
        with pytest.raises(UsageError) as error:
            module(X)
        module.load_state_dict({**state, "length": torch.tensor(3)})
        assert torch.equal(module(X), loss)
        return str(error.value)

    texts = run_ranks(2, run)
    assert texts[0].splitlines()[1:] == [
        "  why:   forward decides by them what it computes; they were 3, and are 2 now",
        "  try:   compile the model again with the new values, or put the old ones back",
    ]
    assert texts[0].startswith("the buffer 'length' of Sliced")


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls > 1 else x


def test_a_buffer_that_decides_and_changes_is_refused(tmp_path: Path) -> None:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    with pytest.raises(TraceError, match="forward changes the buffer calls, whose values decide"):
        parallelize(
            Counted(),
            {"x": torch.ones(2, 4)},
            "dp",
            config,
            gen_savedir=tmp_path,
            load_module=False,
        )
