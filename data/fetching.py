"""Fetching: what reads samples, in the loader's process or in a worker of it.

A worker is told positions of the stream and answers with finished microbatches. What goes wrong is
sent back as data, so that the loader can raise it in words, with the sample's key.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardwright.data.cuts import Cut, take
from shardwright.data.global_batches import Microbatch
from shardwright.data.packing import Packing, pack_row
from shardwright.data.permutation import key
from shardwright.data.rank_roles import ALL_INPUTS, Role
from shardwright.data.sample_stream import Run, SampleStream
from shardwright.runtime.errors import DataError, InputError, ShardwrightError, brief_text
from shardwright.runtime.structure import flatten, map_leaves

MOST_TRIES = 20
"""How many samples in a row may fail before the loader stops even if it skips."""

LOOKED_AT_STEPS = 8
"""Steps of which it is looked whether they draw from the global generators; later ones are looked
at now and then.
"""


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


@dataclass
class Fetcher:
    """Reads microbatches.

    ``sources``: the datasets of the ``stream``. ``transform``: called with a sample and a
    ``torch.Generator`` that follows from ``seed``, epoch and sample. ``seed_samples``: torch's,
    numpy's and Python's global generators are seeded for every sample, and put back after the step.
    ``skips``: a sample that raises is replaced by another one.
    """

    sources: Sequence[Any]
    stream: SampleStream
    role: Role
    seed: int
    collate: Callable[[list[Any]], Any] | None = None
    transform: Callable[[Any, torch.Generator], Any] | None = None
    packing: Packing | None = None
    skips: bool = False
    seed_samples: bool = False
    _num_steps: int = field(default=0, init=False)

    def __getitem__(self, microbatches: tuple[Microbatch, ...]) -> Fetched:
        """Read one step: what torch's DataLoader calls."""
        return self._guarded(
            lambda fetched: [self._microbatch(rows, fetched) for rows in microbatches]
        )

    def fetch(self, runs: Sequence[Run]) -> Fetched:
        """Read one batch of given samples."""
        return self._guarded(lambda fetched: [self._of_runs(runs, fetched, None)])

    def _guarded(self, read: Callable[[Fetched], list[Any]]) -> Fetched:
        """What ``read`` gives, or what went wrong."""
        fetched = Fetched()
        try:
            with self._generators_kept():
                fetched.microbatches = read(fetched)
        except ShardwrightError as error:
            parts = {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}
            fetched.problem = (type(error), parts)
        self._num_steps += 1
        return fetched

    def __len__(self) -> int:
        return self.stream.epoch_size

    def _microbatch(self, rows: Microbatch, fetched: Fetched) -> Any:
        start, stop = rows[0], rows[-1]
        if start == stop:
            return None
        return self._of_runs(self.stream.runs(start, stop), fetched, rows)

    def _of_runs(self, runs: Sequence[Run], fetched: Fetched, rows: Microbatch | None) -> Any:
        parts = [self._samples(*run, fetched) for run in runs]
        samples = parts[0] if len(parts) == 1 else list(itertools.chain.from_iterable(parts))
        if self.packing is not None and rows is not None:
            samples = self._packed(samples, rows)
        return self.batch(samples, runs)

    def batch(self, samples: list[Any], runs: Sequence[Run]) -> Any:
        """What a rank's model takes of samples: collated, its own inputs, cut. ``runs``: which
        samples they are.
        """
        return fit(self._collated(samples, runs), self.role)

    def _samples(self, source: int, epoch: int, indices: list[int], fetched: Fetched) -> list[Any]:
        dataset = self.sources[source]
        plain = self.transform is None and not self.seed_samples
        if plain and hasattr(dataset, "__getitems__"):
            try:
                return list(dataset.__getitems__(indices))
            except Exception:  # one after the other tells which
                return [self._sample(source, epoch, index, fetched) for index in indices]
        if not plain or self.skips:
            return [self._sample(source, epoch, index, fetched) for index in indices]
        left = iter(indices)
        try:
            return [dataset[index] for index in left]
        except Exception as error:
            failed = indices[len(indices) - operator.length_hint(left) - 1]
            raise self._failed(source, failed, error) from error

    def _sample(self, source: int, epoch: int, index: int, fetched: Fetched) -> Any:
        """One sample; if it raises and that is allowed, another one, which follows from the seed,
        so that all ranks and every resumed run take the same.
        """
        wanted = index
        for number in range(MOST_TRIES):
            try:
                return self._transformed(source, epoch, wanted)
            except Exception as error:
                if not self.skips:
                    raise self._failed(source, wanted, error) from error
                reason = f"{type(error).__name__}: {brief_text(error)}"
                fetched.skipped.append((self._key(source, wanted), reason))
                last = error
            wanted = key(self.seed, source, epoch, index, number) % len(self.sources[source])
        raise DataError(
            f"{MOST_TRIES} samples in a row could not be read",
            where=f"the last one is {self._key(source, wanted)}",
            why=reason,
            hint="see what is wrong with the dataset; on_error='skip' is for single samples",
        ) from last

    def _transformed(self, source: int, epoch: int, index: int) -> Any:
        if self.seed_samples:
            seed_everything(key(self.seed, source, epoch, index))
        sample = self.sources[source][index]
        if self.transform is None:
            return sample
        generator = torch.Generator().manual_seed(key(self.seed, source, epoch, index) >> 1)
        return self.transform(sample, generator)

    def _failed(self, source: int, index: int, error: Exception) -> ShardwrightError:
        hint = "mend the sample, or pass on_error='skip', which counts and replaces it"
        if isinstance(error, ShardwrightError):
            where = error.where or self._key(source, index)
            return DataError(error.what, where=where, why=error.why, hint=error.hint or hint)
        return DataError(
            f"{self._key(source, index)} could not be read",
            why=f"{type(error).__name__}: {brief_text(error)}",
            hint=hint,
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

    def _packed(self, samples: list[Any], rows: Microbatch) -> list[Any]:
        assert self.packing is not None
        start = rows[0]
        return [
            pack_row(samples[first - start : last - start], self.packing)
            for first, last in itertools.pairwise(rows)
        ]

    def _collated(self, samples: list[Any], runs: Sequence[Run]) -> Any:
        try:
            batch = default_collate(samples) if self.collate is None else self.collate(samples)
        except Exception as error:
            raise self._uncollated(samples, runs, error) from error
        if self.collate is not None and (why := other_size(batch, len(samples))):
            raise DataError(
                f"collate was given {len(samples)} samples and made a batch of another size",
                where=self._where(runs),
                why=why,
                hint="let collate return one row for each sample; leave samples out of the dataset",
            )
        return batch

    def _where(self, runs: Sequence[Run]) -> str:
        first, last = runs[0], runs[-1]
        return (
            f"from {self._key(first.source, first.indices[0])} to "
            f"{self._key(last.source, last.indices[-1])}"
        )

    def _uncollated(
        self, samples: list[Any], runs: Sequence[Run], error: Exception
    ) -> ShardwrightError:
        where = self._where(runs)
        if self.collate is not None:
            return DataError(
                "collate raised an error",
                where=where,
                why=f"{type(error).__name__}: {brief_text(error)}",
            )
        places = [(run.source, index) for run in runs for index in run.indices]
        shapes = [_shapes(sample) for sample in samples]
        other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is None or len(places) != len(samples):
            why = f"{type(error).__name__}: {brief_text(error)}"
        else:
            why = (
                f"{self._key(*places[0])} has {shapes[0]}, and {self._key(*places[other])} has "
                f"{shapes[other]}"
            )
        return DataError(
            "samples cannot be put into one batch",
            where=where,
            why=why,
            hint="pad or cut them with collate=, or pack them with packing=",
        )

    @contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """The global generators are afterwards what they were. A dataset that draws from them
        without seeding would give other samples on other ranks and after a resume: it is refused.
        """
        looks = self._num_steps < LOOKED_AT_STEPS or self._num_steps % 64 == 0
        if not looks and not self.seed_samples:
            yield
            return
        before = generator_states()
        try:
            yield
            drawn = [] if self.seed_samples else moved(before)
        finally:
            restore(before)
        if drawn:
            raise DataError(
                f"the dataset draws from the global generator of {' and '.join(drawn)}",
                why="what it draws then depends on the number of ranks and workers, and a resumed "
                "run gets other samples",
                hint="pass seed_samples=True, which seeds these generators for every sample, or "
                "draw in transform=, which is given a generator",
            )


Given = TypeVar("Given")


def next_of(ahead: Iterator[Given], num_workers: int) -> Given:
    """What comes next from torch's DataLoader. What samples raise comes as data, so an error of it
    is the end of a worker: killed, or without memory.
    """
    try:
        return next(ahead)
    except StopIteration:
        raise
    except Exception as error:  # a process that is killed while it writes may leave anything
        if not num_workers:
            raise
        raise DataError(
            "a worker that loads samples has ended",
            why=f"{type(error).__name__}: {brief_text(error)}",
            hint="see whether the machine ran out of memory; start the job again, which goes on "
            "from the last checkpoint",
        ) from error


def fit(batch: Any, role: Role) -> Any:
    """The part of a collated batch that a rank's model takes: its inputs, cut as the plan says."""
    if isinstance(batch, Mapping) and role.inputs is not None:
        wanted = {path.partition(".")[0] for path in role.inputs}
        # A batch that calls its entries otherwise is the user's own affair: the model will say so.
        if wanted & set(batch):
            batch = {name: value for name, value in batch.items() if name in wanted}
    if not role.cuts:
        return batch
    if not isinstance(batch, Mapping):
        only = next(iter(role.cuts))
        if len(role.cuts) == 1 and isinstance(batch, Tensor):
            return cut_all(batch, role.cuts[only], only)
        raise InputError(
            "a batch whose inputs are cut is a mapping of inputs by name",
            why=f"it is a {type(batch).__name__}, and the plan cuts "
            + ", ".join(map(repr, role.cuts)),
            hint="let the dataset or collate= give dicts with the names of forward's arguments",
        )

    def cut(path: str, leaf: Any) -> Any:
        cuts = role.cuts.get(path, role.cuts.get(ALL_INPUTS, ()))
        fitting = cuts if path in role.cuts else [c for c in cuts if _has_dim(leaf, c)]
        return cut_all(leaf, fitting, path) if isinstance(leaf, Tensor) else leaf

    return {name: map_leaves(value, cut, name) for name, value in batch.items()}


def _has_dim(leaf: Any, cut: Cut) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > cut.dim


def cut_all(x: Tensor, cuts: Sequence[Cut], path: str) -> Tensor:
    """The part of ``x`` that all cuts leave."""
    for cut in cuts:
        x = take(x, cut, path)
    return x


def other_size(batch: Any, num_samples: int) -> str | None:
    """The shapes of what ``collate`` made, if none of its tensors has a row for each sample."""
    leaves = {path: leaf for path, leaf in flatten({"batch": batch}).items() if _is_row(leaf)}
    if not leaves or any(leaf.shape[0] == num_samples for leaf in leaves.values()):
        return None
    return "it made " + ", ".join(f"{path} {list(x.shape)}" for path, x in leaves.items())


def _is_row(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _shapes(sample: Any) -> str:
    """The shapes of a sample's tensors and arrays, in words."""
    leaves = flatten({"sample": sample})
    named = [
        f"{path.removeprefix('sample').lstrip('.') or 'shape'} {list(leaf.shape)}"
        for path, leaf in leaves.items()
        if hasattr(leaf, "shape")
    ]
    return ", ".join(named) or type(sample).__name__


# Global generators


def generator_states() -> tuple[Any, ...]:
    """Where torch's, numpy's and Python's global generators are."""
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def moved(before: tuple[Any, ...]) -> list[str]:
    """The names of those that are somewhere else now."""
    now = generator_states()
    numpy_before, numpy_now = before[1]["state"], now[1]["state"]
    same = (
        torch.equal(before[0], now[0]),
        numpy_before["pos"] == numpy_now["pos"]
        and np.array_equal(numpy_before["key"], numpy_now["key"]),
        before[2] == now[2],
    )
    return [
        name
        for name, is_same in zip(("torch", "numpy", "random"), same, strict=True)
        if not is_same
    ]


def restore(states: tuple[Any, ...]) -> None:
    """Put the global generators back."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def seed_everything(seed: int) -> None:
    """Seed the global generators of the CPU."""
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def end_workers(ahead: Iterator[Any] | None) -> None:
    """End the workers of torch's DataLoader, if it has some."""
    shutdown = getattr(ahead, "_shutdown_workers", None)
    if shutdown is None:
        return
    try:
        shutdown()
    except RuntimeError:
        # Torch learns by a signal that a worker has died, and says so in whatever runs by then.
        shutdown()
