"""A placement that saves memory: of the placement's problem with seconds for every byte, in the
place of its row.

A heavy weight gives the least memory, a light one the least time. What is weighed is the memory
row; and a share of what every operator reads and writes, which is there for a moment only. That the
peak is a sum of both is not said: which share gives the lowest depends on where it is, so that
searches try several, and audit what they give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.policies.autodist.placement.formulation import Formulation, OpNode
from shardwright.policies.autodist.placement.place import Placement, placement_of
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import Seconds
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.solver.solve import solve


@dataclass(frozen=True, slots=True)
class MemoryWeight:
    """What memory counts. ``heavy``: all that a rank could hold, in the seconds of a step;
    ``momentary``: the share of what operators read and write.
    """

    heavy: float
    momentary: float


def place_for_memory(
    request: PlacementRequest, weight: MemoryWeight, pricing: Pricing | None = None
) -> Placement | Infeasible:
    """The placement of least seconds, with those for its memory; whether it fits is not looked at.
    Its bound says nothing.

    Args:
        request: with a memory limit.
        weight: of the memory.
        pricing: as of :func:`formulate`.
    """
    formulation = formulate(request, pricing)
    # The row of memory becomes a price per byte instead of a limit.
    problem = replace(formulation.problem, rows=())
    usage, momentary = formulation.problem.rows[0].usage, _momentary(formulation, request)
    # A scale: what the fastest choices take, against what the largest ones hold.
    step_s = sum(float(costs[np.isfinite(costs)].min()) for costs in problem.node_costs)
    byte_s = weight.heavy * step_s / max(1.0, sum(float(used.max()) for used in usage.values()))
    costs = []
    for index, cost in enumerate(problem.node_costs):
        zero = np.zeros(len(cost))
        costs.append(
            cost + byte_s * (usage.get(index, zero) + weight.momentary * momentary.get(index, zero))
        )
    solution = solve(replace(problem, node_costs=tuple(costs)), time_limit_s=request.time_limit_s)
    if isinstance(solution, Infeasible):
        return solution
    return placement_of(request, formulation, solution, 0.0, "none: chosen for its memory")


def _momentary(formulation: Formulation, request: PlacementRequest) -> dict[int, Seconds]:
    """The bytes that each choice of each operator reads and writes."""
    known: dict[tuple[int, object], int] = {}
    found = {}
    for index, node in enumerate(formulation.nodes):
        if not isinstance(node, OpNode):
            continue
        # The operands and results of a choice, each in its layout.
        total = np.zeros(len(node.choices))
        for values, ids in (
            (node.op.operands, node.choices.operands),
            (node.op.results, node.choices.results),
        ):
            for position, value in enumerate(values):
                for choice, layout in enumerate(ids[:, position].tolist()):
                    key = layout, value.dtype
                    if key not in known:
                        known[key] = local_bytes(
                            formulation.layouts[layout], value.dtype, request.mesh
                        )
                    total[choice] += known[key]
        found[index] = total
    return found
