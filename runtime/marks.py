"""Which keys each query sees, found from marks that are compared.

A mask is a conjunction of comparisons, each of a number that a query has with a number that a key
has, their **marks**. Query ``i`` sees key ``j`` where every comparison holds:

    a window of 4         key position > query position - 4, key position <= query position
    packed documents      document of the key == document of the query
    padding               the key counts == True

So a mask of ``[queries, keys]`` follows from a few vectors, and is never made as a whole. Of most
of them every query sees an interval of keys, whose ends are found by bisection where the marks of
keys ascend: over the whole sequence, or within each document. Where they do not, what a query sees
is bounded by an interval and asked of the marks, tile by tile.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.runtime.runs import Run
from shardwright.runtime.visible_keys import Band, Bands, all_keys

Mark = Tensor | int | bool
"""A number for all, or integers: of queries ``[..., L, 1]``, of keys ``[..., 1, S]``, each with up
to two dims in front, samples and heads, of which that of heads has size 1.
"""

Result = TypeVar("Result")

Comparison = Callable[[Any, Any], Any]

COMPARISONS: Mapping[str, Comparison] = {
    "eq": operator.eq,
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
}
"""How the mark of a key, on the left, may be compared with that of a query."""

MOST_BANDS = 64
"""How many bands are always worth their tiles. More are, up to one for every 8 queries."""


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What is compared: of queries ``[samples or 1, L or 1]``, of keys ``[samples or 1, S or 1]``,
    and how. ``num_queries``, ``num_keys``: L and S.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    comparisons: tuple[str, ...]
    num_queries: int
    num_keys: int

    def joined(self, other: Marks) -> Marks:
        """These marks and others of the same queries and keys."""
        return replace(
            self,
            queries=(*self.queries, *other.queries),
            keys=(*self.keys, *other.keys),
            comparisons=(*self.comparisons, *other.comparisons),
        )

    def mask(self, samples: Run, queries: Sequence[Run], keys: Sequence[Run]) -> Tensor:
        """What runs of queries see of runs of keys, ``[samples or 1, 1, queries, keys]``."""
        found: Tensor | None = None
        for of_query, of_key, name in zip(self.queries, self.keys, self.comparisons, strict=True):
            left = _taken(_taken(of_key, 0, (samples,)), 1, keys).unsqueeze(1)
            right = _taken(_taken(of_query, 0, (samples,)), 1, queries).unsqueeze(2)
            # ``[samples, 1, keys]`` against ``[samples, queries, 1]``.
            holds = COMPARISONS[name](left, right)
            found = holds if found is None else found & holds
        shape = [sum(size for _, size in runs) for runs in (queries, keys)]
        if found is None:
            return torch.ones(1, 1, *shape, dtype=torch.bool)
        return found.expand(-1, *shape).unsqueeze(1)

    def blind(self, sample: int) -> Tensor:
        """The queries of a sample that see no key, ``[L]``."""
        # Some queries at a time: the mask of all of them would be what marks are there to avoid.
        rows = max(1, 2**24 // max(1, self.num_keys))
        starts = range(0, self.num_queries, rows)
        runs = [(start, min(rows, self.num_queries - start)) for start in starts]
        keys = ((0, self.num_keys),)
        parts = [self.mask((sample, 1), (run,), keys).any(-1).flatten() for run in runs]
        return torch.cat(parts).logical_not().cpu()


def _flat_bands(blind: Tensor, num_keys: int) -> Bands:
    """All keys for each of these queries."""
    zeros = torch.zeros_like(blind, dtype=torch.int64)
    bands = bands_of(zeros, torch.where(blind, num_keys, 0)) if num_keys else ()
    return tuple(replace(band, flat=True) for band in bands)


def _taken(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """Runs of a dim, end to end; a dim of size 1 is that of all."""
    if x.shape[dim] == 1:
        return x
    parts = [x.narrow(dim, *run) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the queries of a run of samples see. ``exact``: all keys in the bands; else those for
    which the marks say so. ``known``: the marks have values; else the bands are all that may be
    seen.
    """

    samples: Run
    bands: Bands
    exact: bool = True
    known: bool = True


