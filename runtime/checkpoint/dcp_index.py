"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), as FSDP2 and torchtitan write them: their
index as one of ours, so that whatever reads a checkpoint here reads theirs.

    checkpoint/
        .metadata           a pickle: every tensor, its chunks, and where each lies
        __0_0.distcp        what rank 0 has written, one blob after the other

Nothing is unpickled, see ``inert_pickle.py``. A chunk of theirs is a piece of ours: the box that
begins at ``offsets`` and is ``sizes`` large.

What belongs to the model and what to the optimizer follows from the path of each entry in the dict
that was saved: ``{"model": ..., "optimizer": ...}``, both perhaps one level deeper, or the model's
tensors beside ``"optimizer"``, as torchtitan has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.checkpoint.checkpoint_index import (
    Index,
    OptimizerRecord,
    PieceRecord,
    TensorRecord,
)
from shardwright.runtime.checkpoint.inert_pickle import Made, is_named, read_pickle
from shardwright.runtime.checkpoint.json_values import encode
from shardwright.runtime.checkpoint.saved_blobs import BlobFile, Place
from shardwright.runtime.checkpoint.tensor_files import FileRecord
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region

DCP_FILE = ".metadata"
"""What ``torch.distributed.checkpoint`` keeps its index in."""

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
OWN_KEY = "shardwright"
"""Under which a checkpoint that was converted from ours has what DCP has no place for, as JSON."""

_METADATA = "torch.distributed.checkpoint.metadata"

Entry = tuple[Any, ...]
"""The keys that lead to an entry in the dict that was saved."""


@dataclass(frozen=True)
class DcpFolder:
    """A folder of DCP. ``index``: what it holds, as one of ours. ``left_out``: the paths of entries
    that have no place in it, such as the states of schedulers and loaders.
    """

    index: Index
    left_out: tuple[str, ...]


def read_dcp(folder: Path) -> DcpFolder:
    """The index of a folder of DCP; values of its files are read where they are no tensors.

    Raises :class:`CheckpointError` for one that is damaged, or has no model.
    """
    path = folder / DCP_FILE
    try:
        metadata = read_pickle(path.read_bytes())
        if not is_named(metadata, f"{_METADATA}.Metadata"):
            raise TypeError(f"it holds a {getattr(metadata, 'name', type(metadata).__name__)}")
        found = _entries(metadata)
    except Exception as error:  # nothing but the content can be the reason
        raise CheckpointError(
            f"{path} cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="it was truncated or altered, or torch.distributed.checkpoint of another version "
            "has written it",
        ) from error
    return _Folder(folder, *found).read()


@dataclass(frozen=True)
class _Value:
    """An entry that is no tensor."""

    file: str
    place: Place


def _entries(metadata: Made) -> tuple[dict[Entry, TensorRecord], dict[Entry, _Value]]:
    """The tensors and the other values, by path."""
    paths = metadata.field("planner_data") or {}
    stored: dict[tuple[str, Any], tuple[str, Place]] = {}
    for index, info in metadata.field("storage_data").items():
        if info.state.get("transform_descriptors"):
            raise ValueError(f"its files are transformed: {info.state['transform_descriptors']}")
        offset = index.state.get("offset")
        at = None if offset is None else _sizes(offset)
        file, place = info.field("relative_path"), Place(info.field("offset"), info.field("length"))
        # A file of another folder, ``../x``, could be any file of the machine.
        if file != Path(file).name:
            raise ValueError(f"{file!r} is no file of this folder")
        stored[index.field("fqn"), at] = file, place
    tensors: dict[Entry, TensorRecord] = {}
    values: dict[Entry, _Value] = {}
    for key, entry in metadata.field("state_dict_metadata").items():
        path = tuple(paths.get(key, (key,)))
        if is_named(entry, f"{_METADATA}.BytesStorageMetadata"):
            values[path] = _Value(*stored[key, None])
            continue
        chunks = [
            (_sizes(chunk.field("offsets")), _sizes(chunk.field("sizes")))
            for chunk in entry.field("chunks")
        ]
        pieces = [
            PieceRecord(stored[key, at][0], stored[key, at][1].key, _box(at, sizes))
            for at, sizes in chunks
            if 0 not in sizes
        ]
        tensors[path] = TensorRecord(
            _sizes(entry.field("size")), _dtype(entry.field("properties")), tuple(pieces)
        )
    return tensors, values


