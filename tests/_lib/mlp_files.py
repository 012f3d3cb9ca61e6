"""A small model, and the files a compile of it would write, by hand: mesh ``dp x tp``, hidden units
over tp, batch over dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.manifest import Manifest, code_file, sha256
from shardwright.runtime.module.declarations import Declaration

WIDTH, HIDDEN, BATCH = 6, 10, 4


class MLP(nn.Module):
    """Two linears with what else a module can hold: tied, frozen and awkwardly named parameters,
    both kinds of buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)])
        self.mesh = nn.Module()
        self.mesh.weight = nn.Parameter(torch.rand(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.head = nn.Module()
        self.head.weight = self.norm.weight
        self.head.bias = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)
        self.captured = torch.rand(WIDTH, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x * self.norm.weight))
        y = (
            self.layers[1](h) * self.mesh.weight
            + self.shift * self.gain
            + self.captured
            + self.head.bias
        )
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return ((y - target) ** 2).sum()


def make_model(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)
    )  # type: ignore[return-value]


def declarations() -> list[Declaration]:
    """The declarations, in the order of the original ``named_parameters()``, then buffers and
    constants.
    """
    dtype = torch.float64

    def parameter(name: str, layout: str, **kwargs: object) -> Declaration:
        return Declaration(
            name, "parameter", Layout.parse(layout), dtype, **{"requires_grad": True, **kwargs}
        )  # type: ignore[arg-type]

    return [
        parameter("gain", "[6]", requires_grad=False),
        parameter("norm.weight", "[6] G(dp, tp)", aliases=("head.weight",)),
        parameter("layers.0.weight", "[10/tp, 6] G(dp)"),
        parameter("layers.0.bias", "[10/tp] G(dp)"),
        parameter("layers.1.weight", "[6, 10/tp] G(dp)"),
        parameter("layers.1.bias", "[6] G(dp)"),
        parameter("mesh.weight", "[6] G(dp)"),
        parameter("head.bias", "[6] G(dp)"),
        Declaration("mean", "buffer", Layout.parse("[6]"), dtype),
        Declaration("shift", "buffer", Layout.parse("[6]"), dtype, persistent=False),
        Declaration("const_0", "constant", Layout.parse("[6]"), dtype, persistent=False),
    ]


def source(rank: int, dp: int, tp: int) -> str:
    lines = []
    for d in declarations():
        words = [f'"{d.name}"', f'"{d.layout}"', "torch.float64"]
        words += [f"aliases={d.aliases}"] if d.aliases else []
        words += ["requires_grad=False"] if d.kind == "parameter" and not d.requires_grad else []
        words += ["persistent=False"] if d.kind == "buffer" and not d.persistent else []
        lines.append(f"        self.{d.kind}({', '.join(words)})")
    return f"""import torch
from torch.nn.functional import linear

from shardwright.runtime.adapters import all_reduce, grad_all_reduce, narrow
from shardwright.runtime.module.inputs import ABSENT
from shardwright.runtime.layout import Mesh
from shardwright.runtime.module.parallel_module import ParallelModule


class MLP(ParallelModule):
    mesh = Mesh((("dp", {dp}), ("tp", {tp})))
    rank = {rank}
    inputs = {{"x": ("[batch, 6]", torch.float64), "target": ("[batch, 6]", torch.float64)}}

    def declare(self):
{chr(10).join(lines)}

    def forward(self, x, target, scale=ABSENT):
        self.check_inputs({{"x": x, "target": target}}, {{"scale": scale}})
        dp = self.axis("dp")
        tp = self.axis("tp")
        x = narrow(x, dp, 0)                                                       # [batch/dp, 6]
        target = narrow(target, dp, 0)                                             # [batch/dp, 6]
        x = grad_all_reduce(x, tp)                                                 # G(tp)
        h = x * self.norm.weight  # [batch/dp, 6] G(tp)
        h = torch.tanh(linear(h, self.layers[0].weight, self.layers[0].bias))  # [batch/dp, 10/tp]
        y = linear(h, self.layers[1].weight)  # [batch/dp, 6] P(tp)
        y = all_reduce(y, tp) + self.layers[1].bias  # [batch/dp, 6]
        y = y * self.weights("mesh.weight") + self.shift * self.gain + self.const_0 + self.head.bias
        loss = all_reduce(((y - target) ** 2).sum(), dp)                           # []
        if self.training:
            mean = all_reduce(y.sum(0), dp) / (dp.size * y.size(0))
            self.update_buffer("mean", self.mean * 0.9 + 0.1 * mean)
        return loss
"""


def write_files(
    directory: Path, model: MLP, dp: int = 1, tp: int = 2, config: Mapping[str, Any] | None = None
) -> Path:
    """What a compile of ``model`` would leave in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    mesh = Mesh((("dp", dp), ("tp", tp)))
    files = {}
    for rank in range(mesh.size):
        text = source(rank, dp, tp).encode()
        (directory / code_file(rank)).write_bytes(text)
        files[code_file(rank)] = sha256(text)
    weights = {
        d.name: model.get_parameter(d.name).detach()
        for d in declarations()
        if d.kind == "parameter"
    }
    save_file({**weights, "mean": model.mean}, directory / "weights.safetensors")
    save_file(
        {"shift": model.shift, "const_0": model.captured}, directory / "constants.safetensors"
    )
    Manifest(
        key="0" * 64,
        class_name="MLP",
        mesh=mesh,
        policy="by hand",
        files=files,
        tensors={d.name: d for d in declarations()},
        request={} if config is None else {"config": ComputeConfig.of(config).to_json()},
    ).write(directory)
    return directory
