"""Saving a checkpoint: every rank writes the pieces it owns, then rank 0 makes the folder current.

While a checkpoint is written no rank needs another: each writes ``rank-<r>.safetensors`` and,
flushed behind it, what it adds to the index. When all of these are there rank 0 writes the index,
then replaces ``LATEST``. So a save can run in a background thread without communicating, and a rank
that is killed at any moment leaves the previous checkpoint current.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import operator
import sys
import threading
import weakref
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn
from torch.optim import Optimizer

from shardwright.runtime.argument_kinds import Stateful, is_too_long
from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.checkpoint_index import (
    INDEX_FILE,
    Index,
)
from shardwright.runtime.checkpoint.contents import check_complete
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.folders import (
    is_current,
    make_current,
    make_folder,
    next_number,
    prune,
    remove_folder,
    remove_unfinished,
    sync_folder,
)
from shardwright.runtime.checkpoint.loader_state import check_same_places
from shardwright.runtime.checkpoint.ordering import ordered_groups, reordered
from shardwright.runtime.checkpoint.owner import claim
from shardwright.runtime.checkpoint.snapshot import Snapshot, take_snapshot, tensor_file
from shardwright.runtime.checkpoint.tensor_files import write_tensors
from shardwright.runtime.errors import CheckpointError, ConfigError, FileError, brief
from shardwright.runtime.ranks.processes import Process
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.swap import write_file, writing
from shardwright.runtime.waiting import LIMIT_HINT, Wait

WRITE_HINT = "another directory, or room and permission to write there"

_BEAT_S = 5.0
"""How often a rank that writes gives one."""

logger = logging.getLogger(__name__)


class CheckpointSave:
    """A checkpoint that is written, or was. ``folder``: where. ``mark``: the file in it that tells
    it from a later folder of that name.

    Until :meth:`wait` returns, or the next save or load begins, an asynchronous one may still be
    under way.
    """

    def __init__(
        self, world: World, folder: Path, mark: str, snapshot: Snapshot, keep: int | None
    ) -> None:
        self.folder = folder
        self._mark = folder / mark
        self._world = world
        self._snapshot: Snapshot | None = snapshot
        self._order = snapshot.order
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_waited_for = False

    def wait(self) -> Path:
        """Return the folder when it is the current checkpoint. Collective.

        Raises on all ranks what any of them met while it wrote.
        """
        if not self._is_waited_for:
            if self._thread is not None:
                self._thread.join()
            self._is_waited_for = True
            _pending.pop(self._world, None)
            _unfinished.discard(self)
            try:
                with together(self._world):
                    self._raise_own()
            except Exception as error:  # of another rank, too: a second call is told the same
                self._error = error
                self._remove()
        self._raise_own()
        return self.folder

    def _raise_own(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """All of it on this rank."""
        self._is_waited_for = True
        try:
            with together(self._world):
                self._write_own()
            with together(self._world):
                if self._world.rank == 0:
                    self._commit()
        except Exception:  # whatever ended it, half a save is worth nothing
            self._remove()
            raise

    def _remove(self) -> None:
        """Delete what a failed save has written, on rank 0, when no rank writes any more: its room
        may be missed.
        """
        if self._world.rank == 0 and self._mark.exists() and not is_current(self.folder):
            with contextlib.suppress(OSError):
                remove_folder(self.folder)

    def _start(self) -> None:
        """All of it in the background."""
        _pending[self._world] = self
        _unfinished.add(self)
        # Before anything is written, so that rank 0 knows of every process that may end meanwhile.
        self.give_sign()
        # Both threads begin here: an interpreter that is about to end starts none.
        self._beat = _Beat(self)
        # No daemon: a process does not end before its files are written. What is waited for has a
        # limit.
        self._thread = threading.Thread(
            target=self._run_in_background, name=f"save {self.folder.name}"
        )
        self._thread.start()

    def _run_in_background(self) -> None:
        try:
            self._write_own()
            if self._world.rank == 0:
                self._await_others()
                self._commit()
        except Exception as error:
            self._error = error
            self._tell_failure(error)
            # Nobody may ever wait for it.
            logger.error(
                "rank %d: the checkpoint %s was not saved: %s", self._world.rank, self.folder, error
            )
        finally:
            self._beat.stop()

    def _say_at_exit(self) -> None:
        """Tell of a failure that nobody has asked for. All threads have ended; no communication."""
        if self._error is not None:
            print(
                f"shardwright: rank {self._world.rank} could not save the last checkpoint, "
                f"{self.folder}; it was not asked "
                f"for the result, so it says so here\n{self._error}",
                file=sys.stderr,
            )
            self._remove()

    def waits_for(self) -> str:
        """What is not written yet, in words."""
        lacking = [
            rank
            for rank in range(self._world.size)
            if not (self.folder / _part_file(rank)).exists()
        ]
        if self._world.rank in lacking or not lacking:
            return f"written its part of the checkpoint {self.folder}"
        return f"the parts of ranks {lacking} of the checkpoint {self.folder}, or gives them up"

    @property
    def alive_file(self) -> Path | None:
        """The file of this rank that says which process saves in the background; none on rank 0,
        which looks at those of others.
        """
        return self.folder / _alive_file(self._world.rank) if self._world.rank else None

    def give_sign(self) -> None:
        """Write into that file which process saves. Its time of change tells that it lives."""
        if self.alive_file is not None and self._mark.exists():
            # The save itself will say what is wrong with the disk.
            with contextlib.suppress(OSError):
                self.alive_file.write_text(json.dumps(Process.own().to_json()))

    def _write_own(self) -> None:
        assert self._snapshot is not None
        # The copy of the state is let go of as soon as this function is done.
        snapshot, self._snapshot = self._snapshot, None
        rank, files = self._world.rank, {}
        try:
            with writing("a checkpoint", self.folder, WRITE_HINT):
                if snapshot.sources:
                    name = tensor_file(rank)
                    self._check_own()
                    files[name] = write_tensors(self.folder / name, snapshot.sources)
                self._check_own()
                replace(snapshot.index, files=files).write(self.folder / _part_file(rank))
                sync_folder(self.folder)
        except FileError:
            self._check_own()
            raise

    def _check_own(self) -> None:
        """Refuse to write into a folder that is not the one which this save has made.

        A rank that was stopped wakes up when the others have gone on without it. Its folder is
        gone, or another save has one of that name. Raises :class:`CheckpointError`.
        """
        if self._mark.exists():
            return
        rank = self._world.rank
        what_is_there = (
            "the folder of that name belongs to a later save, which this rank leaves alone"
            if self.folder.is_dir()
            else "the folder is gone"
        )
        raise CheckpointError(
            f"{self.folder} was given up before rank {rank} had written its part",
            why=f"{what_is_there}: rank 0 deletes what it has waited for too long, and so "
            "does the next job that saves here",
            hint=f"see what has held up rank {rank}; the last checkpoint before it is whole",
        )

    def _tell_failure(self, error: Exception) -> None:
        if not self._mark.exists():
            return
        told = self.folder / _failure_file(self._world.rank)
        try:
            # What this rank has written may be what fills the disk.
            (self.folder / tensor_file(self._world.rank)).unlink(missing_ok=True)
            write_file(told, str(error).encode())
        except OSError:
            # A full disk takes another name still. Else rank 0 runs out of patience.
            if self.alive_file is not None:
                with contextlib.suppress(OSError):
                    self.alive_file.rename(told)

    def _await_others(self) -> None:
        """Return when the parts of all ranks are there. A rank that works gives signs of life, so
        that a large part may take its time and a dead rank is noticed.
        """
        waiting = set(range(self._world.size))
        # How long each rank has given no sign of life.
        silences = {rank: Wait("") for rank in waiting}
        processes: dict[int, Process] = {}
        wait = Wait(
            f"rank 0 waits for the parts of other ranks of the checkpoint {self.folder}", math.inf
        )
        while True:
            # First who is gone: what a rank has written before that is there when it is looked for.
            gone = {rank for rank in waiting if self._is_gone(rank, processes)}
            # A rank that failed says so in a file.
            failed = next(
                (rank for rank in waiting if (self.folder / _failure_file(rank)).exists()), None
            )
            if failed is not None:
                raise CheckpointError(
                    f"rank {failed} could not save its part of {self.folder}",
                    why=self._failure_of(failed),
                )
            waiting -= {rank for rank in waiting if (self.folder / _part_file(rank)).exists()}
            if not waiting:
                return
            if gone & waiting:
                lost = min(gone & waiting)
                raise CheckpointError(
                    f"{self.folder} is incomplete",
                    why=f"rank {lost} ({processes[lost]}) is gone, and its part is missing",
                    hint=f"look for the first error of rank {lost}",
                )
            pause_s = wait.pause_s
            wait.pause(f"; those of ranks {sorted(waiting)} are missing")
            # A large part takes long; a rank that writes beats meanwhile.
            for rank in waiting:
                silences[rank].heard(_last_sign(self.folder / _alive_file(rank)))
            silent = [rank for rank in sorted(waiting) if not silences[rank].passed(pause_s)]
            if silent:
                limit_s = silences[silent[0]].limit_s
                raise CheckpointError(
                    f"{self.folder} is incomplete",
                    why=f"for {limit_s:g} s there was no sign of life of ranks {silent}, whose "
                    "parts are missing",
                    hint="see whether their processes have ended; the directory must be on a file "
                    "system that all ranks share; " + LIMIT_HINT,
                )

    def _failure_of(self, rank: int) -> str:
        """What a rank says that has failed."""
        text = (self.folder / _failure_file(rank)).read_text()
        try:
            process = Process.from_json(json.loads(text))
        except ValueError:
            return text
        return f"it could not write why; {process} has logged it"

    def _is_gone(self, rank: int, processes: dict[int, Process]) -> bool:
        """Whether the process of another rank is seen to have ended. ``processes``: what is known
        of them, to be added to.
        """
        if rank not in processes and (known := self._world.process_of(rank)) is not None:
            processes[rank] = known
        if rank and rank not in processes:
            # There is no such file yet, or it is being written.
            with contextlib.suppress(OSError, ValueError):
                text = (self.folder / _alive_file(rank)).read_text()
                processes[rank] = Process.from_json(json.loads(text))
        return rank in processes and processes[rank].state() == "is gone"

    def _commit(self) -> None:
        """Join the ranks' parts into the index, and make the folder current."""
        self._check_own()
        # Each rank's part lists its own pieces; together they are the whole index.
        parts = [Index.read(self.folder / _part_file(rank)) for rank in range(self._world.size)]
        check_same_places([part.loader for part in parts])
        index = reduce(Index.merged, parts)
        tensors = {
            name: index.tensors[name] for name in reordered(tuple(index.tensors), self._order)
        }
        index, optimizer = replace(index, tensors=tensors), index.optimizer
        if optimizer is not None and parts[0].optimizer is not None:
            groups = ordered_groups(optimizer.groups, parts[0].optimizer.groups, self._order)
            index = replace(index, optimizer=replace(optimizer, groups=groups))
        # Nothing is made current that is not complete.
        check_complete(self.folder, index)
        index.write(self.folder / INDEX_FILE)
        make_current(self.folder)
        for rank in range(self._world.size):
            (self.folder / _part_file(rank)).unlink()
            (self.folder / _alive_file(rank)).unlink(missing_ok=True)
        self._mark.unlink()
        if self._keep is not None:
            prune(self.folder, self._keep)


