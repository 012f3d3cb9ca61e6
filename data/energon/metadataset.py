"""Energon's YAML files: which folders of shards make a dataset, and how they are blended.

    splits:
      train:
        blend:                            # endless: of 7 samples 5 are of coco
          - {weight: 5, path: ./coco}
          - {weight: 2, path: ./coyo}
      val:
        path: ./coco

``blend_epochized`` with ``repetitions:`` in the place of weights makes epochs, in which each
dataset is read that many times. A path may be another such file. ``datasets:`` is what files of
version 1 call ``blend:``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from shardwright.runtime.errors import ConfigError, DataError, brief, brief_text

SUFFIXES = (".yaml", ".yml")

_NUMBERS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
"""How each kind of blend calls the number of an entry."""

_OURS = ("path", "split_part")
_DESCRIPTION = ("__module__", "__class__")


@dataclass(frozen=True)
class Folder:
    """A folder of shards. ``part``: which of its parts. ``weight`` and ``repetitions``: its share
    of a blend; the one that the blend does not go by is 1.
    """

    path: Path
    part: str
    weight: float = 1.0
    repetitions: int = 1


@dataclass(frozen=True)
class Metadataset:
    """The folders of a dataset. ``kind``: by what they are blended, if there are several."""

    folders: tuple[Folder, ...]
    kind: Literal["single", "weights", "repetitions"] = "single"

    @property
    def weights(self) -> list[float] | None:
        """The weights of the folders, if it is blended by them."""
        return [folder.weight for folder in self.folders] if self.kind == "weights" else None


def read_metadataset(file: Path, part: str) -> Metadataset:
    """Read what a YAML file says of a part (``train``, ``val``, ``test``).

    Raises :class:`DataError` for a file that says nothing of it, and :class:`ConfigError` for what
    is not served.
    """
    return _read(file, part, ())


def _read(file: Path, part: str, above: tuple[Path, ...]) -> Metadataset:
    # A file may name other such files; a circle of them would never end.
    if file.resolve() in above:
        raise DataError(f"{file} names itself", why=" -> ".join(map(str, (*above, file))))
    content = read_yaml(file)
    splits = content.get("splits", {})
    # Energon has an entry for each split; a file without ``splits`` is one for all.
    entry = splits.get(part) if isinstance(splits, Mapping) and splits else content
    if not isinstance(entry, Mapping):
        entry = {}
    inside = (*above, file.resolve())
    for name, number in _NUMBERS.items():
        if name in entry:
            _check_keys(file, entry, (name, *_DESCRIPTION))
            return _blend(file, part, entry[name], number, inside)
    if not isinstance(entry.get("path"), str):
        raise DataError(
            f"{file} names no dataset for {part!r}",
            why=f"it has {brief(dict(content))}",
            hint="write 'path: folder', or 'splits: {train: {path: folder}}'",
        )
    _check_keys(file, entry, (*_OURS, *_DESCRIPTION))
    return _at(file, entry, part, inside)


def _at(file: Path, entry: Mapping[str, Any], part: str, inside: tuple[Path, ...]) -> Metadataset:
    """What an entry with a path stands for: a folder, or another file."""
    path = file.parent / entry["path"]
    own_part = str(entry.get("split_part", part))
    if path.suffix in SUFFIXES:
        return _read(path, own_part, inside)
    return Metadataset((Folder(path, own_part),))


def _blend(
    file: Path, part: str, entries: Any, number: str, inside: tuple[Path, ...]
) -> Metadataset:
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{file} blends nothing for {part!r}", why=f"it has {brief(entries)}")
    kind: Literal["weights", "repetitions"]
    kind = "weights" if number == "weight" else "repetitions"
    folders: list[Folder] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
            raise DataError(
                f"an entry of a blend of {file} has no path",
                why=f"it is {brief(entry)}",
                hint=f"write '- {{{number}: 1, path: folder}}'",
            )
        _check_keys(file, entry, (number, *_OURS))
        value = _number(file, entry, number)
        inner = _at(file, entry, part, inside)
        if inner.kind not in ("single", kind):
            raise ConfigError(
                f"{file} blends by {kind} what {entry['path']} blends by {inner.kind}",
                why="a blend by weights has no end, and one by repetitions has epochs",
                hint="blend both by the same",
            )
        # An inner blend is one dataset here: its weights are shares of this entry's weight.
        whole = sum(folder.weight for folder in inner.folders)
        for folder in inner.folders:
            if kind == "weights":
                share = value * folder.weight / whole
                folders.append(Folder(folder.path, folder.part, weight=share))
            else:
                times = int(value) * folder.repetitions
                folders.append(Folder(folder.path, folder.part, repetitions=times))
    return Metadataset(tuple(folders), kind)


def _number(file: Path, entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name, 1)
    whole = name == "repetitions"
    is_right = type(value) is int or (type(value) is float and not whole)
    if not is_right or not 0 < value < float("inf"):
        raise ConfigError(
            f"{name} of {entry['path']} in {file} is {brief(value)}",
            why="it is a whole number from 1 on" if whole else "it is a number above 0",
        )
    return float(value)


def _check_keys(file: Path, entry: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in entry:
        if name not in known:
            raise ConfigError(
                f"{name!r} in {file} is not served",
                why=f"here an entry has {', '.join(n for n in known if n not in _DESCRIPTION)}",
                hint="data.loader(...) reads any dataset; megatron-energon itself works with "
                "data.energon_worker_config(model, num_workers=2)",
            )


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The content of a YAML file. Raises :class:`DataError` if it is none, or no mapping."""
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{file} is YAML, which nothing here can read",
            why="PyYAML is not installed",
            hint="pip install pyyaml, or name the folder of the shards itself",
        ) from error
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise DataError(f"{file} cannot be read", why=error.strerror or str(error)) from error
    except Exception as error:
        raise DataError(f"{file} is no YAML", why=brief_text(error)) from error
    if not isinstance(content, Mapping):
        raise DataError(f"{file} describes no dataset", why=f"it holds {brief(content)}")
    return content
