"""Offline: merging a checkpoint into whole tensors, on any machine that has the folder. Neither
ranks, GPUs, model code nor memory for more than one tensor are needed.

A merged checkpoint is a checkpoint again, in which every tensor is one piece:
:func:`load_checkpoint` loads it under any plan. Its files are also what other tools read:
``model.safetensors`` holds the tensors under the names of the original model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.checkpoint_index import (
    INDEX_FILE,
    Index,
    OptimizerRecord,
    PieceRecord,
    TensorRecord,
    state_key,
    unused,
)
from shardwright.runtime.checkpoint.contents import (
    Contents,
    check_complete,
    check_files,
    read_index,
)
from shardwright.runtime.checkpoint.folders import find_folder, sync_folder
from shardwright.runtime.checkpoint.json_values import decode
from shardwright.runtime.checkpoint.merged import set_random_states
from shardwright.runtime.checkpoint.optimizer_state import NamedState, StateDict
from shardwright.runtime.checkpoint.tensor_files import FileRecord, TensorSource, write_tensors
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region
from shardwright.runtime.swap import write_folder, writing

MODEL_STEM = "model"
OPTIMIZER_STEM = "optimizer"


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint in memory, for the original module, optimizer and scheduler.

    ``module`` and ``optimizer`` are state dicts, as :func:`merge_state_dicts` makes them;
    ``scheduler`` is one too.
    """

    module: StateDict
    optimizer: StateDict | None
    scheduler: Any
    step: int | None
    extra: Any


@checked
def read_checkpoint(directory: Path | str) -> WholeCheckpoint:
    """Read the current checkpoint of ``directory``, or one of the folders in it, into one process.
    No communication.

    Raises :class:`CheckpointError` if there is none, or if files are missing or altered.
    """
    folder = find_folder(Path(directory))
    index = checked_index(folder)
    with Contents(folder, index) as contents:
        module: StateDict = OrderedDict()
        for name, record in index.tensors.items():
            whole = contents.read(record)
            # Names of one tied parameter get one tensor, as ``state_dict`` gives them.
            module.update(dict.fromkeys((name, *record.aliases), whole))
        module.update({key: decode(value) for key, value in index.extra_states.items()})
        set_random_states(module, index.random)
        optimizer = None if index.optimizer is None else _whole_optimizer(contents, index.optimizer)
    return WholeCheckpoint(
        module, optimizer, decode(index.scheduler), index.step, decode(index.extra)
    )


@checked
def merge_checkpoint(
    directory: Path | str, out: Path | str, *, max_file_bytes: int | None = None
) -> Path:
    """Merge the current checkpoint of ``directory``, or one of the folders in it, into the new
    folder ``out``.

    ``model.safetensors`` holds parameters and persistent buffers, ``optimizer.safetensors`` the
    optimizer's tensors as ``<parameter>/<key>``, ``index.json`` everything else. Files grow to
    ``max_file_bytes`` at most (a larger tensor gets one of its own), then there are several,
    ``model-00001-of-00003.safetensors``. Returns ``out``.

    Raises :class:`CheckpointError` if there is no checkpoint, if files are missing or altered, or
    if ``out`` exists.
    """
    folder, out = find_folder(Path(directory)), Path(out)
    if out.exists():
        raise CheckpointError(
            f"{out} exists",
            why="merging would replace it",
            hint="name a new folder, or delete it first",
        )
    index = checked_index(folder)
    place = writing(
        "the merged checkpoint", out, "another folder, or room and permission to write there"
    )
    with place, write_folder(out) as fresh, Contents(folder, index) as contents:
        _merge_into(fresh, contents, max_file_bytes).write(fresh / INDEX_FILE)
        sync_folder(fresh)
    return out


def checked_index(folder: Path) -> Index:
    """The index of a complete folder whose files are as they were written.

    Raises :class:`CheckpointError` otherwise.
    """
    index = read_index(folder)
    check_complete(folder, index)
    check_files(folder, index)
    return index


