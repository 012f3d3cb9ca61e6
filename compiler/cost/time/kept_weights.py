"""Which weights stored in pieces the backward gathers again: those that an operator keeps.

What an operator saves of a gathered weight is a handle, which gathers again
(:mod:`shardwright.runtime.gathered_weights`). So a bias or a table of embeddings is gathered once,
and so is the weight of a product of which no other operand takes a gradient; one that is frozen may
be gathered twice. In a recompute region the gathers run again with the rest, and nothing is a
handle.
"""

from __future__ import annotations

from shardwright.compiler.cost.fake.saved_tensors import saved_for_backward
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.program import Adapt, Compute, Program

VIEWS = frozenset(("grad_all_reduce", "grad_keep_one"))
"""Adapters that change nothing in the forward: what they make is kept with what they are given."""


def keepers(graph: IRGraph) -> frozenset[tuple[str, str]]:
    """``(parameter, operator)``: those that read a parameter and keep it, or make a view of it that
    another one keeps.
    """
    read = {
        value.name: frozenset[tuple[str, str]]() for value in graph.parameters
    }  # by parameter or view: who read it first
    found: set[tuple[str, str]] = set()
    for op in graph.ops:
        if read.keys().isdisjoint(value.name for value in op.operands):
            continue
        saved = saved_for_backward(op)
        of = [read.get(value.name, frozenset()) or {(value.name, op.name)} for value in op.operands]
        for position in saved.operands:
            found |= of[position]
        for result, viewed in zip(op.results, saved.views, strict=False):
            if viewed is not None and op.operands[viewed].name in read:
                read[result.name] = frozenset(of[viewed])
    return frozenset(found)


def gathered_again(program: Program) -> frozenset[str]:
    """The names of what adapters gather again for the backward, unless it is part of a region that
    is computed again.
    """
    if not any(adapter.gathers_weight for adapter in program.adapters()):
        return frozenset()
    keeping = keepers(program.graph)
    kept: set[str] = set()
    found: set[str] = set()
    for instruction in reversed(program.body):
        if isinstance(instruction, Compute):
            original = instruction.original
            pairs = zip(original.operands, instruction.op.operands, strict=True)
            kept |= {own.name for value, own in pairs if (value.name, original.name) in keeping}
        elif isinstance(instruction, Adapt) and instruction.result.name in kept:
            if instruction.gathers_weight:
                found.add(instruction.result.name)
            if instruction.gathers_weight or instruction.step.kind in VIEWS:
                kept.add(instruction.value.name)
    return frozenset(found)
