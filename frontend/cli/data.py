"""The command ``data``: deals saved states of loaders anew, and makes indexes of files."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.data.energon.redist import redistribute
from shardwright.data.formats import json_lines, tar_shards
from shardwright.data.formats.source_files import build_index, listed
from shardwright.frontend.cli.model_arguments import make_console
from shardwright.runtime.errors import ConfigError, DataError, brief_text
from shardwright.runtime.swap import write_file, writing


def run_data(options: argparse.Namespace) -> int:
    """Run ``data``."""
    actions = {"redist": _redist, "index": _index}
    return actions[options.action](options)


def _redist(options: argparse.Namespace) -> int:
    # One file with the states of all ranks, or a file for each.
    found = [_read_states(path) for path in options.states]
    if len(found) == 1 and isinstance(found[0], list):
        (states,) = found
    else:
        states = found
    dealt = redistribute(
        states,
        world_size=options.world_size,
        num_workers=options.num_workers,
        batch_size=options.batch_size,
    )
    text = str(options.out)
    if "{rank}" in text:
        for rank, state in enumerate(dealt):
            _write_states(Path(text.replace("{rank}", str(rank))), state)
    else:
        _write_states(options.out, dealt)
    was = states[0]
    make_console().print(
        f"dealt the states of {len(states)} ranks with {was['num_workers']} workers each to "
        f"{options.world_size} ranks with {options.num_workers}: {text}",
        soft_wrap=True,
    )
    return 0


def _read_states(path: Path) -> Any:
    """A file of states; nothing is unpickled but plain values."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return torch.load(path, weights_only=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{path} holds no states of loaders",
            why=brief_text(error),
            hint="give files that torch.save or json.dump wrote of save_state_rank() or "
            "save_state_global()",
        ) from error


def _write_states(path: Path, states: Any) -> None:
    if path.suffix not in (".pt", ".json"):
        raise ConfigError(f"{path} is neither .pt nor .json", hint="name a file such as out.pt")
    if path.suffix == ".json":
        content = (json.dumps(states) + "\n").encode()
    else:
        buffer = io.BytesIO()
        torch.save(states, buffer)
        content = buffer.getvalue()
    with writing("a state", path, "a folder that is there, with room and permission to write"):
        write_file(path, content)


def _index(options: argparse.Namespace) -> int:
    kinds: Sequence[tuple[tuple[str, ...], Any]] = (
        ((".tar",), tar_shards),
        ((".jsonl", ".ndjson"), json_lines),
    )
    console = make_console()
    for path in listed(options.paths, tuple(s for suffixes, _ in kinds for s in suffixes), "shard"):
        module = next((m for suffixes, m in kinds if path.name.endswith(suffixes)), None)
        if module is None:
            raise ConfigError(f"{path} needs no index", why="only .tar and .jsonl files have one")
        arrays = build_index(path, module.KIND, module.build)
        # One entry of these for each sample.
        count = len(arrays["key_ends" if module is tar_shards else "start"])
        console.print(f"{path}: {count} samples", soft_wrap=True)
    return 0
