"""``tensor``: tensor parallelism in one, two and three dims, for any model.

Of a linear, X [M, K] W [K, N] = Y [M, N], each rank holds and reads these pieces:

    mode   mesh       X                   W                   Y
    1d     tp         R, then S(K)@tp     S(N)@tp, then S(K)  S(N)@tp, then R
    2d     r, c       S(M)@r S(K)@c       S(K)@r S(N)@c       S(M)@r S(N)@c
    2.5d   d, r, c    S(M)@d,r S(K)@c     S(K)@r S(N)@c       S(M)@d,r S(N)@c
    3d     i, j, k    S(M)@i,j S(K)@k     S(N)@j S(K)@k,i     S(M)@i,k S(N)@j

In 2d a linear gathers X over ``c`` and W over ``r``. In 3d it gathers X over ``j`` and W over
``i``, and scatters the sums of Y over ``k``. The next linear has ``j`` and ``k`` exchanged, so that
after two of them, where a residual closes, the axes are again the first ones.

Sources: Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models";
Wang et al. 2021, "2.5-dimensional Distributed Model Training"; Bian et al. 2021, "Maximizing
Parallelism in Distributed Training for Huge Neural Networks".

No operator is named here but the products: M is the batch of the model, K and N are the dims of its
weights. What lies between two linears (norms, attention, activations, residuals, losses) is split
along the dims that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import Strategy, allowed, has_factor, layouts
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.compiler.plan.builder import PlanBuilder, PlannableGraph, classes_in
from shardwright.compiler.plan.plan import AGAIN, KEEP, Plan
from shardwright.compiler.plan.zero import cut_further
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import choose_dims
from shardwright.policies.labels import label
from shardwright.policies.memory_options import saving_memory
from shardwright.policies.pipeline_mesh import (
    PipelineOptions,
    add_stages,
    check_end2end,
    hardware_files,
)
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.product_steps import in_steps
from shardwright.policies.splits import inner_axes, split_dims, split_of
from shardwright.policies.tensor_modes import AXES, Mode, fitting_sizes
from shardwright.policies.weight_operands import PRODUCTS, Sources, weight_sources, weights_of
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TensorOptions(PipelineOptions):
    """``mode``: 1d, 2d, 2.5d or 3d. ``shape``: the sizes of its axes (``AXES``), major to minor;
    by default as square as the ranks of a stage allow. ``depth``: the size of ``d`` in 2.5d.
    ``gathers_again``: whether backward gathers a linear's input and weight again, or they are kept
    whole since the forward; by default again in 2d and 2.5d, kept in 3d. ``gather``: ``"all"`` of
    what a linear gathers at once, or in ``"steps"``, of which there are ``steps`` (default: as many
    as ranks along the longest axis); backward then gathers again, in steps as well.
    ``num_stages``: stages of a pipeline (default: 1).
    """

    mode: Mode = "1d"
    gather: Literal["all", "steps"] = "all"
    steps: int | None = None
    gathers_again: bool | None = None
    shape: tuple[int, ...] = ()
    depth: int | None = None


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The plan for ``config.plan_ngpus`` ranks: ``num_stages`` of the mode's mesh."""
    options = read_options(TensorOptions, config.pas_config, policy="tensor")
    _check_steps(options)
    num_stages = options.num_stages or 1
    if num_stages > 1:
        check_end2end("policy 'tensor'", config)
    else:
        _check_no_pipeline(options)
    if config.plan_ngpus % num_stages:
        raise ConfigError(
            f"{config.plan_ngpus} ranks do not divide into {num_stages} stages",
            hint="make plan_ngpus the number of stages times the ranks of one",
        )
    sizes = mesh_sizes(options, config.plan_ngpus // num_stages)
    if options.mode == "1d":
        inner = inner_axes(graph, sizes["tp"], config.rank_order)
        sizes = {name: axis.axis_size for name, axis in inner.items()}
    stages = {"pp": num_stages} if num_stages > 1 else {}
    builder = graph.builder(mesh={**stages, **sizes}, order=config.rank_order)
    if options.mode == "1d":
        for name, axis in inner.items():
            split_dims(builder, name, axis.classes)
    else:
        split_in_mode(builder, options.mode)
        again = options.mode != "3d" if options.gathers_again is None else options.gathers_again
        for name, choice in gathers_in_mode(graph, again=again).items():
            builder.gather(name, choice)
    plan = builder.plan("tensor")
    if num_stages > 1:
        plan = add_stages(graph, config, plan, options, num_stages)
    plan = saving_memory(graph, plan, options, config, "tensor")
    if options.gather == "steps":
        count = options.steps or max(2, *sizes.values())
        plan = in_steps(graph, plan, count, "tensor")
    return plan


def split_in_mode(builder: PlanBuilder, mode: Mode) -> None:
    """Split the model of a builder whose mesh has the axes of a mode (``AXES``), other than 1d."""
    if mode == "3d":
        _split_3d(builder)
    else:
        _split_2d(builder)


def _check_steps(options: TensorOptions) -> None:
    """Refuse what says something of steps that there are not, or contradicts them."""
    if options.gather == "all" and options.steps is not None:
        raise ConfigError(
            f"option 'steps' is {options.steps}, and everything is gathered at once",
            hint="add gather='steps', or leave it out",
        )
    if options.gather == "all":
        return
    if options.mode == "1d":
        raise ConfigError(
            "mode '1d' gathers nothing in steps",
            why="its linears read whole activations",
            hint="take mode '2d', '2.5d' or '3d', or leave out gather",
        )
    if options.gathers_again is False:
        raise ConfigError(
            "gathers_again=False contradicts gather='steps'",
            why="what is gathered piece by piece is never whole, so nothing can be kept",
            hint="leave one of the two out",
        )
    if options.steps is not None and options.steps < 2:
        raise ConfigError(f"there are 2 steps or more, not {options.steps}")


def _check_no_pipeline(options: TensorOptions) -> None:
    """Refuse what says something of a pipeline that is not there."""
    for name in ("num_microbatches", "schedule", "chunks", "stage_starts", "actions"):
        given = getattr(options, name)
        if given != getattr(TensorOptions, name):
            raise ConfigError(
                f"option {name!r} of policy 'tensor' says something of a pipeline",
                why=f"it is {given!r}, and there is one stage",
                hint="give num_stages, or leave it out",
            )


def mesh_sizes(options: TensorOptions, num_ranks: int) -> dict[str, int]:
    """The mesh of a stage of ``num_ranks`` ranks.

    Raises :class:`ConfigError` for a shape that is not of these ranks, and for ranks that are no
    square (2d), no square times the depth (2.5d) or no cube (3d), where no shape is given.
    """
    axes = AXES[options.mode]
    if options.depth is not None and options.mode != "2.5d":
        raise ConfigError(
            f"mode {options.mode!r} has no depth", hint="leave depth out, or take mode '2.5d'"
        )
    shape = options.shape or _square(options, num_ranks)
    if len(shape) != len(axes) or math.prod(shape) != num_ranks or min(shape) < 1:
        raise ConfigError(
            f"shape {list(shape)} is none of mode {options.mode!r} on {num_ranks} ranks",
            why=f"its axes are {', '.join(axes)}, and the product of their sizes is the number of "
            "ranks of a stage",
            hint=f"give {len(axes)} sizes whose product is {num_ranks}",
        )
    if options.shape and options.depth not in (None, shape[0]):
        raise ConfigError(
            f"depth {options.depth} contradicts shape {list(shape)}",
            why="the first size of a 2.5d shape is its depth",
            hint="leave one of the two out",
        )
    return dict(zip(axes, shape, strict=True))


def _square(options: TensorOptions, num_ranks: int) -> tuple[int, ...]:
    """The shape of a mode that is as long along each axis as along the others."""
    if options.mode == "1d":
        return (num_ranks,)
    if options.mode == "3d":
        edge = round(num_ranks ** (1 / 3))
        shape: tuple[int, ...] = (edge, edge, edge)
    else:
        depth = () if options.mode == "2d" else (options.depth or 1,)
        edge = math.isqrt(num_ranks // math.prod(depth))
        shape = (*depth, edge, edge)
    if options.mode == "2.5d" and options.depth is None:
        raise ConfigError(
            "mode '2.5d' needs its depth",
            hint="give depth, with size = depth x q x q, or shape=[depth, q, q]",
        )
    if math.prod(shape) != num_ranks:
        rule = {"2d": "q x q", "2.5d": f"{options.depth} x q x q", "3d": "l x l x l"}[options.mode]
        raise ConfigError(
            f"{num_ranks} ranks are not {rule}, as mode {options.mode!r} wants them",
            hint=f"{fitting_sizes(options.mode, options.depth)}; or give the sizes of a rectangle: "
            f"shape={_rectangle(options, num_ranks)}",
        )
    return shape


def _rectangle(options: TensorOptions, num_ranks: int) -> list[int]:
    """The sizes nearest to a square, for messages."""
    count, left, found = len(AXES[options.mode]), num_ranks, []
    for remaining in range(count, 1, -1):
        edge = max(
            size for size in range(1, round(left ** (1 / remaining)) + 1) if left % size == 0
        )
        found.append(edge)
        left //= edge
    return [*found, left]


# 2d and 2.5d


def _split_2d(builder: PlanBuilder) -> None:
    """Split the batch over ``d`` and ``r``; over ``c`` the outputs of every linear, and what they
    become. Store each weight cut over ``c`` and ``r``.
    """
    rows = [axis for axis in builder.mesh.names if axis in ("d", "r")]
    for axis in rows:
        split_dims(builder, axis, batch_classes(builder.graph))
    for body in builder.graph.bodies:
        columns = _column_classes(builder, body, builder.mesh.axis_size("c"))
        sources = weight_sources(body)
        splits: dict[str, Strategy] = {}
        for op in body.ops:
            weights = weights_of(op, sources) if op.target in PRODUCTS else []
            if not weights:
                split = split_of(op, body, columns, _size(builder, "c"), builder.pieces(op))
            else:
                split = _split_product(builder, op, body, "c", columns, weights)
            if split is not None:
                splits[op.name] = split
        _add(builder, body, "c", splits)
    _store_weights(builder, {"r"})


def _split_product(
    builder: PlanBuilder,
    op: IROp,
    body: IRGraph,
    axis: str,
    columns: Set[int],
    weights: Sequence[int],
) -> Strategy | None:
    """The strategy that splits the outputs of a product with weights: the rows of a vocabulary, or
    the columns of the result.
    """
    assert op.rule is not None and body.dims is not None
    found = []
    for factor in op.rule.factors:
        index = body.dims.factors.get((op.name, factor.name))
        in_weight = any(has_factor(op.rule.operands[i], factor.name) for i in weights)
        if index not in columns or not in_weight or not _can(builder, op, axis, factor.name):
            continue
        in_result = has_factor(op.rule.results[0], factor.name)
        is_rows = op.target == "embedding" and not in_result
        # Rows of a table of positions are few, and everybody looks them up.
        if is_rows and index not in choose_dims(builder.graph, _size(builder, axis)):
            continue
        found.append((is_rows, in_result, -op.rule.factors.index(factor), factor.name))
    if not found or not max(found)[0] and not max(found)[1]:
        return None
    return f"split:{max(found)[-1]}"


# 3d


def _split_3d(builder: PlanBuilder) -> None:
    """Split the batch over ``i``, then each operator by where it lies: before a first linear rows
    over ``j`` and columns over ``k``, before a second one the other way round. Store each weight
    cut over all three.
    """
    batch = batch_classes(builder.graph)
    split_dims(builder, "i", batch)
    for body in builder.graph.bodies:
        rows = classes_in(body, builder.graph, batch)
        splits: dict[str, dict[str, Strategy]] = {"j": {}, "k": {}}
        columns = {axis: _column_classes(builder, body, _size(builder, axis)) for axis in splits}
        sources = weight_sources(body)
        sides = _sides(builder, body, sources)
        for op in body.ops:
            # After a linear, rows and columns have changed places, so the next one finds its input
            # as the last one left it, without moving anything (Bian et al., "Maximizing Parallelism
            # in Distributed Training for Huge Neural Networks", 2021).
            row_axis, column_axis = ("j", "k") if sides[op.name] == 0 else ("k", "j")
            weights = weights_of(op, sources) if op.target in PRODUCTS else []
            if weights and not _has_chosen_rows(op):
                if op.target == "embedding":
                    # Rows of a vocabulary lie as the head has them, columns as the next linear.
                    found = _split_table(builder, op, body, row_axis, column_axis, columns, weights)
                else:
                    found = _split_linear(
                        builder, op, body, row_axis, column_axis, columns, weights
                    )
                for axis, split in found.items():
                    splits[axis][op.name] = split
                    builder.strategy(op, axis, split)
                continue
            for axis, classes in ((row_axis, rows), (column_axis, columns[column_axis])):
                if weights and axis == column_axis:
                    chosen = _split_product(builder, op, body, axis, columns[axis], weights)
                else:
                    chosen = split_of(op, body, classes, _size(builder, axis), builder.pieces(op))
                if chosen is not None:
                    splits[axis][op.name] = chosen
                    builder.strategy(op, axis, chosen)
        for axis, made in splits.items():
            _add(builder, body, axis, made)
    _store_weights(builder, {"i", "j", "k"})


def _sides(builder: PlanBuilder, body: IRGraph, sources: Sources) -> dict[str, int]:
    """The side of an exchange of ``j`` and ``k`` on which each operator lies: 0 or 1.

    A linear is on the side of its input, and its result on the other one. Where values of both
    sides meet, as in a residual around an odd number of linears, the operator takes the side of
    its largest operand; the others are converted, which a note says.
    """
    assert body.dims is not None
    rows = classes_in(body, builder.graph, batch_classes(builder.graph))
    side_of: dict[str, int] = {}
    found: dict[str, int] = {}
    for op in body.ops:
        weights = weights_of(op, sources) if op.target in PRODUCTS else []
        known = [
            (_elements(v), side_of[v.name])
            for i, v in enumerate(op.operands)
            if v.name in side_of and i not in weights
        ]
        # The larger operand decides, as converting the smaller one sends less.
        side = max(known, key=lambda item: item[0])[1] if known else 0
        if len({s for size, s in known if 2 * size > max(known)[0]}) > 1:
            builder.note(
                op,
                "k",
                "an odd number of linears lies between its operands; one of them is converted, "
                "from rows over k and columns over j or the other way round",
            )
        found[op.name] = side
        is_linear = bool(weights) and op.target != "embedding" and not _has_chosen_rows(op)
        if known or weights:
            for result in op.results:
                # What has no rows, such as biases of positions, is cut the same on both sides.
                classes = {index for dim in body.dims.values[result.name] for index in dim}
                if result.dtype.is_floating_point and classes & rows:
                    side_of[result.name] = 1 - side if is_linear else side
    return found


def _split_linear(
    builder: PlanBuilder,
    op: IROp,
    body: IRGraph,
    n_axis: str,
    k_axis: str,
    columns: Mapping[str, Set[int]],
    weights: Sequence[int],
) -> dict[str, Strategy]:
    """The strategies of a linear: its outputs over one axis, its summed dim over the other one."""
    assert op.rule is not None and body.dims is not None
    found: dict[str, Strategy] = {}
    # ``[M, K] x [K, N]``: N is in the result, K is summed.
    for axis, in_result in ((n_axis, True), (k_axis, False)):
        for factor in op.rule.factors:
            if (
                body.dims.factors.get((op.name, factor.name)) in columns[axis]
                and any(has_factor(op.rule.operands[i], factor.name) for i in weights)
                and has_factor(op.rule.results[0], factor.name) is in_result
                and _can(builder, op, axis, factor.name)
            ):
                found[axis] = f"split:{factor.name}"
                break
    return found


def _split_table(
    builder: PlanBuilder,
    op: IROp,
    body: IRGraph,
    row_axis: str,
    column_axis: str,
    columns: Mapping[str, Set[int]],
    weights: Sequence[int],
) -> dict[str, Strategy]:
    """The strategies of a lookup: the rows of a vocabulary over one axis, columns over the other
    one.
    """
    assert op.rule is not None and body.dims is not None
    found: dict[str, Strategy] = {}
    vocabularies = choose_dims(builder.graph, _size(builder, row_axis))
    for factor in op.rule.factors:
        index = body.dims.factors.get((op.name, factor.name))
        in_result = has_factor(op.rule.results[0], factor.name)
        # The columns of a table are in the result; its rows, the vocabulary, are looked up.
        axis = column_axis if in_result else row_axis
        if index not in columns[axis] or not _can(builder, op, axis, factor.name):
            continue
        if not in_result and index not in vocabularies:
            continue
        in_weight = any(has_factor(op.rule.operands[i], factor.name) for i in weights)
        if in_weight and axis not in found:
            found[axis] = f"split:{factor.name}"
    return found


# Both


def _column_classes(builder: PlanBuilder, body: IRGraph, num_pieces: int) -> set[int]:
    """The dim classes that columns may be: of each dim of a weight one class. Where a dim is a
    product, such as heads times their width, it is the one that tensor parallelism in one dim
    would choose.
    """
    graph = builder.graph
    assert graph.dims is not None
    chosen, found = choose_dims(graph, num_pieces), set[int]()
    batch, sources = batch_classes(graph), weight_sources(graph)
    for op in graph.ops:
        if op.target not in PRODUCTS:
            continue
        for i in weights_of(op, sources):
            if op.operands[i].ndim < 2:
                continue
            for classes in graph.dims.values[op.operands[i].name]:
                picked = [index for index in classes if index in chosen] or (
                    list(classes) if len(classes) == 1 else []
                )
                found |= set(picked)
    # Experts have uneven rows: policy ``ep`` splits them.
    experts = {dim.index for dim in graph.dims.named(EXPERTS)}
    return classes_in(body, graph, found - batch - experts)


def _add(builder: PlanBuilder, body: IRGraph, axis: str, splits: Mapping[str, Strategy]) -> None:
    """Add what an axis splits, and what all other operators do along it."""
    for name, strategy in (label(body, splits, _size(builder, axis)) | dict(splits)).items():
        if strategy != "R":
            builder.strategy(name, axis, strategy)


def _store_weights(builder: PlanBuilder, further: Set[str]) -> None:
    """Store each weight as its product reads it, and of the axes ``further`` cut over those along
    which it is gathered.
    """
    graph, mesh = builder.graph, builder.mesh
    sources, stored = weight_sources(graph), set[str]()
    for op in graph.ops:
        if op.target not in PRODUCTS:
            continue
        for i in weights_of(op, sources):
            value = op.operands[i]
            if value.kind is not ValueKind.PARAMETER or value.ndim < 2 or value.name in stored:
                continue
            assert op.rule is not None and value.fqn is not None
            assignment = builder.plan().assignment(op.name)
            # A weight that two products read is stored for the first of them.
            used = layouts(op.rule, assignment, mesh)[0][i]
            # Where it is G, all ranks hold all of it: there it can be cut further.
            axes = [axis for axis in mesh.names if axis in further and used.placement(axis) == "G"]
            kept = tuple(axis for axis in used.grad_partial if axis not in axes)
            layout = replace(used, partial=(), grad_partial=kept)
            builder.store(value.fqn, cut_further(layout, axes, mesh) if axes else layout)
            stored.add(value.name)


def gathers_in_mode(graph: IRGraph, *, again: bool) -> dict[str, str]:
    """What is gathered again in backward, of the input and the weight of every linear, or kept
    since forward: only choices that differ from the default.
    """
    found: dict[str, str] = {}
    sources = weight_sources(graph)
    for op in graph.ops:
        if op.target not in PRODUCTS or op.target == "embedding":
            continue
        weights = weights_of(op, sources)
        for i, value in enumerate(op.operands):
            if not weights or not value.dtype.is_floating_point:
                continue
            is_parameter = value.kind is ValueKind.PARAMETER
            if not again and is_parameter and value.ndim > 1:
                assert value.fqn is not None
                found[value.fqn] = KEEP
            if again and not is_parameter and i not in weights:
                found[value.name] = AGAIN
    return found


def _has_chosen_rows(op: IROp) -> bool:
    """Whether an operator works on rows that a router chose. They stay on the ranks of their
    tokens, as only dispatch and combine move them.
    """
    assert op.rule is not None
    return op.rule.densities is not None


def _can(builder: PlanBuilder, op: IROp, axis: str, factor: str) -> bool:
    assert op.rule is not None
    assignment = {**builder.plan().assignment(op.name), axis: f"split:{factor}"}
    return allowed(op.rule, assignment, builder.mesh)


def _size(builder: PlanBuilder, axis: str) -> int:
    return builder.mesh.axis_size(axis)


def _elements(value: IRValue) -> float:
    return math.prod(size if isinstance(size, int) else 1 for size in value.shape)


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(TensorOptions, config.pas_config, policy="tensor").hardware)


POLICY = Policy("tensor", apply, TensorOptions, built_in=True, files=files)
