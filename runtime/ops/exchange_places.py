"""What an exchange of tokens is known by before any token is: which tokens this rank has, which
rank has each expert, and in which order rows lie. It is the same in every step of the same sizes.

Of 8 tokens and 4 experts that an axis of 2 ranks cuts, its rank 1 has the tokens ``own`` [4, 5, 6,
7], as a column, and the experts 2 and 3. The experts are at the ranks ``receivers`` [0, 0, 1, 1]. A
row of expert ``e`` and token ``t`` has the place ``keys[e] + t``; rows of experts of other ranks
come last, so ``keys`` are [16, 16, 0, 8], and the rows of its two experts end in front of
``bounds`` [8, 16].
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime.ops.axes import Axes, piece_runs
from shardwright.runtime.ops.routing import TokenDims
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import Run, dealt, within


@dataclass(frozen=True, slots=True)
class ExchangePlaces:
    """See the top of the file. ``receivers``: for each axis of the exchange, the rank of every
    expert along it. ``num_tokens``: how many tokens the ranks have together.
    """

    own: Tensor
    receivers: tuple[Tensor, ...]
    keys: Tensor
    bounds: Tensor
    num_tokens: int


def exchange_places(
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    num_experts: int,
    device: torch.device,
) -> ExchangePlaces:
    """The places of an exchange, as :func:`~.experts.dispatch` describes it, worked out once."""
    known = exchange[0].worked_out
    key = (expert_axes, exchange, token_dims, num_experts, device)
    found = known.get(key)
    if found is None:
        found = _exchange_places(*key)
        # Fake tensors tell sizes only.
        if type(found.own) is Tensor:
            if len(known) == _MOST_KNOWN:
                known.clear()
            known[key] = found
    return found


_MOST_KNOWN = 64
"""How many exchanges one axis knows the places of. Sizes that vary make others in every step."""


def _exchange_places(
    expert_axes: Axes,
    exchange: Axes,
    token_dims: TokenDims,
    num_experts: int,
    device: torch.device,
) -> ExchangePlaces:
    num_tokens = math.prod(sum(segments_of(dim)) for dim in token_dims)
    receivers = []
    for index, axis in enumerate(exchange):
        # Experts beyond the axes of the exchange are reached from other ranks; so are those of
        # other ranks along an axis that the token has crossed already.
        others = tuple(axis for axis in expert_axes if axis not in exchange[index:])
        found = _receivers(axis, others, expert_axes, num_experts)
        receivers.append(torch.tensor(found, device=device))
    runs = piece_runs(expert_axes, num_experts)
    experts = [number for start, size in runs for number in range(start, start + size)]
    count = len(experts)
    keys = [count * num_tokens] * num_experts
    for local, expert in enumerate(experts):
        keys[expert] = local * num_tokens
    return ExchangePlaces(
        own_numbers(token_dims, device).unsqueeze(1),
        tuple(receivers),
        torch.tensor(keys, device=device),
        torch.arange(1, count + 1, device=device) * num_tokens,
        num_tokens,
    )


def segments_of(dim: tuple[int | AxisGroup, ...]) -> tuple[int, ...]:
    """The segments of a dim of the tokens."""
    return tuple(size for size in dim if isinstance(size, int))


def dim_axes(dim: tuple[int | AxisGroup, ...]) -> Axes:
    """The axes that cut a dim of the tokens."""
    return tuple(axis for axis in dim if isinstance(axis, AxisGroup))


def own_numbers(token_dims: TokenDims, device: torch.device) -> Tensor:
    """Which of all tokens are this rank's, ascending."""
    # Dims that nothing cuts are a part of the dim before: 4 samples of 6 positions are 4 times 6.
    dims: list[tuple[tuple[int | AxisGroup, ...], int]] = []
    unit = 1
    for index, dim in reversed(list(enumerate(token_dims))):
        if dim_axes(dim) or index == 0:
            dims.insert(0, (dim, unit))
            unit = 1
        else:
            unit *= sum(segments_of(dim))
    number = None
    for dim, unit in dims:
        segments, axes = segments_of(dim), dim_axes(dim)
        runs = piece_runs(axes, segments, unit) or ((0, 0),)
        places = [torch.arange(start, start + size, device=device) for start, size in runs]
        place = places[0] if len(places) == 1 else torch.cat(places)
        if number is None:
            number = place
        else:
            number = (number.unsqueeze(1) * (unit * sum(segments)) + place).reshape(-1)
    assert number is not None
    return number


def _receivers(
    axis: AxisGroup, others: Axes, expert_axes: Axes, num_experts: int
) -> tuple[int, ...]:
    """The rank of every expert along ``axis``; the size of the axis for an expert that is not where
    this rank is along ``others``.
    """
    places = _places_of(tuple((axis.size, axis.turns) for axis in expert_axes), (num_experts,))
    by_axis = dict(zip((axis.name for axis in expert_axes), places, strict=True))
    found = by_axis[axis.name]
    for other in others:
        found = tuple(
            place if there == other.index else axis.size
            for place, there in zip(found, by_axis[other.name], strict=True)
        )
    return found


def ranks_of(axes: Axes, segments: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """The rank of each thing in segments that ``axes`` cut: its index along every axis."""
    places = _places_of(tuple((axis.size, axis.turns) for axis in axes), segments)
    return {
        axis.name: torch.tensor(indices, dtype=torch.long, device=device)
        for axis, indices in zip(axes, places, strict=True)
    }


@functools.lru_cache(maxsize=256)
def _places_of(
    axes: tuple[tuple[int, int], ...], segments: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """:func:`ranks_of` along axes of these sizes and turns of zigzag."""
    found = [[0] * sum(segments) for _ in axes]

    def cut(runs: tuple[Run, ...], depth: int) -> None:
        """Deal the things of some runs along the axes from this depth on."""
        if depth == len(axes):
            return
        size, turns = axes[depth]
        count = sum(length for _, length in runs)
        for index in range(size):
            own = within(runs, dealt(count, size, index, turns=turns))
            for start, length in own:
                found[depth][start : start + length] = [index] * length
            cut(own, depth + 1)

    before = 0
    for segment in segments:
        cut(((before, segment),), 0)
        before += segment
    return tuple(map(tuple, found))
