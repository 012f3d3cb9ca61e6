"""What a placement takes at least, whatever stages it is cut into: for plans of simple policies,
whose stages are only looked for where they may be of use.

A boundary between stages may save adapters of what crosses it: what arrives may need none. It saves
nothing else, and no adapter of a value that is on one side only.

Example: layers of 10 ms, of which 1 ms is a gather of what the layer before has made. A stage of
four layers takes at least 39 ms, and not 40, as the boundary before it may save one gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from shardwright.compiler.plan.program import Adapt, Compute
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.walk import Walk


class SimpleTimes:
    """The seconds of a placement's operators, ``[place, side]``: forward, and backward with what is
    computed again.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        seconds = np.array([walk.forward_s, walk.backward_s]).T.reshape(-1, 2)
        seconds[[op.name in walk.free for op in walk.program.graph.ops]] = 0.0
        for place, item, again_s in self._again():
            if item.original.name not in walk.free:
                seconds[place, 1] += again_s
        self.seconds: Array = seconds

    def _again(self) -> Iterator[tuple[int, Compute, float]]:
        """The operators that are computed again, and their forwards."""
        ops = self.walk.program.graph.ops
        for (place, item), time in zip(self.walk.by_place, self.walk.times, strict=True):
            if isinstance(item, Compute) and ops[place].region is not None:
                yield place, item, time.forward_s

    def stage(self, places: range) -> tuple[float, float]:
        """What a stage of these places takes at least, forward and backward."""
        own = self.seconds[places.start : places.stop].sum(axis=0) - self._saved_in(places)
        forward_s, backward_s = np.maximum(own, 0.0).tolist()
        return forward_s, backward_s

    def least_s(self, num_stages: int) -> float:
        """The seconds of a microbatch at least, in so many stages."""
        saved_s = (num_stages - 1) * float(self._saved.sum(axis=1).max())
        return max(0.0, float(self.seconds.sum()) - saved_s)

    def saved_s(self, places: range) -> float:
        """What the boundaries of a stage may save at most of its backward."""
        return float(self._saved_in(places)[1])

    def _saved_in(self, places: range) -> Array:
        # Of a value that crosses, both stages may save the adapters.
        found: Array = self._saved[places.start] + self._saved[places.stop]
        return found

    @cached_property
    def _saved(self) -> Array:
        """The most that a boundary before each place may save of a stage at it: all adapters of
        what is there on both sides, ``[place, side]``. None before the first, or behind the last.
        """
        walk, ops = self.walk, self.walk.program.graph.ops
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, op in enumerate(ops):
            # Of inputs and parameters, and of what each stage makes for itself, readers count.
            of_all = () if op.name in walk.free else op.results
            for value in (*op.operands, *of_all):
                first.setdefault(value.name, place)
                last[value.name] = place
        changes = np.zeros((len(ops) + 2, 2))
        for (place, item), time in zip(walk.by_place, walk.times, strict=True):
            if isinstance(item, Adapt) and item.of.name in first:
                own = time.forward_s, time.backward_s
                changes[first[item.of.name] + 1] += own
                changes[max(last[item.of.name], place) + 1] -= own
        found: Array = np.maximum(np.cumsum(changes, axis=0)[: len(ops) + 1], 0.0)
        return found
