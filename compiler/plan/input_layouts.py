"""The layouts in which inputs are given, where they are not whole.

A cache of keys and values that a program returns in pieces comes back as an argument of the next
call. ``ComputeConfig(inputs={"cache": "sharded"})`` says that it comes in pieces:

    cache [8, 4, 128, 64], used with heads over tp=2     -> given as [8, 4/tp, 128, 64]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.strategy import layouts
from shardwright.compiler.plan.check import input_paths
from shardwright.compiler.plan.outputs import below
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout


def input_layouts(graph: IRGraph, config: ComputeConfig, plan: Plan) -> dict[str, Layout]:
    """The layouts of inputs that are given in pieces, by name of the value: those that the plan
    names, and those that its operators read where the config asks for pieces.

    Raises :class:`PlanError` for an input that there is not, for a pipeline, and where the size of
    an input would not be known.
    """
    values = input_paths(graph)
    by_name = {value.name: value for value in values.values()}
    found = {name: _sized(layout, by_name[name]) for name, layout in plan.inputs.items()}
    for asked, mode in config.inputs.items():
        paths = below(asked, list(values))
        if not paths:
            what = f"ComputeConfig.inputs names {asked!r}, which is no tensor that forward is given"
            raise PlanError(what, hint=did_you_mean(asked, tuple(values)))
        if mode == "sharded" and plan.stages:
            raise PlanError(
                f"the input {asked!r} cannot be given in pieces",
                why="a pipeline is given whole samples, and sends its stages what they read",
                hint="leave ComputeConfig.inputs empty, or use a policy without stages",
            )
        for path in paths:
            value = values[path]
            if mode == "sharded":
                # A layout that the plan names is kept; without one, the layout in which operators
                # read it.
                found.setdefault(value.name, _as_used(graph, plan, value))
            else:
                found.pop(value.name, None)
    _check_sizes(graph, found)
    return found


def _sized(layout: Layout, value: IRValue) -> Layout:
    """A layout that was read from a file, with the graph's own sizes for names of sizes."""
    dims = []
    for dim, size in zip(layout.dims, value.shape, strict=True):
        is_named = len(dim) == 1 and dim[0].segments == (str(size),)
        dims.append((replace(dim[0], segments=(size,)),) if is_named else dim)
    return replace(layout, dims=tuple(dims))


def _as_used(graph: IRGraph, plan: Plan, value: IRValue) -> Layout:
    """The layout in which the first operator reads an input that cuts it; whole if none does."""
    for body in graph.bodies:
        for op in body.ops:
            if op.rule is None:
                continue
            reads, _ = layouts(op.rule, plan.assignment(op.name), plan.mesh)
            for operand, layout in zip(op.operands, reads, strict=True):
                if operand.name == value.name and layout.cut_axes:
                    return replace(layout, partial=(), grad_partial=())
    return Layout.whole(value.shape)


def size_sources(
    graph: IRGraph, given: Mapping[str, Layout]
) -> dict[str, tuple[IRValue, int] | None]:
    """Where the size of each dynamic dim can be read off: an input that has it whole, and its
    dim. ``given``: the layouts of inputs by name. ``None``: all inputs that have it are in pieces.
    """
    by_name = {value.name: value for value in graph.inputs}
    found: dict[str, tuple[IRValue, int] | None] = {}
    # In reverse, so that the first input that has the dim whole is the one that stays.
    for one in reversed(graph.dynamic_dims):
        layout = given.get(one.input)
        is_whole = layout is None or not layout.dim_axes(one.dim)
        if is_whole:
            found[one.symbol] = (by_name[one.input], one.dim)
        else:
            found.setdefault(one.symbol, None)
    return found


def _check_sizes(graph: IRGraph, given: Mapping[str, Layout]) -> None:
    for symbol, source in size_sources(graph, given).items():
        if source is None:
            raise PlanError(
                f"the size {symbol!r} is not known where a call begins",
                why="all inputs that have it are given in pieces",
                hint="give one of them whole, or leave that dim out of dynamic_dims",
            )