def write_model_files(
    folder: Path,
    contents: Contents,
    names: Mapping[str, str],
    max_file_bytes: int | None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    """Write the module's tensors, whole. ``names``: what those to be written are called in the
    files.

    Returns the files, and which of them each tensor is in, by its name there.
    """
    records = {written: contents.index.tensors[name] for name, written in names.items()}
    return _write_files(folder, MODEL_STEM, contents, records, max_file_bytes, metadata or {})


def _merge_into(folder: Path, contents: Contents, max_file_bytes: int | None) -> Index:
    index = contents.index
    # As safetensors' own save_model does, so that its load_model finds the other names of tied
    # tensors.
    tied = {alias: name for name, record in index.tensors.items() for alias in record.aliases}
    files, where = write_model_files(
        folder, contents, {name: name for name in index.tensors}, max_file_bytes, tied
    )
    tensors = {name: _in_one_piece(record, name, where) for name, record in index.tensors.items()}
    optimizer = index.optimizer
    if optimizer is not None:
        keys = _keys_in_file(optimizer)
        states = {keys[name, key]: optimizer.tensors[name][key] for name, key in keys}
        more_files, where = _write_files(
            folder, OPTIMIZER_STEM, contents, states, max_file_bytes, {}
        )
        files |= more_files
        moved: dict[str, dict[str, TensorRecord]] = {}
        for name, records in optimizer.tensors.items():
            moved[name] = {}
            for key, record in records.items():
                moved[name][key] = _in_one_piece(record, keys[name, key], where)
        optimizer = replace(optimizer, tensors=moved)
    return replace(index, tensors=tensors, files=files, optimizer=optimizer, num_ranks=1)


def _keys_in_file(optimizer: OptimizerRecord) -> dict[tuple[str, str], str]:
    """What each tensor of the state is called in the file. Of two that would be called alike, as
    ``x/y`` of ``w`` and ``y`` of ``w/x``, the second one gets a mark; the index says which is
    which.
    """
    keys: dict[tuple[str, str], str] = {}
    taken: set[str] = set()
    for name, records in optimizer.tensors.items():
        for key in records:
            keys[name, key] = unused(state_key(name, key), taken)
            taken.add(keys[name, key])
    return keys


def _in_one_piece(record: TensorRecord, key: str, where: Mapping[str, str]) -> TensorRecord:
    whole = Region.whole(record.shape)
    return replace(
        record, pieces=(PieceRecord(where[key], key, whole),) if whole.num_elements else ()
    )


def _write_files(
    folder: Path,
    stem: str,
    contents: Contents,
    records: Mapping[str, TensorRecord],
    max_file_bytes: int | None,
    metadata: Mapping[str, str],
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    packed = list(_packed(records, max_file_bytes))
    files: dict[str, FileRecord] = {}
    where: dict[str, str] = {}
    for number, names in enumerate(packed, start=1):
        file = (
            f"{stem}.safetensors"
            if len(packed) == 1
            else f"{stem}-{number:05d}-of-{len(packed):05d}.safetensors"
        )
        sources = {name: _source(contents.read, records[name]) for name in names}
        files[file] = write_tensors(folder / file, sources, metadata if len(packed) == 1 else {})
        where.update(dict.fromkeys(names, file))
    return files, where


def _source(read: Callable[[TensorRecord], Any], record: TensorRecord) -> TensorSource:
    return TensorSource(record.shape, record.dtype, partial(read, record))


def _packed(records: Mapping[str, TensorRecord], max_file_bytes: int | None) -> Iterable[list[str]]:
    """The names of each file, in order."""
    names: list[str] = []
    num_bytes = 0
    for name, record in records.items():
        if names and max_file_bytes is not None and num_bytes + record.num_bytes > max_file_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += record.num_bytes
    if names:
        yield names


def _whole_optimizer(contents: Contents, record: OptimizerRecord) -> StateDict:
    state: dict[str, dict[str, Any]] = {}
    for name in record.names:
        if record.keys(name):
            values = {key: decode(value) for key, value in record.values.get(name, {}).items()}
            tensors = {
                key: contents.read(tensor) for key, tensor in record.tensors.get(name, {}).items()
            }
            state[name] = {**values, **tensors}
    groups = tuple(
        (names, {key: decode(value) for key, value in options.items()})
        for names, options in record.groups
    )
    return NamedState(groups, state).to_whole_state_dict(contents.index.tensors)
