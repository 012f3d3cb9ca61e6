"""Global batches: which positions of the stream belong to which step, on all ranks together.

A **row** is what a batch has many of: one sample, or several short ones that were packed. A global
batch is ``global_batch`` rows. It follows from where it begins and from nothing else, so a position
of the stream is all the state there is.

An example: 10 samples, global batches of 4. Without the tail an epoch has two batches, at 0 and 4;
the next epoch begins at position 10. With ``tail="short"`` there is a third one with 2 rows. With
``tail="wrap"`` the third one goes on into the next epoch, which then begins at 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from shardwright.data.rank_roles import Role
from shardwright.runtime.errors import ConfigError, DataError
from shardwright.runtime.runs import piece

Tail = Literal["drop", "short", "wrap"]
"""What becomes of the samples at the end of an epoch that make no whole batch."""

Microbatch = Sequence[int]
"""The bounds of neighbouring rows: row ``i`` is positions ``bounds[i]`` to ``bounds[i + 1]``."""


class GlobalBatch(NamedTuple):
    """One step of all ranks. ``epoch``: in which it begins. ``bounds``: of its rows. ``after``: the
    position at which the next one may begin.
    """

    epoch: int
    bounds: Microbatch
    after: int

    @property
    def num_rows(self) -> int:
        """The rows of all ranks together."""
        return len(self.bounds) - 1


class Batching(Protocol):
    """Cuts a stream into global batches."""

    def at(self, position: int) -> GlobalBatch:
        """The first global batch at or behind a position."""
        ...

    def num_steps(self) -> int:
        """The batches of the first epoch."""
        ...


@dataclass(frozen=True)
class SampleBatching:
    """Global batches of single samples. ``epoch_size``: the samples of an epoch."""

    epoch_size: int
    global_batch: int
    tail: Tail = "drop"

    def __post_init__(self) -> None:
        if self.epoch_size < 1:
            raise DataError(
                "the dataset is empty",
                why="it says that it has no samples",
                hint="see whether its files are there",
            )
        if self.tail == "drop" and self.epoch_size < self.global_batch:
            raise DataError(
                f"{self.epoch_size} samples make no global batch of {self.global_batch}",
                why="what does not fill a batch at the end of an epoch is left out",
                hint="use a smaller global_batch, or wrap=True, which goes on into the next epoch",
            )

    def at(self, position: int) -> GlobalBatch:
        """See :class:`Batching`."""
        epoch = position // self.epoch_size
        end = (epoch + 1) * self.epoch_size
        stop = position + self.global_batch
        if self.tail == "wrap" or stop <= end:
            return GlobalBatch(epoch, range(position, stop + 1), stop)
        if self.tail == "short":
            return GlobalBatch(epoch, range(position, end + 1), end)
        # "drop": what is left of this epoch fills no batch, and the next one begins.
        stop = end + self.global_batch
        return GlobalBatch(epoch + 1, range(end, stop + 1), stop)

    def num_steps(self) -> int:
        """See :class:`Batching`."""
        whole, rest = divmod(self.epoch_size, self.global_batch)
        return whole + (1 if rest and self.tail != "drop" else 0)


@dataclass(frozen=True)
class Share:
    """How one rank's part of a global batch is cut out. ``microbatch``: rows of one, on all ranks
    of a replica together; ``None`` for one microbatch with all of the replica's rows. ``uneven``:
    replicas may get different numbers of rows.
    """

    role: Role
    global_batch: int
    microbatch: int | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        if self.global_batch < 1 or (self.microbatch is not None and self.microbatch < 1):
            raise ConfigError(
                f"global_batch={self.global_batch} and microbatch={self.microbatch} are counts of "
                "samples",
                why="a batch has at least one",
            )
        replicas = self.role.num_replicas
        if self.global_batch < self.role.data_size:
            raise ConfigError(
                f"a global batch of {self.global_batch} has nothing for some of "
                f"{self.role.data_size} data-parallel ranks",
                why="all of them take every step",
                hint=f"use global_batch={self.role.data_size} or more",
            )
        # Replicas, then microbatches, then the ranks of a unit that share one: each must divide.
        size, rest = divmod(self.global_batch, replicas)
        parts = self.microbatch or size
        problem = ""
        if rest:
            problem = f"{replicas} replicas"
        elif size % parts:
            problem = f"{replicas} replicas with microbatches of {parts}"
        elif parts % self.role.part[1]:
            problem = f"microbatches of {parts} into {self.role.part[1]} parts"
        if problem and not self.uneven:
            raise ConfigError(
                f"a global batch of {self.global_batch} does not divide into {problem}",
                why="replicas of unequal numbers of samples weigh them differently where the loss "
                "is a mean",
                hint=f"use a multiple of {self._unit()}, or uneven=True if the loss is a sum",
            )

    def _unit(self) -> int:
        return self.role.num_replicas * (self.microbatch or 1) * self.role.part[1]

    def check_short(self, rows: int) -> None:
        """Refuse a last batch of an epoch that leaves some rank without samples."""
        if 0 < rows < self.role.data_size or (rows % self._unit() and not self.uneven):
            raise ConfigError(
                f"the last batch of an epoch has {rows} samples, which do not divide among "
                f"{self.role.data_size} data-parallel ranks",
                why="drop_last=False keeps it, and all ranks take every step",
                hint="leave drop_last on, use wrap=True, or uneven=True if each rank gets some",
            )

    def microbatches(self, batch: GlobalBatch) -> tuple[Microbatch, ...]:
        """The rows of this rank, by microbatch."""
        start, size = piece(batch.num_rows, self.role.num_replicas, self.role.replica)
        length = self.microbatch or size
        index, parts = self.role.part
        found = []
        for first in range(start, start + size, max(1, length)):
            # The last microbatch may be short; its parts are as even as can be.
            offset, count = piece(min(length, start + size - first), parts, index)
            begin = first + offset
            found.append(batch.bounds[begin : begin + count + 1])
        return tuple(found)

    def num_microbatches(self, batch: GlobalBatch) -> int:
        """How many microbatches this rank's replica has of a batch."""
        size = piece(batch.num_rows, self.role.num_replicas, self.role.replica)[1]
        return -(-size // (self.microbatch or max(1, size)))
