"""Loaders of iterable datasets, which have no length and no index.

Such a dataset is one stream. Every rank goes through all of it and keeps its own rows of each
global batch, so that the state is a position here too, valid on any number of ranks. That costs
reading everything on every rank; what is decoded in ``transform`` costs only where it is kept.

A dataset (or its iterator) with ``state_dict`` and ``load_state_dict`` goes on at once; any other
one is read from the beginning of the epoch up to the position. ``set_epoch`` is called if there is
one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardwright.data.fetching import Fetched, Fetcher, end_workers, next_of
from shardwright.data.global_batches import GlobalBatch, Share, Tail
from shardwright.data.permutation import Order, key
from shardwright.data.sample_stream import Run, SingleStream
from shardwright.data.state import VERSION, check_state
from shardwright.runtime.errors import ConfigError, DataError, ShardwrightError, brief_text
from shardwright.runtime.structure import map_leaves


@dataclass(frozen=True)
class Place:
    """Where a stream is: ``epoch``, how many samples of it were given out, and the state of the
    dataset there, if it has states.
    """

    epoch: int = 0
    position: int = 0
    dataset: Any = None


@dataclass
class Step:
    """What comes out of the stream: a step with where the stream is after it, or the end of an
    epoch (``fetched`` is ``None``).
    """

    fetched: Fetched | None
    after: Place

    def pin_memory(self, device: Any = None) -> Step:
        """Pin the tensors: torch's DataLoader calls it."""
        return self if self.fetched is None else Step(self.fetched.pin_memory(), self.after)


class Steps(IterableDataset[Step]):
    """The steps of one rank, epoch after epoch, from ``start`` on."""

    def __init__(self, fetcher: Fetcher, share: Share, tail: Tail, start: Place) -> None:
        self.fetcher = fetcher
        self.share = share
        self.tail = tail
        self.start = start

    def __iter__(self) -> Iterator[Step]:
        place = self.start
        while True:
            has_steps = place.position > 0
            for step in self._epoch(place):
                has_steps = True
                yield step
                if step.fetched is not None and step.fetched.problem is not None:
                    return
            if not has_steps:
                yield Step(Fetched(problem=_no_batch(self.share.global_batch)), place)
                return
            place = Place(place.epoch + 1)
            yield Step(None, place)

    def _epoch(self, place: Place) -> Iterator[Step]:
        try:
            samples, states = self._opened(place)
        except ShardwrightError as error:
            yield Step(Fetched(problem=_parts(error)), place)
            return
        rows = self.share.global_batch
        position = place.position
        while True:
            try:
                taken = list(itertools.islice(samples, rows))
            except Exception as error:
                problem = DataError(
                    f"the dataset raised an error after {position} samples of epoch {place.epoch}",
                    why=f"{type(error).__name__}: {brief_text(error)}",
                )
                yield Step(Fetched(problem=_parts(problem)), place)
                return
            if not taken or (len(taken) < rows and self.tail == "drop"):
                return
            state = None if states is None else deepcopy(states.state_dict())
            bounds = range(position, position + len(taken) + 1)
            batch = GlobalBatch(place.epoch, bounds, bounds[-1])
            fetched = self._fetched(taken, batch)
            position = batch.after
            yield Step(fetched, Place(place.epoch, position, state))

    def _opened(self, place: Place) -> tuple[Iterator[Any], Any]:
        """The samples from a place on, and what has states: the iterator, the dataset, or
        nothing.
        """
        dataset = self.fetcher.sources[0]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(place.epoch)
        begun = place.position > 0
        if begun and place.dataset is not None and _has_states(dataset):
            dataset.load_state_dict(place.dataset)
        samples = iter(dataset)
        holder = samples if _has_states(samples) else dataset
        if not _has_states(holder) or (begun and place.dataset is None):
            # Whatever was given out already is read once more.
            skipped = sum(1 for _ in itertools.islice(samples, place.position))
            if skipped < place.position:
                raise DataError(
                    f"the dataset ends after {skipped} samples",
                    why=f"{place.position} samples of its epoch {place.epoch} were given out "
                    "before",
                    hint="give the dataset that the state was saved with",
                )
            return samples, holder if _has_states(holder) else None
        if begun and holder is samples:
            holder.load_state_dict(place.dataset)
        return samples, holder

    def _fetched(self, taken: list[Any], batch: GlobalBatch) -> Fetched:
        fetched, start = Fetched(), batch.bounds[0]
        role, epoch = self.share.role, batch.epoch
        try:
            if not role.reads:
                fetched.microbatches = [None] * self.share.num_microbatches(batch)
                return fetched
            for rows in self.share.microbatches(batch):
                places = list(rows[:-1])
                samples = [self._transformed(taken[at - start], epoch, at) for at in places]
                runs = [Run(0, epoch, places)]
                fetched.microbatches.append(self.fetcher.batch(samples, runs) if samples else None)
        except ShardwrightError as error:
            fetched.problem = _parts(error)
        return fetched

    def _transformed(self, sample: Any, epoch: int, at: int) -> Any:
        transform = self.fetcher.transform
        if transform is None:
            return sample
        generator = torch.Generator().manual_seed(key(self.fetcher.seed, 0, epoch, at) >> 1)
        try:
            return transform(sample, generator)
        except Exception as error:
            raise DataError(
                f"transform raised an error for sample {at} of epoch {epoch}",
                why=f"{type(error).__name__}: {brief_text(error)}",
            ) from error


