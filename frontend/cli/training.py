"""The command ``train``."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from shardwright.frontend.training.joining_ranks import (
    ToldByFirstRankError,
    joined_job,
    launcher,
)
from shardwright.frontend.training.launching import start_ranks
from shardwright.frontend.training.read_settings import read_run
from shardwright.frontend.training.resuming import checkpoint_to_resume
from shardwright.frontend.training.run_checks import check_run, check_settings
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.stopping import CONFIG_EXIT_CODE, STOPPED_EXIT_CODE
from shardwright.frontend.training.trainer import train
from shardwright.runtime.errors import DistributedError, FileError, ShardwrightError


def run_train(options: argparse.Namespace) -> int:
    """Run ``train``."""
    try:
        read = read_run(options.config, options.rest)
        if options.print_config:
            # The machine that prints may not be the one that runs: its GPUs say nothing.
            if read.settings.num_ranks is None:
                check_settings(read.settings)
            else:
                _check(read.settings, read.settings.num_ranks)
            print(read)
            return 0
        # Nobody has started ranks: this process starts them, and waits for them.
        if launcher(os.environ) is None:
            num_ranks = _num_ranks(read.settings)
            _check(read.settings, num_ranks)
            return start_ranks(num_ranks, _command(options))
        with joined_job():
            result = train(read.settings)
    except ToldByFirstRankError as error:
        return _exit_code(error.__cause__)
    except ShardwrightError as error:
        error.exit_code = _exit_code(error)
        raise
    if result.stopped_by is not None and os.environ.get("RANK") == "0":
        print(
            f"stopped by {result.stopped_by} after step {result.step} of {result.num_steps} and "
            "saved; the same command goes on from there",
            file=sys.stderr,
        )
    return 0 if result.is_complete else STOPPED_EXIT_CODE


def _check(settings: RunSettings, num_ranks: int) -> None:
    """Raise what a run on so many ranks would end with, as far as that shows before it starts."""
    found = checkpoint_to_resume(settings, num_ranks)
    replan = found is not None and found.is_moved_to(num_ranks)
    check_run(settings, num_ranks, replan=replan)


def _exit_code(error: BaseException | None) -> int:
    """What tells Slurm, and whoever starts runs again, whether that may help."""
    may_pass = isinstance(error, DistributedError | FileError)
    return 1 if may_pass else CONFIG_EXIT_CODE


def _num_ranks(settings: RunSettings) -> int:
    """The ranks to start: those asked for, else one for each GPU."""
    return settings.num_ranks or max(1, torch.cuda.device_count())


def _command(options: argparse.Namespace) -> list[str]:
    """The arguments of Python by which a rank runs this command."""
    debug = ["--debug"] if options.debug else []
    config = ["--config", str(options.config)]
    return ["-m", "shardwright", "train", *config, *debug, *options.rest]
