"""The index: what a checkpoint holds and where. It is JSON, and says all that is needed to merge or
to move it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwright import __version__
from shardwright.runtime.checkpoint.json_values import decode, dtype_named
from shardwright.runtime.checkpoint.ordering import Groups, united, united_groups
from shardwright.runtime.checkpoint.tensor_files import FileRecord
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.regions import Region, untiled
from shardwright.runtime.swap import write_file

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
"""Raised when folders of an earlier format cannot be loaded any more."""


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """A piece of a tensor: the tensor ``key`` of ``file`` holds the elements of ``region``."""

    file: str
    key: str
    region: Region

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "key": self.key, "region": self.region.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceRecord:
        return cls(_text(data["file"]), _text(data["key"]), Region.from_json(data["region"]))


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A whole tensor and the pieces it is stored in. ``aliases``: its other names if it is tied.

    ``like_parameter``: of a tensor of optimizer state, whether it has an element for each of its
    parameter's, so that it is cut as the parameter is. Others are whole on every rank.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[PieceRecord, ...]
    aliases: tuple[str, ...] = ()
    like_parameter: bool = True

    @property
    def num_bytes(self) -> int:
        return Region.whole(self.shape).num_elements * self.dtype.itemsize

    @property
    def problem(self) -> str | None:
        """Why the pieces do not make the tensor, in words; ``None`` if each element is in exactly
        one of them.
        """
        return untiled([piece.region for piece in self.pieces], self.shape)

    def merged(self, other: TensorRecord) -> TensorRecord:
        """The record of one tensor with the pieces of both."""
        known = {piece.region for piece in self.pieces}
        fresh = tuple(piece for piece in other.pieces if piece.region not in known)
        return replace(self, pieces=self.pieces + fresh)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        data |= {"aliases": list(self.aliases)} if self.aliases else {}
        data |= {} if self.like_parameter else {"like_parameter": False}
        return {**data, "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorRecord:
        pieces = tuple(PieceRecord.from_json(piece) for piece in data["pieces"])
        aliases = tuple(map(_text, _list(data.get("aliases", []))))
        shape = tuple(map(_count, _list(data["shape"])))
        return cls(
            shape,
            dtype_named(data["dtype"]),
            pieces,
            aliases,
            data.get("like_parameter", True) is True,
        )


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The state of an optimizer by parameter name.

    ``groups``: the names of each parameter group, and its options as encoded values (see
    ``checkpoint/json_values.py``). ``tensors``: by parameter and key of its
    state. ``values``: what is no tensor or has one element only, such as a step count, encoded.
    """

    class_name: str
    groups: Groups
    tensors: Mapping[str, Mapping[str, TensorRecord]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The parameters it updates, by group."""
        return [name for names, _ in self.groups for name in names]

    def keys(self, name: str) -> list[str]:
        """The keys of a parameter's state; none if it never had a gradient."""
        return [*self.values.get(name, ()), *self.tensors.get(name, ())]

    def merged(self, other: OptimizerRecord) -> OptimizerRecord:
        """The record of one optimizer with the pieces and the state that two ranks have of it."""
        groups = united_groups(self.groups, other.groups)
        names = united(tuple(self.tensors), tuple(other.tensors))
        tensors = {
            name: _merge_records(self.tensors.get(name, {}), other.tensors.get(name, {}))
            for name in names
        }
        return replace(self, groups=groups, tensors=tensors, values={**other.values, **self.values})

    def to_json(self) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "groups": [
                {"params": list(names), "options": dict(options)} for names, options in self.groups
            ],
            "tensors": {
                name: {key: record.to_json() for key, record in records.items()}
                for name, records in self.tensors.items()
            },
            "values": {name: dict(values) for name, values in self.values.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OptimizerRecord:
        tensors = {
            name: {key: TensorRecord.from_json(record) for key, record in records.items()}
            for name, records in data["tensors"].items()
        }
        groups = tuple(
            (tuple(map(_text, _list(group["params"]))), dict(group["options"]))
            for group in data["groups"]
        )
        values = {name: dict(of_name) for name, of_name in data["values"].items()}
        return cls(_text(data["class"]), groups, tensors, values)

    def check(self, parameters: Mapping[str, TensorRecord]) -> None:
        """Raise :class:`ValueError` unless it is the state of these parameters."""
        # Names first, then shapes; values are decoded once, so that loading does not fail half way.
        if len(set(self.names)) < len(self.names):
            raise ValueError("a parameter is in two groups of the optimizer")
        foreign = [
            name for name in (*self.names, *self.tensors, *self.values) if name not in parameters
        ]
        if foreign:
            raise ValueError(f"the optimizer has state of {foreign[0]!r}, which is no parameter")
        for name, records in self.tensors.items():
            for key, record in records.items():
                if record.like_parameter and record.shape != parameters[name].shape:
                    raise ValueError(f"the optimizer state {key!r} of {name!r} is not of its shape")
        for encoded in (*(options for _, options in self.groups), *self.values.values()):
            for value in encoded.values():
                decode(value)


@dataclass(frozen=True, slots=True)
class Index:
    """What ``index.json`` says; while a checkpoint is written, what one rank adds to it.

    ``tensors``: parameters and persistent buffers by their first names, in the order of the
    original ``state_dict()``.
    ``random``: seed, step and microbatch of each compiled module, by its path. ``extra_states``:
    what other modules keep beside tensors, encoded, by state dict key. ``scheduler`` and ``extra``:
    encoded values. ``loader``: the encoded states of loaders of data by replica, ``""`` for one
    that is the same on all ranks. ``files``: what they must be.
    """

    module_class: str
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    random: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    scheduler: Any = None
    loader: Any = None
    extra: Any = None
    step: int | None = None
    num_ranks: int = 1

    def merged(self, other: Index) -> Index:
        """The index with what another rank adds. Of what both have, this one's is kept."""
        optimizer = self.optimizer
        if optimizer is not None and other.optimizer is not None:
            optimizer = optimizer.merged(other.optimizer)
        return replace(
            self,
            tensors=_merge_records(self.tensors, other.tensors),
            files={**self.files, **other.files},
            random={**other.random, **self.random},
            optimizer=optimizer,
            loader=_merged_loaders(self.loader, other.loader),
        )

    def records(self) -> Iterable[tuple[str, TensorRecord]]:
        """Every tensor of the module and of the optimizer, with the name to call it by in
        errors.
        """
        yield from self.tensors.items()
        if self.optimizer is not None:
            for name, records in self.optimizer.tensors.items():
                for key, record in records.items():
                    yield state_key(name, key), record

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "shardwright_version": __version__,
            "torch_version": str(torch.__version__),
            "step": self.step,
            "num_ranks": self.num_ranks,
            "files": {name: record.to_json() for name, record in self.files.items()},
            "module_class": self.module_class,
            "tensors": {name: record.to_json() for name, record in self.tensors.items()},
            "random": {path: dict(state) for path, state in self.random.items()},
            "extra_states": dict(self.extra_states),
            "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
            "scheduler": self.scheduler,
            **({} if self.loader is None else {"loader": self.loader}),
            "extra": self.extra,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Index:
        """The reverse of :meth:`to_json`. All values can be decoded, so that loading does not find
        out half way.

        Raises whatever comes of it where it is not one: ``KeyError``, ``TypeError``, ``ValueError``
        and others.
        """
        # Every field is read by a function that refuses another type.
        index = cls(
            module_class=_text(data["module_class"]),
            tensors={
                name: TensorRecord.from_json(record) for name, record in data["tensors"].items()
            },
            files={name: FileRecord.from_json(record) for name, record in data["files"].items()},
            random={
                path: {key: _count(state[key]) for key in ("seed", "step", "microbatch")}
                for path, state in data["random"].items()
            },
            extra_states=dict(data["extra_states"]),
            optimizer=None
            if data["optimizer"] is None
            else OptimizerRecord.from_json(data["optimizer"]),
            scheduler=data["scheduler"],
            loader=data.get("loader"),
            extra=data["extra"],
            step=None if data["step"] is None else _count(data["step"]),
            num_ranks=_count(data["num_ranks"]),
        )
        index.check()
        return index

    def check(self) -> None:
        """Raise :class:`ValueError`, or what decoding raises, if its entries do not belong
        together.
        """
        # Nothing outside of the folder is read, and nothing that has no digest.
        foreign = [name for name in self.files if name != Path(name).name]
        foreign += [
            piece.file
            for _, record in self.records()
            for piece in record.pieces
            if piece.file not in self.files
        ]
        if foreign:
            raise ValueError(f"{foreign[0]!r} is no file of this checkpoint")
        # Aliases are names of tied tensors, and count as names.
        names = [
            name for first, record in self.tensors.items() for name in (first, *record.aliases)
        ]
        if len(set(names)) < len(names):
            raise ValueError("two tensors have one name")
        # A piece is a place in a file: two pieces in one place would both claim it.
        places = [
            (piece.file, piece.key) for _, record in self.records() for piece in record.pieces
        ]
        if len(set(places)) < len(places):
            raise ValueError("two pieces are one tensor of a file")
        if self.optimizer is not None:
            self.optimizer.check(self.tensors)
        states = [] if self.loader is None else _by_replica(self.loader).values()
        for value in (self.scheduler, self.extra, *states, *self.extra_states.values()):
            decode(value)

    def write(self, path: Path) -> None:
        """Write it atomically, with a digest of itself."""
        content = self.to_json()
        write_file(path, (json.dumps({"sha256": _digest(content), **content}) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Index:
        """The index at ``path``. Raises :class:`CheckpointError` if it is missing, altered or of
        another version.
        """
        try:
            # The digest was made without itself.
            content = parse_json(path.read_bytes())
            stored = content.pop("sha256")
            actual = _digest(content)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent} holds no checkpoint",
                why=f"there is no {path.name}",
                hint="the save did not finish",
            ) from None
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        if stored != actual:
            raise _damaged(path, "its sha256 is not that of what was written")
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path.parent} is of another version",
                why=f"its format version is {content.get('format_version')}, here it is "
                f"{FORMAT_VERSION}",
                hint="merge it with the shardwright that wrote it "
                f"({content.get('shardwright_version')})",
            )
        try:
            return cls.from_json(content)
        except Exception as error:  # nothing but the content can be the reason
            raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _by_replica(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} are no states of loaders")
    return value


def _merged_loaders(ours: Any, theirs: Any) -> Any:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return {**theirs, **ours}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def state_key(name: str, key: str) -> str:
    """What a tensor of a parameter's optimizer state is called in files and errors."""
    return f"{name}/{key}"


def unused(key: str, taken: Container[str]) -> str:
    """``key``, with a mark if it is taken: a parameter may be called like another one's state,
    ``w/exp_avg`` beside ``w``.
    """
    while key in taken:
        key += "'"
    return key


def _merge_records(
    ours: Mapping[str, TensorRecord], theirs: Mapping[str, TensorRecord]
) -> dict[str, TensorRecord]:
    result = {}
    for name in united(tuple(ours), tuple(theirs)):
        mine, other = ours.get(name), theirs.get(name)
        record = mine or other
        assert record is not None
        result[name] = record if mine is None or other is None else mine.merged(other)
    return result


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was altered or truncated",
        why=why,
        hint="load an earlier checkpoint of the same run",
    )
