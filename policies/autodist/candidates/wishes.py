"""What to ask of the placement for one mesh, one thing after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.candidates.space import Space, Wish
from shardwright.policies.autodist.placement.lean import Weight
from shardwright.policies.autodist.stages.chain import layer_blocks, layer_pattern
from shardwright.runtime.layout import Mesh

AGAIN = Weight(heavy=1 / 3, momentary=0.0)
"""The price of memory where activations are computed again: a forward, which is a third of a step,
for all that is kept.
"""


def wishes(
    graph: IRGraph, space: Space, num_positions: int, mesh: Mesh, ranks: tuple[int, ...]
) -> Iterable[Wish]:
    """The whole model for speed alone; for the memory of all positions too; for time and memory, at
    the price that computing again has; and for the memory with all layers computed again.
    """
    given = tuple(space.recompute or ())
    # The first of the positions has as many microbatches in flight as there are positions, and a
    # share of the model.
    memory, in_flight = (
        space.memory_bytes * num_positions,
        min(num_positions, space.num_microbatches),
    )
    wish = Wish(
        mesh,
        ranks,
        space.num_microbatches,
        in_flight=in_flight,
        recompute=given,
        num_positions=num_positions,
    )
    yield wish
    if space.memory_bytes < float("inf"):
        wish = replace(wish, memory_bytes=memory)
        yield wish
        if space.recompute is None:
            layers = layer_blocks(graph)[1]
            every = tuple(dict.fromkeys(map(layer_pattern, layers.values())))
            if every:
                yield replace(wish, lean=AGAIN)
                yield replace(wish, recompute=every)
