"""What a placement along one axis means, written without the code under test: encode a value into
local tensors, decode it.

Used by the tests of adapters, of parallel operators, and by those that run on real processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime import adapters
from shardwright.runtime.layout import Cut
from shardwright.runtime.ranks.groups import AxisGroup


@dataclass(frozen=True)
class Sharded:
    """S(dim)."""

    dim: int
    cut: Cut


Placement = str | Sharded
"""``"R"``, ``"P"``, ``"G"`` or a :class:`Sharded`."""


def indices(cut: Cut, num_ranks: int, rank: int) -> list[int]:
    """The global indices of a rank's piece, by brute force: deal every element of every segment to
    its owner.
    """
    kept, position = [], 0
    for _ in range(cut.outer):
        for segment in cut.segments:
            base, extra = divmod(segment, num_ranks)
            owners = [r for r in range(num_ranks) for _ in range(base + (r < extra))]
            for owner in owners:
                kept += range(position, position + cut.inner) if owner == rank else []
                position += cut.inner
    return kept


def encode(
    x: Tensor, placement: Placement, num_ranks: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """What the ranks hold of ``x``. Summands are random."""
    if isinstance(placement, Sharded):
        return [
            x.index_select(placement.dim, torch.tensor(indices(placement.cut, num_ranks, r)).long())
            for r in range(num_ranks)
        ]
    if placement == "P":
        summands = [
            torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(num_ranks - 1)
        ]
        return [*summands, x - sum(summands)]
    return [x.clone() for _ in range(num_ranks)]


def decode(pieces: list[Tensor], placement: Placement) -> Tensor:
    """The value the ranks hold; asserts that copies agree and that shards have the right shape."""
    if isinstance(placement, Sharded):
        shape = list(pieces[0].shape)
        shape[placement.dim] = placement.cut.length
        x = pieces[0].new_full(shape, 0)
        for rank, piece in enumerate(pieces):
            index = torch.tensor(indices(placement.cut, len(pieces), rank)).long()
            assert piece.shape[placement.dim] == len(index)
            x.index_copy_(placement.dim, index, piece)
        return x
    if placement == "P":
        return torch.stack(pieces).sum(0).to(pieces[0].dtype)
    for piece in pieces:
        torch.testing.assert_close(
            piece, pieces[0], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"copies differ: {m}"
        )
    return pieces[0]


def transposed(placement: Placement) -> Placement:
    """How the gradient of a value with this placement lies."""
    return {"R": "R", "P": "G", "G": "P"}[placement] if isinstance(placement, str) else placement


def convert(x: Tensor, axis: AxisGroup, source: Placement, target: Placement) -> Tensor:
    """The adapter of the table for one pair of placements."""
    if isinstance(source, Sharded):
        if isinstance(target, Sharded):
            return adapters.all_to_all(x, axis, source.dim, source.cut, target.dim, target.cut)
        if target == "P":
            return adapters.pad(x, axis, source.dim, source.cut)
        return adapters.all_gather(
            x, axis, source.dim, source.cut, backward="slice" if target == "R" else "reduce_scatter"
        )
    if isinstance(target, Sharded):
        if source == "P":
            return adapters.reduce_scatter(x, axis, target.dim, target.cut)
        return adapters.narrow(
            x, axis, target.dim, target.cut, backward="all_gather" if source == "R" else "pad"
        )
    return {
        "RG": lambda: adapters.grad_all_reduce(x, axis),
        "RP": lambda: adapters.keep_one(x, axis),
        "PR": lambda: adapters.all_reduce(x, axis),
        "PG": lambda: adapters.all_reduce(x, axis, backward="all_reduce"),
        "GR": lambda: adapters.grad_keep_one(x, axis),
        "GP": lambda: adapters.keep_one(x, axis, backward="keep_one"),
    }[source + target]()
