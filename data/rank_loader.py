"""What loaders of one rank have in common: how batches are read and handed over, and states.

A loader knows where it is, and what it gives next follows from that alone. Reading may be ahead of
it, in this process or in workers of torch's DataLoader; a state is that of the last batch handed
over, so nothing that was read ahead is lost or repeated.
"""

from __future__ import annotations

import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardwright.data.fetching import Fetched, Fetcher
from shardwright.data.global_batches import Share
from shardwright.data.permutation import key
from shardwright.data.state import VERSION, check_state
from shardwright.runtime.arguments import checked_late
from shardwright.runtime.errors import ConfigError, DataError, brief, brief_text
from shardwright.runtime.structure import map_leaves


class Item(Protocol):
    """What is read ahead: a step, or the batch of a worker."""

    def pin_memory(self, device: Any = None) -> Any:
        """Pin its tensors."""
        ...


Read = TypeVar("Read", bound=Item)


@dataclass(frozen=True)
class Handing:
    """How batches are read and handed over. ``as_list``: each step is a list of microbatches.
    ``device``: where tensors are moved to. ``num_workers``, ``prefetch_factor``, ``pin_memory``,
    ``multiprocessing_context``: as torch's DataLoader has them.
    """

    as_list: bool = False
    device: torch.device | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    multiprocessing_context: str | None = None

    def handed(self, microbatches: list[Any]) -> Any:
        """Microbatches as the loop takes them."""
        if self.device is not None:
            microbatches = [map_leaves(microbatch, self._moved) for microbatch in microbatches]
        return microbatches if self.as_list else microbatches[0]

    def _moved(self, path: str, leaf: Any) -> Any:
        return leaf.to(self.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


MOST_WORKERS = 4096
MOST_AHEAD = 65_536
"""Processes of a rank, and steps that each of them reads ahead. Nobody means more, and a mistyped
number of either would fill the machine before anything could be said.
"""


def check_workers(num_workers: int, prefetch_factor: int = 1) -> None:
    """Refuse numbers of worker processes and of steps that they read ahead which are none, or
    beyond use. Raises :class:`ConfigError`.
    """
    if not 0 <= num_workers <= MOST_WORKERS:
        raise ConfigError(
            f"num_workers={brief(num_workers)} is no number of workers",
            why=f"a rank has 0 to {MOST_WORKERS} processes that read",
        )
    if not 1 <= prefetch_factor <= MOST_AHEAD:
        raise ConfigError(
            f"prefetch_factor={brief(prefetch_factor)} is no number of steps to read ahead",
            why=f"a worker reads 1 to {MOST_AHEAD} steps ahead",
        )


def read_ahead(source: Any, entries: Iterable[Any] | None, handing: Handing, seed: int) -> Any:
    """What ``source`` has at each of ``entries`` (an iterable source: all it has), read in this
    process, or by workers of torch's DataLoader. ``seed``: of what workers draw.
    """
    if not handing.num_workers:
        items = iter(source) if entries is None else map(source.__getitem__, entries)
        return map(_pinned, items) if _can_pin(handing.pin_memory) else items
    loader = DataLoader(
        source,
        sampler=entries,
        batch_size=None,
        # What has been sent apart cannot be pinned as its class says.
        collate_fn=_as_it_is if handing.pin_memory else _sent,
        num_workers=handing.num_workers,
        prefetch_factor=handing.prefetch_factor,
        pin_memory=handing.pin_memory,
        multiprocessing_context=handing.multiprocessing_context,
        # Without one, torch draws the seeds of workers from the global generator.
        generator=torch.Generator().manual_seed(key(seed, "workers") >> 1),
    )
    try:
        return iter(loader)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        # Spawned workers are sent everything; forked ones have it.
        raise ConfigError(
            "the dataset, or a function of the loader, cannot be sent to worker processes",
            why=f"{type(error).__name__}: {brief_text(error)}",
            hint="define functions and classes at the top of a module, or pass "
            "multiprocessing_context='fork'",
        ) from error


def _can_pin(wanted: bool) -> bool:
    if wanted and not torch.accelerator.is_available():
        warnings.warn("pin_memory=True pins nothing: there is no accelerator", stacklevel=5)
        return False
    return wanted


def _pinned(item: Item) -> Any:
    return item.pin_memory()


def _as_it_is(item: Any) -> Any:
    return item


def _sent(item: Any) -> Any:
    """A step as a worker sends it: in plain values, which pickle finds without looking for a class
    by its name. That saves 1 % of the time of samples of 6 microseconds.
    """
    if type(item) is Fetched:
        return item.microbatches, item.skipped, item.problem
    return item


def _received(item: Any) -> Any:
    """What :func:`_sent` has sent."""
    return Fetched(*item) if type(item) is tuple else item


def next_of(ahead: Iterator[Read], num_workers: int) -> Read:
    """What comes next of what is read ahead. What samples raise comes as data, so an error of
    torch's DataLoader is the end of a worker: killed, or without memory.
    """
    try:
        item: Read = _received(next(ahead))
        return item
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


class RankLoader(ABC, Generic[Read]):
    """Batches of one rank, and where they are in the data. Made by
    :func:`~shardwright.data.loader`.

    ``skipped``: the samples that this rank could not read and replaced, each with the reason.
    """

    KIND: ClassVar[str]
    """The kind of its states, as they say it themselves."""

    def __init__(
        self, fetcher: Fetcher, share: Share, identity: dict[str, Any], handing: Handing
    ) -> None:
        self._fetcher = fetcher
        self._share = share
        self._identity = identity
        self._handing = handing
        self._ahead: Iterator[Read] | None = None
        self.skipped: list[tuple[str, str]] = []

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the next batch."""

    @property
    @abstractmethod
    def position(self) -> int:
        """How many samples were given out on all ranks together; see the classes for since
        when.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the same on all ranks."""
        return {"kind": self.KIND, "version": VERSION, **self._place_in_words(), **self._identity}

    @checked_late
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same data was, on any number of ranks and workers,
        under any plan.

        Raises :class:`DataError` if that loader had other data, or another order of it.
        """
        # Another global batch goes on at the same sample, so that a batch size can grow.
        fixed = {name: value for name, value in self._identity.items() if name != "global_batch"}
        found = check_state(state, self.KIND, fixed)
        self.close()
        self._go_to(found)

    @abstractmethod
    def _place_in_words(self) -> dict[str, Any]:
        """What a state says of the place."""

    @abstractmethod
    def _go_to(self, state: dict[str, Any]) -> None:
        """Take the place of a state that fits."""

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        ahead, self._ahead = self._ahead, None
        end_workers(ahead)

    def _read(self) -> Read:
        """What comes next of what is read ahead."""
        assert self._ahead is not None
        try:
            return next_of(self._ahead, self._handing.num_workers)
        except BaseException:
            # Also where a person has interrupted it: what was half read would be left out.
            self.close()
            raise

    def _handed(self, fetched: Fetched) -> Any:
        """A step as the loop takes it, or the error that it stands for."""
        if fetched.problem is not None:
            self.close()
            fetched.raise_problem()
        self.skipped += fetched.skipped
        # Nothing here holds the batch while the next one is made.
        made, fetched.microbatches = fetched.microbatches, []
        return self._handing.handed(made)
