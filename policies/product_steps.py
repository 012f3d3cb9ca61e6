"""Products whose operands are gathered in steps, one piece of each at a time (SUMMA).

On ``r=2 x c=2`` a rank has columns of X and rows of W, and a product gathers both. At once that is
all of ``[M/r, K]`` and ``[K, N/c]``. In 8 steps it is an eighth of K at a time, and the next eighth
travels meanwhile, so that two of them are there:

    X  [M/r, 2/c * K/2]   piece [M/r, 2/c * K/16]   gathered [M/r, K/8]
    W  [2/r * K/2, N/c]   piece [2/r * K/16, N/c]   gathered [K/8, N/c]

Each piece has a part of every block, and so of every rank. It is a loop over pieces
(:class:`~shardwright.compiler.plan.plan.PlannedLoop`) that cuts the dim which a product sums over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import DimRefs, FactorKind
from shardwright.compiler.ops.strategy import layouts
from shardwright.compiler.passes.loops import before_gathers, in_blocks
from shardwright.compiler.plan.plan import Note, Plan, PlannedLoop
from shardwright.policies.weight_operands import PRODUCTS, weight_sources, weights_of
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout

STEPS = "steps"
"""The name of the loop."""


def in_steps(graph: IRGraph, plan: Plan, count: int, policy: str) -> Plan:
    """The plan with every product in ``count`` steps that gathers an operand, along the dim that it
    sums over. Where that dim lies in other blocks than its ranks cut, the product gathers at once,
    and a note says so.

    Raises :class:`PlanError` where no product gathers, or none can in so many steps.
    """
    taken = {name for loop in plan.loops.values() for name in loop.strategies}
    held = _held(graph, plan)
    sources = weight_sources(graph)
    strategies: dict[str, str] = {}
    blocks: dict[str, int] = {}
    notes: list[Note] = []
    why = "no product with a weight gathers an operand"
    for op in graph.ops:
        if op.target not in PRODUCTS or op.target == "embedding" or op.name in taken:
            continue
        if not weights_of(op, sources) or not _gathers(op, plan, held):
            continue
        found = _step_of(op, plan, held, count)
        if isinstance(found, str):
            why = f"{op.name} ({op.target}): {found}"
            source = op.source.portable if op.source else ""
            notes.append(Note(op.name, op.module_path, source, STEPS, f"gathers at once: {found}"))
        else:
            strategies[op.name], blocks[op.name] = found
    if not strategies:
        raise PlanError(
            f"policy {policy!r} can run no product in {count} steps",
            why=why,
            hint="a smaller number of steps, or gather='all'",
        )
    loop = PlannedLoop(count, strategies, blocks)
    return replace(plan, loops={**plan.loops, STEPS: loop}, notes=(*plan.notes, *notes))


def _held(graph: IRGraph, plan: Plan) -> dict[str, Layout]:
    """How each value lies where it is made or stored. Of a tensor of which the plan says nothing
    each rank has all.
    """
    held = {value.name: Layout.whole(value.shape) for value in graph.sources}
    for value in graph.parameters:
        if value.fqn is not None and value.fqn in plan.stored:
            held[value.name] = plan.stored[value.fqn]
    held |= {v.name: plan.inputs[v.name] for v in graph.inputs if v.name in plan.inputs}
    for op in graph.ops:
        assert op.rule is not None
        made = layouts(op.rule, plan.assignment(op.name), plan.mesh)[1]
        held |= {value.name: layout for value, layout in zip(op.results, made, strict=True)}
    return held


def _summed(op: IROp) -> dict[int, tuple[int, DimRefs]]:
    """The dim that a product sums over: by operand its number, and the factors that it is."""
    assert op.rule is not None
    found = {}
    for index, tensor in enumerate(op.rule.operands):
        for number, refs in enumerate(tensor):
            kinds = {op.rule.factor(ref.factor).kind for ref in refs}
            if kinds == {FactorKind.SUMMED}:
                found[index] = number, refs
    return found


def _gathers(op: IROp, plan: Plan, held: Mapping[str, Layout]) -> bool:
    """Whether an operand lies in more pieces than the product reads."""
    assert op.rule is not None
    needed = layouts(op.rule, plan.assignment(op.name), plan.mesh)[0]
    return any(
        set(held[op.operands[index].name].cut_axes) - set(needed[index].cut_axes)
        for index in _summed(op)
    )


def _step_of(op: IROp, plan: Plan, held: Mapping[str, Layout], count: int) -> tuple[str, int] | str:
    """The strategy of a product along the loop, and in how many blocks its dim lies; or why it can
    have none.
    """
    assert op.rule is not None
    summed = _summed(op)
    forms = {refs for _, refs in summed.values()}
    if len(forms) != 1:
        return "its operands write the dim in different ways"
    *outer, last = next(iter(forms))
    blocks = 1
    if not outer:
        cuts = [held[op.operands[i].name].dim_axes(dim) for i, (dim, _) in summed.items()]
        blocks = math.lcm(*map(plan.mesh.num_ranks, cuts))
    strategy = f"split:{last.factor}"
    size = op.rule.factor(last.factor).size
    if not isinstance(size, int) or size < blocks * count:
        return f"its dim of {size} has fewer than {count} places for each of {blocks} blocks"
    try:
        refined, assignment, along = in_blocks(op, plan.assignment(op.name), strategy, blocks)
    except PlanError:
        return f"its dim of {size} does not lie in {blocks} blocks"
    loops = {**plan.loops, STEPS: PlannedLoop(count, {})}
    mesh = replace(plan, loops=loops).computing_mesh
    assert refined.rule is not None
    needed = layouts(refined.rule, {**assignment, STEPS: along}, mesh)[0]
    for index in summed:
        name = op.operands[index].name
        found = before_gathers(held[name], needed[index], STEPS, mesh, differentiable=True)
        if held[name].partial:
            return f"{name} is a sum over ranks, which is made first"
        if found is None:
            return f"{name} lies as {held[name]}, in other blocks"
    return strategy, blocks
