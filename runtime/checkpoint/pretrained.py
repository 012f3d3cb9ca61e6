"""Folders of Hugging Face transformers: ``model.safetensors`` and ``config.json``, written from a
checkpoint and read under any plan. Transformers itself is not needed for either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.contents import Contents
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.merge_files import checked_index, write_model_files
from shardwright.runtime.checkpoint.optimizer_state import listed
from shardwright.runtime.checkpoint.stacked_experts import Part, parts_of
from shardwright.runtime.checkpoint.tensor_files import MappedFiles
from shardwright.runtime.errors import CheckpointError, brief, brief_text
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.regions import Region, copy_shared
from shardwright.runtime.swap import write_file, write_folder

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
WEIGHT_MAP_FILE = "model.safetensors.index.json"

Rename = Callable[[str], str]
"""What the folder calls a tensor, given its name in the module."""

RenameSome = Callable[[str], str | None]
"""The same, with ``None`` for a tensor that is not to be read from the folder."""


@checked
def export_pretrained(
    directory: Path | str,
    out: Path | str,
    config: Any,
    *,
    rename: Rename | None = None,
    max_file_bytes: int | None = 50 * 10**9,
) -> Path:
    """Write the current checkpoint of ``directory`` as a new folder ``out`` that
    ``from_pretrained`` reads. Returns ``out``.

    ``config``: the model's configuration: a transformers one, a dict, or the path of a
    ``config.json`` or of the folder it is in. ``rename``: what transformers calls a tensor, given
    its name in the module (for a model that was wrapped: ``lambda name:
    name.removeprefix("model.")``). A tied tensor is written once, under its first name, as
    transformers does. One tensor is in memory at a time. ``max_file_bytes``: another file is begun
    where one would grow larger (``None``: never).

    Raises :class:`CheckpointError` if there is no checkpoint, if files are missing or altered, or
    if ``out`` exists.
    """
    folder, out = find_folder(Path(directory)), Path(out)
    if out.exists():
        raise CheckpointError(
            f"{out} exists",
            why="the export would replace it",
            hint="name a new folder, or delete it first",
        )
    # Files are compared with their digests first.
    index = checked_index(folder)
    names = {name: rename(name) if rename else name for name in index.tensors}
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise CheckpointError(f"rename gives several tensors the name {twice!r}")
    content = _config_text(config, index.module_class)
    with write_folder(out) as fresh, Contents(folder, index) as contents:
        # The framework of the tensors, which transformers writes too.
        metadata = {"format": "pt"}
        _, where = write_model_files(fresh, contents, names, max_file_bytes, metadata)
        # Several files need an index that says which tensor is where.
        if set(where.values()) - {MODEL_FILE}:
            total = sum(record.num_bytes for record in index.tensors.values())
            weight_map = {"metadata": {"total_size": total}, "weight_map": where}
            write_file(fresh / WEIGHT_MAP_FILE, _json(weight_map))
        write_file(fresh / CONFIG_FILE, content)
    return out


@checked
def load_pretrained(
    directory: Path | str,
    module: nn.Module,
    *,
    rename: RenameSome | None = None,
    ignore: Callable[[str], bool] | None = None,
    file: str = MODEL_FILE,
) -> None:
    """Load the weights of a transformers folder into a module under any plan. Every rank reads its
    own elements. Collective.

    ``rename``: what the folder calls a tensor, given its name in the module; a tensor for which it
    returns ``None`` stays what it is. Tied tensors may be there under any of their names. Experts
    that the folder has one by one (``experts.0.gate_proj.weight``) are read into the tensor that
    stacks them; ``rename`` is asked for each of them, too.
    ``ignore``: whether something that the folder has more, given its name, is left alone. ``file``:
    the name of the one file that folders of other kinds have.

    Raises :class:`CheckpointError` on all ranks naming what is missing or has another shape, and
    what the folder has more.
    """
    world, directory = current_world(), Path(directory)
    holdings = Holdings.of(module)
    with MappedFiles(directory) as files:
        with together(world):
            where = files_of(directory, files, file)
            shapes = {one: files.shapes(one) for one in sorted(set(where.values()))}

            def shape_of(name: str) -> tuple[int, ...] | None:
                return shapes[where[name]].get(name) if name in where else None

            # What this rank holds, under the names of the folder.
            found, problems, known = [], [], set()
            for holding in holdings.tensors:
                renamed = [rename(name) if rename else name for name in holding.names]
                names = [name for name in renamed if name is not None]
                if not names:
                    continue
                known |= set(names)
                # A tied parameter is stored under one of its names; which one is up to the writer.
                name = next((name for name in names if name in where), None)
                if name is None:
                    parts = parts_of(
                        holding.names[0], holding.shape, rename or (lambda name: name), shape_of
                    )
                    if parts is None:
                        problems.append(f"{names[0]!r} is missing")
                    else:
                        known |= {part.name for part in parts}
                        found += [(holding, part) for part in parts]
                elif shape_of(name) != holding.shape:
                    problems.append(
                        f"{name!r} is {list(shape_of(name) or ())} there and "
                        f"{list(holding.shape)} here"
                    )
                else:
                    found.append((holding, Part(name, Region.whole(holding.shape))))
            _refuse(directory, holdings, problems)
        # A tensor is left over only if no rank has a use for it, as stages hold different parts.
        unknown = [
            set(names)
            for names in world.all_gather_object([name for name in where if name not in known])
        ]
        _refuse(
            directory,
            holdings,
            [
                f"{name!r} is not in the module"
                for name in where
                if name in set.intersection(*unknown) and not (ignore and ignore(name))
            ],
        )
        with together(world):
            for holding, part in found:
                view = files.view(where[part.name], part.name).view(part.region.shape)
                copy_shared(holding.tensor, holding.region, view, part.region)


def folder_names(directory: Path) -> frozenset[str]:
    """The names of the tensors in a transformers folder. Raises as :func:`load_pretrained`."""
    with MappedFiles(directory) as files:
        return frozenset(files_of(directory, files))


def _refuse(directory: Path, holdings: Holdings, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{directory} does not fit {holdings.class_name}",
            why=listed(problems),
            hint="if names differ throughout, pass rename=: what the folder calls a tensor of the "
            "module",
        )


def files_of(directory: Path, files: MappedFiles, file: str = MODEL_FILE) -> dict[str, str]:
    """The file in which each tensor is, by the tensor's name. ``files``: those of ``directory``;
    ``file``: what it is called where there is one.

    Raises :class:`CheckpointError` for a folder without weights, or a damaged index.
    """
    try:
        weight_map = parse_json((directory / WEIGHT_MAP_FILE).read_bytes())["weight_map"]
        return {str(name): Path(one).name for name, one in weight_map.items()}
    except (FileNotFoundError, NotADirectoryError):
        if (directory / file).exists():
            return dict.fromkeys(files.shapes(file), file)
        raise CheckpointError(
            f"{directory} holds no weights",
            why=f"it has neither {file} nor {WEIGHT_MAP_FILE}",
            hint="files of torch.save are not read: convert them with save_pretrained(..., "
            "safe_serialization=True)",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / WEIGHT_MAP_FILE} is damaged", why=str(error)
        ) from error


def _config(config: Any) -> Mapping[str, Any]:
    """The content of ``config.json``."""
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            path = path / CONFIG_FILE if path.is_dir() else path
            config = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{brief(config)} is no configuration", why=brief_text(error)
            ) from error
    elif hasattr(config, "to_json_string"):
        config = parse_json(config.to_json_string())
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"a {type(config).__name__} is no configuration",
            hint="pass model.config, a dict, or the path of a config.json",
        )
    return {
        key: value for key, value in config.items() if value is not None or key != "architectures"
    }


def _config_text(config: Any, module_class: str) -> bytes:
    """``config.json``, with the class of the model if the configuration does not name one."""
    content = {**_config(config)}
    content.setdefault("architectures", [module_class])
    if not all(isinstance(key, str) for key in content):
        raise CheckpointError(
            "the configuration cannot be written as JSON", why="not all of its keys are strings"
        )
    try:
        return _json(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "the configuration cannot be written as JSON",
            why=brief_text(error),
            hint="keep numbers, strings, lists and dicts in it",
        ) from error


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
