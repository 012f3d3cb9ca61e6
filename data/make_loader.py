"""``data.loader``: which kind of loader a dataset needs, and whether what is asked of it fits
together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import IterableDataset

from shardwright.data.cursor_loader import CursorLoader
from shardwright.data.fetching import Fetcher, cause_of, check_dataset
from shardwright.data.global_batches import Batching, SampleBatching, Share, Tail
from shardwright.data.packing import PackedBatching, Packing, as_lengths
from shardwright.data.permutation import Order, key
from shardwright.data.rank_loader import Handing, check_workers
from shardwright.data.rank_roles import Roles, roles
from shardwright.data.sample_stream import BlendedStream, SampleStream, SingleStream
from shardwright.data.stream_loader import StreamFetcher, StreamLoader, check_stream
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ArgumentError, ConfigError, DataError, brief


class MapDataset(Protocol):
    """What the loader needs of a map-style dataset.

    It may have more: ``__getitems__`` (several at once), ``key`` (how messages call a sample),
    ``lengths`` (for packing), ``fingerprint`` (a text that changes with the content; a state is
    refused by a dataset with another one).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
    replay: bool = False,
    device: Any = None,
    pin_memory: bool = False,
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None,
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
    - ``replay=True``: after a resume an iterable dataset is read again from the beginning of the
      epoch, although it has states. For those whose states do not say everything.

    A rank that reads nothing gets ``None`` (or a list of them) for each step, so that all ranks
    take the same number of steps. The global random generators are left alone.

    Raises :class:`ConfigError` for sizes that do not divide, and :class:`DataError` for a dataset
    that gives no batch.
    """
    found = roles(roles_or_plan)
    _check_order(shuffle, shuffle_block, drop_last, wrap)
    _check_workers(num_workers, prefetch_factor, multiprocessing_context)
    microbatch = _microbatch_of(found, global_batch, microbatch, stacks=collate is None)
    share = Share(found.mine, global_batch, microbatch, uneven)
    handing = Handing(
        as_list=microbatch is not None or found.takes_list,
        device=None if device is None else _device(device),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        multiprocessing_context=multiprocessing_context,
    )
    tail = _tail(drop_last, wrap)
    # A stream has no index: what needs one is refused.
    if _is_iterable(dataset) and weights is None:
        needs_index = {
            "shuffle": shuffle,
            "packing": packing,
            "wrap": wrap,
            "on_error='skip'": on_error == "skip",
            "seed_samples": seed_samples,
        }
        check_stream(dataset, needs_index, num_workers)
        stream_fetcher = StreamFetcher([dataset], found.mine, seed, collate, transform)
        return StreamLoader(stream_fetcher, share, handing, tail, replay)
    _check_replay(replay, dataset)
    sources = _sources(dataset, weights)
    sizes = [len(source) for source in sources]
    _check_empty(sources, sizes)
    stream = _stream(sizes, weights, seed, shuffle, shuffle_block)
    lengths = [] if packing is None else _lengths(sources, packing, weights is not None)
    fetcher = Fetcher(
        sources,
        found.mine,
        seed,
        collate,
        transform,
        packing,
        lengths,
        skips=on_error == "skip",
        seed_samples=seed_samples,
    )
    # What a saved state must have been made with to be loaded.
    identity = {
        "seed": seed,
        "num_samples": sizes if weights is not None else sizes[0],
        "shuffle": shuffle,
        "shuffle_block": shuffle_block,
        "weights": None if weights is None else [float(weight) for weight in weights],
        "packed": None if packing is None else packing.identity(lengths),
        "tail": tail,
        "fingerprint": _fingerprint(sources),
        "global_batch": global_batch,
    }
    batching = _batching(stream, share, tail, packing, lengths)
    return CursorLoader(fetcher, share, identity, handing, stream, batching)


def _tail(drop_last: bool, wrap: bool) -> Tail:
    """What becomes of the samples at the end of an epoch that fill no batch."""
    if wrap:
        return "wrap"
    return "drop" if drop_last else "short"


def _check_replay(replay: bool, dataset: Any) -> None:
    if replay:
        raise ConfigError(
            "replay=True is for iterable datasets",
            why=f"a {type(dataset).__name__} has an index: nothing is read again",
            hint="leave it out",
        )


def _batching(
    stream: SampleStream,
    share: Share,
    tail: Tail,
    packing: Packing | None,
    lengths: Sequence[Any],
) -> Batching:
    if packing is not None:
        return PackedBatching(stream, lengths, packing, share.global_batch, tail)
    if tail == "short":
        share.check_short(stream.epoch_size % share.global_batch)
    return SampleBatching(stream.epoch_size, share.global_batch, tail)


def _device(wanted: Any) -> torch.device:
    """The device of that name, if tensors can be moved there."""
    try:
        return torch.empty(0, device=wanted).device
    except Exception as error:  # torch raises an AssertionError where it was built without CUDA
        raise ConfigError(
            f"batches cannot be moved to device={brief(wanted)}",
            why=cause_of(error),
            hint="name a device that this rank has, such as 'cuda' or 'cpu'",
        ) from error


def _check_order(shuffle: bool, shuffle_block: int | None, drop_last: bool, wrap: bool) -> None:
    if shuffle_block is not None and shuffle_block < 1:
        raise ConfigError(f"shuffle_block={shuffle_block} is no size of a block")
    if shuffle_block is not None and not shuffle:
        raise ConfigError(
            f"shuffle_block={shuffle_block} shuffles nothing",
            why="shuffle=False keeps the order of the dataset",
            hint="pass shuffle=True, too",
        )
    if wrap and not drop_last:
        raise ConfigError(
            "wrap=True and drop_last=False contradict each other",
            why="wrap fills up the last batch of an epoch, drop_last=False leaves it short",
            hint="choose one of them",
        )


def _check_workers(num_workers: int, prefetch_factor: int, context: str | None) -> None:
    check_workers(num_workers, prefetch_factor)
    if context is not None and not num_workers:
        raise ConfigError(
            f"multiprocessing_context={context!r} starts no process",
            why="with num_workers=0 the rank's own process reads",
            hint="pass num_workers=1 or more, or leave it out",
        )


def _microbatch_of(
    found: Roles, global_batch: int, microbatch: int | None, *, stacks: bool
) -> int | None:
    """The size of a microbatch: what the user says, if the plan does not contradict; else what the
    plan needs. ``stacks``: batches have a row for each sample, as torch's collate makes them.
    """
    wanted = found.num_microbatches
    if wanted is None:
        if microbatch is None and found.takes_list and found.microbatch is not None:
            return found.microbatch
        if found.takes_list:
            _check_compiled(found, microbatch, stacks)
        return microbatch
    # A pipeline was compiled for so many microbatches, so their size follows from the batch.
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
    _check_compiled(found, size, stacks)
    return size


def _check_compiled(found: Roles, microbatch: int | None, stacks: bool) -> None:
    """Refuse microbatches of another size than the module was compiled for, where the loader makes
    them: ``train_step`` takes them as they are.
    """
    compiled = found.microbatch
    if compiled is None or microbatch is None or microbatch == compiled or not stacks:
        return
    factor = found.num_replicas * (found.num_microbatches or 1)
    raise ConfigError(
        f"microbatches have {microbatch} samples, and the module was compiled for {compiled}",
        why="the first dim of all its inputs is fixed",
        hint=f"use a global_batch that gives {compiled} (such as {factor * compiled}), or compile "
        "with ComputeConfig(dynamic_dims=...)",
    )


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
        check_dataset(source)
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
    streams = [
        SingleStream(make(size, key(seed, "source", number)), number)
        for number, size in enumerate(sizes)
    ]
    return BlendedStream(streams, weights)


def _lengths(sources: Sequence[Any], packing: Packing, is_blend: bool) -> list[Any]:
    given = packing.lengths
    if given is None:
        # Token files know the lengths of their documents.
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
