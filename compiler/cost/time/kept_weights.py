"""Which gathered values the backward gathers again: those that an operator keeps, of weights stored
in pieces and of activations that the plan does not keep whole.

An operator that saves a gathered weight saves a handle instead, which gathers it again in backward
(``runtime/gathered_weights.py``). What no operator saves is gathered once: a bias, a table of
embeddings, the weight of a product whose other operand takes no gradient. A frozen weight may be
gathered twice, as the gradient of the other operand needs it. In a recompute region the gathers run
again with the rest, and nothing is a handle.
"""

from __future__ import annotations

from shardwright.compiler.cost.fake.saved_tensors import saved_for_backward
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.program import Adapt, Compute, Loop, Program

VIEWS = frozenset(("grad_all_reduce", "grad_keep_one"))
"""Adapters that change nothing in the forward. Their result is a view of their operand, so what
keeps the one keeps the other.
"""


def keepers(
    graph: IRGraph, activations: frozenset[str] = frozenset()
) -> frozenset[tuple[str, str]]:
    """The pairs ``(parameter, operator)`` in which the operator keeps the parameter for backward;
    also for the values named in ``activations``.

    The operator is the one that reads the parameter. It counts also if it makes a view, and another
    operator keeps this view.
    """
    # For each parameter or view of one, the pairs that are found if something keeps it.
    names = (*(value.name for value in graph.parameters), *sorted(activations))
    read = {name: frozenset[tuple[str, str]]() for name in names}
    found: set[tuple[str, str]] = set()
    for op in graph.ops:
        if read.keys().isdisjoint(value.name for value in op.operands):
            continue
        saved = saved_for_backward(op)
        # For each operand: the parameter's readers that led to it, or this one if it is the
        # parameter.
        of = [read.get(value.name, frozenset()) or {(value.name, op.name)} for value in op.operands]
        for position in saved.operands:
            found |= of[position]
        # A view passes the question on to whoever reads it.
        for result, viewed in zip(op.results, saved.views, strict=False):
            if viewed is not None and op.operands[viewed].name in read:
                read[result.name] = frozenset(of[viewed])
    return frozenset(found)


def gathered_again(program: Program) -> frozenset[str]:
    """The names of the gathered values that are gathered again for the backward. A weight in a
    recompute region may be among them; there the region gathers it again.
    """
    return frozenset(asked_again(program))


def asked_again(program: Program) -> dict[str, tuple[int, int]]:
    """What :func:`gathered_again` names, with the positions in the body of the first and the last
    operator that keeps it. Backward asks for it at the last one first.
    """
    again = [adapter for adapter in program.adapters() if adapter.gathers_again]
    if not again:
        return {}
    activations = frozenset(a.of.name for a in again if not a.gathers_weight)
    # Which operators keep which value, in the graph; below, which adapters made these.
    keeping = keepers(program.graph, activations)
    kept: dict[str, tuple[int, int]] = {}
    found: dict[str, tuple[int, int]] = {}

    def keep(name: str, first: int, last: int) -> None:
        known = kept.get(name, (first, last))
        kept[name] = min(known[0], first), max(known[1], last)

    # Readers come after the adapters that make what they read, so the way back meets them first.
    for position in range(len(program.body) - 1, -1, -1):
        instruction = program.body[position]
        if isinstance(instruction, Compute):
            original = instruction.original
            for value, own in zip(original.operands, instruction.op.operands, strict=True):
                if (value.name, original.name) in keeping:
                    keep(own.name, position, position)
        elif isinstance(instruction, Loop):
            for value in instruction.operands:  # it keeps all that it reads
                keep(value.name, position, position)
        elif isinstance(instruction, Adapt) and instruction.result.name in kept:
            places = kept[instruction.result.name]
            if instruction.gathers_again:
                found[instruction.result.name] = places
            # On to what the gathered value was made of.
            if instruction.gathers_again or instruction.step.kind in VIEWS:
                keep(instruction.value.name, *places)
    return found
