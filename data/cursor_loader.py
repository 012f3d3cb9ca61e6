"""The loader: global batches of any dataset, dealt to the ranks of any plan, whose state is one
position.

What each step consists of follows from its position alone (:mod:`~shardwright.data.global_batches`
over :mod:`~shardwright.data.sample_stream`). So workers may prefetch as they like: the state is
that of the last batch given out, counted where it is given out. Nothing is sent between ranks.

torch's DataLoader runs the workers. Its "dataset" is a :class:`~shardwright.data.fetching.Fetcher`
and its "sampler" the list of this rank's parts of the steps to come, which never ends, so that
workers and what they have read ahead outlive the end of an epoch.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardwright.data.fetching import Fetched, Fetcher, end_workers, next_of
from shardwright.data.global_batches import (
    Batching,
    GlobalBatch,
    Microbatch,
    SampleBatching,
    Share,
    Tail,
)
from shardwright.data.packing import PackedBatching, Packing, as_lengths
from shardwright.data.permutation import Order, key
from shardwright.data.rank_roles import Roles, roles
from shardwright.data.sample_stream import BlendedStream, SampleStream, SingleStream
from shardwright.data.state import VERSION, check_state
from shardwright.data.stream_loader import StreamLoader
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ArgumentError, ConfigError, DataError, brief
from shardwright.runtime.structure import map_leaves


class MapDataset(Protocol):
    """What the loader needs of a map-style dataset.

    It may have more: ``__getitems__`` (several at once), ``key`` (how messages call a sample),
    ``lengths`` (for packing), ``fingerprint`` (a text that changes with the content; a state is
    refused by a dataset with another one).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class CursorLoader:
    """Batches of one rank. Made by :func:`loader`.

    ``for batch in loader`` goes on from the loader's position to the end of the epoch; the next
    ``for`` is the next epoch. ``len`` is the number of steps of an epoch from its beginning.
    ``skipped``: the samples that this rank could not read and replaced, each with the reason.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        batching: Batching,
        share: Share,
        identity: dict[str, Any],
        *,
        as_list: bool,
        device: torch.device | None,
        workers: dict[str, Any],
    ) -> None:
        self._fetcher = fetcher
        self._batching = batching
        self._share = share
        self._identity = identity
        self._as_list = as_list
        self._device = device
        self._workers = workers
        self._position = 0
        # What reads ahead, the position of what it gives next, and the steps that it was told.
        self._ahead: Iterator[Fetched] | None = None
        self._ahead_at = 0
        self._planned: deque[GlobalBatch] = deque()
        self.skipped: list[tuple[str, str]] = []

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._batching.at(self._position).epoch

    @property
    def position(self) -> int:
        """How much of the stream was given out on all ranks together, in samples."""
        return self._position

    def __len__(self) -> int:
        return self._batching.num_steps()

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while (batch := self._batching.at(self._position)).epoch == epoch:
            # No name here holds the batch while the next one is made.
            yield self._given(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain JSON values: the same on all ranks."""
        return {"kind": "cursor", "version": VERSION, "position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same data was, on any number of ranks and workers,
        under any plan.

        Raises :class:`DataError` if that loader had other data, or another order of it.
        """
        fixed = {name: value for name, value in self._identity.items() if name != "global_batch"}
        checked_state = check_state(state, "cursor", fixed)
        self.close()
        self._position = checked_state["position"]

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        ahead, self._ahead = self._ahead, None
        self._planned.clear()
        end_workers(ahead)

    def _given(self, batch: GlobalBatch) -> Any:
        """What is given out next. From here on it counts, so that a state taken while it is in use
        is that behind it.
        """
        made = self._next(batch)
        self._position = batch.after
        return made

    def _next(self, batch: GlobalBatch) -> Any:
        role = self._share.role
        if not role.reads:
            return [None] * self._share.num_microbatches(batch) if self._as_list else None
        if self._ahead is None or self._ahead_at != self._position:
            self.close()
            self._ahead = self._started()
        try:
            fetched = next_of(self._ahead, self._workers["num_workers"])
        except Exception:
            self.close()
            raise
        planned = self._planned.popleft()
        assert planned == batch, f"{planned} was read ahead, {batch} is next"
        self._ahead_at = batch.after
        if fetched.problem is not None:
            self.close()
        fetched.raise_problem()
        self.skipped += fetched.skipped
        made = fetched.microbatches
        if self._device is not None:
            made = [map_leaves(microbatch, self._moved) for microbatch in made]
        return made if self._as_list else made[0]

    def _moved(self, path: str, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    def _started(self) -> Iterator[Fetched]:
        """What reads this rank's parts from the loader's position on."""
        # The fetcher takes whole steps for indices, which torch's annotations do not know.
        fetcher: Any = self._fetcher
        loader: DataLoader[Fetched] = DataLoader(
            fetcher,
            sampler=self._parts(self._position),
            batch_size=None,
            collate_fn=_as_it_is,
            # Without one, torch draws the seeds of workers from the global generator.
            generator=torch.Generator().manual_seed(key(self._identity["seed"], "workers") >> 1),
            **self._workers,
        )
        return iter(loader)

    def _parts(self, position: int) -> Iterator[tuple[Microbatch, ...]]:
        """List this rank's parts of all steps from a position on, and note which steps they are."""
        while True:
            batch = self._batching.at(position)
            self._planned.append(batch)
            position = batch.after
            yield self._share.microbatches(batch)


def _as_it_is(fetched: Any) -> Any:
    return fetched


Loader = CursorLoader | StreamLoader


@checked
def loader(
    dataset: Any,
    roles_or_plan: Any = None,
    *,
    global_batch: int,
    microbatch: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
    shuffle_block: int | None = None,
    weights: Sequence[float] | None = None,
    packing: Packing | None = None,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    collate: Callable[[list[Any]], Any] | None = None,
    transform: Callable[[Any, torch.Generator], Any] | None = None,
    drop_last: bool = True,
    wrap: bool = False,
    uneven: bool = False,
    on_error: Literal["stop", "skip"] = "stop",
    seed_samples: bool = False,
    device: Any = None,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
) -> Loader:
    """A loader that gives this rank what it is to train on, and goes on exactly where it stopped.

    ``dataset``: map-style (``len`` and ``[index]``; a Hugging Face dataset, a list), or iterable;
    with ``weights=`` a list of map-style ones, which are blended in these proportions.
    ``roles_or_plan``: what :func:`roles` takes; by default every rank is a replica.

    - ``global_batch``: the samples (or packed rows) of a step, of all ranks together.
      ``microbatch``: then each step is a list of microbatches of that many samples, of all ranks of
      a replica together, as ``train_step`` takes it. Modules compiled for ``train_step`` need not
      be told.
    - ``shuffle``: another order in every epoch, which follows from ``seed``. ``shuffle_block``:
      shuffle blocks of that many neighbours, and within them.
    - ``packing``: put several samples into rows of one length, see :class:`Packing`.
    - ``num_workers``, ``prefetch_factor``, ``pin_memory``, ``multiprocessing_context``: as torch's
      DataLoader has them. ``device``: move batches there.
    - ``transform``: called with a sample and a ``torch.Generator`` that follows from seed, epoch
      and sample. ``collate``: makes a batch of a list of samples (default: torch's).
      ``seed_samples=True`` seeds the global generators for each sample, for datasets that draw from
      them.
    - ``drop_last=False``: the last batch of an epoch may be short. ``wrap=True``: it goes on into
      the next epoch, so that all batches are whole and every sample is seen once in each epoch.
      ``uneven=True``: replicas may get different numbers of samples.
    - ``on_error``: what becomes of a sample that raises: ``"stop"``, or ``"skip"``: another sample
      takes its place, and ``skipped`` lists it.

    A rank that reads nothing gets ``None`` (or a list of them) for each step, so that all ranks
    take the same number of steps. The global random generators are left alone.

    Raises :class:`ConfigError` for sizes that do not divide, and :class:`DataError` for a dataset
    that gives no batch.
    """
    found = roles(roles_or_plan)
    _check_numbers(shuffle_block, drop_last, wrap, num_workers)
    microbatch = _microbatch_of(found, global_batch, microbatch)
    share = Share(found.mine, global_batch, microbatch, uneven)
    as_list = microbatch is not None or found.takes_list
    workers: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
    if num_workers:
        workers |= {
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
        }
    tail: Tail = "drop" if drop_last else "short"
    if wrap:
        tail = "wrap"
    torch_device = None if device is None else torch.device(device)
    fetcher_options: dict[str, Any] = {
        "collate": collate,
        "transform": transform,
        "skips": on_error == "skip",
        "seed_samples": seed_samples,
    }
    if _is_iterable(dataset) and weights is None:
        refused = {"shuffle": shuffle, "packing": packing, "wrap": wrap, "uneven": uneven}
        return StreamLoader.of(
            dataset,
            share,
            seed=seed,
            tail=tail,
            refused=refused,
            as_list=as_list,
            device=torch_device,
            workers=workers,
            options=fetcher_options,
        )
    sources = _sources(dataset, weights)
    sizes = [len(source) for source in sources]
    _check_empty(sources, sizes)
    stream = _stream(sizes, weights, seed, shuffle, shuffle_block)
    batching: Batching
    if packing is None:
        batching = SampleBatching(stream.epoch_size, global_batch, tail)
        if tail == "short":
            share.check_short(stream.epoch_size % global_batch)
    else:
        lengths = _lengths(sources, packing, weights is not None)
        batching = PackedBatching(stream, lengths, packing, global_batch, tail)
    identity = {
        "seed": seed,
        "num_samples": sizes if weights is not None else sizes[0],
        "shuffle": shuffle,
        "shuffle_block": shuffle_block,
        "weights": None if weights is None else [float(weight) for weight in weights],
        "packed": None if packing is None else packing.length,
        "tail": tail,
        "fingerprint": _fingerprint(sources),
        "global_batch": global_batch,
    }
    fetcher = Fetcher(sources, stream, found.mine, seed, packing=packing, **fetcher_options)
    return CursorLoader(
        fetcher,
        batching,
        share,
        identity,
        as_list=as_list,
        device=torch_device,
        workers=workers,
    )


def _check_numbers(
    shuffle_block: int | None, drop_last: bool, wrap: bool, num_workers: int
) -> None:
    if shuffle_block is not None and shuffle_block < 1:
        raise ConfigError(f"shuffle_block={shuffle_block} is no size of a block")
    if wrap and not drop_last:
        raise ConfigError(
            "wrap=True and drop_last=False contradict each other",
            why="wrap fills up the last batch of an epoch, drop_last=False leaves it short",
            hint="choose one of them",
        )
    if num_workers < 0:
        raise ConfigError(f"num_workers={num_workers} is no number of workers")


def _microbatch_of(found: Roles, global_batch: int, microbatch: int | None) -> int | None:
    """The size of a microbatch: what the user says, if the plan does not contradict; else what the
    plan needs.
    """
    wanted = found.num_microbatches
    if wanted is None:
        if microbatch is None and found.takes_list and found.microbatch is not None:
            return found.microbatch
        return microbatch
    size, rest = divmod(global_batch, found.num_replicas * wanted)
    if rest or (microbatch is not None and microbatch != size):
        given = "" if microbatch is None else f" with microbatch={microbatch}"
        raise ConfigError(
            f"global_batch={global_batch}{given} does not fit a pipeline of {wanted} microbatches "
            f"on {found.num_replicas} replica(s)",
            why="each replica takes exactly that many microbatches in a step",
            hint="use global_batch = replicas x microbatches x samples of a microbatch; with the "
            "samples that the module was compiled for that is "
            f"{found.num_replicas * wanted * (found.microbatch or microbatch or 1)}",
        )
    return size


def _is_iterable(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def _sources(dataset: Any, weights: Sequence[float] | None) -> list[Any]:
    if weights is not None and (
        not isinstance(dataset, Sequence) or isinstance(dataset, str) or not dataset
    ):
        raise ArgumentError(
            "with weights= the dataset is a list of datasets",
            why=f"it is {brief(dataset)}",
            hint="data.loader([web, books], weights=[0.7, 0.3], ...)",
        )
    sources = [dataset] if weights is None else list(dataset)
    for source in sources:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ArgumentError(
                f"{brief(source)} is no dataset",
                why="a map-style dataset has a length and takes an index",
                hint="pass a torch dataset, a Hugging Face dataset, a list, or an iterable dataset "
                "alone",
            )
    return sources


def _check_empty(sources: Sequence[Any], sizes: Sequence[int]) -> None:
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        if not size:
            which = type(source).__name__ if len(sources) == 1 else f"source {number}"
            raise DataError(
                f"{which} is empty",
                why="it says that it has no samples",
                hint="see whether its files are there",
            )


def _stream(
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    seed: int,
    shuffle: bool,
    block: int | None,
) -> SampleStream:
    make = functools.partial(Order, shuffle=shuffle, block=block)
    if weights is None:
        return SingleStream(make(sizes[0], seed))
    orders = [make(size, key(seed, "source", number)) for number, size in enumerate(sizes)]
    return BlendedStream(orders, weights)


def _lengths(sources: Sequence[Any], packing: Packing, is_blend: bool) -> list[Any]:
    given = packing.lengths
    if given is None:
        each = [getattr(source, "lengths", None) for source in sources]
    else:
        each = list(given) if is_blend else [given]
    if len(each) != len(sources):
        raise ConfigError(
            f"there are lengths for {len(each)} of {len(sources)} sources",
            hint="with weights= give a list of lengths for each source",
        )
    return [
        as_lengths(own, len(source), type(source).__name__)
        for own, source in zip(each, sources, strict=True)
    ]


def _fingerprint(sources: Sequence[Any]) -> list[str | None]:
    """What tells whether the content of the sources is the same; ``None`` for one that does not
    say.
    """
    found = [getattr(source, "fingerprint", None) for source in sources]
    return [value if isinstance(value, str) else None for value in found]
