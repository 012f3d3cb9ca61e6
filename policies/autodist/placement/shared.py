"""Values without gradient that many blocks read, or that blocks make of such: rotary tables, masks,
positions.
"""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.plan.repeated_blocks import container_of

MANY = 1
"""A value that more blocks read would be a neighbour of all of them."""


def shared_values(graph: IRGraph) -> tuple[frozenset[str], frozenset[str]]:
    """``(values, operators)``: the shared values by name, and what makes them, which no gradient
    reaches.

    Where some value is read by many blocks, the values that are made of it and read more than once
    are shared too: what a block makes of a rotary table for its queries and its keys.
    """
    # Values without gradients, such as masks and rotary tables.
    tables = _tables(graph)
    uses = graph.uses()
    # Read by many blocks: as a node of its own such a value would tie all blocks together.
    wide = {
        name
        for name in tables
        if len({container_of(op.module_path) for op, _ in uses.get(name, ())} - {None}) > MANY
    }
    # And what is made of them.
    made_of = set(wide)
    for op in graph.ops:
        if op.results[0].name in tables and any(value.name in made_of for value in op.operands):
            made_of |= {value.name for value in op.results}
    shared = wide | {name for name in made_of if len({op.name for op, _ in uses.get(name, ())}) > 1}
    # Backwards: all operators that make shared values.
    makers: set[str] = set()
    needed = set(shared)
    for op in reversed(graph.ops):
        if any(value.name in needed for value in op.results):
            makers.add(op.name)
            needed |= {value.name for value in op.operands}
    return frozenset(shared), frozenset(makers)


def _tables(graph: IRGraph) -> set[str]:
    """The values that come from inputs and constants by operators without gradient, random numbers
    or updates.
    """
    updated = {before.name for before, _ in graph.buffer_updates}
    found = {
        value.name
        for value in graph.sources
        if not value.takes_gradient and value.name not in updated
    }
    for op in graph.ops:
        # Operators come in the order of the program, so one pass finds what follows from what.
        if all(value.name in found for value in op.operands) and _is_pure(op):
            found |= {value.name for value in op.results}
    return found


def _is_pure(op: IROp) -> bool:
    assert op.rule is not None
    return not (
        op.rule.random or op.rule.updates or any(value.takes_gradient for value in op.results)
    )