@checked
def save_checkpoint(
    directory: Path | str,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    loader: Any = None,
    extra: Any = None,
    step: SupportsIndex | None = None,
    keep: int | None = 2,
    async_save: bool = False,
) -> CheckpointSave:
    """Save the training state into a fresh folder of ``directory``, which then becomes the current
    one. Collective.

    Every distinct piece of a tensor is written once, by the first rank that holds it: parameters,
    persistent buffers (of the first unit), the optimizer's state. Beside them seed and step of
    random numbers, the state of ``scheduler`` (its ``state_dict()``), ``step``, and rank 0's
    ``extra``: plain values and tensors. ``loader``: a loader of :mod:`shardwright.data`, whose
    position is saved; ranks that have none pass ``None``. ``directory`` is shared by all ranks.

    ``keep``: how many complete checkpoints stay, this one included (``None``: all); folders that
    hold anything else beside are never deleted. With ``async_save`` the state is copied to host
    memory and written in the background; the next save or load, or ``wait()`` of the result, waits
    for it and raises its errors.

    Raises :class:`CheckpointError` for what cannot be saved, by name, :class:`FileError` where it
    cannot be written, and :class:`ConfigError` for a ``step`` that is no count.
    """
    if keep is not None and keep < 1:
        raise ConfigError(
            f"keep={keep} would delete the checkpoint itself",
            hint="keep at least 1, or None for all",
        )
    step = _checked_step(step)
    world, directory = current_world(), Path(directory)
    finish_pending(world)
    made = None
    # A snapshot is references, or copies on the host if training goes on meanwhile.
    with together(world):
        snapshot = take_snapshot(world, module, optimizer, scheduler, loader, extra, step)
        if async_save:
            snapshot = snapshot.on_host()
        # Rank 0 makes the folder; the others wait for its name.
        if world.rank == 0:
            with writing("a checkpoint", directory, WRITE_HINT):
                directory.mkdir(parents=True, exist_ok=True)
                claim(directory)
                number = next_number(directory)
                remove_unfinished(directory, {save.folder for save in _unfinished})
                folder, mark = make_folder(directory, number, step)
                made = [folder.name, mark]
    name, mark = world.broadcast_object(made)
    with together(world):
        if not (directory / name).is_dir():
            raise CheckpointError(
                f"{directory / name} is not there on rank {world.rank}",
                why="rank 0 has just made it",
                hint="save to a file system that all ranks share",
            )
    save = CheckpointSave(world, directory / name, mark, snapshot, keep)
    save._start() if async_save else save._run()
    return save


