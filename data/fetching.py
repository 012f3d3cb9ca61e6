"""Fetching: what reads samples, in the loader's process or in a worker of it.

A worker is told samples and answers with finished microbatches. What goes wrong is
sent back as data, so that the loader can raise it in words, with the sample's key.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from shardwright.data.batch_fitting import fit, other_size, shapes_in_words
from shardwright.data.global_batches import Microbatch
from shardwright.data.global_generators import GeneratorsKept, is_looked_at, seed_everything
from shardwright.data.packing import Packing, pack_row, packable
from shardwright.data.permutation import key
from shardwright.data.rank_roles import Role
from shardwright.data.sample_stream import Run
from shardwright.runtime.errors import ArgumentError, DataError, ShardwrightError, brief, brief_text
from shardwright.runtime.structure import map_leaves

MOST_TRIES = 20
"""How many samples in a row may fail before the loader stops even if it skips."""

_UNWATCHED = nullcontext()


Wanted = tuple[list[tuple[int, int, list[int]]], Microbatch | None]
"""A microbatch that is to be read: its samples, each run as :class:`Run` has it, and the bounds of
packed rows among them, as the stream counts. Plain tuples: to send a class of ours to a worker
takes as long as a cheap sample.
"""


def wanted(runs: list[Run], rows: Microbatch | None = None) -> Wanted:
    """What a worker is told of a microbatch."""
    return [(run.source, run.epoch, run.indices) for run in runs], rows


@dataclass
class Fetched:
    """What a step of one rank is. ``microbatches``: collated. ``skipped``: the samples that could
    not be read, each with its reason. ``problem``: the parts of an error, if there was one.
    """

    microbatches: list[Any] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    problem: tuple[type[ShardwrightError], dict[str, Any]] | None = None

    def pin_memory(self, device: Any = None) -> Fetched:
        """Pin the tensors: torch's DataLoader calls it."""
        pinned = [map_leaves(item, _pinned) for item in self.microbatches]
        return replace(self, microbatches=pinned)

    def raise_problem(self) -> None:
        """Raise the error, if there was one."""
        if self.problem is not None:
            kind, parts = self.problem
            raise kind(**parts)


def _pinned(path: str, leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) else leaf


def parts_of(error: ShardwrightError) -> tuple[type[ShardwrightError], dict[str, Any]]:
    """An error as data, which any process can send: its class and its parts."""
    parts = {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}
    return type(error), parts


def cause_of(error: Exception) -> str:
    """What an error of the user's code says, on a line."""
    if isinstance(error, ShardwrightError):
        return error.what + (f": {error.why}" if error.why else "")
    return f"{type(error).__name__}: {brief_text(error)}"


