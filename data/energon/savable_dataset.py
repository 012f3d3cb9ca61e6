"""Datasets for loaders with Energon's interface: a source of samples, how it is batched and
shuffled, and for which worker config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwright.data.energon.metadataset import (
    SUFFIXES,
    Folder,
    Metadataset,
    read_metadataset,
    read_yaml,
)
from shardwright.data.energon.source_mix import SourceMix
from shardwright.data.energon.worker_config import WorkerConfig
from shardwright.data.energon.worker_stream import Split
from shardwright.data.fetching import check_dataset
from shardwright.data.formats.tar_shards import TarShards
from shardwright.data.sample_stream import Pattern
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import ConfigError, DataError, brief

MOST_SAMPLES = 2**24
"""The most samples of a batch of one rank: more are a slip, and would be read for days."""

SplitName = Literal["train", "val", "test"]


@checked_fields
@dataclass(frozen=True, kw_only=True)
class SavableDataset:
    """What :func:`get_savable_loader` takes.

    ``source``: any map-style dataset; with ``weights`` a list of them, which are blended in these
    proportions. ``batch_size``: samples of a batch, on one rank. ``worker_config``: of this rank.
    ``shuffle_buffer_size``: more than 1 shuffles; orders are computed, so there is no buffer, and
    how large it is does not matter. ``max_samples_per_sequence``: neighbours that stay together
    when it is shuffled. ``repeat``: epoch after epoch, without an end. ``collate``: makes a batch
    of a list of samples (default: torch's). ``on_error``: what becomes of a sample that raises, see
    :func:`shardwright.data.loader`.
    """

    source: Any
    batch_size: int
    worker_config: WorkerConfig
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    repeat: bool = True
    weights: Sequence[float] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    on_error: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MOST_SAMPLES:
            raise ConfigError(f"batch_size={brief(self.batch_size)} is no number of samples")
        if self.max_samples_per_sequence is not None and self.max_samples_per_sequence < 1:
            raise ConfigError(
                f"max_samples_per_sequence={self.max_samples_per_sequence} is no number of samples"
            )
        if self.weights is not None:
            self._check_weights(self.weights)
        for source in self.sources:
            check_dataset(source)
        workers = self.worker_config.num_global_workers
        for split in self.splits:
            if split.num_samples < workers:
                which = "" if self.weights is None else f" of source {split.source}"
                raise DataError(
                    f"{split.num_samples} samples{which} do not give each of {workers} workers one",
                    why=f"{self.worker_config.world_size} ranks have "
                    f"{self.worker_config.workers_per_rank} workers each, and all ranks take the "
                    "same number of steps",
                    hint="use fewer workers",
                )

    def _check_weights(self, weights: Sequence[float]) -> None:
        if not isinstance(self.source, list | tuple) or len(self.source) != len(weights):
            raise ConfigError(
                f"{len(weights)} weights need a list of as many datasets",
                why=f"the source is {brief(self.source)}",
                hint="SavableDataset(source=[web, books], weights=[0.7, 0.3], ...)",
            )
        if not self.repeat:
            raise ConfigError(
                "a blend by weights repeats",
                why="each dataset has epochs of its own, so that the blend has no end",
                hint="leave repeat=True",
            )
        Pattern.of_weights(weights)  # refuses what is no proportion

    @property
    def sources(self) -> list[Any]:
        """The datasets that are blended, or the one that there is."""
        return [self.source] if self.weights is None else list(self.source)

    @property
    def splits(self) -> list[Split]:
        """How workers share the samples of each source."""
        offset, shuffles = self.worker_config.seed_offset, (self.shuffle_buffer_size or 0) > 1
        most = self.max_samples_per_sequence
        return [
            Split(len(source), offset, shuffles, most, number)
            for number, source in enumerate(self.sources)
        ]


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

    ``path``: a folder of tar shards, or a YAML file: Energon's metadataset, which may blend several
    (see the top of ``data/energon/metadataset.py``). A folder that ``energon prepare`` was run in
    says which shards are of ``split_part``; in others all are. ``decode``: see
    :class:`~shardwright.data.TarShards`. For ``batch_size``, ``worker_config``,
    ``shuffle_buffer_size``, ``max_samples_per_sequence``, ``collate`` and ``on_error`` see
    :class:`SavableDataset`.
    """
    shards, found = _read(Path(path), split_part, decode)
    source: Any = shards[0]
    if found.kind == "weights":
        source = shards
    elif found.kind == "repetitions":
        source = SourceMix(shards, [folder.repetitions for folder in found.folders])
    return SavableDataset(
        source=source,
        weights=found.weights,
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
    """The samples for validation, each once, whatever a blend says. See :func:`get_train_dataset`
    for ``path``, ``batch_size``, ``worker_config``, ``split_part``, ``decode``, ``collate`` and
    ``on_error``.
    """
    shards, _ = _read(Path(path), split_part, decode)
    return SavableDataset(
        source=shards[0] if len(shards) == 1 else SourceMix(shards, [1] * len(shards)),
        batch_size=batch_size,
        worker_config=worker_config,
        repeat=False,
        collate=collate,
        on_error=on_error,
    )


def _read(
    path: Path, part: SplitName, decode: Mapping[str, Callable[[bytes], Any]] | None
) -> tuple[list[TarShards], Metadataset]:
    """The datasets that a path stands for, and how they are blended."""
    if path.suffix in SUFFIXES:
        found = read_metadataset(path, part)
    else:
        found = Metadataset((Folder(path, part),))
    return [_shards(folder, decode) for folder in found.folders], found


def _shards(folder: Folder, decode: Mapping[str, Callable[[bytes], Any]] | None) -> TarShards:
    listed = folder.path / ".nv-meta" / "split.yaml"
    if not listed.is_file():
        return TarShards(folder.path, decode=decode)
    parts = read_yaml(listed).get("split_parts", {})
    if not parts.get(folder.part):
        raise DataError(f"{listed} has no shards of {folder.part!r}", why=f"it has {brief(parts)}")
    return TarShards([folder.path / name for name in parts[folder.part]], decode=decode)
