"""What a pipelined training step holds at most, beside ``torch.distributed.pipelining`` with the
same schedule and stages.

    python benchmarks/pipeline_peaks.py [--ranks 2] [--only 1f1b]

The model and the settings are those of ``pipeline_step.py``. Peak bytes of live tensors on each
rank, counted at every operator of the third step: parameters, gradients, optimizer state, samples,
buffers for messages and activations, whoever holds them. Each side runs in processes of its own, so
that nothing of the other is counted. The numbers do not depend on the load.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_step import PEERS, ours, peers
from storage_bytes import LiveBytes
from torch import Tensor


def run_rank(side: str, schedule: str, folder: str) -> None:
    """One side on the calling rank; its numbers go to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = ours(schedule, folder) if side == "ours" else peers(schedule)
    step(), step()
    gc.collect()
    # No fakes of the tracer.
    counted = LiveBytes(x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter))
    before = counted.now
    with counted:
        step()
    Path(folder, f"{side}{dist.get_rank()}.json").write_text(json.dumps([before, counted.peak]))
    dist.barrier()
    dist.destroy_process_group()


def measure(schedule: str, num_ranks: int) -> None:
    """Both sides of one case; prints a line for each rank."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for side in ("ours", "peers"):
            command = [*torchrun, __file__, "--rank-in", side, schedule, folder]
            subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        for rank in range(num_ranks):
            found = [
                json.loads(Path(folder, f"{side}{rank}.json").read_text())
                for side in ("ours", "peers")
            ]
            (our_rest, our_peak), (their_rest, their_peak) = (
                [size / 2**20 for size in sizes] for sizes in found
            )
            cells = [
                schedule,
                num_ranks,
                rank,
                f"{our_peak / their_peak:.3f}",
                f"{our_peak:.1f}",
                f"{their_peak:.1f}",
            ]
            print(
                "| "
                + " | ".join(map(str, [*cells, f"{our_rest:.1f}", f"{their_rest:.1f}"]))
                + " |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4))
    parser.add_argument("--only", choices=list(PEERS))
    parser.add_argument(
        "--rank-in", nargs=3, metavar=("SIDE", "CASE", "DIR"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.rank_in:
        return run_rank(*arguments.rank_in)
    print(
        "| schedule | ranks | rank | ours / theirs | ours, MiB | theirs, MiB | between steps "
        "| theirs |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for num_ranks in (2, 4):
        for schedule in PEERS:
            if arguments.only in (None, schedule) and arguments.ranks in (None, num_ranks):
                measure(schedule, num_ranks)


if __name__ == "__main__":
    main()
