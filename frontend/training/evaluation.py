"""The mean loss over the evaluation data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.frontend.training.datasets import cast_to, make_loader
from shardwright.frontend.training.run_state import Run
from shardwright.runtime.errors import DataError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.structure import flatten, map_leaves


def evaluate(run: Run) -> dict[str, Any]:
    """The mean loss over the global batches of the evaluation data, in evaluation mode. Collective.

    Samples that fill no global batch are left out, and counted in the record.
    """
    assert run.evaluated is not None
    settings, dataset, transform = run.evaluated
    device = run.world.device if run.world.device.type == "cuda" else None
    loader = make_loader(
        settings, dataset, transform, run.model,
        global_batch=run.settings.global_batch, microbatch=run.batches.microbatch, device=device,
    )  # fmt: skip
    started, losses = time.perf_counter(), []
    with _evaluation_mode(run.model):
        for samples in loader:
            cast = cast_to(run.dtype)
            given = [None if s is None else map_leaves(s, cast) for s in samples]
            results = run.model.infer_step(run.weights.told(given, run.model))
            found = [next(iter(flatten(result).values())) for result in results]
            losses.append(run.weights.total(found, run.world, run.batches.num_units))
            if len(losses) == run.settings.evaluation.max_steps:
                break
    loader.close()
    if not losses:
        raise DataError(
            "the evaluation data has no global batch",
            why=f"it has less than {run.settings.global_batch} samples",
            hint="evaluate on more, or use a smaller global_batch",
        )
    num_samples = len(losses) * run.settings.global_batch
    left_out = len(dataset) - num_samples if hasattr(dataset, "__len__") else None
    loss = torch.stack(losses).mean().item()
    record = run.loggers.write(
        "evaluation",
        step=run.step,
        loss=loss,
        # exp(709.8) is the largest float64.
        perplexity=math.exp(min(loss, 700.0)),
        samples=num_samples,
        samples_left_out=left_out,
        seconds=time.perf_counter() - started,
    )
    run.hooks.call("on_evaluate", run, record)
    return record


@contextmanager
def _evaluation_mode(model: ParallelModule) -> Iterator[None]:
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