def _has_states(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def _parts(error: ShardwrightError) -> tuple[type[ShardwrightError], dict[str, Any]]:
    parts = {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}
    return type(error), parts


def _no_batch(global_batch: int) -> tuple[type[ShardwrightError], dict[str, Any]]:
    return DataError, {
        "what": f"the dataset gives no global batch of {global_batch}",
        "why": "an epoch of it ended before one was full",
        "hint": "see whether its files are there, or use a smaller global_batch",
    }


class StreamLoader:
    """Batches of one rank from an iterable dataset. Made by :func:`~shardwright.data.loader`; used
    like a :class:`~shardwright.data.CursorLoader`, but it has no length.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        share: Share,
        tail: Tail,
        identity: dict[str, Any],
        *,
        as_list: bool,
        device: torch.device | None,
        workers: dict[str, Any],
    ) -> None:
        self._fetcher = fetcher
        self._share = share
        self._tail: Tail = tail
        self._identity = identity
        self._as_list = as_list
        self._device = device
        self._workers = workers
        self._place = Place()
        self._ahead: Iterator[Step] | None = None
        self.skipped: list[tuple[str, str]] = []

    @classmethod
    def of(
        cls,
        dataset: Any,
        share: Share,
        *,
        seed: int,
        tail: Tail,
        refused: Mapping[str, Any],
        as_list: bool,
        device: torch.device | None,
        workers: dict[str, Any],
        options: dict[str, Any],
    ) -> StreamLoader:
        """See :func:`~shardwright.data.loader`. ``refused``: options that need an index."""
        refused = {**refused, "on_error='skip'": options["skips"]}
        refused["seed_samples"] = options["seed_samples"]
        for name, value in refused.items():
            if value:
                raise ConfigError(
                    f"{name} does not work with an iterable dataset",
                    why=f"a {type(dataset).__name__} has no length and no index",
                    hint="let the dataset itself do it, or use a map-style dataset",
                )
        if workers["num_workers"] > 1:
            raise ConfigError(
                f"an iterable dataset has at most one worker, not {workers['num_workers']}",
                why="it is one stream, which a worker goes through alone",
                hint="use num_workers=1, or a map-style dataset",
            )
        fetcher = Fetcher([dataset], SingleStream(Order(1, seed)), share.role, seed, **options)
        identity = {"seed": seed, "tail": tail, "global_batch": share.global_batch}
        return cls(fetcher, share, tail, identity, as_list=as_list, device=device, workers=workers)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as far as it is known: a stream tells its end when it is
        asked for more.
        """
        return self._place.epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch were given out on all ranks together."""
        return self._place.position

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self._ahead is None:
                self._ahead = self._started()
            try:
                step = next_of(self._ahead, self._workers["num_workers"])
            except Exception:
                self.close()
                raise
            if step.fetched is None:
                self._place = step.after
                return
            if step.fetched.problem is not None:
                self.close()
                step.fetched.raise_problem()
            self._place = step.after
            # No name here holds the batch while the next one is made.
            yield self._given(step.fetched)

    def _given(self, fetched: Fetched) -> Any:
        made, fetched.microbatches = fetched.microbatches, []
        if self._device is not None:
            made = [map_leaves(microbatch, self._moved) for microbatch in made]
        return made if self._as_list else made[0]

    def _moved(self, path: str, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, with the state of the dataset there if it has states."""
        return {
            "kind": "stream",
            "version": VERSION,
            "epoch": self._place.epoch,
            "position": self._place.position,
            "dataset": deepcopy(self._place.dataset),
            **self._identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`~shardwright.data.CursorLoader.load_state_dict`."""
        expected = {name: value for name, value in self._identity.items() if name != "global_batch"}
        checked_state = check_state(state, "stream", expected)
        self.close()
        dataset = deepcopy(checked_state.get("dataset"))
        self._place = Place(int(checked_state["epoch"]), checked_state["position"], dataset)

    def close(self) -> None:
        """End the worker; the next batch starts a new one."""
        ahead, self._ahead = self._ahead, None
        end_workers(ahead)

    def _started(self) -> Iterator[Step]:
        steps = Steps(self._fetcher, self._share, self._tail, self._place)
        make = functools.partial(DataLoader, steps, batch_size=None, collate_fn=_as_it_is)
        generator = torch.Generator().manual_seed(key(self._identity["seed"], "workers") >> 1)
        return iter(make(generator=generator, **self._workers))


def _as_it_is(step: Any) -> Any:
    return step
