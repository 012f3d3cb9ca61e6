"""What follows the last action of a step on the positions of a pipeline: sums of gradients, and
updates.

What a stage is counted to take is a sum over its parameters, as if each shared one message with all
of the model. The gradients of a position have messages of their own, and what other positions hold,
too, is summed with them. Both are known once the model is cut.

Example: a model of 8 MB is cut into two stages, in two units. Each position sums 4 MB with the same
position of the other unit, and waits for a whole message. Its stage counts half of one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.compiler.cost.time.after_backward import Reduction
from shardwright.compiler.plan.program import Declaration
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.walk import Held, Walk

Ranks = tuple[int, ...]
Places = tuple[int, int]
"""The first place of a stage, and the one behind its last."""


@dataclass(frozen=True)
class StepEnds:
    """The ends of steps of pipelines whose stages all have the placement that ``walk`` is of."""

    walk: Walk

    def more_s(self, ranks: Sequence[Ranks], places: Sequence[Sequence[Places]]) -> list[float]:
        """What the end of a step takes longer on each position than its stages count.

        ``places``: of every position, those of its stages.
        """
        # By position: what others hold, too, and on which ranks.
        elsewhere: list[dict[int, tuple[Ranks, ...]]] = [{} for _ in ranks]
        for number in self._of_several_places:
            on = [position for position, of in enumerate(places) if self._num_readers(number, of)]
            for own in on:
                elsewhere[own][number] = tuple(ranks[other] for other in on if other != own)
        return [self._more_s(*each) for each in zip(ranks, places, elsewhere, strict=True)]

    def _more_s(
        self, ranks: Ranks, places: Sequence[Places], elsewhere: Mapping[int, tuple[Ranks, ...]]
    ) -> float:
        before, kinds_s = self._by_kind
        counts = sum(before[stop] - before[start] for start, stop in places)
        counted_s = float(counts @ kinds_s)
        for number in elsewhere:
            counted_s += self._num_readers(number, places) * self._trained[number].once_s
        key = ranks, counts.tobytes(), tuple(elsewhere.items())
        if key not in self._known:
            self._known[key] = self._end_s(ranks, places, elsewhere)
        return self._known[key] - counted_s

    def _end_s(
        self, ranks: Ranks, places: Sequence[Places], elsewhere: Mapping[int, tuple[Ranks, ...]]
    ) -> float:
        setting = self.walk.setting
        held: list[Declaration] = []
        shared: dict[str, tuple[Ranks, ...]] = {}
        for number, parameter in enumerate(self._trained):
            declaration = parameter.declaration
            if declaration is not None and self._num_readers(number, places):
                held.append(declaration)
                shared[declaration.value.fqn or ""] = elsewhere.get(number, ())
        # A stage sums once per step, as ``parameter_s`` has it.
        is_staged = len(setting.ranks) < setting.config.plan_ngpus
        return Reduction.of(
            held, self.walk.storage_mesh, setting.config, setting.hardware, setting.optimizer,
            ranks, shared,
            num_microbatches=1 if is_staged else setting.num_microbatches,
            model_bytes=self.walk.gradients_bytes,
        ).end_s  # fmt: skip

    def _num_readers(self, number: int, places: Sequence[Places]) -> int:
        """How many of these stages read a parameter."""
        read_at = self._trained[number].places
        return sum(any(start <= place < stop for place in read_at) for start, stop in places)

    @cached_property
    def _trained(self) -> list[Held]:
        return [held for held in self.walk.parameters if held.declaration is not None]

    @cached_property
    def _of_several_places(self) -> list[int]:
        """The numbers of the parameters that several stages may read."""
        return [number for number, held in enumerate(self._trained) if len(held.places) > 1]

    @cached_property
    def _by_kind(self) -> tuple[Array, Array]:
        """How many parameters of each kind are read before each place and nowhere else, and what
        one of each kind is counted to take.
        """
        numbers: dict[Hashable, int] = {}
        seconds: list[float] = []
        read: list[tuple[int, int]] = []
        for held in self._trained:
            if len(held.places) == 1 and held.declaration is not None:
                kind = held.declaration.layout, held.declaration.value.dtype
                if kind not in numbers:
                    numbers[kind] = len(numbers)
                    seconds.append(held.once_s)
                read.append((held.places[0], numbers[kind]))
        counts = np.zeros((len(self.walk.program.graph.ops) + 1, len(numbers)))
        for place, kind_number in read:
            counts[place + 1, kind_number] += 1
        return counts.cumsum(axis=0), np.array(seconds)

    @cached_property
    def _known(self) -> dict[Hashable, float]:
        """What ends of steps take, so far."""
        return {}
