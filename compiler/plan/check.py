"""Refuse a plan that does not fit its graph, in words: one that was edited by hand, or made for
another model.
"""

from __future__ import annotations

import difflib
import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.identifier import is_name
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.strategy import (
    Assignment,
    allowed,
    exchange,
    factor_axes,
    is_known,
    on_both_sides,
    split_factor,
    strategies,
)
from shardwright.compiler.plan.imbalance import check_reachable
from shardwright.compiler.plan.plan import AGAIN, KEEP, Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO

NAMES_SHOWN = 5
"""The most names that an error shows, of those that contain the wrong name or are nearest to it."""
FEW = 20
"""The most names of which an error shows all."""


def check_mesh(plan: Plan, config: ComputeConfig) -> None:
    """Refuse a plan for another number of ranks, or with an axis called ``zero`` or by what is no
    name. Raises :class:`PlanError`; :class:`ConfigError` for an imbalance that its ranks cannot
    have.
    """
    if plan.mesh.size != config.plan_ngpus:
        raise PlanError(
            "the plan's mesh has another number of ranks than plan_ngpus",
            why=f"mesh {plan.mesh} has {plan.mesh.size}, plan_ngpus={config.plan_ngpus}",
            hint="make the product of the axes equal to plan_ngpus",
        )
    if plan.imbalance is not None:
        check_reachable(plan.imbalance, plan.mesh.size, "the imbalance of the plan")
    axes = dict.fromkeys(
        axis for mesh in (plan.mesh, *(stage.mesh for stage in plan.stages)) for axis in mesh.names
    )
    for axis in axes:
        # Python normalises identifiers, so two names that differ here would be one variable there.
        if not axis.isidentifier() or unicodedata.normalize("NFKC", axis) != axis:
            raise PlanError(
                f"the plan's mesh has an axis called {axis!r}",
                why="layouts and generated code write the names of axes, so they are identifiers "
                "(in the normal form NFKC)",
                hint="give the axis another name",
            )
    if ZERO in axes:
        raise PlanError(
            f"no axis of a plan's mesh is called {ZERO!r}",
            why="the axis of that name runs over units: along it ZeRO-3 stores parameters in "
            "pieces",
            hint="give the axis another name",
        )


def check_names(graph: IRGraph, plan: Plan) -> None:
    """Raise :class:`PlanError` if the plan speaks of operators, tensors, inputs or outputs that the
    graph does not have.
    """
    tensors = {value.fqn: value for value in (*graph.parameters, *graph.buffers) if value.fqn}
    inputs = {value.name: value for value in graph.inputs}
    _check_known("operator", plan.strategies, ops_of(graph))
    _check_known("parameter or buffer", plan.stored, tensors)
    _check_known("input", plan.inputs, inputs)
    _check_known("output", plan.outputs, output_paths(graph))
    check_gathers(graph, plan.gathers)
    check_loops(graph, plan)
    if plan.stages:
        return  # their layouts are of the meshes of the stages
    for fqn, layout in plan.stored.items():
        check_layout(fqn, layout, tensors[fqn], plan.mesh)
    for name, layout in plan.inputs.items():
        check_layout(name, layout, inputs[name], plan.mesh)


def check_gathers(graph: IRGraph, gathers: Mapping[str, str]) -> None:
    """Raise :class:`PlanError` for values that the graph does not have, and choices that are
    none.
    """
    _check_known("parameter or value", gathers, gathered_names(graph))
    for name, choice in gathers.items():
        if choice not in (KEEP, AGAIN):
            raise PlanError(
                f"{name!r} cannot be gathered and then {choice!r}",
                hint=f"{KEEP!r}: kept for backward, or {AGAIN!r}: gathered again there",
            )


