"""Running a benchmark on several ranks of this machine: the command starts itself again under
torchrun.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


def parser_of(
    doc: str | None, *, pairs: int = 20, rank_in: Sequence[str] = ("CASE", "DIR")
) -> argparse.ArgumentParser:
    """What all these commands understand. ``rank_in``: what they pass on to their ranks, see
    :func:`start_ranks`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument(
        "--rank-in", nargs=len(rank_in), metavar=tuple(rank_in), help=argparse.SUPPRESS
    )
    return parser


def start_ranks(file: str, num_ranks: int, case: Sequence[str] = (), **options: object) -> None:
    """Run ``file --rank-in CASE DIR --option VALUE`` on every rank, one thread each; ``DIR`` goes
    away afterwards.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [*torchrun, file, "--rank-in", *case, folder, *words]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})


@contextmanager
def gloo_rank() -> Iterator[int]:
    """The number of the calling rank; the process group exists inside the block."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def assert_same_training(first: float, second: float) -> None:
    """The losses of both sides after as many steps are those of one model."""
    assert abs(first - second) < 1e-4 * abs(second), (
        f"the two sides train different things: loss {first} and {second}"
    )
