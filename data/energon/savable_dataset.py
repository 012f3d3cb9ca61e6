"""Datasets for loaders with Energon's interface: a source of samples, how it is batched and
shuffled, and for which worker config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from shardwright.data.energon.worker_config import WorkerConfig
from shardwright.data.energon.worker_stream import Split
from shardwright.data.formats.tar_shards import TarShards
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import ConfigError, DataError, brief, brief_text

SplitName = Literal["train", "val", "test"]


@checked_fields
@dataclass(frozen=True, kw_only=True)
class SavableDataset:
    """What :func:`get_savable_loader` takes.

    ``source``: any map-style dataset. ``batch_size``: samples of a batch, on one rank.
    ``worker_config``: of this rank. ``shuffle_buffer_size``: more than 1 shuffles; orders are
    computed, so there is no buffer, and how large it is does not matter.
    ``max_samples_per_sequence``: neighbours that stay together when it is shuffled. ``repeat``:
    epoch after epoch, without an end. ``collate``: makes a batch of a list of samples (default:
    torch's). ``on_error``: what becomes of a sample that raises, see
    :func:`shardwright.data.loader`.
    """

    source: Any
    batch_size: int
    worker_config: WorkerConfig
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    repeat: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    on_error: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} is no number of samples")
        if self.max_samples_per_sequence is not None and self.max_samples_per_sequence < 1:
            raise ConfigError(
                f"max_samples_per_sequence={self.max_samples_per_sequence} is no number of samples"
            )
        size, workers = len(self.source), self.worker_config.num_global_workers
        if size < workers:
            raise DataError(
                f"{size} samples do not give each of {workers} workers one",
                why=f"{self.worker_config.world_size} ranks have "
                f"{self.worker_config.workers_per_rank} workers each, and all ranks take the same "
                "number of steps",
                hint="use fewer workers",
            )

    @property
    def split(self) -> Split:
        """How workers share the samples."""
        return Split(
            len(self.source),
            self.worker_config.seed_offset,
            (self.shuffle_buffer_size or 0) > 1,
            self.max_samples_per_sequence,
        )


@checked
def get_train_dataset(
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    worker_config: WorkerConfig,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    split_part: SplitName = "train",
    decode: Mapping[str, Callable[[bytes], Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
) -> SavableDataset:
    """The training samples of a webdataset, epoch after epoch.

    ``path``: a folder of tar shards, or a YAML file with ``path:`` or ``splits:`` (Energon's
    metadataset of one dataset). A folder that ``energon prepare`` was run in says which shards are
    of ``split_part``; in others all are. ``decode``: see :class:`~shardwright.data.TarShards`. For
    ``batch_size``, ``worker_config``, ``shuffle_buffer_size``, ``max_samples_per_sequence``,
    ``collate`` and ``on_error`` see :class:`SavableDataset`.
    """
    return SavableDataset(
        source=_shards(Path(path), split_part, decode),
        batch_size=batch_size,
        worker_config=worker_config,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=max_samples_per_sequence,
        collate=collate,
        on_error=on_error,
    )


@checked
def get_val_dataset(
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    worker_config: WorkerConfig,
    split_part: SplitName = "val",
    decode: Mapping[str, Callable[[bytes], Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
) -> SavableDataset:
    """The samples for validation, once, in order. See :func:`get_train_dataset` for ``batch_size``,
    ``worker_config``, ``split_part``, ``decode``, ``collate`` and ``on_error``.
    """
    return SavableDataset(
        source=_shards(Path(path), split_part, decode),
        batch_size=batch_size,
        worker_config=worker_config,
        repeat=False,
        collate=collate,
        on_error=on_error,
    )


def _shards(
    path: Path, part: SplitName, decode: Mapping[str, Callable[[bytes], Any]] | None
) -> TarShards:
    if path.suffix in (".yaml", ".yml"):
        return _shards(_path_in(path, part), part, decode)
    listed = path / ".nv-meta" / "split.yaml"
    if not listed.is_file():
        return TarShards(path, decode=decode)
    parts = _yaml(listed).get("split_parts", {})
    if not parts.get(part):
        raise DataError(f"{listed} has no shards of {part!r}", why=f"it has {brief(parts)}")
    return TarShards([path / name for name in parts[part]], decode=decode)


def _path_in(file: Path, part: SplitName) -> Path:
    """The folder that a YAML file names."""
    content = _yaml(file)
    entry = content.get("splits", {}).get(part, content)
    if isinstance(entry, Mapping) and ("blend" in entry or "blend_epochized" in entry):
        raise ConfigError(
            f"{file} blends several datasets",
            why="a dataset with Energon's interface is a single one here",
            hint="data.loader([a, b], weights=[...]) blends, with the same exact resume",
        )
    found = entry.get("path") if isinstance(entry, Mapping) else None
    if not isinstance(found, str):
        raise DataError(
            f"{file} names no dataset for {part!r}",
            why=f"it has {brief(content)}",
            hint="write 'path: folder', or 'splits: {train: {path: folder}}'",
        )
    return file.parent / found


def _yaml(file: Path) -> Mapping[str, Any]:
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
