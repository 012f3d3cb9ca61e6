"""The commands that need only the runtime: ``merge``. They work where the compiler's dependencies
are not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwright.runtime.checkpoint.checkpoint_index import INDEX_FILE, Index
from shardwright.runtime.checkpoint.convert import convert_checkpoint
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.merge_files import merge_checkpoint
from shardwright.runtime.commands import HELP
from shardwright.runtime.errors import ConfigError, ShardwrightError

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
"""What adds a command's arguments, what runs it, and its help."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(prog="shardwright")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (add_arguments, run, text) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=HELP[name],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        command.add_argument("--debug", action="store_true", help="print a traceback for an error")
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ShardwrightError, OSError) as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="what save_checkpoint was called with, or a folder in it",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder to write")
    parser.add_argument(
        "--max-file-size",
        metavar="SIZE",
        help="begin another file when one would grow larger: 5GB, 500MB (default: one file)",
    )


def _merge(options: argparse.Namespace) -> int:
    size = None if options.max_file_size is None else _num_bytes(options.max_file_size)
    folder = find_folder(options.directory)
    out = merge_checkpoint(folder, options.out, max_file_bytes=size)
    index = Index.read(out / INDEX_FILE)
    num_bytes = sum(record.num_bytes for record in index.files.values())
    step = "" if index.step is None else f" of step {index.step}"
    files = f"{len(index.files)} file{'s' if len(index.files) > 1 else ''}"
    print(f"merged {folder}{step}: {len(index.tensors)} tensors, {_in_words(num_bytes)} in {files}")
    print(f"files: {out}")
    return 0


def _in_words(num_bytes: int) -> str:
    """``4.2 MB``."""
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}"
    return f"{num_bytes} B"


def _num_bytes(text: str) -> int:
    number = text.upper().rstrip("KMGB")
    unit = text.upper()[len(number) :]
    if not number.isdecimal() or unit not in _UNITS:
        raise ConfigError(f"{text!r} is no size", hint="write 5GB, 500MB or a number of bytes")
    return int(number) * _UNITS[unit]


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="DIR", help="a checkpoint, of either form")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder to write")
    parser.add_argument(
        "--to",
        required=True,
        choices=("shardwright", "huggingface", "full"),
        help="the form to write",
    )
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="with --to huggingface: where config.json is"
    )
    parser.add_argument(
        "--max-file-size",
        metavar="SIZE",
        help="begin another file when one would grow larger: 5GB, 500MB (default: one file)",
    )


def _convert(options: argparse.Namespace) -> int:
    size = None if options.max_file_size is None else _num_bytes(options.max_file_size)
    out = convert_checkpoint(
        options.source, options.out, options.to, config=options.config, max_file_bytes=size
    )
    print(f"converted {options.source} to {options.to}")
    print(f"files: {out}")
    return 0


COMMANDS: Mapping[str, Command] = {
    "convert": (
        _add_convert,
        _convert,
        """Convert a checkpoint: from ours to Hugging Face's form and back, or to whole tensors.

    shardwright convert checkpoints/ exported/ --to huggingface --config base-model/
    shardwright convert base-model/ start/ --to shardwright
    shardwright convert checkpoints/ whole/ --to full --max-file-size 5GB

Runs on any machine that has the folder: no GPU, no model code, memory for one tensor. Nothing is
unpickled.""",
    ),
    "merge": (
        _add_merge,
        _merge,
        """Merge a checkpoint into whole tensors under the original names.

    shardwright merge checkpoints/ merged/
    shardwright merge checkpoints/000007-step-3500 merged/ --max-file-size 5GB

Runs on any machine that has the folder: no GPU, no model code, memory for one tensor.
OUT/model.safetensors loads into the original module, and OUT is a checkpoint again, which
load_checkpoint loads under any plan.""",
    ),
}
"""The commands by name."""
