"""The ways to see one model as a chain of blocks, worked out once for all that is placed and cut.

Example: a model of 32 layers is seen by layer, and finely. Where its layers begin, and what crosses
each place, is the same for every mesh. Only how finely it is cut depends on what operators take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.stages.block_costs import operator_times
from shardwright.policies.autodist.stages.chain import (
    Part,
    block_starts,
    layer_blocks,
    layer_parts,
    nested_starts,
)
from shardwright.policies.autodist.stages.walk import Walk
from shardwright.policies.stage_places import cut_traffic

Chain = tuple[list[int], Mapping[int, str]]
"""Where blocks begin, and the module paths of those that are layers that may be computed again."""


class ModelChains:
    """The chains of blocks of one graph."""

    def __init__(self, graph: PlannableGraph) -> None:
        self.graph = graph

    @cached_property
    def by_layer(self) -> tuple[list[int], dict[int, str]]:
        """Where blocks begin that are layers, and the module paths of these."""
        return layer_blocks(self.graph)

    @cached_property
    def nested(self) -> list[list[int]]:
        """Where numbered modules inside layers begin, the coarsest first."""
        return nested_starts(self.graph)

    @cached_property
    def layer_parts(self) -> Mapping[int, Sequence[Part]]:
        """What may be computed again of each layer."""
        return layer_parts(self.graph, *self.by_layer)

    @cached_property
    def _traffic(self) -> list[float]:
        return cut_traffic(self.graph, from_nothing(self.graph))

    def fine(self, walk: Walk, num_stages: int, share: float) -> list[int]:
        """Where blocks begin that take at most that share of a stage of average length."""
        times = operator_times(walk)
        seconds = [times[op.name] for op in self.graph.ops]
        return block_starts(self.graph, seconds, num_stages, share, self._traffic)