def check_loops(graph: IRGraph, plan: Plan) -> None:
    """Raise :class:`PlanError` for loops of operators that the graph does not have, of one that is
    in two, of no number of pieces, or with the name of an axis.
    """
    seen: dict[str, str] = {}
    axes = {axis for mesh in (plan.mesh, *(s.mesh for s in plan.stages)) for axis in mesh.names}
    for name, loop in plan.loops.items():
        _check_known("operator", loop.strategies, ops_of(graph))
        if not is_name(name) or name in axes or name == ZERO:
            raise PlanError(
                f"no loop is called {name!r}",
                why=f"it is an axis of time, with a name of its own beside the axes of the mesh: "
                f"{', '.join(sorted(axes)) or 'none'}",
                hint="give it another name, an identifier such as 'loss'",
            )
        if loop.count < 2:
            raise PlanError(f"loop {name!r} has {loop.count} pieces", hint="2 or more")
        for op in loop.blocks.keys() - loop.strategies.keys():
            raise PlanError(
                f"loop {name!r} gathers the operands of {op}, which is not in it",
                hint="give it a strategy along the loop",
            )
        for op in loop.strategies:
            if op in seen:
                raise PlanError(
                    f"operator {op} is in two loops, {seen[op]!r} and {name!r}",
                    hint="give it to one of them",
                )
            seen[op] = name


def gathered_names(graph: IRGraph) -> dict[str, IRValue]:
    """The names under which a plan may speak of what is gathered: FQNs of parameters, and names of
    values.
    """
    found = {value.fqn: value for value in graph.parameters if value.fqn}
    for body in graph.bodies:
        found |= {value.name: value for value in body.inputs}
        found |= {result.name: result for op in body.ops for result in op.results}
    return found


def check_batch(graph: IRGraph, plan: Plan) -> None:
    """Raise :class:`PlanError` if the plan is for microbatches of another size than the graph was
    traced for. Sizes that may vary between calls fit.
    """
    if plan.batch is None:
        return
    values = input_paths(graph)
    _check_known("input", plan.batch.dims, values)
    for path, dim in plan.batch.dims.items():
        size = values[path].shape[dim] if dim < values[path].ndim else None
        # A symbolic size fits any number of samples.
        if size != plan.batch.samples and (size is None or isinstance(size, int)):
            has = "have others" if size is None else f"have {size}"
            raise PlanError(
                f"the plan is for microbatches of {plan.batch.samples} samples, the dummy "
                f"arguments {has}",
                why=f"input {path!r} has shape {list(values[path].shape)}, and its dim {dim} "
                "counts samples",
                hint=f"give dummy arguments of {plan.batch.samples} samples "
                "(shardwright.search_plan returns them), or search again",
            )


def check_strategies(graph: IRGraph, plan: Plan) -> None:
    """Raise :class:`PlanError` for the first operator of the graph that is given a strategy it does
    not have.
    """
    names = plan.mesh.names
    for op in ops_of(graph).values():
        assignment = plan.assignment(op.name)
        unknown = [axis for axis in assignment if axis not in names]
        if unknown:
            raise PlanError(
                f"operator {op.name} is given a strategy on axis {unknown[0]!r}, which the "
                "mesh does not have",
                why=f"mesh {plan.mesh}",
                hint=did_you_mean(unknown[0], plan.mesh.names),
            )
        check_assignment(op, assignment, plan.mesh, graph.dims)


def check_assignment(op: IROp, assignment: Assignment, mesh: Mesh, dims: ModelDims | None) -> None:
    """Raise :class:`PlanError` if an operator cannot follow its strategies, each or all together;
    with ``dims``, those of the model, what it says of sizes has their names.
    """
    assert op.rule is not None
    if allowed(op.rule, assignment, mesh):
        return
    told = ", ".join(
        f"{strategy!r} over {axis}={mesh.axis_size(axis)}" for axis, strategy in assignment.items()
    )
    # A common mistake with an answer of its own, before what holds of any.
    if op.rule.densities is not None and (within := _cut_within(op.rule, assignment, mesh)):
        raise PlanError(
            f"operator {op.name} ({op.target}) cannot follow {told}",
            where=op.place,
            why=f"the tokens that {within[0]!r} exchanges do not lie together, as {within[1]!r} "
            "cuts them further",
            hint=f"a mesh with {within[1]!r} before {within[0]!r}, or an exchange over both",
        )
    too_small = _too_small(op, op.rule, assignment, mesh, dims)
    raise PlanError(
        f"operator {op.name} ({op.target}) cannot follow {told}",
        where=op.place,
        why=too_small
        or (f"its rule is {op.rule.annotation!r}" if op.rule.annotation else "it has no rule"),
        hint="fewer ranks along these axes, or larger inputs"
        if too_small
        else f"strategies along one axis: {', '.join(strategies(op.rule))}",
    )


