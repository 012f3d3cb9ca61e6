"""Predicted and measured peaks of many plans of one GPT-2, on ranks that are processes: all plans
in the same ones.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zoo
from plans import random_plan
from torch import nn
from traces import shared_trace, shared_traces

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.machine.backend import Backend
from shardwright.compiler.cost.memory.pipeline_memory import pipeline_memory
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.frontend.parallelize import parallelize
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer

SIZES = {
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 32,
    "use_cache": False,
}
SAMPLES = 16
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "use_cache": False,
}


class Layers(nn.Module):
    """Two blocks of linear layers without biases, and a head. With few samples weights are most of
    the memory.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(pairwise((*widths, widths[0])))
        linear = partial(nn.Linear, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(linear(a, b) for a, b in pairs)) for _ in range(2)
        )
        self.head = linear(*widths[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).square().mean()


@dataclass(frozen=True)
class PeakCase:
    """A plan. ``unit``: ranks of a unit, 0 for all. ``fields``: of the config; ``options``: of the
    policy. Policy ``random`` draws a plan by its ``seed``. ``optimizer``: a class, as command lines
    name it. ``documents``: their lengths in each row, which a Llama gets in the place of a GPT-2.
    ``widths``: of the layers of a :class:`Layers`, which takes its place.
    """

    policy: str
    unit: int = 0
    num_microbatches: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    recompute: tuple[str, ...] = ()
    seed: int = 0
    optimizer: str = "Adam"
    documents: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [self.policy, *(f"{k}={v}" for k, v in (self.fields | self.options).items())]
        words += [f"seed={self.seed}"] if self.policy == "random" else []
        words += [self.optimizer] if self.optimizer != "Adam" else []
        words += [f"{len(self.documents)} documents"] if self.documents else []
        words += ["widths", *map(str, self.widths)] if self.widths else []
        words += ["bfloat16"] if self.dtype == torch.bfloat16 else []
        return " ".join(
            [*words, *(["recompute"] if self.recompute else []), f"x{self.num_microbatches}"]
        )

    def config(self, num_ranks: int) -> ComputeConfig:
        staged = (
            {"num_microbatches": self.num_microbatches} if self.policy in ("pp", "hybrid") else {}
        )
        unit = self.unit or num_ranks
        return ComputeConfig(
            plan_ngpus=unit,
            runtime_ngpus=num_ranks,
            use_end2end=True,
            pas_config={**self.options, **staged},
            **self.fields,
        )

    def plan(self, graph: Any, config: Any) -> Any:
        if self.policy == "random":
            mesh = Mesh(tuple((axis, 2) for axis in "abc"[: config.plan_ngpus.bit_length() - 1]))
            return replace(
                random_plan(graph, mesh, random.Random(self.seed)), recompute=self.recompute
            )
        found = find_policy(self.policy).apply(graph, config)
        return replace(getattr(found, "plan", found), recompute=self.recompute)

    @property
    def model_name(self) -> str:
        """What tells the model from those of other cases."""
        return f"peaks {self.widths}" if self.widths else "peaks"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.documents:
            return zoo.get("llama").make(**LLAMA).to(self.dtype).train()
        if self.widths:
            return Layers(self.widths).to(self.dtype)
        return zoo.get("gpt2").make(**SIZES).to(self.dtype).train()

    def sample(self, num_ranks: int) -> dict[str, torch.Tensor]:
        """One microbatch of one unit."""
        if self.widths:
            return {"x": torch.randn(2, self.widths[0]).to(self.dtype)}
        if self.documents:
            places = torch.cat([torch.arange(length) for length in self.documents])[None]
            ids = torch.randint(64, places.shape, generator=torch.Generator().manual_seed(0))
            return {"input_ids": ids, "labels": ids.clone(), "position_ids": places}
        size = SAMPLES // (num_ranks // (self.unit or num_ranks)) // self.num_microbatches
        ids = torch.randint(256, (size, 32), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids.clone()}


def predicted(case: PeakCase, num_ranks: int, backend: Backend = "gloo") -> list[int]:
    """What the cost model says, by rank of the unit."""
    config = case.config(num_ranks)
    compiled = compile_graph(
        shared_trace(case.model_name, case.model(), case.sample(num_ranks)),
        case.plan,
        config,
        policy_name=case.policy,
    )
    optimizer = OptimizerMemory(named=NamedOptimizer(case.optimizer))
    if isinstance(compiled.program, PipelineProgram):
        return [
            memory.peak_bytes
            for memory in pipeline_memory(compiled.program, config, optimizer, backend)
        ]
    found = program_memory(
        compiled.program,
        config,
        optimizer,
        num_microbatches=case.num_microbatches,
        backend=backend,
    )
    return [found.peak_bytes] * config.plan_ngpus


class _LiveOnDevice(LiveBytes):
    """Counts what lives on devices of one type: copies on the host belong to a stand-in."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        super().__init__()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        super().watch(x for x in tensors if x.device.type == self._device_type)


def _named(text: str) -> Any:
    """``"Adam"`` of torch, ``"my_module:Adam"`` of one's own."""
    module, colon, name = text.rpartition(":")
    return getattr(importlib.import_module(module) if colon else torch.optim, name)


def measure(folder: str, cases: Sequence[PeakCase]) -> list[int]:
    """Measure, by case, the most bytes that live at once on this rank in a step. Results are kept
    up to its end.

    Of the steps after the second the least: a thread of gloo that has sent what a bucket held lets
    go of it when it runs again, which on a machine with other work may be far into the optimizer's
    step.
    """
    return [_peak(Path(folder, str(number)), case) for number, case in enumerate(cases)]


def _peak(folder: Path, case: PeakCase) -> int:
    num_ranks = dist.get_world_size()
    config, sample = case.config(num_ranks), case.sample(num_ranks)
    with shared_traces(case.model_name):
        model = parallelize(case.model(), sample, case.plan, config, gen_savedir=str(folder))
    device = current_world().device
    samples = [
        {name: x.to(device, copy=True) for name, x in sample.items()}
        for _ in range(case.num_microbatches)
    ]
    with _LiveOnDevice(device.type) as live:
        optimizer = build_optimizer(model, _named(case.optimizer), config, lr=1e-4)
        live.watch(
            [*model.parameters(), *model.buffers(), *(x for each in samples for x in each.values())]
        )
        peaks = []
        for _ in range(6):
            live.restart()
            results = model.train_step(samples)
            optimizer.step()
            optimizer.zero_grad()
            del results
            peaks.append(live.peak)
        return min(peaks[2:])
