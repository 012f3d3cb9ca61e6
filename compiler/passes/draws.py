"""Draw random numbers for the piece at hand, where ranks may draw what they please.

``rng="plan_independent"`` cuts the numbers of the whole tensor, so it needs the layout of what is
drawn. ``rng="fast"`` draws a piece: its shape is that of the piece at hand, and ranks differ along
the axes that cut it. So ``self.draw("noise", layout="[4, 8, 64/tp]")`` becomes ``self.draw("noise",
"tp")``, and ``self.draw("noise")`` where no axis cuts it. The numbers stay the same, but for masks
of attention in blocks, which are drawn block by block.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Compute, Instruction, Loop, Program, Step, steps
from shardwright.runtime.errors import PlanError


def draw_pieces(program: Program | PipelineProgram) -> Program | PipelineProgram:
    """``program`` with draws of pieces in the place of draws by layout, or itself without any."""
    done = _of_stages(program) if isinstance(program, PipelineProgram) else _of_body(program)
    return program if done == program else done


def check_draws(program: Program | PipelineProgram) -> Program | PipelineProgram:
    """``program``, if all that it draws has positions, by which every plan draws the same.

    Raises :class:`PlanError` for a mask of rows that a router chose: they have none.
    """
    parts = program.programs if isinstance(program, PipelineProgram) else (program,)
    for part in parts:
        for instruction in steps(part.instructions):
            if isinstance(instruction, Compute):
                _check_draw(instruction)
    if program.eval_program is not None:
        check_draws(program.eval_program)
    return program


def _check_draw(instruction: Compute) -> None:
    op = instruction.original
    assert op.rule is not None
    if op.rule.random and op.rule.densities is not None:
        raise PlanError(
            f'{op.target} draws numbers for rows of experts, with rng="plan_independent"',
            where=f"{op.source} ({op.module_path or 'top-level forward'})",
            why="a router chooses these rows, so they have no positions that all plans share",
            hint='draw with rng="fast", or before tokens are dispatched to experts; to verify, '
            "which needs the same draws under every plan, set the rate to 0",
        )


def _of_stages(program: PipelineProgram) -> PipelineProgram:
    evaluated = _of_stages(program.eval_program) if program.eval_program else None
    return replace(program, programs=tuple(map(_of_body, program.programs)), eval_program=evaluated)


def _of_body(program: Program) -> Program:
    body, tail = (tuple(map(_drawn, instructions)) for instructions in (program.body, program.tail))
    evaluated = _of_body(program.eval_program) if program.eval_program else None
    return replace(program, body=body, tail=tail, eval_program=evaluated)


def _drawn(instruction: Instruction) -> Instruction:
    if isinstance(instruction, Loop):
        return replace(instruction, body=tuple(map(_drawn_step, instruction.body)))
    return _drawn_step(instruction)


def _drawn_step(instruction: Step) -> Step:
    if not isinstance(instruction, Compute) or not instruction.op.draws:
        return instruction
    return replace(instruction, op=instruction.op.drawing_pieces)
