"""Starting the ranks of a run on this machine, where no launcher has.

The program that starts them only watches: it passes signals on, and when a rank ends with an error
it says which one and ends the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from types import FrameType

from shardwright.frontend.training.stopping import (
    CONFIG_EXIT_CODE,
    SIGNALS,
    STOPPED_EXIT_CODE,
)
from shardwright.runtime.errors import format_error

GRACE_S = 20.0
"""How long the others get after a rank has failed: they notice it by themselves, and say why."""

POLL_S = 0.05


def rank_variables(num_ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun gives each rank of a job on this machine."""
    with socket.socket() as free:
        # The system chooses a free port. Another process may take it before rank 0 does: the job
        # then fails at once, in words.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(num_ranks)
    everywhere = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def start_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Run ``command`` (arguments of Python) as ranks of one job; returns the exit code.

    0 if all ranks ended well, :data:`STOPPED_EXIT_CODE` if they were stopped and have saved,
    :data:`CONFIG_EXIT_CODE` if one has told that it cannot run, else that of the first one that
    failed.
    """
    # As under torchrun: each rank would otherwise take all cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ranks = [
        subprocess.Popen([sys.executable, *command], env={**environment, **variables})
        for variables in rank_variables(num_ranks)
    ]

    passed_on: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.add(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        return _watched(ranks, passed_on)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(ranks)


def _watched(ranks: Sequence[subprocess.Popen[bytes]], passed_on: Collection[int]) -> int:
    """Wait for all ranks, or for a while after the first that fails. ``passed_on``: the signals
    that they were sent.
    """
    failed: int | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        for number, rank in enumerate(ranks):
            code = rank.poll()
            if failed is None and code not in (None, 0, STOPPED_EXIT_CODE):
                # The others will fail too, waiting for this one; they get time to say so in words.
                failed, deadline = number, time.monotonic() + GRACE_S
        time.sleep(POLL_S)
    codes = [rank.poll() for rank in ranks]
    if failed is None:
        failed = next(
            (n for n, code in enumerate(codes) if code not in (0, STOPPED_EXIT_CODE)), None
        )
    if failed is None:
        return STOPPED_EXIT_CODE if STOPPED_EXIT_CODE in codes else 0
    # It has told why, and the others only miss it. Started again, it would tell the same.
    if CONFIG_EXIT_CODE in codes:
        return CONFIG_EXIT_CODE
    code = codes[failed]
    # A rank that is still importing, or is asked twice, ends at once.
    if code is not None and -code in passed_on:
        print(
            f"stopped by {signal.Signals(-code).name} before anything could be saved; the same "
            "command goes on from the newest checkpoint, if there is one",
            file=sys.stderr,
            flush=True,
        )
        return STOPPED_EXIT_CODE
    assert code is not None
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    print(
        format_error(
            f"rank {failed} has ended with {how}",
            why="a run needs all of its ranks",
            hint="look for the first error above; the same command goes on from the newest "
            "checkpoint, if there is one",
        ),
        file=sys.stderr,
        flush=True,
    )
    # As shells write a signal: 137 for SIGKILL.
    return code if code > 0 else 128 - code


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    # SIGTERM first, so that ranks can say where they were; SIGKILL five seconds later.
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for rank in ranks:
            if rank.poll() is None:
                stop(rank)
        deadline = time.monotonic() + 5.0
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
