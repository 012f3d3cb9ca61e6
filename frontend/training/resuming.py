"""Finding the checkpoint that a run goes on from, and whether it may."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.frontend.training.run_settings import RunSettings
from shardwright.runtime.checkpoint.contents import read_index
from shardwright.runtime.checkpoint.folders import LATEST_FILE, find_folder
from shardwright.runtime.checkpoint.json_values import decode
from shardwright.runtime.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from: its folder, the step after which it was saved, and the number of
    ranks that saved it, if it says so.
    """

    folder: Path
    step: int
    num_ranks: int | None

    def is_moved_to(self, num_ranks: int) -> bool:
        """Whether it was saved by another number of ranks, as far as it says."""
        return self.num_ranks not in (None, num_ranks)


def checkpoint_folder(settings: RunSettings) -> Path:
    """Where the run saves."""
    folder = settings.checkpoints.folder
    return Path(settings.output) / "checkpoints" if folder is None else Path(folder)


def checkpoint_to_resume(settings: RunSettings, num_ranks: int) -> Found | None:
    """The checkpoint to go on from; ``None`` to begin anew. Reads files, sends nothing.

    Raises :class:`CheckpointError` if there is none where one is named, or one where there may be
    none, and :class:`ConfigError` if it is of another number of ranks and ``on_world_change`` is
    ``refuse``.
    """
    folder, resume = checkpoint_folder(settings), settings.checkpoints.resume
    is_there = (folder / LATEST_FILE).exists()
    if resume == "never":
        if is_there:
            raise CheckpointError(
                f"{folder} has checkpoints of an earlier run",
                why="checkpoints.resume is 'never', and the new ones would be mixed with them",
                hint="name another output, delete the folder, or resume: auto",
            )
        return None
    if resume == "auto" and not is_there:
        return None
    found = _read(find_folder(folder if resume == "auto" else Path(resume)))
    # ``None``: a checkpoint that does not say, such as one from another library.
    if found.is_moved_to(num_ranks) and settings.on_world_change == "refuse":
        raise ConfigError(
            f"{found.folder} was saved by {found.num_ranks} ranks, and {num_ranks} are running",
            why="on_world_change is 'refuse'",
            hint="start as many, or on_world_change: replan, which makes the plan anew and moves "
            "the checkpoint",
        )
    return found


def saved_extra(num_ranks: int, plan_ngpus: int, scaler: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of a run holds besides."""
    return {"num_ranks": num_ranks, "plan_ngpus": plan_ngpus, "scaler": dict(scaler)}


def _read(folder: Path) -> Found:
    index = read_index(folder)
    num_ranks = None
    with contextlib.suppress(KeyError, TypeError):  # saved by another program than this one
        num_ranks = int(decode(index.extra)["num_ranks"])
    if index.step is None:
        raise CheckpointError(
            f"{folder} does not say after which step it was saved",
            why="a run counts its steps, and goes on with the next one",
            hint="save it with save_checkpoint(..., step=...)",
        )
    return Found(folder, index.step, num_ranks)
