"""``autodist``: the best plan that can be proved, over meshes of the plan's ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.cost.hardware import Hardware, load_hardware
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Certificate, Plan
from shardwright.policies.autodist.constraints import Constraints
from shardwright.policies.autodist.placement import Placement, place
from shardwright.policies.autodist.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.policy import Policy, read_options
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

AXES = ("x", "y", "z")
"""What the axes of meshes are called that the search tries."""

MAX_AXES = 2
"""Meshes of more axes are tried where they are asked for only."""


@dataclass(frozen=True, kw_only=True)
class AutodistOptions:
    """``hardware``: a preset or a hardware file, of at least ``plan_ngpus`` devices. ``mesh``: axes and sizes, major to minor;
    without it all meshes of up to two axes are tried. ``memory_limit_gb``: of one device (default: what the hardware has).
    ``time_limit_s``: for the whole search. ``pin``, ``forbid``, ``stored``: see
    :class:`shardwright.policies.autodist.constraints.Constraints`; they name axes, so that they need a ``mesh``.
    """

    hardware: str = "a100-80gb"
    mesh: Mapping[str, int] | None = None
    memory_limit_gb: float | None = None
    time_limit_s: float = 120.0
    pin: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forbid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The fastest plan found on any mesh, with its certificate."""
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    hardware = load_hardware(options.hardware, config.runtime_ngpus)
    started = time.monotonic()
    meshes = list(_meshes(options, config))
    best: Placement | None = None
    refused: list[tuple[Mesh, Infeasible]] = []
    tried: list[str] = []
    for index, mesh in enumerate(meshes):
        left = options.time_limit_s - (time.monotonic() - started)
        if left <= 0 and best is not None:
            break
        found = place(_request(graph, config, options, hardware, mesh, max(1.0, left / (len(meshes) - index))))
        if isinstance(found, Infeasible):
            refused.append((mesh, found))
            tried.append(f"mesh {mesh}: {found.reason}")
            continue
        tried.append(f"mesh {mesh}: {found.cost_s * 1e3:.6g} ms, at least {found.bound_s * 1e3:.6g} ms")
        if best is None or found.cost_s < best.cost_s:
            best = found
    if best is None:
        raise PlanError(
            f"no plan for {config.plan_ngpus} ranks fits on {hardware.name}",
            why="; ".join(f"mesh {mesh}: {found.reason}" for mesh, found in refused),
            hint="more ranks (plan_ngpus), a larger memory_limit_gb, or fewer constraints",
        )
    plan = best.plan if graph.eval_graph is None else _with_evaluation(best, graph.eval_graph)
    return replace(plan, certificate=certificate(best, tried))


def _request(
    graph: PlannableGraph,
    config: ComputeConfig,
    options: AutodistOptions,
    hardware: Hardware,
    mesh: Mesh,
    time_limit_s: float,
) -> PlacementRequest:
    limit = hardware.device.memory_bytes if options.memory_limit_gb is None else options.memory_limit_gb * 1e9
    return PlacementRequest(
        graph,
        mesh,
        tuple(range(mesh.size)),
        hardware,
        config,
        memory_limit_bytes=limit,
        constraints=Constraints(options.pin, options.forbid, options.stored),
        time_limit_s=time_limit_s,
        outputs=output_wishes(graph, config),
    )


def _meshes(options: AutodistOptions, config: ComputeConfig) -> Iterator[Mesh]:
    """The mesh asked for, or every way to arrange the ranks along up to :data:`MAX_AXES` axes."""
    if options.mesh is not None:
        mesh = Mesh(tuple(options.mesh.items()))
        if mesh.size != config.plan_ngpus or min(size for _, size in mesh.axes) < 1:
            raise PlanError(
                f"the mesh of policy 'autodist' has {mesh.size} ranks",
                why=f"mesh {mesh}, plan_ngpus={config.plan_ngpus}",
                hint="make the product of the axes equal to plan_ngpus",
            )
        yield _ordered(mesh, config.rank_order)
        return
    named = [name for name, given in (("pin", options.pin), ("forbid", options.forbid), ("stored", options.stored)) if given]
    if named or config.rank_order is not None:
        raise PlanError(
            f"policy 'autodist' has {' and '.join(named) or 'rank_order'} but no mesh",
            why="the axes they name are those of a mesh",
            hint="give the option mesh, for example {'dp': 2, 'tp': 4}",
        )
    for sizes in factorizations(config.plan_ngpus, MAX_AXES):
        yield Mesh(tuple(zip(AXES, sizes, strict=False)))


def factorizations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every ordered product of at most ``most`` factors above 1 that gives ``number``, the fewest factors first."""
    yield (number,)
    if most > 1:
        longer = [
            (first, *rest)
            for first in range(2, number)
            if number % first == 0
            for rest in factorizations(number // first, most - 1)
            if 1 not in rest
        ]
        yield from sorted(longer, key=lambda sizes: (len(sizes), sizes))


def _ordered(mesh: Mesh, order: str | None) -> Mesh:
    if order is None:
        return mesh
    names = order.split("-")
    if sorted(names) != sorted(mesh.names):
        raise PlanError(f"order {order!r} does not name the axes of the mesh", why=f"axes {mesh.names}")
    return Mesh(tuple((name, mesh.axis_size(name)) for name in names))


def _with_evaluation(best: Placement, body: IRGraph) -> Plan:
    """The plan with strategies for the operators that only the evaluation body has, for the tensors as they are stored."""
    plan, request = best.plan, best.request
    names = {op.name for op in body.ops}
    pin = {op: {axis: found.get(axis, "R") for axis in plan.mesh.names} for op, found in plan.strategies.items() if op in names}
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
            outputs={path: wish for path, wish in request.outputs.items() if path in paths},
        )
    )
    assert not isinstance(found, Infeasible), found.reason
    return replace(plan, strategies={**found.plan.strategies, **plan.strategies})


def certificate(best: Placement, found: Iterable[str] = ()) -> Certificate:
    """What is certain of the plan."""
    return Certificate(
        best.cost_s, best.bound_s, best.proof, f"mesh {best.plan.mesh}: {best.space}", best.request.hardware.name, tuple(found)
    )


POLICY = Policy("autodist", apply, AutodistOptions, built_in=True)
