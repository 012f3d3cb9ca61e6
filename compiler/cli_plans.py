"""The commands about plans as data: ``diff``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from shardwright.compiler.report.diff import diff, show_diff
from shardwright.policies.saved import read_plan_file

PIPE_WIDTH = 160
"""Columns of output that goes to no terminal."""


def make_console() -> Console:
    """Where commands print. Layouts are full of brackets: no markup."""
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("before", "after"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a plan.json, or the folder of a compile")
    parser.add_argument("--every-layer", action="store_true", help="a row for every operator, not one per kind of layer")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def _diff(options: argparse.Namespace) -> int:
    found = diff(*(read_plan_file(path / "plan.json" if path.is_dir() else path) for path in (options.before, options.after)))
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        make_console().print(show_diff(found, every_layer=options.every_layer))
    return 1 if found else 0


COMMANDS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]] = {
    "diff": (
        _add_diff,
        _diff,
        """Show what differs between two plans.

    shardwright diff .shardwright/_parallel_modules/my_models/Gpt/a .shardwright/_parallel_modules/my_models/Gpt/b
    shardwright diff plan.json edited.json --json

The exit code is 1 if anything does.""",
    ),
}
"""Name to what adds its arguments, what runs it, and its help."""
