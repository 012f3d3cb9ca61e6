"""Stages of a pipeline that are alike but for names, so that one walk tells what all of them hold.

Most stages of a pipeline are some layers in the middle of the model. Two of them run the same
instructions on tensors of the same layouts; only the numbers in their names differ. A *signature*
has numbers in the place of all names, and ``names`` says which name each number stands for.

Example: two stages of one linear layer each.

- ``h3 = linear(h2, layers_3_weight)``: 0 is ``h2``, 1 is ``layers_3_weight``, 2 is ``h3``
- ``h4 = linear(h3, layers_4_weight)``: 0 is ``h3``, 1 is ``layers_4_weight``, 2 is ``h4``

Both have the signature ``2 = linear(0, 1)``, so what the first keeps as ``h2`` the second keeps as
``h3``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.pipeline import StageGraph
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.compiler.plan.repeated_blocks import (
    Run,
    container_of,
    group_blocks,
    instruction_key,
    path_of,
    writes,
)

PREFIXES = ("backward of ", "gradient of ", "")
"""What may stand before a name where a moment is told."""


@dataclass(frozen=True)
class Signature:
    """``key`` is equal for stages that are alike; ``names``: what its numbers stand for."""

    key: Hashable
    names: tuple[str, ...]

    def renaming(self, other: Signature) -> Callable[[str], str]:
        """A function from a name of this stage, or a text about it, to that of a stage alike."""
        table = dict(zip(self.names, other.names, strict=True))

        def rename(text: str) -> str:
            for prefix in PREFIXES:
                if text.startswith(prefix) and text[len(prefix) :] in table:
                    return prefix + table[text[len(prefix) :]]
            return text

        return rename


def signature(
    stage: StageGraph,
    program: Program,
    sources: Collection[str],
    form_of: Callable[[str], Hashable],
) -> Signature:
    """The signature of a stage.

    ``sources``: the names of the tensors that lie on the rank from the start to the end;
    ``form_of``: what is to be equal of one of them, by its name.
    """
    numbers: dict[str, int] = {}
    labels: list[str] = []  # the names of operators, which moments are told by
    symbols: set[str] = set()

    def number(value: IRValue) -> int:
        return numbers.setdefault(value.name, len(numbers))

    received = {value.name for value, _ in stage.receives}
    inputs = tuple(
        (
            number(value),
            program.input_layouts[value.name],
            value.dtype,
            value.takes_gradient,
            value.name in received,
        )
        for value in program.graph.inputs
    )
    items, keys = group_blocks(program), []
    for item in items:
        for instruction in item.instructions if isinstance(item, Run) else (item,):
            container = container_of(path_of(instruction))
            keys.append(instruction_key(instruction, number, container, symbols))
            keys.append(tuple(map(number, writes(instruction))))
            if isinstance(instruction, Adapt):
                of = instruction.of
                facts = (of.kind, of.dtype, of.takes_gradient, instruction.choice)
                keys.append((*facts, instruction.in_loop))
            elif isinstance(instruction, Compute):
                labels.append(instruction.original.name)
        # Blocks are methods: their variables go when they return.
        if isinstance(item, Run):
            inside = tuple(map(number, item.inputs)), tuple(map(number, item.outputs))
            keys.append((item.recompute, len(item.instructions), *inside))
    # Adapters may have moved in front of blocks; gathers go together in the order of the body.
    order = tuple(number(value) for instruction in program.body for value in writes(instruction))
    results = tuple(
        number(value) if isinstance(value, IRValue) else None
        for _, value in program.output.leaves()
    )
    updates = tuple((number(before), number(after)) for before, after in program.buffer_updates)
    given = set(sources).difference(value.name for value in program.graph.inputs)
    forms = tuple((at, form_of(name)) for name, at in numbers.items() if name in given)
    key = (inputs, tuple(keys), order, results, len(stage.sends), updates, forms)
    return Signature(key, (*numbers, *labels))
