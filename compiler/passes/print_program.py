"""A program as text, for dumps and golden files."""

from __future__ import annotations

from shardwright.compiler.ir.quote import comment
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.plan.program import Adapt, Program


def print_program(program: Program) -> str:
    """One line per declaration and instruction, with layouts."""
    lines = [f"program {program.graph.name} on {program.plan.storage_mesh}"]
    lines += [f"  {declaration.value.name}: {declaration.layout}" for declaration in program.declarations]
    for instruction in program.body:
        if isinstance(instruction, Adapt):
            step = instruction.step
            call = f"{instruction.result.name} = {step.kind}({instruction.value.name}, {', '.join(step.axes)})"
            lines.append(f"  {call}  # {step.transition}: {step.after}")
        else:
            names = ", ".join(value.name for value in instruction.op.results)
            layouts = " ".join(map(str, instruction.layouts))
            strategy = " ".join(f"{axis}={s}" for axis, s in instruction.assignment.items())
            call = call_source(instruction.op, lambda value: value.name, to_python)
            lines.append(f"  {names} = {call}  # {layouts}  {strategy}".rstrip())
    leaves = [(path, value) for path, value in program.output.leaves() if isinstance(value, IRValue)]
    outputs = [f"{comment(path)}={value.name}" if path else value.name for path, value in leaves]
    lines.append(f"  return {', '.join(outputs)}")
    if program.eval_program is not None:
        lines += ["in evaluation:", print_program(program.eval_program)]
    return "\n".join(lines)
