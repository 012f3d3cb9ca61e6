"""A plan under the names of transformers' ``tp_plan``, for servers that read it.

    {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise", ...}

``tp_plan`` says of linear layers and embeddings how their weights are cut over one group of ranks.
What lies between them runs on what a rank has. So a plan can be said in these names if it cuts
nothing else, over one axis, in even pieces.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import split_factor
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.runtime.errors import PlanError, format_error
from shardwright.runtime.layout import Layout

COLUMNS, ROWS = "colwise", "rowwise"
GATHERED = "colwise_gather_output"
VOCABULARY = "embedding_rowwise"

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def tp_plan_of(program: Program | PipelineProgram) -> dict[str, str]:
    """How transformers would say the plan of a program: a style for each module that is cut, with
    ``*`` for the numbers of layers that are alike.

    Warns of layers that transformers has to hold whole. Raises :class:`PlanError` for a plan that
    cannot be said so.
    """
    if isinstance(program, PipelineProgram):
        raise _cannot("it puts layers on different ranks")
    plan, graph = program.plan, program.graph
    axes = [axis for axis, size in plan.mesh.axes if size > 1]
    if len(axes) != 1:
        raise _cannot(f"its mesh is {plan.mesh}, and tp_plan knows one axis")
    (axis,) = axes
    layouts = {declared.value.name: declared.layout for declared in program.declarations}
    cut = {name for name, layout in layouts.items() if layout.cut_axes}
    styles: dict[str, str] = {}
    held_whole = _held_whole(graph, cut)
    cut -= held_whole
    for op in graph.ops:
        tables = [operand for operand in _parameters(op) if operand.name in cut]
        if op.target in ("linear", "embedding") and tables:
            styles[op.module_path] = _style(op, layouts, plan, graph, axis)
            cut -= {table.name for table in tables}
    if cut:
        names = sorted(v.fqn or v.name for d in program.declarations if (v := d.value).name in cut)
        raise _cannot(f"{names[0]} is cut, and belongs to no linear layer or embedding")
    if not styles:
        raise _cannot("it cuts no layer")
    if held_whole:
        _warn_of(sorted({op.module_path for op in graph.ops if held_whole & _names(op)}))
    return _starred(styles, graph)


def _held_whole(graph: IRGraph, cut: Collection[str]) -> set[str]:
    """The names of the parameters of linear layers whose bias is a parameter of another module, too
    (the head of BERT). transformers 5.23 cuts the one and leaves the other, and torch refuses to
    use both.
    """
    found: set[str] = set()
    for op in graph.ops:
        bias = dict(op.args).get("bias")
        if op.target == "linear" and isinstance(bias, IRValue) and bias.aliases:
            found |= _names(op) & set(cut)
    return found


def _names(op: IROp) -> set[str]:
    return {value.name for value in _parameters(op)}


def _warn_of(paths: Sequence[str]) -> None:
    warnings.warn(
        format_error(
            f"the tp_plan leaves {', '.join(paths)} whole, which the plan cuts",
            why="a bias of theirs is a parameter of two modules, of which transformers cuts one",
            hint="nothing: results are the same, with more memory on each rank",
        ),
        stacklevel=3,
    )


def _parameters(op: IROp) -> list[IRValue]:
    values = [value for _, value in op.args if isinstance(value, IRValue)]
    return [value for value in values if value.kind is ValueKind.PARAMETER]


def _weight(op: IROp) -> IRValue:
    weight = dict(op.args)["weight"]
    assert isinstance(weight, IRValue)
    return weight


def _style(op: IROp, layouts: Mapping[str, Layout], plan: Plan, graph: IRGraph, axis: str) -> str:
    """How the weight of a linear layer or an embedding is cut."""
    layout = layouts[_weight(op).name]
    dim = _cut_dim(layout, axis)
    if dim is None or (op.target == "embedding" and dim == 1):
        raise _cannot(f"the weight of {op.module_path} is held as {layout}")
    outermost = layout.dims[dim][0]
    # Cut anywhere else, a rank has several pieces of the dim: some of each of several tensors that
    # are stored as one.
    if outermost.axes != (axis,) or len(outermost.segments) != 1:
        raise _cannot(f"the weight of {op.module_path} is cut inside, as {layout}")
    if op.target == "embedding":
        return VOCABULARY
    if dim == 1:
        return ROWS
    return COLUMNS if _reaches_rows(op, layouts, plan, graph, axis) else GATHERED


def _cut_dim(layout: Layout, axis: str) -> int | None:
    return {"S(0)": 0, "S(1)": 1}.get(layout.placement(axis))


def _reaches_rows(
    start: IROp, layouts: Mapping[str, Layout], plan: Plan, graph: IRGraph, axis: str
) -> bool:
    """Whether what a layer makes is used in pieces, up to a layer that sums over them."""
    users: dict[str, list[IROp]] = defaultdict(list)
    for op in graph.ops:
        for value in op.operands:
            users[value.name].append(op)
    waiting, seen = [start], {start.name}
    while waiting:
        for result in waiting.pop().results:
            for op in users[result.name]:
                if op.name in seen or split_factor(plan.assignment(op.name).get(axis, "R")) is None:
                    continue
                if op.target == "linear":
                    return _cut_dim(layouts[_weight(op).name], axis) == 1
                seen.add(op.name)
                waiting.append(op)
    return False


def _starred(styles: dict[str, str], graph: IRGraph) -> dict[str, str]:
    """The styles with ``*`` for the numbers of layers, where all layers of a name are alike."""
    alike: dict[str, set[str | None]] = defaultdict(set)
    for path in dict.fromkeys(op.module_path for op in graph.ops):
        alike[_NUMBER.sub("*", path)].add(styles.get(path))
    found = {}
    for path, style in styles.items():
        star = _NUMBER.sub("*", path)
        found[star if alike[star] == {style} else path] = style
    return found


def _cannot(why: str) -> PlanError:
    return PlanError(
        "the plan cannot be said as transformers' tp_plan",
        why=why,
        hint="policy 'tp' alone, for a model whose layers are linear, makes one that can",
    )
