"""Places the model as a search asks for it, within what the options fix.

The search asks for a mesh, and perhaps a memory limit (``MeshRequest``). The options add
constraints, the optimizer and a time limit, which makes it a request for the placement
(``PlacementRequest``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.axis_roles import forbidden, named
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.mesh_requests import (
    MeshRequest,
    NoPlacement,
    PlacedModel,
)
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.policies.autodist.placement.formulation import Node, OpNode
from shardwright.policies.autodist.placement.least_memory import place_for_memory
from shardwright.policies.autodist.placement.memory_bound import least_step_s
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

TARGET_GAP, LARGE = 5e-3, 256
"""How near to its bound the placement on one of many meshes need be, and from how many operators
on: meshes differ by more, and the time is for all of them. On a mesh that is given, and for smaller
models, placements are made as good as time allows.
"""

Pricings = dict[tuple[Mesh, tuple[int, ...], bool], Pricing]
"""What does not change between placements, by mesh, the ranks that it lies on, and whether gathers
of weights are priced as hidden.
"""

SHARE = 0.02
"""The share of the time limit for a placement that need not be better."""

PLACING_SHARE = 0.8
"""The share of the time limit after which the memory of placements is no longer measured to correct
them.
"""


class Placer:
    """Places the model, keeping what does not change between the mesh requests for one mesh."""

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        options: AutodistOptions,
        hardware: Hardware,
        times: OperatorTimes | None = None,
        pricings: Pricings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.graph, self.config, self.options = graph, config, options
        self.hardware, self.times = hardware, times
        self._clock = clock or Clock(options.time_limit_s)
        self._optimizer = options.optimizer_memory
        self._pricings: Pricings = {} if pricings is None else pricings

    def request(self, mesh_request: MeshRequest) -> PlacementRequest:
        """What a mesh request asks of the placement, with what the options fix."""
        # Large models on free meshes are placed within a gap: many meshes are to be tried.
        coarse = self.options.mesh is None and len(self.graph.ops) >= LARGE
        limit_s = min(
            self._clock.left_s / 2, self.options.time_limit_s * (SHARE if coarse else 1.0)
        )
        return PlacementRequest(
            self.graph,
            mesh_request.mesh,
            mesh_request.ranks,
            self.hardware,
            self.config,
            memory_limit_bytes=mesh_request.memory_bytes,
            constraints=constraints_on(mesh_request.mesh, self.graph, self.options),
            time_limit_s=max(1.0, self._clock.steady * limit_s),
            target_gap=TARGET_GAP if coarse else 0.0,
            microbatches=mesh_request.num_microbatches,
            # Evaluation may ask for outputs that a training step leaves out; steps are what is
            # optimised.
            outputs=training_wishes(self.graph, self.config),
            recompute=mesh_request.recompute,
            in_flight=mesh_request.in_flight,
            times=self.times,
            deadline=self._clock.latest
            if mesh_request.hurried
            else self._clock.moment(PLACING_SHARE),
            hurried=mesh_request.hurried,
            optimizer=self._optimizer,
            hides_gathers=mesh_request.hides_gathers,
        )

    def pricing_of(self, request: PlacementRequest) -> Pricing:
        """What requests for one mesh share; on other ranks, or with another price of gathers, as
        far as it is the same there.
        """
        key = request.mesh, request.ranks, request.hides_gathers
        if key not in self._pricings:
            like = (known for (mesh, *_), known in self._pricings.items() if mesh == request.mesh)
            self._pricings[key] = Pricing(request, next(like, None))
        return self._pricings[key]

    def __call__(self, mesh_request: MeshRequest) -> PlacedModel:
        request = self.request(mesh_request)
        pricing = self.pricing_of(request)
        found = (
            place(request, pricing=pricing)
            if mesh_request.memory_weight is None
            else place_for_memory(request, mesh_request.memory_weight, pricing)
        )
        if isinstance(found, Infeasible):
            raise _no_placement(found, request, pricing, mesh_request.num_positions)
        # Operators of evaluation alone have no part in the search: they follow.
        plan = (
            found.plan
            if self.graph.eval_graph is None
            else _with_evaluation(found, self.graph.eval_graph)
        )
        # Axes are named after what they turned out to split.
        if self.options.mesh is None:
            plan = named(plan, split_dim_names(self.graph, plan), kept=self.options.degrees)
        return PlacedModel(
            plan,
            found.bound_s,
            found.proof,
            str(found.space),
            found.interrupted,
            found.cost_s,
            found.longest_s,
        )

    def least_s(self, mesh_request: MeshRequest) -> float:
        """Seconds per step that no plan for a mesh request with memory is below; what may be
        computed again is as the options say.
        """
        request = self.request(mesh_request)
        return least_step_s(request, self.pricing_of(request), again=self.options.recompute is None)


def constraints_on(mesh: Mesh, graph: PlannableGraph, options: AutodistOptions) -> Constraints:
    """What the options fix on a mesh, degrees included."""
    return Constraints(
        options.pin, forbidden(graph, mesh, options.degrees, options.forbid), options.stored
    )


def _no_placement(
    found: Infeasible, request: PlacementRequest, pricing: Pricing, num_positions: int
) -> NoPlacement:
    """Why nothing fits: how much is missing on a device, and what takes most."""
    if found.row is None or found.least_usage is None or request.memory_limit_bytes is None:
        return NoPlacement(found.reason, math.inf)
    formulation = formulate(request, pricing)
    names = [_name(formulation.nodes[index]) for index in found.nodes[:3]]
    # No choice changes them.
    given_bytes = request.memory_limit_bytes - formulation.problem.rows[found.row].limit
    needed_bytes = (given_bytes + found.least_usage) / num_positions
    limit_bytes = request.memory_limit_bytes / num_positions
    least, limit = (amount(num_bytes, "B", digits=4) for num_bytes in (needed_bytes, limit_bytes))
    shared = f" if {num_positions} positions share it evenly" if num_positions > 1 else ""
    words = f"at least {least}{shared}, and {limit} are allowed; most of it for {', '.join(names)}"
    return NoPlacement(words, needed_bytes)


def _name(node: Node) -> str:
    """What a node of the problem stands for: a parameter, an operator or a value."""
    return node.op.name if isinstance(node, OpNode) else node.value.fqn or node.value.name


def _with_evaluation(best: Placement, body: IRGraph) -> Plan:
    """The plan with strategies for the operators that only the evaluation body has, for the tensors
    as they are stored.
    """
    plan, request = best.plan, best.request
    names = {op.name for op in body.ops}
    # What training shares with evaluation stays as it is.
    pin = {
        op: {axis: found.get(axis, "R") for axis in plan.mesh.names}
        for op, found in plan.strategies.items()
        if op in names
    }
    held = {value.fqn for value in (*body.parameters, *body.buffers)}
    stored = {fqn: layout for fqn, layout in plan.stored.items() if fqn in held}
    graph = PlannableGraph.of(body)
    paths = {path for path, _ in body.output.leaves()}
    found = place(
        replace(
            request,
            graph=graph,
            constraints=Constraints(pin, {}, stored),
            memory_limit_bytes=None,
            outputs={path: wanted for path, wanted in request.outputs.items() if path in paths},
        )
    )
    assert not isinstance(found, Infeasible), found.reason
    return replace(plan, strategies={**found.plan.strategies, **plan.strategies})