def marks_of(
    query_marks: Sequence[Mark],
    key_marks: Sequence[Mark],
    comparisons: Sequence[str],
    bands: Bands | None,
    lengths: tuple[int, int],
    device: torch.device,
) -> Marks:
    """The marks of an operator, and its bands as two comparisons more."""
    queries = [_flat(mark, -2, device) for mark in query_marks]
    keys = [_flat(mark, -1, device) for mark in key_marks]
    names = list(comparisons)
    if bands is not None:
        low, end = _ends_of(bands, lengths[0])
        # Bands are two marks more: key >= the first that is seen, and key < the end.
        position = torch.arange(lengths[1], device=device)[None]
        queries += [low[None].to(device), end[None].to(device)]
        keys += [position, position]
        names += ["ge", "lt"]
    return Marks(tuple(queries), tuple(keys), tuple(names), *lengths)


def _flat(mark: Mark, dim: int, device: torch.device) -> Tensor:
    """``[samples or 1, positions or 1]``: integers, whatever they were."""
    if not isinstance(mark, Tensor):
        return torch.full((1, 1), int(mark), device=device)
    mark = mark[(None,) * max(0, 4 - mark.ndim)]
    # A copy: what is remembered of a mark may not hold it.
    return mark.squeeze(-1 if dim == -2 else -2).squeeze(1).to(torch.int64, copy=True)


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What was found of marks, by the first of them: all layers of a model ask for the same."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What was found for marks. The others are held weakly: one of them may be a view of the first,
    which would then live as long as itself.
    """

    question: tuple[Any, ...]
    others: list[weakref.ref[Tensor]]
    versions: list[int]
    answer: Any

    def answers(self, question: tuple[Any, ...], others: list[Tensor], versions: list[int]) -> bool:
        if (self.question, self.versions) != (question, versions):
            return False
        return all(found() is other for found, other in zip(self.others, others, strict=True))


def remembered(
    marks: Sequence[Mark], question: tuple[Any, ...], find: Callable[[], Result]
) -> Result:
    """What ``find`` gives, once for each ``question`` and these tensors, as long as the first of
    them lives.
    """
    # The first tensor is the key, weakly held, so that answers go when a batch goes. Versions tell
    # whether somebody has written into one since.
    tensors = [mark for mark in marks if isinstance(mark, Tensor)]
    if not tensors:
        return _found(find)
    first, *others = tensors
    versions = [tensor._version for tensor in tensors]
    known: list[_Found] = _known.setdefault(first, [])  # type: ignore[no-untyped-call]
    for found in known:
        if len(found.others) == len(others) and found.answers(question, others, versions):
            answer: Result = found.answer
            return answer
    answer = _found(find)
    known.append(_Found(question, [weakref.ref(x) for x in others], versions, answer))
    return answer


def _found(find: Callable[[], Result]) -> Result:
    """An answer that serves later calls, whichever mode this one is in."""
    with torch.inference_mode(False), torch.no_grad():
        return find()


def seen(marks: Marks, samples: int, *, blind_see_all: bool = False) -> tuple[Seen, ...]:
    """What queries see, by runs of samples that see alike. Of tensors without values, as if they
    saw all. ``blind_see_all``: queries that see no key get all of them, alike.
    """
    if any(isinstance(x, FakeTensor) for x in (*marks.queries, *marks.keys)):
        every = all_keys(marks.num_queries, marks.num_keys)
        return (Seen((0, samples), every, known=False),)
    low, end, exact = (x.cpu() for x in intervals(marks))
    assert len(exact) in (1, samples), f"marks of {len(exact)} samples for {samples}"
    found: list[Seen] = []
    for index in range(len(exact)):
        run = (index, 1) if len(exact) == samples else (0, samples)
        one = _seen(run, low[index], end[index], bool(exact[index]))
        if blind_see_all:
            blind = end[index] <= low[index] if one.exact else marks.blind(index)
            bands = (*one.bands, *_flat_bands(blind, marks.num_keys))
            one = replace(one, bands=tuple(sorted(bands, key=lambda band: band.start)))
        # Samples that see alike, one behind another, are computed together. What is not exact has a
        # mask of its own, and stays apart.
        last = found[-1] if found else None
        if last is not None and (last.bands, last.exact, one.exact) == (one.bands, True, True):
            found[-1] = Seen((last.samples[0], last.samples[1] + 1), one.bands)
        else:
            found.append(one)
    return tuple(found)


def _seen(samples: Run, low: Tensor, end: Tensor, exact: bool) -> Seen:
    bands = bands_of(low, end)
    # So many bands cost more than the tiles that they spare: one band around all, and within it the
    # marks decide.
    if len(bands) > max(MOST_BANDS, len(low) // 8):
        sees = end > low
        bounds = Band(0, len(low), int(low[sees].min()), int(end[sees].max()))
        return Seen(samples, (bounds,), exact=False)
    return Seen(samples, bands, exact)


def intervals(marks: Marks) -> tuple[Tensor, Tensor, Tensor]:
    """The interval of keys, from ``low`` up to, but without, ``end``, beyond which no query sees
    any, ``[samples or 1, L]`` each, and for which samples it sees all in between, ``[samples or
    1]``.
    """
    atoms = list(zip(marks.queries, marks.keys, marks.comparisons, strict=True))
    batch = max(
        (x.shape[0] for of_query, of_key, _ in atoms for x in (of_query, of_key)), default=1
    )
    device = atoms[0][0].device if atoms else torch.device("cpu")
    shape, num_keys = (batch, marks.num_queries), marks.num_keys
    low = torch.zeros(shape, dtype=torch.int64, device=device)
    end = torch.full(shape, num_keys, dtype=torch.int64, device=device)
    exact = torch.ones(batch, dtype=torch.bool, device=device)
    part = torch.zeros(batch, num_keys, dtype=torch.int64, device=device)
    # The part of the sequence that a key belongs to: within it marks of keys may ascend though they
    # do not over the whole sequence, as positions that start again with every document.
    if not num_keys or not marks.num_queries:
        return low, low, exact
    bisected = []
    for of_query, of_key, name in atoms:
        if of_key.shape[1] == 1:  # whether a query sees anything
            holds = COMPARISONS[name](of_key, of_query).expand(shape)
            end = torch.where(holds, end, 0)
        elif of_query.shape[1] == 1:  # keys that nobody sees
            first, stop, all_between = runs_of(COMPARISONS[name](of_key, of_query))
            low, end = torch.maximum(low, first), torch.minimum(end, stop)
            exact = exact & all_between
        else:
            bisected.append((of_query.expand(shape), of_key.expand(batch, num_keys), name))
    for of_query, of_key, name in bisected:
        if name == "eq":
            ascends = _ascends(of_key)
            # searchsorted needs ascending keys. Those of other samples are not looked at: zeros
            # will do.
            sorted_key = torch.where(ascends[:, None], of_key, 0).contiguous()
            wanted = of_query.contiguous()
            first = torch.searchsorted(sorted_key, wanted)
            stop = torch.searchsorted(sorted_key, wanted, right=True)
            low = torch.where(ascends[:, None], torch.maximum(low, first), low)
            end = torch.where(ascends[:, None], torch.minimum(end, stop), end)
            exact = exact & ascends
            part[:, 1:] += sorted_key[:, 1:] != sorted_key[:, :-1]
    part = part.cumsum(1)
    query_part = part.gather(1, low.clamp(max=num_keys - 1))
    for of_query, of_key, name in bisected:
        if name != "eq":
            bound, ascends = _bound(of_query, of_key, name, query_part, part)
            if name in ("ge", "gt"):
                low = torch.where(ascends[:, None], torch.maximum(low, bound), low)
            else:
                end = torch.where(ascends[:, None], torch.minimum(end, bound), end)
            exact = exact & ascends
    sees = low < end
    return torch.where(sees, low, 0), torch.where(sees, end, 0), exact


def _bound(
    of_query: Tensor, of_key: Tensor, name: str, query_part: Tensor, part: Tensor
) -> tuple[Tensor, Tensor]:
    """Where in the part of the query the comparison begins or ceases to hold, and in which samples
    the marks of keys ascend in every part.
    """
    least, most = of_key.amin(1, keepdim=True), of_key.amax(1, keepdim=True)
    # Marks lie from 1 to most - least + 1; those of queries beyond them at 0 and at the next.
    room = most - least + 3
    # Part and mark as one number that ascends over the whole sequence, so that one search serves
    # all parts.
    keys = part * room + (of_key - least + 1)
    wanted = torch.minimum((of_query - least + 1).clamp(min=0), room - 1)
    queries = query_part * room + wanted
    right = name in ("le", "gt")
    bound = torch.searchsorted(keys.contiguous(), queries.contiguous(), right=right)
    return bound, _ascends(keys)


def _ascends(keys: Tensor) -> Tensor:
    return (keys[:, 1:] >= keys[:, :-1]).all(1)


def runs_of(holds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first place at which something holds, and the one behind the last, ``[rows, 1]``, and
    whether it holds at all places in between, ``[rows]``.
    """
    places = torch.arange(holds.shape[1], device=holds.device)
    count = holds.sum(1, keepdim=True)
    first = torch.where(holds, places, holds.shape[1]).amin(1, keepdim=True)
    stop = torch.where(holds, places + 1, 0).amax(1, keepdim=True)
    return first, stop, ((stop - first == count) | (count == 0)).squeeze(1)


