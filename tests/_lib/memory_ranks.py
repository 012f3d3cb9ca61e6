"""Training steps on ranks that are threads, with the peak of the bytes that live on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from plans import write
from torch import nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer


def measured_peaks(
    directory: Path,
    compiled: Compiled,
    module: nn.Module,
    inputs: Mapping[str, Any],
    config: ComputeConfig,
    num_microbatches: int | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> list[int]:
    """The most bytes that live at once on each rank, in a step that is not the first. Every such
    step must have the same, however the threads take turns.
    """
    write(directory, compiled, module)

    def rank(index: int) -> int:
        part = load_class(directory)()
        with LiveBytes() as live:
            optimizer = build_optimizer(part, make, config)
            samples = [
                dict(inputs) for _ in range(num_microbatches or compiled.plan.num_microbatches)
            ]
            samples = [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
                for s in samples
            ]
            live.watch([*part.parameters(), *part.buffers()])
            peaks = []
            for _ in range(4):
                live.restart()
                part.train_step(samples)
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(live.peak)
            assert len(set(peaks[1:])) == 1, (
                f"the peak of rank {index} differs from step to step: {peaks[1:]}"
            )
            return peaks[-1]

    return run_ranks(config.runtime_ngpus, rank)
