"""``as_strided`` in terms of dims.

It reads memory, and what a rank holds lies elsewhere in memory than what the model held when it was
written for one device: a gathered or copied tensor is contiguous, whatever the strides of the
original were. So the places that a call reads are found here, while the strides are known, as
slices and windows of dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class _Run:
    """Neighbouring dims of a tensor that one stride goes through: ``size`` elements, ``stride``
    apart in memory.
    """

    dims: list[int]
    size: int
    stride: int


def strided(
    input: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor | None:
    """What ``input.as_strided(size, stride, storage_offset)`` gives; ``None`` where it reads other
    memory than that of ``input``, or mixes its dims.
    """
    start = 0 if storage_offset is None else int(storage_offset - input.storage_offset())
    # The dims of the input as runs in memory, the longest stride first.
    strides = input.stride()
    order = sorted(
        (d for d in range(input.ndim) if input.shape[d] > 1), key=lambda dim: -strides[dim]
    )
    runs = [_Run([dim], input.shape[dim], strides[dim]) for dim in order]
    if not runs or start < 0 or 0 in size or runs[-1].stride == 0:
        return None
    # The dims of the result that move through memory.
    read = [
        number
        for number, (n, step) in enumerate(zip(size, stride, strict=True))
        if n > 1 and step > 0
    ]
    # Find for each the run it goes along; where none fits, neighbouring runs are joined to one.
    while (
        found := _places(runs, start, [(number, size[number], stride[number]) for number in read])
    ) is None:
        if not _joined(runs, start, [(size[number], stride[number]) for number in read]):
            return None
    result = input.permute(*order, *(d for d in range(input.ndim) if d not in order)).reshape(
        [run.size for run in runs]
    )
    # Every run is cut into the dims that go along it.
    numbers: list[int] = []  # of the dims of the result that the dims of ``result`` are
    for begin, places in found:
        result, numbers = (
            _cut(result, len(numbers), begin, places),
            [*numbers, *(number for number, _, _ in places)],
        )
    # Back into the order that was asked for; dims of size 1 and repeated ones are put in.
    result = result.permute([numbers.index(number) for number in read])
    result = result.reshape([n if number in read else 1 for number, n in enumerate(size)])
    return result.expand(*size) if tuple(result.shape) != tuple(size) else result


_Places = list[tuple[int, int, int]]
"""The dims of the result, widest steps first: number, size, and step along a run."""


def _places(runs: list[_Run], start: int, dims: _Places) -> list[tuple[int, _Places]] | None:
    """Per run, where reading begins and which dims of the result go along it; ``None`` if one
    leaves its run.
    """
    found = []
    for run, places in zip(runs, _by_run(runs, dims), strict=True):
        begin, start = divmod(start, run.stride)
        # A step inside of one element of the run would read parts of two.
        if any(step % run.stride for _, _, step in places):
            return None
        along = sorted(
            ((number, n, step // run.stride) for number, n, step in places),
            key=lambda place: -place[2],
        )
        if begin + _span(along) > run.size:
            return None
        found.append((begin, along))
    return found if start == 0 and sum(len(along) for _, along in found) == len(dims) else None


def _by_run(runs: list[_Run], dims: _Places) -> list[_Places]:
    """The dims of the result that go along each run: those whose step is at least its stride, and
    less than the next one's.
    """
    bounds = [*(run.stride for run in runs), 0]
    return [
        [place for place in dims if low <= place[2] and (high is None or place[2] < high)]
        for high, low in zip([None, *bounds], bounds[:-1], strict=False)
    ]


def _span(places: _Places) -> int:
    return sum((n - 1) * step for _, n, step in places) + 1


def _joined(runs: list[_Run], start: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Make one run of the innermost two that follow each other in memory where dims leave the inner
    one; whether any do.
    """
    for index, (outer, inner) in reversed(list(enumerate(itertools.pairwise(runs)))):
        if outer.stride == inner.stride * inner.size:
            along = [
                (0, n, step // inner.stride)
                for n, step in dims
                if inner.stride <= step < outer.stride
            ]
            if start % outer.stride // inner.stride + _span(along) > inner.size:
                runs[index : index + 2] = [
                    _Run([*outer.dims, *inner.dims], outer.size * inner.size, inner.stride)
                ]
                return True
    return False


def _cut(x: torch.Tensor, dim: int, begin: int, places: _Places) -> torch.Tensor:
    """Dim ``dim`` as the dims of ``places``, from ``begin`` on."""
    if not places:
        return x.select(dim, begin)
    (_, n, step), *rest = places
    span = _span(rest)
    last = x.ndim - 1
    if not rest:
        whole = begin == 0 and step == 1 and x.shape[dim] == n
        return (
            x
            if whole
            else x[(*[slice(None)] * dim, slice(begin, begin + (n - 1) * step + 1, step))]
        )
    if step == span and x.shape[dim] >= begin + n * step:  # pieces that tile the dim
        x = (
            x[(*[slice(None)] * dim, slice(begin, begin + n * step))]
            if begin or x.shape[dim] > n * step
            else x
        )
        return _cut(x.reshape(*x.shape[:dim], n, step, *x.shape[dim + 1 :]), dim + 1, 0, rest)
    x = (
        x.narrow(dim, begin, (n - 1) * step + span)
        .unfold(dim, span, step)
        .movedim(last + 1, dim + 1)
    )
    return _cut(x, dim + 1, 0, rest)
