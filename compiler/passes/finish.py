"""The passes between lowering and emission. They change what a step costs, so an audit of a plan
runs them as a compile does.
"""

from __future__ import annotations

from shardwright.compiler.pass_manager import AnyPass, FunctionPass
from shardwright.compiler.passes.draws import check_draws, draw_pieces
from shardwright.compiler.passes.gathers import GatherTogether
from shardwright.compiler.passes.start_early import Overlap
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.config import ComputeConfig


def finishing(config: ComputeConfig) -> tuple[AnyPass, ...]:
    """The passes that follow lowering, in order: draws are of pieces, gathers go together where
    that holds no more memory, and messages start early.
    """
    # Ranks may draw each their own piece, or all must draw what one device would.
    draws = draw_pieces if config.rng == "fast" else check_draws
    return FunctionPass("draws", draws), GatherTogether(config), Overlap(config)


def finished(
    program: Program | PipelineProgram, config: ComputeConfig
) -> Program | PipelineProgram:
    """A lowered program as it is emitted; the same object where no pass changes it.

    Raises :class:`PlanError` for a program that cannot be emitted as the config wants it.
    """
    for step in finishing(config):
        program = step(program)
    return program
