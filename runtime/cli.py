"""The commands that need only the runtime, ``merge`` and ``convert``: they run where the compiler's
dependencies are not installed.
"""

from __future__ import annotations

import argparse

from shardwright.runtime.activity import activity
from shardwright.runtime.checkpoint.checkpoint_index import INDEX_FILE, Index
from shardwright.runtime.checkpoint.convert import convert_checkpoint
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.merge_files import merge_checkpoint
from shardwright.runtime.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run_merge(options: argparse.Namespace) -> int:
    """Run ``merge``."""
    size = None if options.max_file_size is None else _num_bytes(options.max_file_size)
    folder = find_folder(options.directory)
    with activity("merging"):
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


def run_convert(options: argparse.Namespace) -> int:
    """Run ``convert``."""
    size = None if options.max_file_size is None else _num_bytes(options.max_file_size)
    with activity("converting"):
        out = convert_checkpoint(
            options.source, options.out, options.to, config=options.config, max_file_bytes=size
        )
    print(f"converted {options.source} to {options.to}")
    print(f"files: {out}")
    return 0
