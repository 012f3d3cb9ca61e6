"""Writing a checkpoint as one of ``torch.distributed.checkpoint`` (DCP), which FSDP2, torchtitan
and everything else that uses it loads with ``dcp.load``, in any number of ranks.

The dict that it is a checkpoint of::

    {
        "model": {name: tensor, ...},                       # tied tensors under all their names
        "optimizer": {
            "state": {name: {"exp_avg": tensor, "step": tensor, ...}, ...},
            "param_groups": [{"lr": 1e-3, ..., "params": [name, ...]}, ...],
        },
        "step": 100,
        "shardwright": "...",     # random numbers, scheduler, loader: JSON, for the way back
    }

This is what ``get_state_dict`` of torch gives, so what it gives can be loaded. Where an optimizer
has masters, the model's tensors are these: the parameters of FSDP2 are in full precision.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwright.runtime.activity import tell
from shardwright.runtime.checkpoint.checkpoint_index import TensorRecord
from shardwright.runtime.checkpoint.contents import Contents
from shardwright.runtime.checkpoint.dcp_index import DCP_FILE, OWN_KEY, Entry
from shardwright.runtime.checkpoint.json_values import decode
from shardwright.runtime.checkpoint.saved_blobs import BLOBS
from shardwright.runtime.swap import write_file
from shardwright.runtime.zero.state_masters import MASTER


def write_dcp(folder: Path, contents: Contents, max_file_bytes: int | None) -> None:
    """Write all of ``contents`` into an empty folder; one tensor at a time is in memory. Files grow
    to ``max_file_bytes`` at most, but for a tensor that is larger itself.
    """
    writer = _Writer(folder, max_file_bytes)
    index, optimizer = contents.index, contents.index.optimizer
    masters = {} if optimizer is None else _masters(optimizer.tensors)
    for name, record in index.tensors.items():
        # The value in full precision where there is one: a reader that knows no masters then loses
        # nothing.
        source = masters.get(name, record)
        paths: list[tuple[str, ...]] = [("model", other) for other in (name, *record.aliases)]
        if name in masters:
            paths.append(("optimizer", "state", name, MASTER))
        writer.add(contents.read(source), *paths)
    for name, value in index.extra_states.items():
        writer.add(decode(value), ("model", name))
    if optimizer is not None:
        for name, key, value in _state(contents):
            writer.add(value, ("optimizer", "state", name, key))
        for number, (names, options) in enumerate(optimizer.groups):
            root = ("optimizer", "param_groups", number)
            for key, value in options.items():
                writer.add(decode(value), (*root, key))
            writer.add(list(names), (*root, "params"))
    if index.step is not None:
        writer.add(index.step, ("step",))
    # What has no place in torch's form, such as the state of random numbers and of a loader.
    own = replace(index, tensors={}, files={}, optimizer=None).to_json()
    writer.add(json.dumps(own), (OWN_KEY,))
    writer.finish()


def _masters(tensors: Any) -> dict[str, TensorRecord]:
    return {name: records[MASTER] for name, records in tensors.items() if MASTER in records}


def _state(contents: Contents) -> Iterator[tuple[str, str, Any]]:
    """The optimizer's state but for masters: the name of each parameter, the key, and the value."""
    optimizer = contents.index.optimizer
    assert optimizer is not None
    for name, records in optimizer.tensors.items():
        for key, record in records.items():
            # Masters are written as the model's tensors.
            if key != MASTER:
                yield name, key, contents.read(record)
    for name, values in optimizer.values.items():
        for key, value in values.items():
            yield name, key, decode(value)


class _Writer:
    """Writes values one after the other, and then the index of them. What it makes of torch's own
    is what ``dcp.save`` makes on one rank.
    """

    def __init__(self, folder: Path, max_file_bytes: int | None) -> None:
        self._folder, self._most = folder, max_file_bytes
        # Imported here, as it takes most of a second and only who converts needs it.
        self._forms: Any = importlib.import_module("torch.distributed.checkpoint.metadata")
        self._storage: Any = importlib.import_module("torch.distributed.checkpoint.filesystem")
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, Entry] = {}
        self._stored: dict[Any, Any] = {}
        self._number = 0
        self._file = self._opened()

    def add(self, value: Any, *paths: Entry) -> None:
        """Write a value once, for all of its paths."""
        tell(f"writing {'.'.join(map(str, paths[0]))}")
        blob = io.BytesIO()
        is_tensor = isinstance(value, Tensor)
        # Without this, a view would bring the memory that it is a view of.
        torch.save(value.detach().contiguous().clone() if is_tensor else value, blob)
        data, at = blob.getbuffer(), self._file.tell()
        # A file that is empty takes anything, or a large tensor would find no place at all.
        if at and self._most is not None and at + len(data) > self._most:
            self._close()
            self._number += 1
            self._file, at = self._opened(), 0
        self._file.write(data)
        info = self._storage._StorageInfo(self._name, at, len(data))
        for path in paths:
            key = ".".join(map(str, path))
            self._paths[key] = path
            if is_tensor:
                start = torch.Size([0] * value.ndim)
                self._entries[key] = self._forms.TensorStorageMetadata(
                    self._forms.TensorProperties.create_from_tensor(value),
                    value.size(),
                    [self._forms.ChunkStorageMetadata(start, value.size())],
                )
                self._stored[self._forms.MetadataIndex(key, start, 0)] = info
            else:
                self._entries[key] = self._forms.BytesStorageMetadata()
                self._stored[self._forms.MetadataIndex(key)] = info

    def finish(self) -> None:
        """Write the index."""
        self._close()
        metadata = self._forms.Metadata(
            self._entries, planner_data=self._paths, storage_data=self._stored
        )
        version = getattr(self._storage, "CURRENT_DCP_VERSION", None)
        if version is not None:  # of torch versions that write one
            metadata.version = version
        write_file(self._folder / DCP_FILE, pickle.dumps(metadata))

    @property
    def _name(self) -> str:
        return f"__0_{self._number}{BLOBS}"

    def _opened(self) -> BinaryIO:
        return (self._folder / self._name).open("wb")

    def _close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