def _cut_within(rule: OpRule, assignment: Assignment, mesh: Mesh) -> tuple[str, str] | None:
    """An axis that exchanges tokens, and one within that splits the same ones, if there are any."""
    axes = [axis for axis in mesh.names if axis in assignment]
    for outer, inner in itertools.combinations(axes, 2):
        tokens = {f for f in exchange(assignment[outer]) or () if on_both_sides(rule, f)}
        if exchange(assignment[inner]) is None and split_factor(assignment[inner]) in tokens:
            return outer, inner
    return None


def _too_small(
    op: IROp, rule: OpRule, assignment: Assignment, mesh: Mesh, dims: ModelDims | None
) -> str | None:
    """The factors that have too few elements for the ranks that are to share them, in words, if
    that is what is wrong.
    """
    # Another mistake than a dim that is too small.
    if not all(is_known(rule, strategy) for strategy in assignment.values()):
        return None
    told = []
    for factor, axes in factor_axes(assignment, mesh).items():
        num_ranks = math.prod(map(mesh.axis_size, axes))
        if not rule.splittable(factor, num_ranks):
            dim = dims.of_factor(op.name, factor) if dims else None
            size = " + ".join(map(str, rule.factor(factor).segments))
            told.append(
                f"{factor!r}{f' ({dim.name})' if dim else ''} has {size} elements for "
                f"{num_ranks} ranks"
            )
    if not told:
        return None
    return (
        f"{', '.join(told)}, and it cannot run on a rank without any; its rule is "
        f"{rule.annotation!r}"
    )


def check_layout(name: str, layout: Layout, value: IRValue, mesh: Mesh) -> None:
    """Raise :class:`PlanError` if a tensor cannot be held so."""
    if layout.shape != value.shape:
        raise PlanError(
            f"layout {layout} does not fit {name}", why=f"its shape is {list(value.shape)}"
        )
    axes = (*layout.cut_axes, *layout.partial, *layout.grad_partial)
    unknown = [axis for axis in axes if axis not in mesh.names]
    if unknown:
        raise PlanError(
            f"layout {layout} of {name} has axis {unknown[0]!r}, which the mesh does not have",
            why=f"mesh {mesh}",
            hint=did_you_mean(unknown[0], mesh.names),
        )
    if layout.partial:
        raise PlanError(
            f"{name} cannot be held as {layout}",
            why="what a user gives or loads is whole or cut, never a summand (P)",
            hint="leave out P: a copy on every rank, or with G one whose gradients are summed",
        )


def ops_of(graph: IRGraph) -> dict[str, IROp]:
    """The operators by name, those of the evaluation body included."""
    return {op.name: op for body in graph.bodies for op in body.ops}


def input_paths(graph: IRGraph) -> dict[str, IRValue]:
    """The tensors that the module is given, by path: ``input_ids``, ``batch.mask``."""
    leaves = (leaf for name, tree in graph.signature for leaf in tree.leaves(name))
    return {path: value for path, value in leaves if isinstance(value, IRValue)}


def output_paths(graph: IRGraph) -> tuple[str, ...]:
    """The paths of the tensors that the module returns, and of every ``None``, which may be a
    tensor that is not needed; a lone tensor has the path ``""``.
    """
    leaves = (leaf for body in graph.bodies for leaf in body.output.leaves())
    return tuple(
        {path: None for path, value in leaves if value is None or isinstance(value, IRValue)}
    )


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = tuple(known)
    found = frozenset(known)  # a plan names every operator of the model
    for name in names:
        if name not in found:
            raise PlanError(f"the model has no {what} {name!r}", hint=suggestion(name, known))


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """A hint for a name that is not among ``known``: the closest one, some that it is part of, all
    where they are few, or those that are least unlike it.
    """
    known = tuple(known)
    # ``linaer`` is close to ``linear``; ``mlp`` is close to no name, and a part of many.
    close = difflib.get_close_matches(name, known, n=1)
    containing = sorted(other for other in known if name and name in other)
    if not close and containing:
        more = f" and {len(containing) - NAMES_SHOWN} more" if len(containing) > NAMES_SHOWN else ""
        return f"names that contain it: {', '.join(map(repr, containing[:NAMES_SHOWN]))}{more}"
    if close or 0 < len(known) <= FEW:
        return did_you_mean(name, known)
    nearest = difflib.get_close_matches(name, known, n=NAMES_SHOWN, cutoff=0.0)
    return (
        f"of {len(known)} names the nearest are {', '.join(map(repr, nearest))}"
        if nearest
        else None
    )
