"""Values without gradient that many blocks read: rotary tables, masks, positions."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.blocks import container_of

MANY = 3
"""A value that more blocks read is shared: it would be a neighbour of all of them."""


def shared_values(graph: IRGraph) -> tuple[frozenset[str], frozenset[str]]:
    """``(values, operators)``: the shared values by name, and what makes them, which no gradient reaches."""
    producers = graph.producers()
    readers = graph.uses()
    trained = {value.name for op in graph.ops for value in (*op.operands, *op.results) if value.requires_grad}
    sources = {value.name for value in graph.sources if value.kind is not ValueKind.PARAMETER}
    shared: set[str] = set()
    makers: set[str] = set()
    for name, uses in readers.items():
        blocks = {container_of(op.module_path) for op, _ in uses} - {None}
        if len(blocks) <= MANY or name in trained or not (name in producers or name in sources):
            continue
        before = _makers(name, graph)
        if before is not None:
            shared.add(name)
            makers |= before
    return frozenset(shared), frozenset(makers)


def _makers(name: str, graph: IRGraph) -> set[str] | None:
    """All operators a value comes from; None if a gradient reaches one of them, or it draws or updates something."""
    producers = graph.producers()
    found: set[str] = set()
    waiting = [name]
    while waiting:
        made = producers.get(waiting.pop())
        if made is None or made[0].name in found:
            continue
        op = made[0]
        assert op.rule is not None
        if op.rule.random or op.rule.updates or any(v.requires_grad for v in (*op.operands, *op.results)):
            return None
        found.add(op.name)
        waiting += [value.name for value in op.operands]
    return found
