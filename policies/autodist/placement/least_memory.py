"""A placement that saves memory: of the placement's problem with seconds for every byte, in the
place of its row.

A heavy weight gives the least memory, a light one the least time. What is weighed is the memory
row, which counts what is there all the time; a share of what every operator reads and writes, which
is there for a moment only; and all that the operators ``at_peak`` need while they run. The peak is
the first and one of the others, but where it is depends on the placement. So a search places the
model, audits what it gets, and places it again with the operator that ran at the peak.

Example: with the batch split on all axes the peak of a language model is in the backward of its
loss, which needs two tensors as large as the logits. Placed again with the loss at the peak, its
vocabulary is split on one axis, as that form of the loss computes the gradient in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.cost.fake.saved_tensors import saved_for_backward
from shardwright.compiler.cost.local_calls import local_bytes, local_call
from shardwright.compiler.cost.memory.footprint import TensorForm, footprints_of
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.plan.program import Compute
from shardwright.policies.autodist.placement.formulation import Formulation, OpNode
from shardwright.policies.autodist.placement.place import Placement, placement_of
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import Seconds
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.solver.solve import solve
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True, slots=True)
class MemoryWeight:
    """What memory counts. ``heavy``: all that a rank could hold, in the seconds of a step;
    ``momentary``: the share of what operators read and write; ``at_peak``: the names of operators
    whose memory while they run counts in full.
    """

    heavy: float
    momentary: float
    at_peak: frozenset[str] = frozenset()


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
    usage = formulation.problem.rows[0].usage
    momentary = _momentary(formulation, request)
    running = _running(formulation, request, weight.at_peak)
    copied = _copied(formulation, request, weight.at_peak)
    # A scale: what the fastest choices take, against what the largest ones hold.
    step_s = sum(float(costs[np.isfinite(costs)].min()) for costs in problem.node_costs)
    byte_s = weight.heavy * step_s / max(1.0, sum(float(used.max()) for used in usage.values()))
    costs = []
    for index, cost in enumerate(problem.node_costs):
        zero = np.zeros(len(cost))
        num_bytes = usage.get(index, zero) + running.get(index, zero)
        num_bytes = num_bytes + weight.momentary * momentary.get(index, zero)
        costs.append(cost + byte_s * num_bytes)
    edges = tuple((maker, reader, byte_s * num_bytes) for maker, reader, num_bytes in copied)
    problem = replace(problem, node_costs=tuple(costs), edges=problem.edges + edges)
    solution = solve(problem, time_limit_s=request.time_limit_s)
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
                    # Choices of all operators together want few different layouts.
                    if key not in known:
                        known[key] = local_bytes(
                            formulation.layouts[layout], value.dtype, request.mesh
                        )
                    total[choice] += known[key]
        found[index] = total
    return found


def _running(
    formulation: Formulation, request: PlacementRequest, names: frozenset[str]
) -> dict[int, Seconds]:
    """The bytes that each choice of the operators ``names`` needs while it runs, beyond what it
    keeps from the forward to the backward.
    """
    found: dict[int, Seconds] = {}
    rng = request.config.rng
    for index, node in enumerate(formulation.nodes):
        if isinstance(node, OpNode) and node.op.name in names:
            assignments = node.choices.assignments
            needed = [
                float(_while_running(node.op, each, request.mesh, rng)) for each in assignments
            ]
            found[index] = np.array(needed)
    return found


def _copied(
    formulation: Formulation, request: PlacementRequest, names: frozenset[str]
) -> list[tuple[int, int, Seconds]]:
    """The bytes of the copies that operators ``names`` read where their operands are made in
    another layout. Both copies are there while they run. By maker and reader, [choices of the
    maker, choices of the reader].
    """
    by_maker = {
        result.name: (index, node)
        for index, node in enumerate(formulation.nodes)
        if isinstance(node, OpNode)
        for result in node.op.results
    }
    converted = {(a, b): cost > 0 for a, b, cost in formulation.problem.edges}
    found = []
    waiting = [
        (index, node)
        for index, node in enumerate(formulation.nodes)
        if isinstance(node, OpNode) and node.op.name in names
    ]
    # What comes through views is converted before any of them: the views are asked, too.
    while waiting:
        reader, node = waiting.pop()
        for position, value in enumerate(node.op.operands):
            maker, made_by = by_maker.get(value.name, (-1, None))
            if made_by is None or (maker, reader) not in converted:
                continue
            sizes = [
                local_bytes(formulation.layouts[layout], value.dtype, request.mesh)
                for layout in node.choices.operands[:, position].tolist()
            ]
            found.append((maker, reader, converted[maker, reader] * np.array(sizes, float)))
            # A view has no memory of its own, so the copy is of what it is a view of.
            if saved_for_backward(made_by.op).views[:1] not in ((), (None,)):
                waiting.append((maker, made_by))
    return found


def _while_running(op: IROp, assignment: Assignment, mesh: Mesh, rng: RngMode) -> int:
    """The bytes that a rank needs while one call runs, forward or backward, whichever is more."""
    assert op.rule is not None
    call = local_call(op, assignment, mesh)
    compute = Compute(localise(op, op.rule, assignment, mesh), op, assignment, ())
    forms = [TensorForm.contiguous(x.shape, x.dtype, x.requires_grad) for x in call.operands]
    footprints = footprints_of(mesh, rng)
    forward = footprints.forward(compute, forms)
    kept = sum(
        forward.made[number - len(forms)] for number in forward.saved if number >= len(forms)
    )
    # What the call reads but does not keep is there while it runs.
    read = sum(form.num_bytes for i, form in enumerate(forms) if i not in forward.saved)
    incoming = [
        form if x.requires_grad else None
        for form, x in zip(forward.results, call.results, strict=True)
    ]
    backward = footprints.backward(compute, forms, incoming)
    arrived = sum(form.num_bytes for form in incoming if form is not None)
    return max(read + forward.peak - kept, arrived + backward.peak)
