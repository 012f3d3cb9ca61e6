"""A closer look at some steps: the profiler of torch, and a snapshot of CUDA memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwright.frontend.training.run_settings import ProfileSettings
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.ranks.world import World


class Observer:
    """Profiles and snapshots the steps that the settings name, on this rank.

    Raises :class:`ConfigError` for a snapshot of memory on a CPU.
    """

    def __init__(self, settings: ProfileSettings, folder: Path, world: World) -> None:
        self._settings, self._folder, self._world = settings, folder, world
        self._profiler: Any = None
        if settings.memory_step is not None and world.device.type != "cuda":
            raise ConfigError(
                "profile.memory_step needs a CUDA device",
                why="torch records allocations of CUDA's allocator only",
                hint="profile.first_step works on a CPU, with memory by operator",
            )

    def before_step(self, step: int) -> None:
        """Begin to record, if this step, counted from 1, is the first of those."""
        first = self._settings.first_step
        if step == self._settings.memory_step:
            torch.cuda.memory._record_memory_history()
        if step != first or self._world.rank not in self._settings.ranks:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._profiler.start()

    def after_step(self, step: int) -> None:
        """Write what was recorded, if this step is the last of those."""
        first, rank = self._settings.first_step, self._world.rank
        if step == self._settings.memory_step:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]
                str(self._folder / f"memory-rank{rank}.pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profiler is None or first is None:
            return
        if step == first + self._settings.num_steps - 1:
            self._finish()

    def close(self) -> None:
        """Write what was recorded of a run that ended before."""
        if self._profiler is not None:
            self._finish()

    def _finish(self) -> None:
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / f"trace-rank{self._world.rank}.json"))
        self._profiler = None
