"""The pieces of a tensor of one shape that is cut at some places, before and behind a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwright.compiler.cost.local_calls import cut_sizes
from shardwright.compiler.plan.conversion import GATHERS, SLICES
from shardwright.compiler.plan.layout_cuts import PlaceKey
from shardwright.compiler.plan.patterns import Cuts, PatternStep


class Pieces:
    """The sizes of the pieces of a tensor. ``keys``: the places that may be cut, all of numbers;
    ``sizes``: of the axes.
    """

    def __init__(
        self, shape: tuple[int, ...], keys: tuple[PlaceKey, ...], sizes: Mapping[str, int]
    ) -> None:
        self.shape, self.sizes = shape, sizes
        self.places = [
            (dim, _number(outer), tuple(map(_number, segments)), element)
            for dim, outer, segments, element in keys
        ]
        self.total = math.prod(shape)
        self._largest: dict[Cuts, int] = {}
        self._average: dict[Cuts, float] = {}

    def largest(self, cuts: Cuts) -> int:
        """The elements of the largest piece."""
        found = self._largest.get(cuts)
        if found is None:
            found = self.total
            for index, axes in cuts:
                found = found // sum(self.places[index][2]) * self._piece(index, axes)
            self._largest[cuts] = found
        return found

    def average(self, cuts: Cuts) -> float:
        """The elements of a piece, on average."""
        found = self._average.get(cuts)
        if found is None:
            found = self._average[cuts] = float(self.total) / math.prod(
                self.sizes[axis] for _, axes in cuts for axis in axes
            )
        return found

    def end_to_end(self, step: PatternStep) -> bool:
        """Whether one even segment is all that the step cuts or gathers, with nothing outside of
        it.
        """
        if step.place is None or step.kind not in (*GATHERS, *SLICES):
            return False
        dim, outer, segments, _ = self.places[step.place]
        (own,) = step.axes
        axes = next(
            (
                axes
                for index, axes in (*step.before, *step.after)
                if index == step.place and own in axes
            ),
            (),
        )
        pieces = cut_sizes(segments, [self.sizes[axis] for axis in axes[: step.count]])
        exact = segments[0] % math.prod(self.sizes[axis] for axis in axes[: step.count]) == 0
        if len(segments) > 1 or not exact or pieces[0] % self.sizes[own]:
            return False
        outside = math.prod(self.shape[:dim]) * outer
        for index, cut_by in step.after if step.kind in GATHERS else step.before:
            other = self.places[index]
            # A place of one element has the same outer size as the place that follows it.
            end = other[1] * sum(other[2])
            if index != step.place and (other[0] < dim or (other[0] == dim and end <= outer)):
                if other[0] == dim and self._uneven(other[2], cut_by):
                    return False  # a size that differs between ranks is not told to be 1
                outside = outside // sum(other[2]) * self._piece(index, cut_by)
        return bool(outside == 1)

    def _piece(self, place: int, axes: tuple[str, ...]) -> int:
        """The size of a place on the rank at index 0 of all axes that cut it."""
        _, _, segments, element = self.places[place]
        sizes = [self.sizes[axis] for axis in axes]
        if element:
            index, count = element
            return int(index < cut_sizes((count,), sizes)[0])
        return sum(cut_sizes(segments, sizes))

    def _uneven(self, segments: tuple[int, ...], axes: tuple[str, ...]) -> bool:
        num_pieces = math.prod(self.sizes[axis] for axis in axes)
        return any(segment % num_pieces for segment in segments)


def _number(size: object) -> int:
    assert isinstance(size, int), f"{size} is not known"
    return size
