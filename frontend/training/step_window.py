"""How long the steps took since the last record, and what they waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.frontend.training.records import peak_memory_bytes
from shardwright.frontend.training.run_state import Run


class StepWindow:
    """The steps since the last record: how long they took, and what they sent."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begin()
        self._waiting_since = time.perf_counter()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._waited_before = self._run.world.counters.waited_s
        self._num_steps, self._data_s, self._aside_s = 0, 0.0, 0.0

    def data_ready(self) -> None:
        """The samples of a step have come."""
        self._num_steps += 1
        self._data_s += time.perf_counter() - self._waiting_since

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around evaluations and saves, which count for no step."""
        started, waited_s = time.perf_counter(), self._run.world.counters.waited_s
        yield
        self._aside_s += time.perf_counter() - started
        self._waited_before += self._run.world.counters.waited_s - waited_s

    def step_done(self, *, was_logged: bool) -> None:
        """A step is over, and what followed it."""
        if was_logged:
            self._begin()
        self._waiting_since = time.perf_counter()

    def record(self, losses: Sequence[Tensor], norm: Tensor | None, rate: float) -> dict[str, Any]:
        """The record of the step that is over, which took that learning rate. Collective."""
        run, world = self._run, self._run.world
        loss = run.weights.total(losses, world, run.batches.num_units).item()
        norm_value = None if norm is None else float(norm)
        # On a GPU the numbers above were waited for, so the steps are over.
        now = time.perf_counter()
        waited_s = world.counters.waited_s - self._waited_before
        seconds = now - self._started - self._aside_s
        step_s = seconds / self._num_steps
        memory = torch.tensor(float(peak_memory_bytes(world.device)), device=world.device)
        memory = world.everyone.all_reduce(memory.double(), "max", phase="setup")
        predicted = run.prediction
        # Collectives of a GPU are waited for on the device, where the host's clock does not see
        # them.
        waits_on_host = world.device.type == "cpu" and world.size > 1
        return run.loggers.write(
            "step",
            step=run.step,
            epoch=run.loader.epoch,
            loss=loss,
            grad_norm=norm_value,
            lr=rate,
            step_s=step_s,
            predicted_step_s=predicted.step_s,
            samples_per_s=run.settings.global_batch / step_s,
            tokens_per_s=None if run.tokens_per_step is None else run.tokens_per_step / step_s,
            mfu=predicted.mfu(step_s),
            peak_memory_bytes=int(memory.item()),
            predicted_peak_memory_bytes=predicted.peak_bytes,
            communication_share=waited_s / seconds if waits_on_host else None,
            predicted_communication_share=predicted.communication_share,
            data_s=self._data_s,
        )