def _checked_step(step: Any) -> int | None:
    """A count of steps as an ``int``; integers of NumPy and of tensors are such counts too."""
    try:
        checked = None if step is None else int(operator.index(step))
    except TypeError:
        checked = -1
    if checked is not None and (checked < 0 or is_too_long(checked)):
        raise ConfigError(
            f"step={brief(step)} is no count of steps",
            why="it is a part of the folder's name",
            hint="pass an integer from 0 on",
        )
    return checked


def finish_pending(world: World) -> None:
    """Wait for the asynchronous save that is under way, if there is one. Collective."""
    pending = _pending.get(world)
    if pending is not None:
        pending.wait()


_unfinished: set[CheckpointSave] = set()
"""The asynchronous saves of this process that nobody has waited for."""


@atexit.register
def _say_all_at_exit() -> None:
    for save in list(_unfinished):
        save._say_at_exit()


class _Beat:
    """Writes a file again and again while a save is under way, so that other ranks see that this
    process lives; and says on stderr what the process waits for when it could end otherwise.
    """

    def __init__(self, save: CheckpointSave) -> None:
        self._save = save
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"signs of life {save.folder.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when the file is touched no more."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        has_said = False
        while not self._done.wait(_BEAT_S):
            self._save.give_sign()
            if not has_said and not threading.main_thread().is_alive():
                has_said = True
                print(
                    f"shardwright: this process ends when it has {self._save.waits_for()}",
                    file=sys.stderr,
                    flush=True,
                )


def _last_sign(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


_pending: weakref.WeakKeyDictionary[World, CheckpointSave] = weakref.WeakKeyDictionary()
"""The asynchronous save of each world that nobody has waited for: at most one."""


def _part_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _alive_file(rank: int) -> str:
    return f"rank-{rank:05d}.alive"


def _failure_file(rank: int) -> str:
    return f"rank-{rank:05d}.failed"
