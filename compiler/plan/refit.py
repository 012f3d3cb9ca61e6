"""Use a plan again: on another number of ranks, with inputs of another size, or for an edited
model, where it still fits.

Strategies name factors, not sizes, so most of a plan carries over as it is. What does not is
collected and refused together, so that a person sees at once how far the plan is from fitting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.plan.check import (
    check_assignment,
    check_layout,
    gathered_names,
    ops_of,
    output_paths,
)
from shardwright.compiler.plan.imbalance import capped
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.runtime.atoms import Atom
from shardwright.runtime.errors import PlanError, did_you_mean, on_lines
from shardwright.runtime.layout import Layout, Mesh

DATA_AXES = ("dp",)
"""The axes that take up a change in the number of ranks where nothing else is said: copies of the
rest of the plan.
"""

SHOWN = 8
"""How many of the things that do not fit an error lists."""


def refit(
    plan: Plan, graph: IRGraph, num_ranks: int, axis_sizes: Mapping[str, int] | None = None
) -> Plan:
    """``plan`` for this graph and ``num_ranks`` ranks; ``axis_sizes`` says which axes of its mesh
    get another size.

    Raises :class:`PlanError` listing what does not fit: operators and tensors that the model does
    not have, tensors of another shape, strategies that the operators do not have (any more, or on
    so many ranks), stages that cannot be dealt out anew.
    """
    mesh = _resized(plan.mesh, num_ranks, axis_sizes or {})
    # Mesh and stages first: whether a strategy is allowed depends on the number of ranks.
    imbalance = None if plan.imbalance is None else capped(plan.imbalance, mesh.size)
    moved = replace(plan, mesh=mesh, stages=_stages(plan, mesh), imbalance=imbalance)
    problems: list[str] = []
    moved = replace(moved, inputs=_inputs(moved, graph, problems))
    problems += _unfitting(moved, graph)
    if problems:
        listed = problems[:SHOWN] + (
            [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        )
        raise PlanError(
            f"the plan does not fit this model on {num_ranks} ranks",
            why=on_lines(listed),
            hint="edit the plan where it says, or plan anew",
        )
    return moved


def _resized(mesh: Mesh, num_ranks: int, axis_sizes: Mapping[str, int]) -> Mesh:
    """The mesh with the sizes asked for; what is then missing to ``num_ranks`` is taken by the axis
    that copies the rest.
    """
    for axis in axis_sizes:
        if axis not in mesh.names:
            raise PlanError(
                f"the plan has no mesh axis {axis!r}",
                why=f"its mesh is {mesh}",
                hint=did_you_mean(axis, mesh.names),
            )
    sized = mesh.of_axes((name, axis_sizes.get(name, size)) for name, size in mesh.axes)
    if sized.size == num_ranks:
        return sized
    # The axis to take what is missing: one of data parallelism, or the only one there is.
    free = [name for name in mesh.names if name not in axis_sizes]
    taker = next(
        (name for name in DATA_AXES if name in free),
        free[0] if len(free) == 1 and len(mesh.names) == 1 else None,
    )
    # Ranks per position of that axis.
    others = sized.size // sized.axis_size(taker) if taker else 0
    if taker is None or num_ranks % others:
        raise PlanError(
            f"the plan's mesh {mesh} is for {mesh.size} ranks, not {num_ranks}",
            why=f"the axes but {taker!r} have {others} ranks"
            if taker
            else "it is not clear which axis takes up the difference",
            hint="say the sizes of the axes, for example mesh={"
            + ", ".join(f"{n!r}: {s}" for n, s in mesh.axes)
            + "}",
        )
    return mesh.of_axes(
        (name, num_ranks // others if name == taker else size) for name, size in sized.axes
    )


def _stages(plan: Plan, mesh: Mesh) -> tuple[StagePlan, ...]:
    """The stages on their part of the new mesh: possible where the old ones are the positions along
    its ``pp`` axis.
    """
    if not plan.stages or mesh == plan.mesh:
        return plan.stages
    # A stage is the position of its ranks along ``pp``, if all of them are at one.
    positions = (
        []
        if "pp" not in plan.mesh.names
        else [_position(plan.mesh, stage) for stage in plan.stages]
    )
    if not positions or None in positions or mesh.axis_size("pp") != plan.mesh.axis_size("pp"):
        raise PlanError(
            f"the stages of the plan cannot be dealt out on mesh {mesh}",
            why="a stage keeps its operators only if it keeps its place along 'pp', and all "
            "stages have equal meshes",
            hint=f"keep the sizes of mesh {plan.mesh}, or plan anew",
        )
    # All stages of a plan with a `pp` axis have the rest of its mesh as theirs.
    inner = mesh.of_axes(axis for axis in mesh.axes if axis[0] != "pp")
    ranks = [
        tuple(rank for rank in range(mesh.size) if mesh.coords(rank)["pp"] == position)
        for position in range(mesh.axis_size("pp"))
    ]
    return tuple(
        StagePlan(stage.first_op, inner, ranks[position])
        for stage, position in zip(plan.stages, positions, strict=True)
        if position is not None
    )


def _position(mesh: Mesh, stage: StagePlan) -> int | None:
    """The place of a stage along ``pp``, if its ranks are all ranks there."""
    place = mesh.coords(stage.ranks[0])["pp"]
    ranks = tuple(rank for rank in range(mesh.size) if mesh.coords(rank)["pp"] == place)
    return place if ranks == stage.ranks else None


def _inputs(plan: Plan, graph: IRGraph, problems: list[str]) -> dict[str, Layout]:
    """The layouts of the inputs with the sizes they have now."""
    values = {value.name: value for value in graph.inputs}
    result = {}
    for name, layout in plan.inputs.items():
        value = values.get(name)
        # An input that is gone is refused later, with all other names that nothing answers to.
        if value is None or layout.shape == value.shape:
            result[name] = layout
            continue
        sized = _sized(layout, value.shape)
        if sized is None:
            problems.append(
                f"input {name} has shape {list(value.shape)} now, and the plan holds it as {layout}"
            )
        else:
            result[name] = sized
    return result


def _sized(layout: Layout, shape: tuple[Size, ...]) -> Layout | None:
    """The layout of a tensor of another shape, where the dims that changed are no products."""
    if len(shape) != len(layout.dims):
        return None
    dims = []
    for dim, old, new in zip(layout.dims, layout.shape, shape, strict=True):
        if old != new and (len(dim) > 1 or len(dim[0].segments) > 1):
            return None
        # Axes stay on the dim whatever its size: the first ranks get one more where it does not
        # divide.
        dims.append(dim if old == new else (Atom((new,), dim[0].axes),))
    return replace(layout, dims=tuple(dims))


def _unfitting(plan: Plan, graph: IRGraph) -> list[str]:
    """What of the plan the graph does not have or cannot do, a line each."""
    ops = ops_of(graph)
    tensors: dict[str, IRValue] = {
        value.fqn: value for value in (*graph.parameters, *graph.buffers) if value.fqn
    }
    inputs = {value.name: value for value in graph.inputs}
    # Names of what is there no more.
    known = (
        ("operator", plan.strategies, ops),
        ("parameter or buffer", plan.stored, tensors),
        ("input", plan.inputs, inputs),
        ("output", plan.outputs, output_paths(graph)),
        ("parameter or value", plan.gathers, gathered_names(graph)),
    )
    problems = [
        _unknown(what, name, there)
        for what, names, there in known
        for name in names
        if name not in there
    ]
    # Strategies that the operators have, at the new sizes.
    for name, assignment in plan.strategies.items():
        if name in ops:
            problems += _refused(
                check_assignment, ops[name], assignment, _mesh_of(plan, assignment), graph.dims
            )
    # With stages, layouts are of the meshes of the stages, and lowering checks them there.
    if not plan.stages:
        for values, layouts in ((tensors, plan.stored), (inputs, plan.inputs)):
            for name, layout in layouts.items():
                if name in values:
                    problems += _refused(check_layout, name, layout, values[name], plan.mesh)
    for index, stage in enumerate(plan.stages):
        if index and stage.first_op not in ops:
            problems.append(
                f"stage {index} begins there: {_unknown('operator', stage.first_op, ops)}"
            )
    return problems


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence about an unknown name, with the nearest known one if any is near."""
    near = difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.8)
    return f"the model has no {what} {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _mesh_of(plan: Plan, assignment: Assignment) -> Mesh:
    """A mesh with the axes of an assignment: that of the stages that have them."""
    return next(
        (stage.mesh for stage in plan.stages if set(assignment) <= set(stage.mesh.names)), plan.mesh
    )


def _refused(check: Callable[..., None], *arguments: object) -> list[str]:
    """What a check says against its arguments, if anything, on one line."""
    try:
        check(*arguments)
    except PlanError as error:
        return [f"{error.what}: {error.why}" if error.why else error.what]
    return []
