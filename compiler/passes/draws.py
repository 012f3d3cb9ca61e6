"""Draw masks by the tensor that they are for, where ranks may draw what they please.

``rng="plan_independent"`` cuts the numbers of the whole tensor, so it needs the layout of what is
drawn. ``rng="fast"`` draws a piece: its shape is that of the piece at hand, and ranks differ along
the axes that cut it. So ``layout="[4, 8, 64/tp]"`` becomes ``axes=("tp",)``, and nothing where no
axis cuts it. The numbers stay the same.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Compute, Instruction, Program
from shardwright.runtime.errors import PlanError

ELEMENTWISE = frozenset(("dropout", "alpha_dropout"))
"""Operators that draw a number for every element of their result."""


def draw_pieces(program: Program | PipelineProgram) -> Program | PipelineProgram:
    """``program`` with draws of pieces in the place of draws by layout, or itself without any."""
    done = _of_stages(program) if isinstance(program, PipelineProgram) else _of_body(program)
    return program if done == program else done


def check_draws(graph: IRGraph) -> IRGraph:
    """The graph, if ``rng="plan_independent"`` can draw for all of it. Raises :class:`PlanError`
    for a draw over rows of chosen experts: which numbers of the whole are theirs is not told.
    """
    for op in (op for body in graph.bodies for op in body.ops):
        if op.rule is not None and op.rule.random and op.rule.densities is not None:
            raise PlanError(
                f"{op.target} draws numbers for rows of chosen experts",
                where=f"{op.source} ({op.module_path or 'top-level forward'})",
                why="with rng='plan_independent' a rank draws its piece of what one device draws, "
                "and which rows it has follows from what the router chose",
                hint="ComputeConfig(rng='fast')",
            )
    return graph


def _of_stages(program: PipelineProgram) -> PipelineProgram:
    evaluated = _of_stages(program.eval_program) if program.eval_program else None
    return replace(program, programs=tuple(map(_of_body, program.programs)), eval_program=evaluated)


def _of_body(program: Program) -> Program:
    body, tail = (tuple(map(_drawn, instructions)) for instructions in (program.body, program.tail))
    evaluated = _of_body(program.eval_program) if program.eval_program else None
    return replace(program, body=body, tail=tail, eval_program=evaluated)


def _drawn(instruction: Instruction) -> Instruction:
    if not isinstance(instruction, Compute) or instruction.original.target not in ELEMENTWISE:
        return instruction
    op = instruction.op
    if not op.has_arg("layout"):
        return instruction
    (layout,) = instruction.layouts
    kept = tuple((name, arg) for name, arg in op.args if name not in ("layout", "sizes"))
    op = replace(op, args=kept)
    return replace(
        instruction, op=op.with_args(axes=tuple(layout.cut_axes)) if layout.cut_axes else op
    )
