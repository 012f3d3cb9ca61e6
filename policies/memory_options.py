"""What all policies but ``autodist`` offer to those who are short of memory: modules that backward
computes again, and operators that run in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.piece_loops import PieceOptions, in_pieces
from shardwright.runtime.config import ComputeConfig


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(PieceOptions):
    """``recompute``: module paths, ``*`` for any one name, whose activations are computed again in
    the backward. Others: :class:`PieceOptions`.
    """

    recompute: tuple[str, ...] = ()


def saving_memory(
    graph: PlannableGraph, plan: Plan, options: MemoryOptions, config: ComputeConfig, policy: str
) -> Plan:
    """The plan with what the options ask for. Raises :class:`PlanError` where the model has no part
    that can run in so many pieces; modules are looked for when the plan is lowered.
    """
    plan = replace(plan, recompute=options.recompute)
    return in_pieces(graph, plan, options, config, policy)
