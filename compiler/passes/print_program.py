"""A program as text, for dumps and golden files."""

from __future__ import annotations

from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.quote import comment
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Loop, Program


def print_program(program: Program) -> str:
    """One line per declaration and instruction, with layouts."""
    lines = [f"program {program.graph.name} on {program.plan.storage_mesh}"]
    lines += [
        f"  {declaration.value.name}: {declaration.layout}" for declaration in program.declarations
    ]
    returned = _returned(program.output)
    for position, instruction in enumerate(program.instructions):
        # Behind the body comes what only outputs of evaluation need.
        if position == len(program.body):
            lines.append(f"  in training: return {returned}")
        lines += _lines(instruction)
    if program.whole_output is not None and not program.tail:
        lines.append(f"  in training: return {returned}")
    lines.append(f"  return {_returned(program.whole_output or program.output)}")
    if program.eval_program is not None:
        lines += ["in evaluation:", print_program(program.eval_program)]
    return "\n".join(lines)


def _lines(instruction: Instruction, indent: str = "  ") -> list[str]:
    """An instruction in a line; a loop with what is in it below."""
    if isinstance(instruction, Loop):
        inside = (*instruction.takes, *instruction.body, *instruction.gives)
        lines = [line for step in inside for line in _lines(step, f"{indent}  ")]
        return [f"{indent}in {instruction.count} pieces, {instruction.axis}:", *lines]
    if isinstance(instruction, Adapt):
        step = instruction.step
        call = (
            f"{instruction.result.name} = {step.kind}({instruction.value.name}, "
            f"{', '.join(step.axes)})"
        )
        together = ", with the one above" if instruction.joins else ""
        if instruction.beside:
            together += f", beside {', '.join(weight.name for weight in instruction.beside)}"
        together += _meanwhile(instruction)
        return [f"{indent}{call}  # {step.transition}: {step.after}{together}"]
    names = ", ".join(value.name for value in instruction.op.results)
    layouts = " ".join(map(str, instruction.layouts))
    strategy = " ".join(f"{axis}={s}" for axis, s in instruction.assignment.items())
    call = call_source(instruction.op, lambda value: value.name, to_python)
    return [f"{indent}{names} = {call}  # {layouts}  {strategy}".rstrip() + _meanwhile(instruction)]


def _meanwhile(instruction: Adapt | Compute) -> str:
    """What runs while the message of an instruction is under way."""
    count = instruction.meanwhile
    return f", under way during the next {count}" if count else ""


def print_pipeline(pipeline: PipelineProgram) -> str:
    """The programs of all stages, each under its number and its ranks, and what goes where."""
    blocks = []
    for stage, program, planned in zip(
        pipeline.stages, pipeline.programs, pipeline.plan.stages, strict=True
    ):
        ranks = f"rank{'s' if len(planned.ranks) > 1 else ''} {', '.join(map(str, planned.ranks))}"
        lines = [f"stage {stage.index} on {ranks}"]
        lines += [f"  receive {value.name} from stage {source}" for value, source in stage.receives]
        lines += [f"  send {value.name} to stage {target}" for value, target in stage.sends]
        blocks.append("\n".join((*lines, print_program(program))))
    if pipeline.eval_program is not None:
        blocks += ["in evaluation:", print_pipeline(pipeline.eval_program)]
    return "\n\n".join(blocks)


def _returned(output: Tree) -> str:
    leaves = [(path, value) for path, value in output.leaves() if hasattr(value, "name")]
    return ", ".join(
        f"{comment(path)}={value.name}" if path else value.name for path, value in leaves
    )
