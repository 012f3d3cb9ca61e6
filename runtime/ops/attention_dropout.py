"""Dropout on attention weights that are never whole: which weights of a tile are kept.

In mode ``"plan_independent"`` the weights of a head, ``[queries, keys]``, are drawn in squares of
256 x 256, each by a generator of its own. So a rank draws the squares that it computes, whatever
part of the queries it has and wherever its keys lie. In mode ``"fast"`` each tile is drawn for
itself. Either way backward draws again what forward drew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime.ops.dropout import check_probability
from shardwright.runtime.ops.random import Draw
from shardwright.runtime.runs import Run, within

SQUARE = 256
"""How many queries, and how many keys, are drawn by one generator."""


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """Dropout with probability ``p`` of the attention weights ``[..., heads, L, S]``. Its draw has
    a random state that does not move on: backward may run in another step.
    """

    p: float
    shape: tuple[int, ...]
    draw: Draw

    @classmethod
    def of(cls, p: float, shape: Sequence[int], draw: Draw) -> WeightDropout:
        """The dropout that generated code asks for; ``shape`` is that of the weights here."""
        check_probability(p)
        return cls(p, tuple(shape), draw.kept_here())

    @property
    def scale(self) -> float:
        """What weights that are kept are multiplied by."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def kept(
        self, samples: Run, rows: Sequence[Run], columns: Sequence[Run], device: torch.device
    ) -> Tensor:
        """Which weights are kept, ``[samples, heads, queries, keys]``, of queries and keys that lie
        in the sequence where ``rows`` and ``columns`` say. Leading dims count as one of samples.
        """
        draw = self.draw
        if draw.layout is None:
            counts = [sum(size for _, size in runs) for runs in (rows, columns)]
            heads = self.shape[-3] if len(self.shape) > 2 else 1
            first = (samples[0], *(runs[0][0] for runs in (rows, columns)))
            name = "/".join(map(str, (draw.name, *first)))
            tile = (samples[1], heads, *counts)
            return draw.named(name).kept(tile, device, torch.bool, 1 - self.p)
        found = [
            torch.cat([self._square(row, column, device) for column in _squares(columns)], -1)
            for row in _squares(rows)
        ]
        whole = torch.cat(found, -2)
        lead, heads = math.prod(whole.shape[:-3]), whole.shape[-3] if whole.ndim > 2 else 1
        return whole.reshape(lead, heads, *whole.shape[-2:]).narrow(0, *samples)

    def _square(
        self, row: tuple[int, Run], column: tuple[int, Run], device: torch.device
    ) -> Tensor:
        """The part of one square, of this rank's samples and heads."""
        (i, queries), (j, keys) = row, column
        draw = self.draw
        assert draw.layout is not None
        num_queries, num_keys = draw.layout.shape[-2:]
        square = draw.named(f"{draw.name}/{i}/{j}" if i or j else draw.name)
        square = square.with_dim(-2, min(SQUARE, num_queries - i * SQUARE))
        square = square.with_dim(-1, min(SQUARE, num_keys - j * SQUARE))
        assert square.layout is not None
        shape = square.layout.local_shape(draw.rng.mesh, draw.rng.coords)
        kept = square.kept(shape, device, torch.bool, 1 - self.p)
        return kept.narrow(-2, *queries).narrow(-1, *keys)

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights of all of this rank's queries, some of them zero."""
        draw = self.draw
        assert draw.layout is not None
        # [start, stop) of each run of this rank's queries.
        bounds = draw.layout.runs(weights.ndim - 2, draw.rng.mesh, draw.rng.coords)
        rows = [(start, stop - start) for start, stop in bounds]
        kept = torch.zeros_like(weights, dtype=torch.bool)
        if weights.numel():
            samples = 0, math.prod(weights.shape[:-3])
            kept = self.kept(samples, rows, ((0, weights.shape[-1]),), weights.device)
        return weights * kept.view(weights.shape) * self.scale


def _squares(runs: Sequence[Run]) -> Iterator[tuple[int, Run]]:
    """Runs cut where a square ends: the number of the square, and the run as it lies in it."""
    for start, size in runs:
        at = start
        while at < start + size:
            number, begin = divmod(at, SQUARE)
            count = min(SQUARE - begin, start + size - at)
            yield number, (begin, count)
            at += count


@dataclass(frozen=True, slots=True)
class TileDropout:
    """The dropout of one tile. ``rows``, ``columns``: where its queries and keys lie."""

    dropout: WeightDropout
    samples: Run
    rows: tuple[Run, ...]
    columns: tuple[Run, ...]

    def factors(self, queries: Run, keys: Run, like: Tensor) -> Tensor:
        """What weights of some of its queries and keys are multiplied by, ``[samples, heads,
        queries, keys]``.
        """
        rows, columns = within(self.rows, (queries,)), within(self.columns, (keys,))
        kept = self.dropout.kept(self.samples, rows, columns, like.device)
        return kept.to(like.dtype).mul_(self.dropout.scale)
