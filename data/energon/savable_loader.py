"""Loaders with Energon's interface.

A rank gives out batches of its workers in turn. A worker's batch ``k`` is samples
``k * batch_size`` to ``(k + 1) * batch_size`` of its stream, so the number of batches that a rank
has given out says everything; what was read ahead is read again after a restore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from shardwright.data.energon.redist import redistribute
from shardwright.data.energon.savable_dataset import SavableDataset
from shardwright.data.energon.worker_config import WorkerConfig
from shardwright.data.energon.worker_stream import KIND, blended, worker_streams
from shardwright.data.fetching import Fetched, Fetcher, Wanted, wanted
from shardwright.data.rank_loader import Handing, check_workers, end_workers, next_of, read_ahead
from shardwright.data.rank_roles import Role
from shardwright.data.sample_stream import SampleStream
from shardwright.data.state import VERSION, check_state
from shardwright.runtime.arguments import checked, checked_late
from shardwright.runtime.errors import ConfigError, DataError, UsageError, brief


class SavableLoader:
    """Batches of one data-parallel rank, and its state. Made by :func:`get_savable_loader`.

    ``worker_config``: of the dataset. ``skipped``: samples that could not be read, with reasons.
    """

    def __init__(
        self, dataset: SavableDataset, prefetch_factor: int = 2, redistributes: bool = False
    ) -> None:
        check_workers(dataset.worker_config.num_workers, prefetch_factor)
        self.dataset = dataset
        self.worker_config: WorkerConfig = dataset.worker_config
        self.skipped: list[tuple[str, str]] = []
        self._prefetch_factor = prefetch_factor
        self._redistributes = redistributes
        self._batches = 0
        self._is_begun = False
        self._ahead: Iterator[Fetched] | None = None
        self._streams = self._own_streams(None)
        self._dealt: dict[str, Any] | None = None

    def _own_streams(self, dealt: dict[str, Any] | None) -> list[SampleStream]:
        """The streams of this rank's workers. ``dealt``: what a state that was dealt anew says."""
        config, dataset = self.worker_config, self.dataset
        streams = []
        for worker in range(config.workers_per_rank):
            own = worker_streams(
                dataset.splits,
                config.num_global_workers,
                config.global_worker_id(worker),
                None if dealt is None else dealt["segments"][worker],
                None if dealt is None else dealt["first_epoch"],
            )
            streams.append(blended(own, dataset.weights))
        return streams

    def __len__(self) -> int:
        """The number of batches of a dataset that does not repeat; the same on all ranks."""
        if self.dataset.repeat:
            raise TypeError("a dataset that repeats has no length")
        config, size = self.worker_config, len(self.dataset.source)
        least = size // config.num_global_workers
        return config.workers_per_rank * -(-least // self.dataset.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._is_begun = True
        end = None if self.dataset.repeat else len(self)
        if self._ahead is None and self._batches == end:
            self._batches = 0
        while self._batches != end:
            if self._ahead is None:
                self._ahead = self._started()
            try:
                fetched = next_of(self._ahead, self.worker_config.num_workers)
            except BaseException:
                self.close()
                raise
            if fetched.problem is not None:
                self.close()
                fetched.raise_problem()
            self.skipped += fetched.skipped
            self._batches += 1
            # No name here holds the batch while the next one is made.
            yield fetched.microbatches.pop()
        self.close()

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        ahead, self._ahead = self._ahead, None
        end_workers(ahead)

    def _started(self) -> Iterator[Fetched]:
        config, dataset = self.worker_config, self.dataset
        seed = config.worker_seed()
        role = Role(config.rank, config.rank, config.world_size)
        fetcher = Fetcher(
            dataset.sources,
            role,
            seed,
            collate=dataset.collate,
            skips=dataset.on_error == "skip",
        )
        handing = Handing(num_workers=config.num_workers, prefetch_factor=self._prefetch_factor)
        entries = self._wanted(self._batches)
        # Workers read ahead of what was given out; the state is of what was given out.
        ahead: Iterator[Fetched] = read_ahead(fetcher, entries, handing, seed)
        return ahead

    def _wanted(self, batches: int) -> Iterator[tuple[Wanted]]:
        """The samples of each batch from one on."""
        size, workers = self.dataset.batch_size, len(self._streams)
        while self.dataset.repeat or batches < len(self):
            # Workers give batches in turns, as torch's DataLoader takes them: so the count of
            # batches alone says where each of them is.
            turn, worker = divmod(batches, workers)
            stream = self._streams[worker]
            stop = (turn + 1) * size
            if not self.dataset.repeat and batches + workers >= len(self):
                stop = stream.epoch_size  # the last batch of a worker has what is left
            yield (wanted(stream.runs(turn * size, stop)),)
            batches += 1

    # States

    def save_state_rank(self) -> dict[str, Any] | None:
        """The state of this rank, plain values; ``None`` if nothing was given out or restored."""
        if not self._is_begun:
            return None
        state = {"kind": KIND, "version": VERSION, "position": self._batches, **self._identity()}
        return state if self._dealt is None else {**state, "dealt": self._dealt}

    def _identity(self) -> dict[str, Any]:
        config, dataset = self.worker_config, self.dataset
        weights = dataset.weights
        return {
            "rank": config.rank,
            "world_size": config.world_size,
            "num_workers": config.num_workers,
            "seed_offset": config.seed_offset,
            "num_samples": [split.num_samples for split in dataset.splits],
            "weights": None if weights is None else [float(weight) for weight in weights],
            "repeat": dataset.repeat,
            "shuffle": dataset.splits[0].shuffle,
            "max_samples_per_sequence": dataset.max_samples_per_sequence,
            "batch_size": dataset.batch_size,
            "fingerprint": [getattr(source, "fingerprint", None) for source in dataset.sources],
        }

    @checked_late
    def restore_state_rank(self, state: dict[str, Any] | None) -> None:
        """Go on where a rank was. ``None``: from the start.

        Raises :class:`UsageError` while batches are being read, and :class:`DataError` for the
        state of another loader, or of another number of ranks or workers.
        """
        if self._ahead is not None:
            raise UsageError(
                "a state cannot be restored while batches are being read",
                why="workers have read ahead of it",
                hint="restore it into a new loader, before it is iterated",
            )
        if state is None:
            self._batches, self._is_begun, self._dealt = 0, False, None
            self._streams = self._own_streams(None)
            return
        _check_sizes(state, self.worker_config)
        found = check_state(state, KIND, self._identity())
        dealt = found.get("dealt")
        self._streams = self._own_streams(dealt)
        # The streams follow from the position, so nothing else of the past is needed.
        self._batches, self._is_begun, self._dealt = found["position"], True, dealt

    @checked
    def save_state_global(self, global_dst_rank: int) -> list[Any] | None:
        """The states of all ranks of the data-parallel group, by data-parallel rank, on one rank of
        the job; ``None`` on others. Collective over the group.

        Raises :class:`ConfigError` if that rank is not one of the group.
        """
        config = self.worker_config
        if config.world_size == 1:
            return [self.save_state_rank()]
        group = config.process_group()
        members = dist.get_process_group_ranks(group)
        if global_dst_rank not in members:
            raise ConfigError(
                f"global_dst_rank={global_dst_rank} is not in the data-parallel group",
                why=f"the group has ranks {members}",
                hint="name a rank of the job that is one of them",
            )
        is_here = dist.get_rank() == global_dst_rank
        texts: list[Any] | None = [None] * config.world_size if is_here else None
        # A plan may number its ranks in another order than the group does.
        mine = json.dumps([config.rank, self.save_state_rank()])
        dist.gather_object(mine, texts, global_dst_rank, group)
        if texts is None:
            return None
        by_rank = dict(map(json.loads, texts))
        return [by_rank[rank] for rank in range(config.world_size)]

    @checked
    def restore_state_global(
        self, state: Sequence[Any] | None, *, src_rank: int | None = None
    ) -> None:
        """Restore from the states of all data-parallel ranks.

        ``src_rank=None``: every rank passes the whole list, or ``None``. Else the rank of that
        number *within the group* passes it, and the others ``None``; collective over the group
        then.
        """
        config = self.worker_config
        if src_rank is not None and config.world_size > 1:
            if not 0 <= src_rank < config.world_size:
                raise ConfigError(
                    f"src_rank={src_rank} is no rank of the data-parallel group",
                    why=f"the group has {config.world_size} ranks, counted from 0",
                )
            group = config.process_group()
            source = config.global_rank(src_rank)
            # As text: pickles of a state would bring the sender's classes.
            held = [json.dumps(None if state is None else list(state))]
            dist.broadcast_object_list(held, source, group)
            state = json.loads(held[0])
        if state is None:
            self.restore_state_rank(None)
            return
        if self._redistributes:
            state = redistribute(
                state,
                world_size=config.world_size,
                num_workers=config.num_workers,
                batch_size=self.dataset.batch_size,
            )
        if len(state) != config.world_size:
            raise DataError(
                f"there are states of {len(state)} ranks for {config.world_size}",
                why="each data-parallel rank restores its own",
                hint="deal them anew: shardwright data redist STATE OUT --world-size "
                f"{config.world_size} --num-workers {config.num_workers}",
            )
        self.restore_state_rank(state[config.rank])


def _check_sizes(state: Any, config: WorkerConfig) -> None:
    """Refuse the state of another number of ranks or workers, naming both."""
    if not isinstance(state, dict):
        raise DataError(f"this is no state of a rank: {brief(state)}")
    saved = state.get("world_size"), state.get("num_workers")
    if saved != (config.world_size, config.num_workers):
        raise DataError(
            f"the state is that of {saved[0]} ranks with {saved[1]} workers each",
            why=f"here are {config.world_size} ranks with {config.num_workers} workers each",
            hint="deal the states of all ranks anew: shardwright data redist STATE OUT "
            f"--world-size {config.world_size} --num-workers {config.num_workers}, or "
            "get_savable_loader(..., redistributes=True)",
        )


@checked
def get_savable_loader(
    dataset: SavableDataset,
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
    redistributes: bool = False,
) -> SavableLoader:
    """The loader of a dataset, whose state can be saved and restored.

    ``worker_config``: only to be compared with that of the dataset. ``prefetch_factor``: batches
    that each worker reads ahead. ``redistributes``: ``restore_state_global`` and checkpoints take
    the states of any number of ranks and workers, and deal them anew.
    """
    if worker_config is not None and worker_config != dataset.worker_config:
        raise ConfigError(
            "the loader and its dataset have different worker configs",
            why=f"{worker_config} and {dataset.worker_config}",
            hint="give the config to the dataset alone",
        )
    return SavableLoader(dataset, prefetch_factor, redistributes)


@checked
def get_loader(
    dataset: SavableDataset,
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
) -> SavableLoader:
    """The loader of a dataset; here every loader can be saved. For ``worker_config`` and
    ``prefetch_factor`` see :func:`get_savable_loader`.
    """
    return get_savable_loader(dataset, worker_config=worker_config, prefetch_factor=prefetch_factor)
