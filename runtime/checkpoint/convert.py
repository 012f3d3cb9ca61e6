"""Converting a checkpoint from one form to another: offline, on the CPU, one tensor in memory at a
time, without ranks or model code.

| form | what it is |
|---|---|
| ``shardwright`` | a folder with ``index.json``; loads under any plan |
| ``full`` | the same with every tensor in one piece, under the original names |
| ``huggingface`` | ``model.safetensors`` and ``config.json``, as ``from_pretrained`` reads them |
| ``dcp`` | a folder of ``torch.distributed.checkpoint``, as FSDP2 and torchtitan have them |
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.checkpoint_index import (
    INDEX_FILE,
    Index,
    PieceRecord,
    TensorRecord,
)
from shardwright.runtime.checkpoint.contents import Contents
from shardwright.runtime.checkpoint.dcp_index import DCP_FILE
from shardwright.runtime.checkpoint.dcp_write import write_dcp
from shardwright.runtime.checkpoint.folders import (
    LATEST_FILE,
    find_folder,
    pieces_folder,
    sync_folder,
)
from shardwright.runtime.checkpoint.merge_files import MODEL_STEM, checked_index, merge_checkpoint
from shardwright.runtime.checkpoint.pretrained import (
    CONFIG_FILE,
    MODEL_FILE,
    WEIGHT_MAP_FILE,
    export_pretrained,
    files_of,
)
from shardwright.runtime.checkpoint.tensor_files import (
    FileRecord,
    MappedFiles,
    TensorSource,
    write_tensors,
)
from shardwright.runtime.errors import CheckpointError, ConfigError
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.regions import Region
from shardwright.runtime.swap import write_folder, writing

Form = Literal["shardwright", "huggingface", "full", "dcp"]


@checked
def convert_checkpoint(
    source: Path | str,
    out: Path | str,
    form: Form,
    *,
    config: Path | str | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write what ``source`` holds as a new folder ``out`` of another form; returns ``out``.

    ``config``: the ``config.json`` of the model, or its folder, for ``huggingface``. A folder of
    Hugging Face has no optimizer, and neither has what is made of it. What a folder of
    ``torch.distributed.checkpoint`` has that no other form has a place for is left out, with a
    warning that names it.

    Raises :class:`CheckpointError` for a folder of no form, damaged files, and an ``out``
    that exists; :class:`ConfigError` for a form that needs a ``config``, or has no use for one.
    """
    source, out = Path(source), Path(out)
    given = form_of(source)
    if (config is not None) != (form == "huggingface"):
        raise ConfigError(
            "the form huggingface needs a config"
            if config is None
            else f"the form {form} has no use for a config",
            why="from_pretrained reads config.json beside the weights",
            hint="--config FOLDER, where the config.json of the model is"
            if config is None
            else "leave it out",
        )
    if given == form:
        raise ConfigError(
            f"{source} has the form {form} already", hint="copy the folder, or name another form"
        )
    if given == "huggingface" and form == "dcp":
        raise ConfigError(
            f"{source} is of Hugging Face, and dcp is made of a checkpoint",
            hint=f"shardwright convert {source} START --to shardwright, and then that one",
        )
    if form == "dcp":
        return _export_dcp(source, out, max_file_bytes)
    if given == "huggingface":
        return import_pretrained(source, out, max_file_bytes=max_file_bytes)
    if form == "huggingface":
        return export_pretrained(source, out, config, max_file_bytes=max_file_bytes)
    return merge_checkpoint(source, out, max_file_bytes=max_file_bytes)


def form_of(folder: Path) -> Form:
    """The form of a folder. Raises :class:`CheckpointError` for what is none that can be read."""
    pieces = pieces_folder(folder)
    # A trained model that was saved beside the checkpoints of a Trainer is what is meant.
    if pieces == folder and _is_saved(folder):
        return "shardwright"
    if (folder / MODEL_FILE).exists() or (folder / WEIGHT_MAP_FILE).exists():
        return "huggingface"
    if (folder / DCP_FILE).exists():
        return "dcp"
    if _is_saved(pieces):
        return "shardwright"
    raise CheckpointError(
        f"{folder} is no checkpoint",
        why=f"it has none of {INDEX_FILE}, {LATEST_FILE}, {MODEL_FILE} and {DCP_FILE}",
        hint="pass a folder of save_checkpoint, of save_pretrained, or of "
        "torch.distributed.checkpoint",
    )


def _is_saved(folder: Path) -> bool:
    return (folder / INDEX_FILE).exists() or (folder / LATEST_FILE).exists()


def _export_dcp(source: Path, out: Path, max_file_bytes: int | None) -> Path:
    folder = find_folder(source)
    _check_free(out)
    index = checked_index(folder)
    place = writing("the checkpoint", out, "another folder, or room and permission to write there")
    with place, write_folder(out) as fresh, Contents(folder, index) as contents:
        write_dcp(fresh, contents, max_file_bytes)
        sync_folder(fresh)
    return out


def _check_free(out: Path) -> None:
    if out.exists():
        raise CheckpointError(
            f"{out} exists",
            why="converting would replace it",
            hint="name a new folder, or delete it first",
        )


def import_pretrained(folder: Path, out: Path, *, max_file_bytes: int | None = None) -> Path:
    """Write a folder of Hugging Face as a checkpoint, which :func:`load_checkpoint` takes under any
    plan.
    """
    _check_free(out)
    place = writing("the checkpoint", out, "another folder, or room and permission to write there")
    with place, MappedFiles(folder) as files, write_folder(out) as fresh:
        where = files_of(folder, files)
        tensors: dict[str, TensorRecord] = {}
        written: dict[str, FileRecord] = {}
        for number, names in enumerate(_packed(files, where, max_file_bytes), start=1):
            file = f"{MODEL_STEM}-{number:05d}.safetensors"
            sources = {name: _source(files, where[name], name) for name in names}
            written[file] = write_tensors(fresh / file, sources)
            for name, source in sources.items():
                # A folder of Hugging Face holds whole tensors: each is one piece.
                whole = Region.whole(source.shape)
                pieces = (PieceRecord(file, name, whole),) if whole.num_elements else ()
                tensors[name] = TensorRecord(source.shape, source.dtype, pieces)
        Index(_class_name(folder), tensors, written).write(fresh / INDEX_FILE)
        sync_folder(fresh)
    return out


def _source(files: MappedFiles, file: str, name: str) -> TensorSource:
    shape, dtype = files.kind(file, name)
    if dtype is None:
        raise CheckpointError(f"{name!r} in {file} has a dtype that torch does not have")
    return TensorSource(shape, dtype, partial(files.view, file, name))


def _packed(
    files: MappedFiles, where: Mapping[str, str], max_file_bytes: int | None
) -> list[list[str]]:
    """The names of each file to write, in order."""
    packed: list[list[str]] = [[]]
    total = 0
    for name, file in where.items():
        source = _source(files, file, name)
        # A tensor larger than the limit gets a file of its own.
        if packed[-1] and max_file_bytes is not None and total + source.num_bytes > max_file_bytes:
            packed.append([])
            total = 0
        packed[-1].append(name)
        total += source.num_bytes
    return packed


def _class_name(folder: Path) -> str:
    """The class that ``config.json`` names."""
    try:
        config: Any = parse_json((folder / CONFIG_FILE).read_bytes())
        return str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "Module"  # the name is for messages only
