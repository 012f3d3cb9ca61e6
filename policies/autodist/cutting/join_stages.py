"""One plan of pipeline stages that come from different placements of the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.eval_stages import stage_of_eval_ops
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.passes.unused_outputs import drop_outputs
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.policies.autodist.candidates.meshes import with_pp
from shardwright.runtime.layout import Layout, Mesh

T = TypeVar("T")


def joined(
    graph: IRGraph,
    plans: Sequence[Plan],
    starts: Sequence[str],
    schedule: str,
    num_microbatches: int,
) -> Plan:
    """A pipeline with a stage on a mesh of its own for each of ``plans``, side by side in this
    order.

    Operators do in every stage what its plan says; parameters and buffers are stored as the plan of
    the first stage that reads them says, where those of unequal meshes have their owner too.
    ``starts``: the first operators of stages 1, 2, ...
    """
    # The ranks of stage ``i`` are ``begins[i]`` to ``begins[i + 1]``.
    begins = [0, *itertools.accumulate(plan.mesh.size for plan in plans)]
    stages = tuple(
        StagePlan(first, plan.mesh, tuple(range(begin, end)))
        for first, plan, (begin, end) in zip(
            ["", *starts], plans, itertools.pairwise(begins), strict=True
        )
    )
    # Meshes of one form are one mesh with a ``pp`` axis. Others have none in common.
    alike = len({plan.mesh for plan in plans}) == 1
    mesh = with_pp(plans[0].mesh, len(plans)) if alike else Mesh((("rank", begins[-1]),))
    base = replace(
        plans[0], mesh=mesh, stages=stages, schedule=schedule, num_microbatches=num_microbatches
    )
    # Without outputs that nobody wants, as lowering has it.
    training = drop_outputs(graph, base.outputs)
    stage_of = stage_of_ops(training, base)
    # The stage that owns each parameter: the first that reads it, in training or in evaluation.
    homes = _first_readers(training, stage_of)
    if graph.eval_graph is not None:
        evaluation = drop_outputs(graph.eval_graph, base.outputs)
        of_evaluation = stage_of_eval_ops(training, stage_of, evaluation)
        for fqn, stage in _first_readers(evaluation, of_evaluation).items():
            homes[fqn] = min(stage, homes.get(fqn, stage))
        stage_of = of_evaluation | stage_of
    return replace(
        base,
        strategies=_of_stages(plans, stage_of, lambda plan: plan.strategies),
        dims=_of_stages(plans, stage_of, lambda plan: plan.dims),
        stored=_stored(plans, homes),
        notes=tuple(
            note
            for index, plan in enumerate(plans)
            for note in plan.notes
            if stage_of.get(note.op, 0) == index
        ),
    )


def _first_readers(graph: IRGraph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """FQN of a parameter or buffer to the first stage that reads it."""
    found: dict[str, int] = {}
    for op in graph.ops:
        for value in op.operands:
            if value.fqn is not None:
                found[value.fqn] = min(stage_of[op.name], found.get(value.fqn, stage_of[op.name]))
    return found


def _of_stages(
    plans: Sequence[Plan], stage_of: Mapping[str, int], part: Callable[[Plan], Mapping[str, T]]
) -> dict[str, T]:
    """What the plan of each operator's stage has for it."""
    return {
        op: part(plans[stage])[op] for op, stage in stage_of.items() if op in part(plans[stage])
    }


def _stored(plans: Sequence[Plan], homes: Mapping[str, int]) -> dict[str, Layout]:
    """The layout of each parameter and buffer, by FQN: from the plan of the stage that reads it
    first; what nobody reads lives in the first stage.
    """
    names = dict.fromkeys(fqn for plan in plans for fqn in plan.stored)
    found = {fqn: plans[homes.get(fqn, 0)].stored.get(fqn) for fqn in names}
    return {fqn: layout for fqn, layout in found.items() if layout is not None}
