"""What is hidden of gathers in a backward that runs a part of the program again.

The weights that a region gathers are gathered again, too: each is begun while the one before it is
used (:mod:`shardwright.compiler.cost.time.gathers_ahead`). So other computations hide other
messages than without the region. How much that changes depends on what else runs again, which
is not chosen yet when a region is priced. So this is the most that it can be: no plan takes less.

A region gathers ``b`` and ``c``. Without it, backward gathers ``d c b a``; with it, ``d b c a``:

- ``b`` is begun where ``c`` was. What was hidden of ``c`` may be hidden of ``b``, and more by as
  much as its message is longer, or as runs again before it.
- ``c`` is hidden by what the second run computes between the two.
- ``a`` is begun in the second run, with all of the region's backward before it.

Example: messages of 4 ms, products of 1 ms forward and 2 ms backward, one of each weight. Without
the region 2 ms of each of ``c``, ``b`` and ``a`` are hidden: 6 ms. With it 2 ms of ``b``, 1 ms of
``c``, and 3 ms of ``a``: 6 ms as well. Where messages take 1 ms, all is hidden both times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.gathers_ahead import (
    Both,
    BusyStep,
    Gathers,
    GathersAndWork,
    busy_s,
    gathers_parameter,
    kept_gathers,
)


@dataclass(frozen=True)
class GathersOfRegions:
    """What changes for the gathers of a program if a part of it becomes a region. ``hidden``: what
    of each costs nothing, forward and again in backward, if nothing runs again.
    """

    gathers: GathersAndWork
    hidden: Mapping[int, Both]
    device: Device

    def more_hidden_s(self, own: range, again: Sequence[int]) -> float:
        """The seconds that are hidden in backward beyond what was, at most, if the instructions of
        a range of the body become a region, of which these run again. They may be less than none.
        """
        kept = [use for use in self._kept_in(own) if _position(use) in again]
        found = -sum(self.hidden[_position(use)][1] for use in kept)
        inside = [p for p in again if gathers_parameter(self.gathers.program.body[p])]
        if inside:
            found += self._first_s(inside[0], again, kept)
            found += sum(self._later_s(*pair, again) for pair in pairwise(inside))
        return found + self._before_s(own, again, inside, kept)

    @cached_property
    def _kept(self) -> list[Gathers]:
        return kept_gathers(self.gathers)

    def _kept_in(self, own: range) -> list[Gathers]:
        first, last = (bisect_left(self._kept, end, key=_position) for end in (own.start, own.stop))
        return self._kept[first:last]

    def _first_s(self, first: int, again: Sequence[int], kept: Sequence[Gathers]) -> float:
        """What is hidden of the first gather of a region."""
        overlap, messages = self.device.overlap, self.gathers.messages
        message_s, asked_s, instead_s = messages[first].forward_s, 0.0, 0.0
        if kept:
            # The gather that backward would begin without the region.
            position = _position(max(kept, key=lambda use: use.last))
            asked_s, instead_s = messages[position].again_s, self.hidden[position][1]
        before = sum(self._forward(p)[0] for p in again if p < first)
        longer_s = max(0.0, message_s - asked_s) + before
        return min(overlap * message_s, instead_s + overlap * longer_s)

    def _later_s(self, before: int, position: int, again: Sequence[int]) -> float:
        """What is hidden of another one of its gathers, begun when that ``before`` is needed."""
        between = [self._forward(p) for p in again if before < p < position]
        busy = busy_s(between, self.gathers.axes_at(position))
        return self.device.hidden_s(self.gathers.messages[position].forward_s, busy)

    def _before_s(
        self, own: range, again: Sequence[int], inside: Sequence[int], kept: Sequence[Gathers]
    ) -> float:
        """What is hidden of the next gather after the region, beyond what was."""
        number = bisect_left(self._kept, own.start, key=_position) - 1
        while number >= 0 and self._kept[number].last >= own.start:
            number -= 1
        if number < 0:
            return 0.0
        following = self._kept[number]
        position = _position(following)
        message_s, axes = self.gathers.messages[position].again_s, self.gathers.axes_at(position)
        hidden_s = self.hidden[position][1]
        if inside:
            # The rest of the second run, and backward from the end of the region on.
            steps = [self._forward(p) for p in again if p > inside[-1]]
            steps += map(self._backward, range(own.stop - 1, following.last, -1))
            more_s = self.device.hidden_s(message_s, busy_s(steps, axes)) - hidden_s
        else:
            # It is begun behind the region, whose second run comes in between.
            most_s = self.device.overlap * message_s
            second_s = self.device.overlap * sum(self._forward(p)[0] for p in again)
            more_s = most_s - hidden_s if kept else min(most_s - hidden_s, second_s)
        return max(0.0, more_s)

    def _forward(self, position: int) -> BusyStep:
        item = self.gathers.work[position]
        return item.busy.forward_s, item.axes[0]

    def _backward(self, position: int) -> BusyStep:
        item = self.gathers.work[position]
        return item.busy.backward_s, item.axes[1]


def _position(use: Gathers) -> int:
    return use.positions[0]
