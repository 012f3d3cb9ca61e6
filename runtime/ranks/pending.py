"""Collectives that are under way: what a communicator gives back before they have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.ranks.transport import Shape, Work


class PendingRows:
    """Rows of other members on their way into ``rows``. ``work``: the collective, unless it is
    complete.
    """

    def __init__(self, rows: Tensor, work: Work | None = None) -> None:
        self.rows = rows
        self.work = work

    def wait(self) -> Tensor:
        """All rows, by sender."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.rows


class PendingPieces:
    """The pieces of all members on their way into ``rows [size, longest]``.

    ``shapes``: of the pieces, which differ along ``dim``. ``work``: the collective, unless it is
    complete.
    """

    def __init__(self, rows: Tensor, shapes: Sequence[tuple[int, ...]], dim: int) -> None:
        self.rows = rows
        self.work: Work | None = None
        self._shapes = shapes
        self._dim = dim

    def wait(self) -> list[Tensor]:
        """Everyone's piece, by index, as views of one buffer."""
        self._finish()
        if len(set(self._shapes)) == 1:
            return rows_as(self.rows, self._shapes[0])
        lengths = [math.prod(shape) for shape in self._shapes]
        return [
            row[:length].view(shape)
            for row, length, shape in zip(self.rows, lengths, self._shapes, strict=True)
        ]

    def joined(self) -> Tensor:
        """The pieces joined along ``dim``; they are copied only where they do not lie end to
        end.
        """
        first, dim = self._shapes[0], self._dim
        if math.prod(first[:dim]) == 1 and len(set(self._shapes)) == 1:
            self._finish()
            return self.rows.view(*first[:dim], first[dim] * len(self._shapes), *first[dim + 1 :])
        return torch.cat(self.wait(), dim)

    def _finish(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class PendingWholes:
    """Several tensors on their way, whose pieces arrive where they belong."""

    def __init__(self, wholes: list[Tensor], work: Work) -> None:
        self._wholes, self._work = wholes, work

    def wait(self) -> list[Tensor]:
        """The whole tensors."""
        self._work.wait()
        return self._wholes


class Done:
    """A collective that was complete when it was called."""

    def wait(self) -> None:
        return None


class Averaging:
    """Divides by the size of the group once the sum is there."""

    def __init__(self, work: Work, x: Tensor, size: int) -> None:
        self._work, self._x, self._size = work, x, size

    def wait(self) -> None:
        self._work.wait()
        self._x.div_(self._size)


def rows_as(rows: Tensor, shape: Shape) -> list[Tensor]:
    """The rows of ``rows [size, numel]`` in one shape: two calls, however many there are."""
    return list(rows.view(rows.shape[0], *shape).unbind())
