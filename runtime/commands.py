"""The commands by name, with what each does: what ``shardwright --help`` and ``--version`` say
without importing torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import version

from shardwright import __version__

ALIASES: Mapping[str, str] = {"merge-checkpoint": "merge"}
"""Other names of commands."""

HELP: Mapping[str, str] = {
    "compile": "Compile a module offline: no GPU, no torchrun, no process group",
    "verify": "Check a plan against one device, in this process",
    "inspect": "Show the plan of a compiled module, and where it replicates",
    "accept": "Accept edits of generated code",
    "trace": "Show a model's program after every pass of a compile",
    "ops": "List the operators of a model that have no rule, with lines to paste",
    "train": "Train a model: the whole run, from the settings in a file",
    "plan": "Search for the best plan for a machine",
    "explain": "Say why the best plan looks as it does",
    "simulate": "Predict the time and the memory of a plan",
    "profile": (
        "Measure the operators of a plan on this machine: a rank's calls, each different one once"
    ),
    "diff": "Show what differs between two plans",
    "calibrate": "Measure this machine and write it as a hardware file",
    "data": "Work on data: deal saved states of loaders anew, make indexes of shards",
    "doctor": "Look at this machine: versions, devices, disk, a collective of two ranks",
    "completion": "Print a script that completes commands and options in a shell",
    "convert": (
        "Convert a checkpoint: from ours to Hugging Face's form and back, or to whole tensors"
    ),
    "merge": "Merge a checkpoint into whole tensors under the original names",
}
"""One line for each command, in the order of ``--help``."""

Commands = argparse._SubParsersAction  # the only name that argparse has for it


def main_parser() -> tuple[argparse.ArgumentParser, Commands[argparse.ArgumentParser]]:
    """The parser of the whole command line, and what commands are added to."""
    parser = argparse.ArgumentParser(
        prog="shardwright", description="Compile an ordinary PyTorch module for many devices."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"shardwright {__version__} (torch {version('torch')})",
    )
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def answer(option: str) -> None:
    """Print what ``--help`` or ``--version`` alone asks for, and exit."""
    parser, commands = main_parser()
    for name, line in HELP.items():
        commands.add_parser(name, help=line)
    parser.parse_args([option])