def bands_of(low: Tensor, end: Tensor) -> Bands:
    """The bands of queries that see the keys from ``low`` up to, but without, ``end``, ``[L]``."""
    found: list[Band] = []
    sees = end > low
    steps = low.diff(), end.diff()
    goes_on = sees[1:] & sees[:-1]
    for step in steps:
        goes_on = goes_on & ((step == 0) | (step == 1))
    # How both ends move to the next query; 0 where no band goes on.
    code = torch.where(goes_on, 1 + steps[0] + 2 * steps[1], 0)
    values, counts = torch.unique_consecutive(code, return_counts=True)
    start = 0
    """The first query that is in no band yet."""
    passed = 0
    for value, count in zip([*values.tolist(), 0], [*counts.tolist(), 1], strict=True):
        # From query ``passed`` on, ``count`` steps to the next query are of one kind. The step out
        # of a band belongs to none, so that a band may begin one query later.
        stop = passed + count
        if value and stop > start:
            begin = max(start, passed)
            band = Band(
                begin, stop + 1, int(low[begin]), int(end[begin]), (value - 1) % 2, (value - 1) // 2
            )
            found.append(band)
            start = stop + 1
        elif not value:
            alone = torch.arange(max(start, passed), min(stop, len(low)))
            queries = alone[sees[alone]].tolist()
            found += [Band(i, i + 1, int(low[i]), int(end[i])) for i in queries]
            start = max(start, stop)
        passed = stop
    return tuple(found)


def _ends_of(bands: Bands, num_queries: int) -> tuple[Tensor, Tensor]:
    """What every query sees, as two ends; the same number twice where it sees nothing."""
    low, end = (torch.zeros(num_queries, dtype=torch.int64) for _ in range(2))
    for band in bands:
        passed = torch.arange(band.stop - band.start)
        low[band.start : band.stop] = band.low + passed * band.low_step
        end[band.start : band.stop] = band.end + passed * band.end_step
    return low, end
