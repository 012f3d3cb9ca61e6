"""Folders of a model: pieces that ranks save and read, and what ``from_pretrained`` reads.

    parallel_ckpt/                       save_parallelized("parallel_ckpt")
        config.json  generation_config.json  LATEST
        000003/
            index.json  rank-00000.safetensors  rank-00001.safetensors

    merged_ckpt/                         save_parallelized("merged_ckpt", merge_checkpoints=True)
        config.json  generation_config.json  model.safetensors

The first is a checkpoint as :func:`shardwright.save_checkpoint` makes it: every distinct piece
once, by the first rank that has it, so data-parallel copies write nothing. It loads on any number
of ranks.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.runtime.checkpoint.checkpoint_index import INDEX_FILE, Index
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.pretrained import (
    CONFIG_FILE,
    Rename,
    RenameSome,
    export_pretrained,
    folder_names,
    load_pretrained,
)
from shardwright.runtime.checkpoint.save import save_checkpoint
from shardwright.runtime.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    MissingFileError,
)
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.swap import write_folder, writing

HINT = "another folder, or room and permission to write there"

_MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_pieces(
    model: nn.Module, directory: Path, *, save_config: bool, config_of: Any = None, **state: Any
) -> None:
    """Save the pieces of all ranks into ``directory``, as its only checkpoint. Collective.

    ``config_of``: the model whose config is saved, where it is inside ``model``.
    """
    world = current_world()
    check_folder(world, directory)
    save_checkpoint(directory, model, keep=1, **state)
    with together(world):
        if save_config and world.rank == 0:
            with writing("the config", directory, HINT):
                write_config(model if config_of is None else config_of, directory)


def save_merged(
    model: nn.Module,
    directory: Path,
    *,
    save_config: bool,
    max_file_bytes: int | None,
    config_of: Any = None,
) -> None:
    """Save what ``from_pretrained`` reads into ``directory``. Collective.

    One rank writes it, and has one tensor at a time. Other files that are there, such as those of a
    tokenizer, stay. ``config_of``: the model of transformers, where ``model`` is compiled from it.
    """
    world = current_world()
    check_folder(world, directory)
    original: Any = model if config_of is None else config_of
    with together(world):
        if has_peft_layers(original):
            raise ConfigError(
                f"the layers of {type(original).__name__} are wrapped by peft",
                why="from_pretrained does not know their names",
                hint="initialize what get_peft_model returned, and save that; or save pieces",
            )
    with pieces_aside(world, model, directory) as pieces, together(world):
        if world.rank == 0:
            with writing("the model", directory, HINT):
                # Beside the folder, on the same disk, so that files are moved into it and never
                # half there.
                aside = directory.with_name(f".{directory.name}.merged.{secrets.token_hex(4)}")
                try:
                    export_pretrained(
                        pieces, aside, _config_of(original),
                        rename=names_for_folder(original), max_file_bytes=max_file_bytes,
                    )  # fmt: skip
                    if save_config:
                        write_config(original, aside)
                    else:
                        (aside / CONFIG_FILE).unlink()
                    move_into(aside, directory)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)


def check_folder(world: World, directory: Path) -> None:
    """Raise :class:`FileError` on all ranks if something else than a folder lies there."""
    with together(world):
        if directory.exists() and not directory.is_dir():
            raise FileError(
                f"{directory} is not a folder",
                why="a file lies there, and the model is saved into a folder",
                hint="name another one, or delete the file",
            )


def check_pieces(directory: Path) -> None:
    """Raise :class:`MissingFileError` on all ranks if a folder of pieces lacks one. Collective."""
    with together(current_world()):
        if directory.exists() and not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not a folder",
                why="a file lies there, and save_parallelized makes a folder",
                hint="pass the folder that save_parallelized was given",
            )
        if _is_merged(directory):
            raise CheckpointError(
                f"{directory} holds a merged model, not its pieces",
                why="save_parallelized(..., merge_checkpoints=True) left it for from_pretrained",
                hint="from_pretrained before shardwright.initialize, or a folder that was saved "
                "without merge_checkpoints",
            )
        folder = find_folder(directory)
        names = Index.read(folder / INDEX_FILE).files
        missing = [name for name in sorted(names) if not (folder / name).exists()]
        if missing:
            raise MissingFileError(
                f"{folder} lacks {', '.join(missing)}",
                why=f"{len(names)} files hold the pieces of the model, and {len(missing)} of them "
                "are not there",
                hint="copy the folder as a whole, from all nodes that saved",
            )


def _is_merged(directory: Path) -> bool:
    """Whether a folder holds a model as transformers saves it, and no checkpoint."""
    has_model = any(directory.glob("model*.safetensors"))
    return has_model and not any(directory.glob(f"*/{INDEX_FILE}"))


def load_whole(
    model: Any, program: nn.Module, directory: Path, *, named: RenameSome | None = None
) -> None:
    """Read this rank's pieces into ``program``, which is compiled from ``model``, from a folder
    that ``save_pretrained`` wrote. Collective.

    ``named``: what ``model`` calls a tensor of ``program``, where that was compiled from something
    around it; ``None`` for one that is not the model's.

    Names are matched as transformers does: a folder of the base model lacks the prefix
    (``h.0.attn.c_attn.weight`` is ``transformer.h.0...`` here), and what the class declares as
    unneeded is left alone.
    """
    world = current_world()
    with together(world):
        there = names_in_folder(model, folder_names(directory))

    def rename(name: str) -> str | None:
        own = name if named is None else named(name)
        return None if own is None else there(own)

    # Tensors of older versions of the class, which transformers ignores, too.
    patterns = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    load_pretrained(
        directory,
        program,
        rename=rename,
        ignore=lambda name: any(pattern.search(name) for pattern in patterns),
    )


def names_in_folder(model: Any, names: Iterable[str]) -> Rename:
    """What a folder with these ``names`` calls a tensor of ``model``."""
    prefix = f"{model.base_model_prefix}."
    renamed = _renaming(model)
    # By today's name: folders keep the one that the class had when it was published.
    known = {renamed(name): name for name in names} | {name: name for name in names}

    def there(name: str) -> str:
        candidates = (name, name.removeprefix(prefix), prefix + name)
        return next((known[one] for one in candidates if one in known), name)

    return there


def names_for_folder(model: Any) -> Rename:
    """What ``save_pretrained`` calls a tensor of ``model``: by the names that were published."""
    return _renaming(model, reverse=True)


def _renaming(model: Any, *, reverse: bool = False) -> Rename:
    """How transformers renames the tensors of a folder when it reads them (``embed_out.weight`` of
    a GPT-NeoX is ``lm_head.weight`` of its class), or, in ``reverse``, when it writes them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            WeightRenaming,
            apply_renamings,
        )
    except ImportError:  # older versions read and write the names of the class
        return lambda name: name
    steps = get_model_conversion_mapping(model, add_legacy=not reverse)
    steps = [step for step in steps if not isinstance(step, PrefixChange)]
    if reverse:
        # Tensors that the class has merged (the weights of experts) are written merged, under
        # today's names, which from_pretrained reads as well.
        if any(isinstance(step, WeightConverter) for step in steps):
            return lambda name: name
        steps = [step.reverse_transform() for step in reversed(steps)]
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    return lambda name: str(apply_renamings(name, renamings))


