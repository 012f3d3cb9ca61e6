"""The command ``train``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from shardwright.frontend.training.joining_ranks import joined_job, launcher
from shardwright.frontend.training.launching import start_ranks
from shardwright.frontend.training.read_settings import read_run
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.stopping import STOPPED_EXIT_CODE
from shardwright.frontend.training.trainer import train


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the settings of the run, as YAML",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings with where each came from, and run nothing",
    )
    parser.epilog = (
        "Any setting is an option by its path, and counts in the place of the file's: "
        "--steps 100 --optimizer.options.lr 3e-4"
    )
    parser.set_defaults(rest=[])


def _train(options: argparse.Namespace) -> int:
    read = read_run(options.config, options.rest)
    if options.print_config:
        print(read)
        return 0
    if launcher(os.environ) is None:
        return start_ranks(_num_ranks(read.settings), _command(options))
    with joined_job():
        result = train(read.settings)
    if result.stopped_by is not None and os.environ.get("RANK") == "0":
        print(
            f"stopped by {result.stopped_by} after step {result.step} of {result.num_steps} and "
            "saved; the same command goes on from there",
            file=sys.stderr,
        )
    return 0 if result.is_complete else STOPPED_EXIT_CODE


def _num_ranks(settings: RunSettings) -> int:
    """The ranks to start: those asked for, else one for each GPU."""
    return settings.num_ranks or max(1, torch.cuda.device_count())


def _command(options: argparse.Namespace) -> list[str]:
    """The arguments of Python by which a rank runs this command."""
    debug = ["--debug"] if options.debug else []
    config = ["--config", str(options.config)]
    return ["-m", "shardwright", "train", *config, *debug, *options.rest]


COMMANDS: Mapping[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
] = {
    "train": (
        _add_train,
        _train,
        """Train a model: the whole run, from the settings in a file.

    shardwright train -c run.yaml
    shardwright train -c run.yaml --steps 100 --parallel.policy tp
    torchrun --nproc-per-node 8 -m shardwright train -c run.yaml
    srun shardwright train -c run.yaml
    shardwright train -c run.yaml --print-config

Under torchrun and srun this process is one of the ranks; alone it starts num_ranks of them. SIGTERM
and SIGUSR1 save and stop, with exit code 75; the same command then goes on from the newest
checkpoint, on another number of ranks too. All settings: docs/finetuning.md.""",
    ),
}
"""Name to what adds its arguments, what runs it, and its help."""
