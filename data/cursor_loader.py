"""Loaders of datasets with an index: global batches, dealt to the ranks of any plan, whose state is
one position.

What each step consists of follows from its position alone (:mod:`~shardwright.data.global_batches`
over :mod:`~shardwright.data.sample_stream`). So workers may prefetch as they like: the state is
that of the last batch given out, counted where it is given out. Nothing is sent between ranks.

Workers are told this rank's parts of the steps to come. The list of these never ends, so that
workers and what they have read ahead outlive the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.data.fetching import Fetched, Fetcher, Wanted, wanted
from shardwright.data.global_batches import Batching, GlobalBatch, Share
from shardwright.data.rank_loader import Handing, RankLoader, read_ahead
from shardwright.data.sample_stream import SampleStream


class CursorLoader(RankLoader[Fetched]):
    """Batches of one rank, of datasets with an index. Made by :func:`~shardwright.data.loader`.

    ``for batch in loader`` goes on from the loader's position to the end of the epoch; the next
    ``for`` is the next epoch. ``len`` is the number of steps of an epoch from its beginning.
    ``skipped``: the samples that this rank could not read and replaced, each with the reason.
    """

    KIND = "cursor"

    def __init__(
        self,
        fetcher: Fetcher,
        share: Share,
        identity: dict[str, Any],
        handing: Handing,
        stream: SampleStream,
        batching: Batching,
    ) -> None:
        super().__init__(fetcher, share, identity, handing)
        self._stream = stream
        self._batching = batching
        self._position = 0
        # The position of what is given next by what reads ahead.
        self._ahead_at = 0
        # By position, the steps that are known and were not given out yet: workers are told of
        # steps long before, and to pack rows twice would cost twice.
        self._known: dict[int, GlobalBatch] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._at(self._position).epoch

    @property
    def position(self) -> int:
        """How much of the stream was given out on all ranks together, in samples, over all
        epochs.
        """
        return self._position

    def __len__(self) -> int:
        return self._batching.num_steps()

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while (batch := self._at(self._position)).epoch == epoch:
            yield self._given(batch)

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        self._known.clear()
        super().close()

    def _place_in_words(self) -> dict[str, Any]:
        return {"position": self._position}

    def _go_to(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def _at(self, position: int) -> GlobalBatch:
        """The step at a position."""
        batch = self._known.get(position)
        if batch is None:
            batch = self._known[position] = self._batching.at(position)
        return batch

    def _given(self, batch: GlobalBatch) -> Any:
        """What is given out next. From here on it counts, so that a state taken while it is in use
        is that behind it.
        """
        made = self._next(batch)
        self._known.pop(self._position, None)
        self._position = batch.after
        return made

    def _next(self, batch: GlobalBatch) -> Any:
        if batch.num_rows < self._share.global_batch:
            self._share.check_short(batch.num_rows)
        if not self._share.role.reads:
            return self._handing.handed([None] * self._share.num_microbatches(batch))
        # The position was set, or read-ahead was given up after an error: what workers have is not
        # it.
        if self._ahead is None or self._ahead_at != self._position:
            self.close()
            parts = self._parts(self._position)
            self._ahead = read_ahead(self._fetcher, parts, self._handing, self._identity["seed"])
        fetched = self._read()
        self._ahead_at = batch.after
        return self._handed(fetched)

    def _parts(self, position: int) -> Iterator[tuple[Wanted, ...]]:
        """List this rank's parts of all steps from a position on. Their samples are looked up here,
        once, and not by every worker.
        """
        is_packed = self._fetcher.packing is not None
        while True:
            batch = self._at(position)
            position = batch.after
            yield tuple(
                wanted(self._stream.runs(rows[0], rows[-1]), rows if is_packed else None)
                for rows in self._share.microbatches(batch)
            )