def _sizes(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``."""
    sizes = tuple(value.given[0])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} are no sizes")
    return sizes


def _dtype(properties: Made) -> torch.dtype:
    """The first field of a ``TensorProperties``, whose state is a tuple."""
    dtype = getattr(torch, properties.state[0].name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
    return dtype


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return Region(tuple(((at, at + size),) for at, size in zip(offsets, sizes, strict=True)))


@dataclass
class _Folder:
    """The entries of a folder, sorted into what they belong to."""

    folder: Path
    tensors: Mapping[Entry, TensorRecord]
    values: Mapping[Entry, _Value]
    used: set[Entry] = field(default_factory=set)

    def read(self) -> DcpFolder:
        """The index, and what is left out of it."""
        above = self._above()
        module = self._module(above)
        optimizer = self._optimizer(above, module)
        index = Index(
            "Module",  # for messages only
            _tied(module, () if optimizer is None else optimizer.names),
            self._files(),
            optimizer=optimizer,
            step=self._step(above),
        )
        index = self._with_own(above, index)
        try:
            index.check()
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.folder} does not fit together", why=str(error)) from error
        everything = [*self.tensors, *self.values]
        left_out = (".".join(map(str, path)) for path in everything if path not in self.used)
        return DcpFolder(index, tuple(sorted(left_out)))

    def _above(self) -> Entry:
        """The keys above the model and the optimizer: none, or the one that all entries have."""
        tops = {path[0] for path in (*self.tensors, *self.values)}
        inner = {path[1] for path in self.tensors if len(path) > 2}
        if len(tops) == 1 and inner.intersection(MODEL_KEYS) and not tops & {*MODEL_KEYS}:
            return tuple(tops)
        return ()

    def _module(self, above: Entry) -> dict[str, TensorRecord]:
        for key in MODEL_KEYS:
            found = self._below(self.tensors, (*above, key))
            if found:
                self.used |= {(*above, key, *path) for path in found}
                return {".".join(map(str, path)): record for path, record in found.items()}
        # The state dict of a module itself is flat: its keys have dots.
        flat = {path: record for path, record in self.tensors.items() if len(path) == 1}
        self.used |= flat.keys()
        if not flat:
            tops = sorted({str(path[0]) for path in (*self.tensors, *self.values)})
            raise CheckpointError(
                f"{self.folder} has no tensors of a model",
                why=f"{', '.join(map(repr, tops[:10])) or 'nothing'} was saved",
                hint=f"save the model under one of {', '.join(map(repr, MODEL_KEYS))}, or alone",
            )
        return {str(path[0]): record for path, record in flat.items()}

    def _optimizer(
        self, above: Entry, module: Mapping[str, TensorRecord]
    ) -> OptimizerRecord | None:
        """The optimizer, if its state is there by the names of parameters."""
        # torch writes an optimizer under one of several keys. What a key that is not the right one
        # has marked as used is taken back.
        before = set(self.used)
        for key in OPTIMIZER_KEYS:
            self.used, root = set(before), (*above, key)
            tensors = self._by_parameter(self._below(self.tensors, root), "state", module)
            values = self._by_parameter(self._below(self.values, root), "state", module)
            groups = self._groups(root, module)
            if groups is None or not (tensors or values or groups):
                continue
            kept: dict[str, dict[str, TensorRecord]] = {}
            single: dict[str, dict[str, Any]] = {}
            for name, records in tensors.items():
                for entry, (path, record) in records.items():
                    self.used.add((*root, *path))
                    like = record.shape == module[name].shape
                    # Step counts are tensors of one element there, and values here.
                    if record.num_bytes == record.dtype.itemsize and not (like and record.shape):
                        value = self._tensor(record)
                        single.setdefault(name, {})[entry] = encode(value, f"{name}/{entry}")
                    else:
                        kept.setdefault(name, {})[entry] = replace(record, like_parameter=like)
            for name, entries in values.items():
                for entry, (path, value) in entries.items():
                    found = self._plain((*root, *path), value)
                    if found is not _UNREAD:
                        single.setdefault(name, {})[entry] = encode(found, f"{name}/{entry}")
            return OptimizerRecord("Optimizer", groups, kept, single)
        self.used = before
        return None

    def _by_parameter(
        self, entries: Mapping[Entry, Any], kind: str, module: Mapping[str, Any]
    ) -> dict[str, dict[str, tuple[Entry, Any]]]:
        """What lies under ``kind`` by the name of a parameter, then by key: as ``("state", name,
        key)``, or in one key as ``"state.name.key"``. Other entries are not among it.
        """
        found: dict[str, dict[str, tuple[Entry, Any]]] = {}
        for path, value in entries.items():
            name, key = None, ""
            if len(path) == 3 and path[0] == kind:
                name, key = path[1], str(path[2])
            elif len(path) == 1 and str(path[0]).startswith(f"{kind}."):
                # Keys have no dots, and names have: the last part is the key.
                name, _, key = path[0].removeprefix(f"{kind}.").rpartition(".")
            if name in module:
                found.setdefault(str(name), {})[key] = (path, value)
        return found

    def _groups(
        self, root: Entry, module: Mapping[str, TensorRecord]
    ) -> tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] | None:
        """The parameter groups; ``None`` if their parameters have numbers and no names."""
        values = self._below(self.values, root)
        numbered: dict[int, dict[str, Any]] = {}
        for path, value in values.items():
            if len(path) == 3 and path[0] == "param_groups" and isinstance(path[1], int):
                plain = self._plain((*root, *path), value)
                if plain is not _UNREAD:
                    numbered.setdefault(path[1], {})[str(path[2])] = plain
        groups: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        for number in sorted(numbered):
            names = numbered[number].pop("params", ())
            if not all(name in module for name in names):
                return None
            groups.append((tuple(names), _encoded(numbered[number])))
        # In one key per option of a parameter: those with equal options are a group.
        by_name = self._by_parameter(values, "param_groups", module)
        for name in (name for name in module if name in by_name):
            plain_options = {
                key: self._plain((*root, *path), value)
                for key, (path, value) in by_name[name].items()
            }
            options = _encoded({k: v for k, v in plain_options.items() if v is not _UNREAD})
            position = next((i for i, (_, known) in enumerate(groups) if known == options), None)
            if position is None:
                groups.append(((name,), options))
            else:
                groups[position] = ((*groups[position][0], name), options)
        return tuple(groups)

    def _step(self, above: Entry) -> int | None:
        """The number of steps, where something is called so."""
        for path in ((*above, "step"), (*above, "train_state", "step"), ("train_state", "step")):
            value: Any = None
            if path in self.values:
                value = self._plain(path, self.values[path])
            # torchtitan saves the step as a tensor of one element.
            elif path in self.tensors and self.tensors[path].shape in ((), (1,)):
                value = self._tensor(self.tensors[path]).item()
                self.used.add(path)
            if type(value) is int and value >= 0:
                return value
        return None

    def _with_own(self, above: Entry, index: Index) -> Index:
        """The index with what ours had besides, if the folder was converted from one of ours."""
        path = (*above, OWN_KEY)
        text = self._plain(path, self.values[path]) if path in self.values else None
        if not isinstance(text, str):
            return index
        try:
            own = Index.from_json({**json.loads(text), "tensors": {}, "files": {}})
        except Exception as error:  # nothing but the content can be the reason
            raise CheckpointError(
                f"{self.folder} has a damaged entry {OWN_KEY!r}",
                why=f"{type(error).__name__}: {error}",
            ) from error
        return replace(own, tensors=index.tensors, files=index.files, optimizer=index.optimizer)

    def _below(self, entries: Mapping[Entry, Any], root: Entry) -> dict[Entry, Any]:
        """The entries under ``root``, without it."""
        size = len(root)
        return {
            path[size:]: value
            for path, value in entries.items()
            if len(path) > size and path[:size] == root
        }

    def _plain(self, path: Entry, value: _Value) -> Any:
        """A value made of what JSON can hold; :data:`_UNREAD` for another one, which is left
        out.
        """
        try:
            with BlobFile(self.folder / value.file) as file:
                found = file.value(value.place.key)
            encode(found, "value")
        except (CheckpointError, OSError):
            return _UNREAD
        self.used.add(path)
        return found

    def _tensor(self, record: TensorRecord) -> Tensor:
        """A small tensor."""
        (piece,) = record.pieces
        found: Tensor = self._read(piece.file, lambda file: file.view(piece.key))
        return found

    def _read(self, name: str, read: Callable[[BlobFile], Any]) -> Any:
        try:
            with BlobFile(self.folder / name) as file:
                return read(file)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / name} cannot be read", why=str(error.strerror)
            ) from error

    def _files(self) -> dict[str, FileRecord]:
        """The files, which have no digests: their blobs have checksums of their own."""
        names = {piece.file for record in self.tensors.values() for piece in record.pieces}
        found = {}
        for name in sorted(names | {value.file for value in self.values.values()}):
            path = self.folder / name
            found[name] = FileRecord(path.stat().st_size if path.exists() else 0, None)
        return found


_UNREAD = object()


def _tied(
    tensors: Mapping[str, TensorRecord], first_names: Collection[str]
) -> dict[str, TensorRecord]:
    """The tensors, each once: names that lie in the same places of the same files are one tied
    tensor. It is called by the first of them, or by one of ``first_names``, by which the optimizer
    knows it; the others are its aliases.
    """
    names: dict[Any, list[str]] = {}
    for name, record in tensors.items():
        # Tensors without elements lie nowhere, so that nothing says that two of them are one. What
        # lies in one place with two shapes or dtypes is no tied tensor, and is refused later.
        places = frozenset(record.pieces) or name
        names.setdefault((places, record.shape, record.dtype), []).append(name)
    found = {}
    for together in names.values():
        first = next((name for name in together if name in first_names), together[0])
        aliases = tuple(name for name in together if name != first)
        found[first] = replace(tensors[first], aliases=aliases)
    return found


def _encoded(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: encode(value, key) for key, value in options.items()}
