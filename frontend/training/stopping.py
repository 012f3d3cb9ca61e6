"""Stopping a run between two steps, on all ranks after the same one.

Clusters send a signal before they take a machine away (Slurm: ``--signal=USR1@120``), perhaps to
one rank only. So ranks tell each other after each step whether one has been asked to stop. The
answer is read a step later: waiting for it at once would keep a GPU idle between steps.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.ranks.transport import Work
from shardwright.runtime.ranks.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

STOPPED_EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h, "try again later": the run has saved, and is not complete."""


CONFIG_EXIT_CODE = 78
"""``EX_CONFIG`` of sysexits.h: an error that would come again, however often the run is started."""


class StopRequest:
    """Whether this run is to stop, and why. As a ``with`` block it listens for :data:`SIGNALS`."""

    def __init__(self, world: World) -> None:
        self.reason: str | None = None
        self._world = world
        self._told: tuple[Tensor, Work] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread, and only there may one listen.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def ask(self, reason: str) -> None:
        """Let all ranks stop, soon; a hook may ask for it."""
        self.reason = self.reason or reason

    def is_agreed(self) -> bool:
        """Whether some rank was asked to stop before its last call. Collective: all ranks call it
        after each step, and get the same answer.
        """
        if self._world.size == 1:
            return self.reason is not None
        agreed = False
        if self._told is not None:
            flag, work = self._told
            work.wait()
            agreed = bool(flag.item())
            if agreed:
                self.ask(f"rank {int(flag.item()) - 1}, which was asked to")
        # The number of a rank that was asked to, counted from 1.
        mine = 0 if self.reason is None else self._world.rank + 1
        flag = torch.full((), float(mine), device=self._world.device)
        self._told = flag, self._world.everyone.all_reduce_async(flag, "max", phase="setup")
        return agreed

    def settle(self) -> None:
        """Wait for what ranks still tell each other, after the last step. Collective."""
        if self._told is not None:
            self._told[1].wait()
            self._told = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)
        # A second signal ends the process: the first one may have come in a step that hangs.
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
