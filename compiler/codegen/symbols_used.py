"""The dynamic sizes that generated code reads, by the names of their symbols."""

from __future__ import annotations

from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.op import leaves
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Adapt, Loop, Program, steps
from shardwright.compiler.plan.repeated_blocks import size_symbols


def output_symbols(tree: Tree) -> set[str]:
    """The names of the dynamic sizes that a result returns itself: ``return x, x.shape[0]``."""
    return {
        name
        for _, leaf in tree.leaves()
        if hasattr(leaf, "free_symbols")
        for name in size_symbols(leaf)
    }


def used_symbols(program: Program) -> set[str]:
    """The names of the dynamic sizes in a body and its results."""
    used = output_symbols(program.output)
    if program.whole_output is not None:
        used |= output_symbols(program.whole_output)
    doors = (
        door
        for loop in program.instructions
        if isinstance(loop, Loop)
        for door in (*loop.takes, *loop.gives)
    )
    for instruction in (*steps(program.instructions), *doors):
        if isinstance(instruction, Adapt):
            for cut in (instruction.step.cut, instruction.step.to_cut):
                if cut is not None:
                    for size in cut.sizes:
                        used |= size_symbols(size)
            continue
        for _, arg in instruction.op.args:
            if type(arg) is IRValue:
                continue
            for leaf in leaves(arg):
                if hasattr(leaf, "free_symbols"):
                    used |= size_symbols(leaf)
    return used
