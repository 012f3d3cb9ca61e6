"""Parallel modules under ``torch.compile``, on ranks that are processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwright
from shardwright.runtime.module.parallel_module import ParallelModule


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.beside, self.dropout = nn.Linear(hidden, hidden), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(self.up(y).relu())) + self.beside(y)


class Result(NamedTuple):
    loss: Tensor
    hidden: Tensor


class Net(nn.Module):
    def __init__(self, hidden: int = 8, num_layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_layers))

    def forward(self, x: Tensor, y: Tensor) -> Result:
        for block in self.blocks:
            x = block(x)
        return Result((x - y).square().mean(), x)


class Loss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y).loss


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp, ZeRO-2": ("dp", {"plan_ngpus": 1, "use_zero": 2}),
    "tp": ("tp", {"plan_ngpus": 2}),
    "dp, ZeRO-3": ("dp", {"plan_ngpus": 1, "use_zero": 3}),
    "pp": ("pp", {"plan_ngpus": 2, "use_end2end": True, "pas_config": {"pipeline_nmicros": 2}}),
    "recompute": ("tensor", {"plan_ngpus": 2, "pas_config": {"recompute": ["blocks.0"]}}),
    "plan_independent": ("tp", {"plan_ngpus": 2, "rng": "plan_independent"}),
    "tp, end to end, early messages": (
        "tp",
        {"plan_ngpus": 2, "use_end2end": True, "overlap_communication": True},
    ),
}
"""Policies and configs of 2 ranks, by what they are called."""

SEVERAL_GRAPHS = ("dp, ZeRO-3", "recompute", "plan_independent")
"""Plans of which parts lie between graphs."""

Losses = list[list[float]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in "xy")  # type: ignore[return-value]


def made(name: str, folder: str) -> ParallelModule:
    policy, options = PLANS[name]
    config = shardwright.ComputeConfig(runtime_ngpus=2, **options)
    torch.manual_seed(0)
    model = (Loss if config.use_end2end else Net)().double()
    x, y = batch(0)
    where = f"{folder}/{name}"
    found = shardwright.parallelize(model, {"x": x, "y": y}, policy, config, gen_savedir=where)
    assert isinstance(found, ParallelModule)
    return found


def train(module: ParallelModule, call: Callable[..., Any]) -> tuple[Losses, list[Tensor]]:
    """Losses of a few steps of two microbatches, and the parameters after them."""
    optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        samples = [batch(2 * step), batch(2 * step + 1)]
        if module.end2end:
            found = module.train_step(samples)
        else:
            with optimizer.no_sync():
                found = [call(*samples[0]).loss]
                found[0].backward()
            found.append(call(*samples[1]).loss)
            found[1].backward()
        optimizer.step()
        losses.append([float(loss.detach()) for loss in found])
    return losses, [parameter.detach().clone() for parameter in module.parameters()]


def eager_and_compiled(folder: str) -> dict[str, Any]:
    """What :func:`train` gives, eager and compiled, and how many graphs that took, by plan."""
    found = {}
    for name in PLANS:
        backend = "inductor" if name == "tp" else "aot_eager"  # it takes its time to compile
        eager = made(name, folder)
        expected = train(eager, eager)
        module = made(name, folder)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fullgraph = name not in SEVERAL_GRAPHS
        if module.end2end:
            module.compile(backend=backend, fullgraph=fullgraph)
            call: Any = None
        else:
            call = torch.compile(module, backend=backend, fullgraph=fullgraph)
        results = train(module, call)
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found[name] = expected, results, num_graphs, "" if call is None else refusal(module, call)
    return found


class Packed(nn.Module):
    """Two layers of causal attention within documents."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        mask = (document[:, None, :, None] == document[:, None, None]) & (
            place[:, None] >= place[None]
        )
        for layer in self.qkv:
            query, key, value = layer(x).view(*x.shape[:2], 12, 8).transpose(1, 2).split(4, 1)
            y = nn.functional.scaled_dot_product_attention(query, key, value, mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x.square().mean()


ROWS = ((*(1,) * 256, 256, 256, *(1,) * 256), (1024,), (100, 500, 424))
"""Lengths of documents, by step. Of 2 ranks in zigzag the first has the single tokens."""


def packed_rows(folder: str, mode: str, backend: str) -> tuple[Any, Any, int, str]:
    """Losses, parameters and bytes received by step, eager and compiled; how many graphs that took;
    what ``fullgraph=True`` says.
    """
    config = shardwright.ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, pas_config={"cp_mode": mode, "cp_turns": 1}
    )

    def inputs(row: tuple[int, ...]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 1024, 32, generator=generator, dtype=torch.float64)
        return {"x": x, "document": torch.repeat_interleave(torch.tensor(row))[None]}

    def run(options: dict[str, Any] | None) -> Any:
        torch.manual_seed(0)
        model, where = Packed().double(), f"{folder}/{mode}"
        module = shardwright.parallelize(model, inputs(ROWS[0]), "cp", config, gen_savedir=where)
        call = module if options is None else torch.compile(module, **options)
        optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
        found = []
        for row in ROWS:
            optimizer.zero_grad()
            with shardwright.count_communication() as counted:
                loss = call(**inputs(row))
                loss.backward()
            optimizer.step()
            found.append((float(loss.detach()), counted.total("all_to_all").received))
        return found, [parameter.detach().clone() for parameter in module.parameters()]

    eager = run(None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run({"backend": backend})
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    try:
        run({"backend": "eager", "fullgraph": True})
    except torch._dynamo.exc.Unsupported as error:
        return eager, compiled, num_graphs, str(error)
    return eager, compiled, num_graphs, ""


def refusal(module: ParallelModule, call: Callable[..., Any]) -> str:
    """What a call says that gives the ranks of a unit different batches."""
    module.expect_comparison()
    try:
        call(*batch(module.rank))
    except shardwright.InputError as error:
        return str(error)
    return ""