def has_peft_layers(model: nn.Module) -> bool:
    """Whether layers of ``model`` are wrapped by peft."""
    return any(
        base.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
        for part in model.modules()
        for base in type(part).__mro__
    )


def write_config(model: Any, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json``, and ``generation_config.json`` of a model that generates, as
    ``save_pretrained`` does. ``dtype``: of the parameters beside it (default: of the model's).
    """
    _config_of(model, dtype).save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def _config_of(model: Any, dtype: torch.dtype | None = None) -> Any:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    return config


@contextmanager
def pieces_aside(world: World, model: nn.Module, directory: Path) -> Iterator[Path]:
    """A checkpoint of ``model`` beside ``directory``, deleted afterwards. All ranks share the
    disk.
    """
    name = world.broadcast_object(f".{directory.name}.pieces.{secrets.token_hex(4)}")
    aside = directory.with_name(name)
    try:
        save_checkpoint(aside, model, keep=1)
        yield aside
    finally:
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def move_into(fresh: Path, directory: Path) -> None:
    """Put the files of ``fresh`` into ``directory``, each at once, and delete model files of an
    earlier save that are not among them.
    """
    if not directory.exists():
        with write_folder(directory) as made:
            for file in sorted(fresh.iterdir()):
                os.replace(file, made / file.name)
        return
    names = {file.name for file in fresh.iterdir()}
    for name in sorted(names):
        os.replace(fresh / name, directory / name)
    # Last: a crash before leaves too many files, never too few.
    for file in directory.iterdir():
        if _MODEL_FILES.fullmatch(file.name) and file.name not in names:
            with suppress(FileNotFoundError):
                file.unlink()


def pretrained_folder(model: Any, checkpoint: str | Path | None) -> Path:
    """The folder of weights: ``checkpoint``, or where the model's config comes from. A name of the
    hub stands for its folder in the local cache.

    Raises :class:`CheckpointError` if there is none.
    """
    name = checkpoint if checkpoint is not None else getattr(model.config, "_name_or_path", "")
    if not name:
        raise CheckpointError(
            f"{type(model).__name__} has no values",
            why="it lies on the meta device, and its config does not say which folder it is of",
            hint="pass checkpoint=: a folder that save_pretrained wrote",
        )
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name} is no folder, and not in the cache of the hub",
            why=str(error).splitlines()[0],
            hint=f"hf download {name}, or pass checkpoint=: a folder that save_pretrained wrote",
        ) from error


def folder_of_values(model: nn.Module, checkpoint: str | Path | None) -> Path | None:
    """The folder to read values from, for a model that has none; ``None`` for one that has them.

    Raises :class:`ConfigError` for a model that has values in parts.
    """
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if on_meta == {True}:
        return pretrained_folder(model, checkpoint)
    if True in on_meta:
        raise ConfigError(
            f"a part of {type(model).__name__} lies on the meta device",
            why="the values of the rest would be used, and those of that part read",
            hint="make the whole model under torch.device('meta'), or none of it",
        )
    if checkpoint is not None:
        raise ConfigError(
            "checkpoint is for a model on the meta device",
            why=f"this {type(model).__name__} has values, which would be thrown away",
            hint="leave out checkpoint, or make the model under torch.device('meta')",
        )
    return None
