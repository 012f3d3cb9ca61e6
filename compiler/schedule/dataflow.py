"""Which stages use what a stage produces.

Most pipelines are chains: each stage feeds the next. Encoder states, long skips and masks go
further. A value that a later stage uses goes there directly, in a message of its own, once per
rank. The stages of one rank run a microbatch in ascending order. So a value is received with the
first of them that uses it. Its gradient, summed over all of them, is sent after the backward of
that first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.runtime.errors import PlanError

StagePair = tuple[int, int]
"""The producing stage and a later one that receives from it."""


@dataclass(frozen=True)
class Dataflow:
    """The pairs of stages between which activations go forward, and those of them where gradients
    come back.

    Pairs on one rank are allowed: they order the work and need no message.

    Raises:
        PlanError: a pair that is not ascending, that names no stage, or a gradient without
            activation.
    """

    num_stages: int
    activations: frozenset[StagePair]
    gradients: frozenset[StagePair]

    def __post_init__(self) -> None:
        for source, target in sorted(self.activations):
            if not 0 <= source < target < self.num_stages:
                raise PlanError(
                    f"stage {target} cannot use what stage {source} produces",
                    why="activations go from earlier to later stages, and there are "
                    f"{self.num_stages}, counted from 0",
                    hint="number the stages in the order in which the model runs them",
                )
        for source, target in sorted(self.gradients - self.activations):
            raise PlanError(
                f"a gradient from stage {target} to stage {source}, which sends it no activation",
                hint="name gradients only between stages that activations connect",
            )

    @classmethod
    def chain(cls, num_stages: int) -> Dataflow:
        """Each stage feeds the next one, and gets its gradient back."""
        return cls.of(num_stages, {stage: (stage + 1,) for stage in range(num_stages - 1)})

    @classmethod
    def of(
        cls,
        num_stages: int,
        consumers: Mapping[int, Collection[int]],
        without_gradient: Collection[StagePair] = (),
    ) -> Dataflow:
        """The dataflow in which each stage feeds the ``consumers`` that are named for it.

        Args:
            num_stages: the number of all stages.
            consumers: for each stage, the stages that receive a message from it: on each rank the
                first that uses what it makes.
            without_gradient: those (producer, consumer) whose values need no gradient (masks, token
                ids).
        """
        pairs = frozenset(
            (source, target) for source, targets in consumers.items() for target in targets
        )
        return cls(num_stages, pairs, pairs - frozenset(without_gradient))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The earlier stages whose activations each stage uses, ascending."""
        return _grouped(self.num_stages, ((target, source) for source, target in self.activations))

    @cached_property
    def gradient_sources(self) -> tuple[tuple[int, ...], ...]:
        """The later stages from which each stage gets gradients, ascending."""
        return _grouped(self.num_stages, self.gradients)


def _grouped(num_stages: int, pairs: Iterable[StagePair]) -> tuple[tuple[int, ...], ...]:
    """The second elements of the pairs that start with each stage, ascending."""
    grouped: list[list[int]] = [[] for _ in range(num_stages)]
    for stage, other in pairs:
        grouped[stage].append(other)
    return tuple(tuple(sorted(others)) for others in grouped)
