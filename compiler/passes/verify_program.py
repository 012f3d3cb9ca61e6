"""Prove a program right before any code is written.

The invariant that prevents wrong gradients: every operator's operand and result placements match one of its strategies on
every axis, and every edge between them is a chain of adapters from the table. Then the placement of every parameter's
gradient is known, and each axis on which it is G gets exactly one reduction. This pass walks the program with layouts in
place of tensors and re-derives all of it independently of the pass that made it.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.strategy import allowed, layouts
from shardwright.compiler.plan.conversion import AdapterStep, canonical
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Layout, Mesh

# (kind, backward) -> the placement letters it may go between
TABLE = {
    ("all_gather", "slice"): ("S", "R"),
    ("all_gather", "reduce_scatter"): ("S", "G"),
    ("pad", None): ("S", "P"),
    ("all_to_all", None): ("S", "S"),
    ("narrow", "all_gather"): ("R", "S"),
    ("narrow", "pad"): ("G", "S"),
    ("reduce_scatter", None): ("P", "S"),
    ("all_reduce", "identity"): ("P", "R"),
    ("all_reduce", "all_reduce"): ("P", "G"),
    ("grad_all_reduce", None): ("R", "G"),
    ("keep_one", "identity"): ("R", "P"),
    ("keep_one", "keep_one"): ("G", "P"),
    ("grad_keep_one", None): ("G", "R"),
}


def verify_program(program: Program) -> None:
    """Raise InternalError where the program breaks the invariant."""
    mesh = program.plan.mesh
    held: dict[str, Layout] = {}

    def now(value: IRValue) -> Layout:
        if value.name not in held:
            raise InternalError(f"{value.name} is used before it is made")
        return canonical(held[value.name], mesh, differentiable=value.requires_grad)

    for declaration in program.declarations:
        if declaration.layout.partial:
            raise InternalError(f"{declaration.value.name} is stored partial: {declaration.layout}")
        held[declaration.value.name] = declaration.layout
    held |= program.input_layouts
    for instruction in program.body:
        if isinstance(instruction, Adapt):
            _check_adapter(instruction, now(instruction.value), mesh)
            held[instruction.result.name] = instruction.step.after
            continue
        _check_compute(instruction, now, mesh)
        held |= {value.name: layout for value, layout in zip(instruction.op.results, instruction.layouts, strict=True)}
    for _, value in program.output.leaves():
        if isinstance(value, IRValue):
            now(value)
    if program.eval_program is not None:
        verify_program(program.eval_program)


def _check_compute(instruction: Compute, now, mesh: Mesh) -> None:  # type: ignore[no-untyped-def]
    op = instruction.original
    assert op.rule is not None
    if not allowed(op.rule, instruction.assignment, mesh):
        raise InternalError(f"{op.name} cannot follow {dict(instruction.assignment)}", where=str(op.source))
    operands, results = layouts(op.rule, instruction.assignment, mesh)
    for value, original, needed in zip(instruction.op.operands, op.operands, operands, strict=True):
        if now(value) != canonical(needed, mesh, differentiable=original.requires_grad):
            raise InternalError(f"{op.name} needs {original.name} as {needed} and gets {now(value)}", where=str(op.source))
    if results != instruction.layouts:
        raise InternalError(f"{op.name} gives {results}, not {instruction.layouts}", where=str(op.source))


def _check_adapter(instruction: Adapt, held: Layout, mesh: Mesh) -> None:
    step: AdapterStep = instruction.step
    letters = step.before.placement(step.axis)[0], step.after.placement(step.axis)[0]
    known = TABLE.get((step.kind, step.backward))
    differentiable = instruction.value.requires_grad
    # without a gradient R and G are one
    blur = str.maketrans("G", "R") if not differentiable else {}
    if known is None or [x.translate(blur) for x in known] != [x.translate(blur) for x in letters]:
        raise InternalError(
            f"adapter {step.kind} (backward {step.backward}) goes from {letters[0]} to {letters[1]} on {step.axis}"
        )
    if canonical(step.before, mesh, differentiable=differentiable) != held:
        raise InternalError(f"adapter {step.kind} of {instruction.of.name} expects {step.before} and gets {held}")
    for axis in mesh.names:
        if axis != step.axis and step.before.placement(axis) != step.after.placement(axis):
            raise InternalError(f"adapter {step.kind} on {step.axis} changes {axis} of {instruction.of.name}")
    if replace(step.before, dims=()) == replace(step.after, dims=()) and step.before == step.after:
        raise InternalError(f"adapter {step.kind} of {instruction.of.name} changes nothing")
