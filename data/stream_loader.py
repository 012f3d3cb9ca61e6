"""Loaders of iterable datasets, which have no length and no index.

Such a dataset is one stream. Every rank goes through all of it and keeps its own rows of each
global batch, so that the state is a position here too, valid on any number of ranks. That costs
reading everything on every rank; what is decoded in ``transform`` costs only where it is kept.

[Note: Streams are not split] Where a dataset can be cut into shards, each rank could read its own.
But how many samples a shard has is known at its end only. So ranks would not know in which step
the epoch ends elsewhere, unless they asked each other in every step; and batches would follow from
the number of ranks.

A dataset (or its iterator) with ``state_dict`` and ``load_state_dict`` goes on at once; any other
one is read from the beginning of the epoch up to the position. ``set_epoch`` is called if there is
one. Either way the last samples that were given out are read again, and must be those of which the
state has digests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from shardwright.data.fetching import Fetched, Fetcher, cause_of, parts_of
from shardwright.data.global_batches import GlobalBatch, Share, Tail
from shardwright.data.rank_loader import Handing, RankLoader, read_ahead
from shardwright.data.sample_digest import sample_digest
from shardwright.data.sample_stream import Run
from shardwright.runtime.errors import ConfigError, DataError, ShardwrightError

READ_AGAIN = 4
"""The most samples that are read again after a resume. One might be the right one by chance, where
a buffer shuffles.
"""


@dataclass(frozen=True)
class Place:
    """Where a stream is: ``epoch``, and how many samples of it were given out. ``last``: digests of
    the last ones. ``dataset``: the state of the dataset before these, if it has states.
    """

    epoch: int = 0
    position: int = 0
    last: tuple[str, ...] = ()
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
    """The steps of one rank, epoch after epoch, from ``start`` on. ``replay``: read again rather
    than load states.
    """

    def __init__(
        self, fetcher: Fetcher, share: Share, tail: Tail, start: Place, replay: bool
    ) -> None:
        self.fetcher = fetcher
        self.share = share
        self.tail = tail
        self.start = start
        self.replay = replay
        # The samples of the epoch under way, and what has states: the iterator, the dataset, or
        # nothing.
        self._samples: Iterator[Any] = iter(())
        self._states: Any = None

    def __iter__(self) -> Iterator[Step]:
        place = self.start
        try:
            while True:
                for step in self._epoch(place):
                    yield step
                    place = step.after
                place = Place(place.epoch + 1)
                yield Step(None, place)
        except ShardwrightError as error:
            yield Step(Fetched(problem=parts_of(error)), place)

    def _epoch(self, place: Place) -> Iterator[Step]:
        """The steps of an epoch from a place on."""
        has_steps = place.position > 0
        with self.fetcher.watched():
            self._open(place)
        while True:
            with self.fetcher.watched():
                step = self._read(place)
            if step is None:
                break
            yield step
            place, has_steps = step.after, True
        if not has_steps:
            raise DataError(
                f"the dataset gives no global batch of {self.share.global_batch}",
                why="an epoch of it ended before one was full",
                hint="see whether its files are there, or use a smaller global_batch",
            )

    def _read(self, place: Place) -> Step | None:
        rows = self.share.global_batch
        again = min(rows, READ_AGAIN)
        try:
            taken = list(itertools.islice(self._samples, rows - again))
            # Before the last samples: these are read again after a resume, and looked at.
            state = None if self._states is None else deepcopy(self._states.state_dict())
            taken += itertools.islice(self._samples, again)
        except Exception as error:
            raise DataError(
                f"the dataset raised an error after {place.position} samples of epoch "
                f"{place.epoch}",
                why=cause_of(error),
            ) from error
        if len(taken) < rows:
            if not taken or self.tail == "drop":
                return None
            self.share.check_short(len(taken))
        bounds = range(place.position, place.position + len(taken) + 1)
        batch = GlobalBatch(place.epoch, bounds, bounds[-1])
        if len(taken) < rows:
            # The stream has ended: to go on from here is to read it up to the end again.
            after = Place(place.epoch, batch.after)
        else:
            last = tuple(map(sample_digest, taken[-again:]))
            after = Place(place.epoch, batch.after, last, state)
        return Step(self._own(taken, batch), after)

    def _own(self, taken: list[Any], batch: GlobalBatch) -> Fetched:
        """The part of a global batch that this rank keeps."""
        fetched, start, epoch = Fetched(), batch.bounds[0], batch.epoch
        # A rank that reads nothing takes part in the count of steps all the same.
        if not self.share.role.reads:
            fetched.microbatches = [None] * self.share.num_microbatches(batch)
            return fetched
        for rows in self.share.microbatches(batch):
            places = list(rows[:-1])
            samples = [self.fetcher.transformed(taken[at - start], 0, epoch, at) for at in places]
            runs = [Run(0, epoch, places)]
            fetched.microbatches.append(self.fetcher.batch(samples, runs) if samples else None)
        return fetched

    def _open(self, place: Place) -> None:
        """Begin, or go on with, an epoch at a place."""
        dataset = self.fetcher.sources[0]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(place.epoch)
        uses_state = place.dataset is not None and not self.replay
        try:
            if uses_state and _has_states(dataset):
                dataset.load_state_dict(place.dataset)
            samples = iter(dataset)
            # Some datasets keep the state in their iterator.
            if uses_state and not _has_states(dataset) and _has_states(samples):
                samples.load_state_dict(place.dataset)
        except Exception as error:
            raise DataError(
                "the dataset does not open" + (" where its state says" if uses_state else ""),
                where=f"sample {place.position} of epoch {place.epoch}",
                why=cause_of(error),
            ) from error
        self._samples = samples
        self._states = next((s for s in (dataset, samples) if _has_states(s)), None)
        if place.position > 0:
            self._skip(place, uses_state and self._states is not None)

    def _skip(self, place: Place, has_gone_on: bool) -> None:
        """Read what was given out already: the last samples alone, if the dataset has gone on where
        its state says.
        """
        wanted = len(place.last) if has_gone_on else place.position
        last: deque[Any] = deque(maxlen=len(place.last))
        read = 0
        for sample in itertools.islice(self._samples, wanted):
            read += 1
            last.append(sample)
        # The same samples came again, so the stream is where it was.
        if read == wanted and tuple(map(sample_digest, last)) == place.last:
            return
        other, remedy = "", ""
        if has_gone_on:
            other = ", or its own state does not say everything: a buffer that shuffles, say"
            remedy = ", or pass replay=True, which reads the epoch again up to there"
        ends = f"; it ends after {place.position - wanted + read}" if read < wanted else ""
        raise DataError(
            "the dataset goes on with other samples than those that were given out",
            where=f"up to sample {place.position - 1} of epoch {place.epoch}{ends}",
            why=f"it is another dataset, or another order of it{other}",
            hint=f"give the dataset that the state was saved with{remedy}",
        )


def _has_states(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


class StreamFetcher(Fetcher):
    """Makes batches of samples that come by themselves."""

    SKIP_HINT = ""
    DRAWING_HINT = (
        "let the dataset draw from a generator of its own, seeded in set_epoch(epoch); or draw in "
        "transform=, which is given a generator"
    )


class StreamLoader(RankLoader[Step]):
    """Batches of one rank from an iterable dataset. Made by :func:`~shardwright.data.loader`; used
    like a :class:`~shardwright.data.CursorLoader`, but it has no length.
    """

    KIND = "stream"

    def __init__(
        self, fetcher: StreamFetcher, share: Share, handing: Handing, tail: Tail, replay: bool
    ) -> None:
        identity = {
            "seed": fetcher.seed,
            "tail": tail,
            "source": description(fetcher.sources[0]),
            "global_batch": share.global_batch,
        }
        super().__init__(fetcher, share, identity, handing)
        self._tail: Tail = tail
        self._replay = replay
        self._place = Place()

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
                steps = Steps(self._fetcher, self._share, self._tail, self._place, self._replay)
                self._ahead = read_ahead(steps, None, self._handing, self._fetcher.seed)
            step = self._read()
            if step.fetched is None:
                self._place = step.after
                return
            made = self._handed(step.fetched)
            self._place = step.after
            yield made
            del made  # nothing here holds the batch while the next one is made

    def _place_in_words(self) -> dict[str, Any]:
        """The place, with the state of the dataset there if it has states."""
        place = self._place
        return {
            "epoch": place.epoch,
            "position": place.position,
            "last": list(place.last),
            "dataset": deepcopy(place.dataset),
        }

    def _go_to(self, state: dict[str, Any]) -> None:
        missing = [name for name in ("epoch", "last", "dataset") if name not in state]
        if missing or type(state["epoch"]) is not int or state["epoch"] < 0:
            raise DataError(f"the state of the loader has no {(missing or ['epoch'])[0]!r}")
        last = tuple(map(str, state["last"]))
        self._place = Place(state["epoch"], state["position"], last, deepcopy(state["dataset"]))


def check_stream(dataset: Any, needs_index: Mapping[str, Any], num_workers: int) -> None:
    """Refuse what a stream cannot do. ``needs_index``: options, by how they are called."""
    for name, value in needs_index.items():
        if value:
            raise ConfigError(
                f"{name} does not work with an iterable dataset",
                why=f"a {type(dataset).__name__} has no length and no index",
                hint="let the dataset itself do it, or use a map-style dataset",
            )
    if num_workers > 1:
        raise ConfigError(
            f"an iterable dataset has at most one worker, not {num_workers}",
            why="it is one stream, which a worker goes through alone",
            hint="use num_workers=1, or a map-style dataset",
        )
    # Hugging Face's datasets note here what split_dataset_by_node was told.
    nodes = getattr(getattr(dataset, "_distributed", None), "world_size", 1)
    if nodes > 1:
        raise ConfigError(
            f"the dataset is one of {nodes} parts, by split_dataset_by_node",
            why="every rank goes through the whole stream and keeps its own rows: parts of parts "
            "would leave samples out",
            hint="pass the dataset as it was before it was split",
        )


def description(dataset: Any) -> dict[str, Any]:
    """What a state notes of an iterable dataset, so that it is not loaded for another one."""
    shards, fingerprint = (getattr(dataset, n, None) for n in ("num_shards", "fingerprint"))
    return {
        "class": type(dataset).__qualname__,
        "num_shards": shards if type(shards) is int else None,
        "fingerprint": fingerprint if isinstance(fingerprint, str) else None,
    }
