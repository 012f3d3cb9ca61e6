"""``tp`` splits the channels of convolutions where that pays on the hardware given, and the numbers
stay.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import plans
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from parity import reference_run
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.trace.entry import trace

GENERATOR = torch.Generator().manual_seed(0)


def hardware(directory: Path, bytes_per_s: float) -> str:
    """A machine of slow devices, and links of this speed without latency."""
    machine = {
        "format": 1,
        "name": "test",
        "num_devices": 4,
        "device": {
            "name": "slow",
            "memory_bytes": 2**34,
            "flops_per_s": {"float64": 1e9, "float32": 1e9},
            "bytes_per_s": 1e12,
            "launch_s": 0.0,
            "matmul_efficiency": 1.0,
        },
        "tiers": [{"name": "links", "sizes": "all", "latency_s": 0.0, "bytes_per_s": bytes_per_s}],
    }
    path = directory / "machine.json"
    path.write_text(json.dumps(machine))
    return str(path)


class Extractor(nn.Module):
    """Sound to features as in wav2vec 2.0: strided convolutions over a long sequence, then small
    products.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [1, 8, 8, 8, 8]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(a, b, 3, 2) for a, b in itertools.pairwise(sizes)
        )
        self.norm = nn.GroupNorm(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.convolutions[0](x[:, None])))
        for convolution in self.convolutions[1:]:
            x = F.gelu(convolution(x))
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).square().mean()


class Inverted(nn.Module):
    """Two inverted bottlenecks as in MobileNetV2: a convolution per channel between a wide and a
    narrow one.
    """

    def __init__(self) -> None:
        super().__init__()

        def convolution(a: int, b: int, size: int, groups: int = 1) -> list[nn.Module]:
            return [
                nn.Conv2d(a, b, size, padding=size // 2, groups=groups, bias=False),
                nn.BatchNorm2d(b),
            ]

        def bottleneck(narrow: int) -> nn.Sequential:
            wide = 3 * narrow
            inner = [
                *convolution(narrow, wide, 1),
                nn.ReLU6(),
                *convolution(wide, wide, 3, wide),
                nn.ReLU6(),
            ]
            return nn.Sequential(*inner, *convolution(wide, narrow, 1))

        self.stem = nn.Sequential(*convolution(3, 4, 3), nn.ReLU6())
        self.first, self.second, self.head = bottleneck(4), bottleneck(32), nn.Linear(32, 5)
        self.between = nn.Conv2d(4, 32, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.between(x + self.first(x))
        return self.head((x + self.second(x)).mean((2, 3))).square().mean()


class Residual(nn.Module):
    """Positions are embedded as in wav2vec 2.0: a convolution in groups between whole values. A
    norm of all channels keeps these whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv1d(3, 8, 4, 4), nn.LayerNorm(8)
        self.positions = nn.Conv1d(8, 8, 9, padding=4, groups=4)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).transpose(1, 2))
        x = self.norm(x + F.gelu(self.positions(x.transpose(1, 2)).transpose(1, 2)))
        return self.norm(x + self.down(F.gelu(self.up(x)))).square().mean()


OWN = {
    "residual": (
        Residual,
        {"x": torch.randn(2, 3, 32, dtype=torch.float64, generator=GENERATOR)},
    ),
    "extractor": (Extractor, {"x": torch.randn(2, 150, dtype=torch.float64, generator=GENERATOR)}),
    "inverted": (
        Inverted,
        {"x": torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=GENERATOR)},
    ),
}
ZOO = [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "resnet-uneven", "unet")]


def model_of(name: str) -> tuple[nn.Module, dict]:
    if name in OWN:
        make, inputs = OWN[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().double(), inputs
    entry = zoo.get(name)
    return entry.build(), entry.inputs()


def share(compiled: Compiled) -> float:
    assert compiled.work is not None
    return compiled.work.share


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "inverted")),
        "extractor",
        *ZOO,
    ],
)
def test_channels_are_split_where_that_is_faster(name: str, tmp_path: Path) -> None:
    module, inputs = model_of(name)
    graph = plans.traced(module, inputs)
    slow, fast = (
        plans.compile_with(graph, "tp", 2, pas_config={"hardware": hardware(tmp_path, bytes_per_s)})
        for bytes_per_s in (1e3, 1e12)
    )
    # Where it takes longer to begin than to do all of this work.
    before = plans.compile_with(graph, "tp", 2)
    assert slow.plan.strategies == before.plan.strategies
    assert share(fast) < share(slow) - 0.03
    plans.check(module, inputs, fast, tmp_path / "code", reference_run(module, [inputs], steps=1))


def test_every_convolution_of_an_extractor_is_split(tmp_path: Path) -> None:
    """Column- and row-parallel in turn: each rank does half the work, and two sums go each way."""
    module, inputs = model_of("extractor")
    compiled = plans.compile_with(
        plans.traced(module, inputs), "tp", 2, pas_config={"hardware": hardware(tmp_path, 1e12)}
    )
    assert share(compiled) == pytest.approx(0.5, abs=0.01)
    layouts = [compiled.program.layout_of(f"convolutions.{index}.weight") for index in range(4)]
    assert [str(layout) for layout in layouts] == [
        "[8/tp, 1, 3]",
        "[8, 8/tp, 3]",
        "[8/tp, 8, 3]",
        "[8, 8/tp, 3]",
    ]


def test_convolutions_between_whole_values_are_split_by_themselves(tmp_path: Path) -> None:
    """The one in groups reads a piece and gives a piece, in groups. The one of 3 colours is split
    in its outputs, as of 3 colours one of 2 ranks would have 2.
    """
    module, inputs = model_of("residual")
    compiled = plans.compile_with(
        plans.traced(module, inputs), "tp", 2, pas_config={"hardware": hardware(tmp_path, 1e12)}
    )
    assert share(compiled) == pytest.approx(0.5, abs=0.01)
    assert str(compiled.program.layout_of("positions.weight")) == "[4/tp * 2, 2, 9]"
    assert str(compiled.program.layout_of("patches.weight")) == "[4/tp * 2, 3, 4]"


@pytest.mark.slow
def test_wav2vec_2_on_a100s() -> None:
    """The model has its real size: the preset says to split all of the extractor, whose work is
    half of the model's.
    """
    with torch.device("meta"):
        model = transformers.Wav2Vec2Model(
            transformers.Wav2Vec2Config(layerdrop=0.0, mask_time_prob=0.0)
        )
    graph = trace(model, {"input_values": torch.empty(2, 64000, device="meta")})
    assert share(plans.compile_with(graph, "tp", 4)) < 0.28
