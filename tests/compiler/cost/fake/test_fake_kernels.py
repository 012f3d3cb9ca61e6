"""What fake tensors tell of recurrent layers, whose peaks are held against those measured, and of
exponential numbers.
"""

from pathlib import Path

import pytest
import torch
from covers import spread
from memory_ranks import measured_peaks
from plans import traced
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.fake.fake_kernels import rnn_workspace_bytes
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


class Recurrent(nn.Module):
    def __init__(
        self, kind: str, inputs: int, hidden: int, dtype: torch.dtype, **options: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, inputs, dtype=dtype)
        self.layers = getattr(nn, kind)(inputs, hidden, batch_first=True, dtype=dtype, **options)
        self.head = nn.Linear(hidden, 4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.layers(self.embed(x))[0]) - y).square().mean()


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes", "options"),
    spread(
        [
            ("LSTM", torch.float32, (16, 32, 8, 20), {}),
            ("LSTM", torch.float32, (16, 32, 8, 120), {"num_layers": 2}),
            ("LSTM", torch.bfloat16, (64, 128, 4, 50), {}),
            ("LSTM", torch.float64, (16, 32, 8, 20), {}),
            ("GRU", torch.float32, (16, 32, 8, 20), {}),
            ("RNN", torch.float32, (16, 32, 8, 20), {}),
            pytest.param("LSTM", torch.float32, (700, 1100, 16, 40), {}, marks=pytest.mark.slow),
        ],
        3,
    ),
)
def test_peaks_are_those_measured(
    kind: str, dtype: torch.dtype, sizes: tuple[int, ...], options: dict[str, int], tmp_path: Path
) -> None:
    inputs, hidden, batch, steps = sizes
    torch.manual_seed(0)
    model = Recurrent(kind, inputs, hidden, dtype, **options)
    args = {
        "x": torch.randn(batch, steps, inputs, dtype=dtype),
        "y": torch.zeros(batch, steps, 4, dtype=dtype),
    }
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, use_end2end=True)
    compiled = compile_graph(traced(model, args), find_policy("dp").apply, config, policy_name="dp")
    (measured,) = measured_peaks(tmp_path, compiled, model, args, config)
    assert program_memory(compiled.program, config).peak_bytes == pytest.approx(measured, rel=0.02)  # type: ignore[arg-type]


def test_large_workspaces_are_asked_for_in_parts() -> None:
    """Sizes grow with steps, batch and widths."""

    def size(steps: int, batch: int, width: int) -> int:
        return rnn_workspace_bytes(
            steps, batch, width, width, torch.float32, (False, (), 2), (1, True, False, False, True)
        )

    base = size(32, 8, 512)
    for steps, batch, width, times in (
        (320, 8, 512, 10),
        (32, 256, 512, 32),
        (32, 8, 4096, 8),
        (64, 64, 8192, 2 * 8 * 16),
    ):
        assert size(steps, batch, width) == pytest.approx(times * base, rel=0.04)


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.gumbel_softmax(self.layer(x), dim=-1) - y).square().mean()


def test_gumbel_softmax(tmp_path: Path) -> None:
    model, args = Gumbel(), {"x": torch.randn(128, 32), "y": torch.zeros(128, 64)}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, use_end2end=True)
    compiled = compile_graph(traced(model, args), find_policy("dp").apply, config, policy_name="dp")
    (measured,) = measured_peaks(tmp_path, compiled, model, args, config)
    found = program_memory(compiled.program, config)  # type: ignore[arg-type]
    assert found.peak_bytes == pytest.approx(measured, rel=0.02) and not found.assumed