def check_dataset(source: Any) -> None:
    """Refuse what has no length or takes no index. Raises :class:`ArgumentError`."""
    if isinstance(source, Mapping):
        raise ArgumentError(
            f"a {type(source).__name__} is no dataset: it takes names, not numbers",
            why=f"its keys are {brief(list(source))}",
            hint="pass one of its values (dataset['train']), or a list of samples",
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ArgumentError(
            f"{brief(source)} is no dataset",
            why="a map-style dataset has a length and takes an index",
            hint="pass a torch dataset, a Hugging Face dataset, a list, or an iterable dataset "
            "alone",
        )
    try:
        len(source)
    except TypeError as error:  # a tensor without dims has the method and no length
        raise ArgumentError(
            f"{brief(source)} is no dataset", why=f"it has no length: {brief_text(error)}"
        ) from error


@dataclass
class Fetcher:
    """Reads microbatches.

    ``sources``: the datasets. ``transform``: called with a sample and a
    ``torch.Generator`` that follows from ``seed``, epoch and sample. ``lengths``: of all samples by
    source, as rows are ``packing``-ed by them. ``seed_samples``: torch's, numpy's and Python's
    global generators are seeded for every sample, and put back after the step. ``skips``: a sample
    that raises is replaced by another one.
    """

    sources: Sequence[Any]
    role: Role
    seed: int
    collate: Callable[[list[Any]], Any] | None = None
    transform: Callable[[Any, torch.Generator], Any] | None = None
    packing: Packing | None = None
    lengths: Sequence[NDArray[Any]] = ()
    skips: bool = False
    seed_samples: bool = False
    _num_steps: int = field(default=0, init=False)

    SKIP_HINT: ClassVar[str] = ", or pass on_error='skip', which counts and replaces such samples"
    DRAWING_HINT: ClassVar[str] = (
        "pass seed_samples=True, which seeds these generators for every sample, or draw in "
        "transform=, which is given a generator"
    )

    def __getitem__(self, microbatches: tuple[Wanted, ...]) -> Fetched:
        """Read one step: what torch's DataLoader calls."""
        try:
            with self.watched():
                return self._step(microbatches)
        except ShardwrightError as error:
            return Fetched(problem=parts_of(error))

    def watched(self) -> AbstractContextManager[None]:
        """A ``with`` block for each step, after which the global generators are what they were. A
        dataset that draws from them without being seeded is refused.
        """
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if self.seed_samples or is_looked_at(step):
            return GeneratorsKept(seeded=self.seed_samples, hint=self.DRAWING_HINT)
        return _UNWATCHED

    def _step(self, microbatches: tuple[Wanted, ...]) -> Fetched:
        fetched = Fetched()
        for plain_runs, rows in microbatches:
            # Uneven replicas may have nothing of a short batch.
            runs = [Run(*run) for run in plain_runs]
            fetched.microbatches.append(self._microbatch(runs, rows, fetched) if runs else None)
        return fetched

    def _microbatch(self, runs: list[Run], rows: Microbatch | None, fetched: Fetched) -> Any:
        parts = [self._samples(*run, fetched) for run in runs]
        samples = parts[0] if len(parts) == 1 else list(itertools.chain.from_iterable(parts))
        if self.packing is not None and rows is not None:
            samples = self._packed(samples, rows, runs)
        return self.batch(samples, runs)

    def batch(self, samples: list[Any], runs: Sequence[Run]) -> Any:
        """What a rank's model takes of samples: collated, its own inputs, cut. ``runs``: which
        samples they are.
        """
        return fit(self._collated(samples, runs), self.role, lambda: self._where(runs))

    # Samples

    def _samples(self, source: int, epoch: int, indices: list[int], fetched: Fetched) -> list[Any]:
        dataset = self.sources[source]
        plain = self.transform is None and self.packing is None and not self.seed_samples
        if plain and hasattr(dataset, "__getitems__"):
            try:
                samples = list(dataset.__getitems__(indices))
            except Exception:  # one after the other tells which
                return [self._sample(source, epoch, index, fetched) for index in indices]
            if len(samples) != len(indices):
                raise DataError(
                    f"{len(indices)} samples were asked for, and __getitems__ gave {len(samples)}",
                    where=self._where([Run(source, epoch, indices)]),
                    hint="let it give one sample for each index, in their order",
                )
            return samples
        if not plain or self.skips:
            return [self._sample(source, epoch, index, fetched) for index in indices]
        left = iter(indices)
        try:
            return [dataset[index] for index in left]
        except Exception as error:
            # What the iterator has left tells how far the comprehension came.
            failed = indices[len(indices) - operator.length_hint(left) - 1]
            raise self._failed(source, failed, error) from error

    def _sample(self, source: int, epoch: int, index: int, fetched: Fetched) -> Any:
        """One sample; if it raises and that is allowed, another one, which follows from the seed,
        so that all ranks and every resumed run take the same.
        """
        wanted = index
        for number in range(MOST_TRIES):
            try:
                sample = self._read(source, epoch, wanted)
            except Exception as error:
                if not self.skips:
                    raise self._failed(source, wanted, error) from error
                reason, last = cause_of(error), error
                fetched.skipped.append((self._key(source, wanted), reason))
            else:
                if self.packing is None or wanted == index:
                    return sample
                # Its row has as much room as the sample had that it replaces.
                room = int(self.lengths[source][index])
                return {name: x[:room] for name, x in sample.items()}
            wanted = key(self.seed, source, epoch, index, number) % len(self.sources[source])
        raise DataError(
            f"{MOST_TRIES} samples in a row could not be read",
            where=f"the last one is {fetched.skipped[-1][0]}",
            why=reason,
            hint="see what is wrong with the dataset; on_error='skip' is for single samples",
        ) from last

    def _read(self, source: int, epoch: int, index: int) -> Any:
        if self.seed_samples:
            seed_everything(key(self.seed, source, epoch, index))
        sample = self.transformed(self.sources[source][index], source, epoch, index)
        if self.packing is None:
            return sample
        return packable(sample, int(self.lengths[source][index]))

    def transformed(self, sample: Any, source: int, epoch: int, index: int) -> Any:
        """What ``transform`` makes of a sample; the generator follows from seed, source, epoch and
        index.

        Raises :class:`DataError` if it raises anything.
        """
        if self.transform is None:
            return sample
        # A seed of torch's has 63 bits and a sign.
        generator = torch.Generator().manual_seed(key(self.seed, source, epoch, index) >> 1)
        try:
            return self.transform(sample, generator)
        except Exception as error:
            raise DataError(
                f"transform raised an error for {self._key(source, index)}",
                where=error.where if isinstance(error, ShardwrightError) else None,
                why=cause_of(error),
                hint="mend transform" + self.SKIP_HINT,
            ) from error

    def _failed(self, source: int, index: int, error: Exception) -> ShardwrightError:
        hint = "mend the sample" + self.SKIP_HINT
        if isinstance(error, ShardwrightError):
            own_key = self._key(source, index)
            where = error.where or (None if own_key in error.what else own_key)
            return DataError(error.what, where=where, why=error.why, hint=error.hint or hint)
        return DataError(
            f"{self._key(source, index)} could not be read", why=cause_of(error), hint=hint
        )

    def _key(self, source: int, index: int) -> str:
        """How messages call a sample."""
        dataset = self.sources[source]
        of = type(dataset).__name__ if len(self.sources) == 1 else f"source {source}"
        try:
            name = dataset.key(index) if hasattr(dataset, "key") else None
        except Exception:  # a broken index must not hide why
            name = None
        return f"sample {index} of {of}" + (f" ({name})" if name is not None else "")

    def _where(self, runs: Sequence[Run]) -> str:
        """Which samples a batch has, in words."""
        first = self._key(runs[0].source, runs[0].indices[0])
        last = self._key(runs[-1].source, runs[-1].indices[-1])
        return first if first == last else f"from {first} to {last}"

    # Batches

    def _packed(self, samples: list[Any], rows: Microbatch, runs: Sequence[Run]) -> list[Any]:
        assert self.packing is not None
        start = rows[0]
        try:
            return [
                pack_row(samples[first - start : last - start], self.packing)
                for first, last in itertools.pairwise(rows)
            ]
        except DataError as error:
            where = error.where or self._where(runs)
            raise DataError(error.what, where=where, why=error.why, hint=error.hint) from error

    def _collated(self, samples: list[Any], runs: Sequence[Run]) -> Any:
        if self.collate is None:
            try:
                return default_collate(samples)
            except Exception as error:
                raise self._uncollated(samples, runs, error) from error
        try:
            batch = self.collate(samples)
        except Exception as error:
            raise DataError(
                "collate raised an error", where=self._where(runs), why=cause_of(error)
            ) from error
        if batch is None:
            raise DataError(
                "collate returned None",
                where=self._where(runs),
                why="None stands for a rank that reads nothing",
                hint="let collate return the batch; leave samples out of the dataset",
            )
        if why := other_size(batch, len(samples)):
            raise DataError(
                f"collate was given {len(samples)} samples and made a batch of another size",
                where=self._where(runs),
                why=why,
                hint="let collate return one row for each sample; leave samples out of the dataset",
            )
        return batch

    def _uncollated(
        self, samples: list[Any], runs: Sequence[Run], error: Exception
    ) -> ShardwrightError:
        """Why samples cannot be put into one batch: the first two that differ, if some do."""
        places = [(run.source, index) for run in runs for index in run.indices]
        shapes = [shapes_in_words(sample) for sample in samples]
        other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        # A packed row is many samples, and has no name of its own.
        if other is None or len(places) != len(samples):
            why = cause_of(error)
        else:
            why = (
                f"{self._key(*places[0])} has {shapes[0]}, and {self._key(*places[other])} has "
                f"{shapes[other]}"
            )
        return DataError(
            "samples cannot be put into one batch",
            where=self._where(runs),
            why=why,
            hint="pad or cut them with collate=, or pack them with packing=",
        )
