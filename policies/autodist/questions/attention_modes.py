"""Why attention over a split sequence is done as it is: the same plan with each other way, audited.

Example: along ``sp=4`` a plan cuts 4 groups of heads in the place of positions, and a step takes
48.9 ms. With keys that go round it takes 56.1 ms, in zigzag 49.3 ms, as then all ranks have the
same pairs; with gathered keys 56.3 ms. With 2 groups there are too few heads for 4 ranks: the row
says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.ops.strategy import allowed, exchange_strategy, split_factor
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.questions.explain import Choice, Request
from shardwright.policies.context_axes import MODES, ContextAxis, split_context, turns_of_axes
from shardwright.policies.sequences import (
    attends,
    heads_factor,
    heads_of,
    position_split,
    ring_of,
    sequence_classes,
)
from shardwright.policies.splits import add_strategies
from shardwright.runtime.errors import ConfigError, PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.mesh import in_turns

WORDS = {
    "ring": "ring: keys go round",
    "ulysses": "ulysses: heads are cut",
    "gather": "gather: keys are gathered",
}


def attention_modes(request: Request) -> list[Choice]:
    """The ways of attention along each axis that splits the sequence: the plan's own first, then
    the same plan with each other one, audited, or the reason why there is none. With another way
    goes all that the axis does as policy ``cp`` would have it, if that is faster. No rows if no
    axis splits a sequence.
    """
    found: list[Choice] = []
    best, finder = request.best, _Finder(request)
    assert best.cost is not None
    for axis in finder.axes():
        own = finder.own_way(axis)
        peak = best.cost.peak_bytes
        found.append(Choice(f"{axis}: {own}", best.step_s, peak, chosen=True))
        for mode in MODES[1:]:
            for turns in (0, *finder.turns(axis)) if mode != "ulysses" else (0,):
                name = finder.way(mode, turns)
                if name != own:
                    found.append(_choice(request, f"{axis}: {name}", finder, axis, mode, turns))
    return found


def _choice(
    request: Request, name: str, finder: _Finder, axis: str, mode: str, turns: int
) -> Choice:
    costs, refused = [], ""
    for make in (finder.changed, finder.as_policy):
        try:
            costs.append(request.auditor(make(axis, mode, turns)))
        except (PlanError, ConfigError) as error:
            refused = refused or error.what
    if not costs:
        return Choice(f"{name}: {refused}", math.inf)
    cost = min(costs, key=lambda found: found.step_s)
    sends = max(rank.communication_s for rank in cost.ranks)
    fits = cost.peak_bytes <= request.memory_limit_bytes
    said = f"{name}, {amount(sends, 's')} of communication"
    return Choice(said, cost.step_s, cost.peak_bytes, fits)


class _Finder:
    """Plans in which attention is done in another way."""

    def __init__(self, request: Request) -> None:
        self._graph, self._plan = request.graph, request.best.plan
        self._sequence = sequence_classes(self._graph)
        self._heads = heads_of(self._graph)
        stages = stage_of_ops(self._graph, self._plan) if self._plan.stages else {}
        self._meshes = {
            op.name: self._plan.stages[stages[op.name]].mesh if stages else self._plan.mesh
            for op in self._graph.ops
        }
        self._attention = [
            op
            for op in self._graph.ops
            if op.target in ATTENTION and attends(op, self._graph, self._sequence, self._heads)
        ]

    def axes(self) -> list[str]:
        """The axes that split the sequence around attention."""
        names = dict.fromkeys(
            axis for op in self._attention for axis, size in self._meshes[op.name].axes if size > 1
        )
        return [axis for axis in names if self._splits_sequence(axis)]

    def _splits_sequence(self, axis: str) -> bool:
        """Whether most operators that have positions, attention aside, are split along them."""
        assert self._graph.dims is not None
        factors = self._graph.dims.factors
        split, whole = 0, 0
        for op in self._graph.ops:
            assert op.rule is not None
            has = any(factors.get((op.name, f.name)) in self._sequence for f in op.rule.factors)
            if not has or op in self._attention:
                continue
            factor = split_factor(self._plan.assignment(op.name).get(axis, "R"))
            is_split = factor is not None and factors.get((op.name, factor)) in self._sequence
            split, whole = split + is_split, whole + (not is_split)
        return split > whole

    def own_way(self, axis: str) -> str:
        """What the plan does, in words."""
        ways = {self._mode(op, axis) for op in self._attention}
        turns = {self._meshes[op.name].turns_of(axis) for op in self._attention}
        names = [self.way(mode, max(turns)) for mode in MODES[1:] if mode in ways]
        return " and ".join(names) or "attention is whole"

    def _mode(self, op: IROp, axis: str) -> str | None:
        assert self._graph.dims is not None
        strategy = self._plan.assignment(op.name).get(axis, "R")
        ring, factor = ring_of(op), split_factor(strategy)
        if ring is not None and strategy == exchange_strategy(ring.pair):
            return "ring"
        found = self._graph.dims.factors.get((op.name, factor)) if factor is not None else None
        if found in self._heads:
            return "ulysses"
        return "gather" if found in self._sequence else None

    def way(self, mode: str, turns: int) -> str:
        """A mode in words."""
        in_zigzag = turns and mode != "ulysses"
        return WORDS[mode] + (f", positions in{in_turns(turns)}" if in_zigzag else "")

    def turns(self, axis: str) -> Sequence[int]:
        """The turns of zigzag in which positions would be dealt."""
        size = max(self._meshes[op.name].axis_size(axis) for op in self._attention)
        found = turns_of_axes(self._graph, [ContextAxis(axis, size, "ring")], None, "cp")
        return [turns for _, turns in found]

    def as_policy(self, axis: str, mode: str, turns: int) -> Plan:
        """The plan with all that an axis does as policy ``cp`` would have it. Raises
        :class:`PlanError` if that cannot be.
        """
        plan = self._plan
        meshes = set(self._meshes.values())
        if len(meshes) > 1:
            raise PlanError("the stages have different meshes")
        mesh = _dealing(meshes.pop(), axis, turns)
        builder = self._graph.builder(mesh=mesh)
        for other in mesh.names:
            if other != axis:
                found = {name: by.get(other, "R") for name, by in plan.strategies.items()}
                add_strategies(builder, other, found)
        split_context(builder, [ContextAxis(axis, mesh.axis_size(axis), mode)], {})
        strategies = builder.plan(plan.policy).strategies
        return replace(self._dealt(axis, turns), strategies=strategies, stored={})

    def changed(self, axis: str, mode: str, turns: int) -> Plan:
        """The plan with nothing but attention along an axis done in another way. Raises
        :class:`PlanError` if that cannot be.
        """
        plan = self._plan
        strategies = {op.name: {**plan.assignment(op.name)} for op in self._graph.ops}
        for op in self._attention:
            strategies[op.name][axis] = self._strategy(op, axis, mode)
        for op in self._graph.ops if turns else ():
            assert op.rule is not None
            # A split vocabulary or a scan needs pieces in one run, which zigzag does not give.
            mesh = _dealing(self._meshes[op.name], axis, turns)
            if not allowed(op.rule, strategies[op.name], mesh):
                size, cut = mesh.axis_size(axis), self._pieces(op, axis)
                split = position_split(op, self._graph, self._sequence, size, cut)
                strategies[op.name][axis] = split or "R"
        return replace(self._dealt(axis, turns), strategies=strategies)

    def _dealt(self, axis: str, turns: int) -> Plan:
        """The plan on meshes of which one axis deals in so many turns."""
        plan = self._plan
        stages = tuple(
            replace(stage, mesh=_dealing(stage.mesh, axis, turns)) for stage in plan.stages
        )
        mesh = plan.mesh if stages else _dealing(plan.mesh, axis, turns)
        return replace(plan, mesh=mesh, stages=stages)

    def _strategy(self, op: IROp, axis: str, mode: str) -> str:
        size = self._meshes[op.name].axis_size(axis)
        cut = self._pieces(op, axis)
        if mode == "ring":
            ring = ring_of(op)
            if ring is None:
                raise PlanError(f"{op.name} has no ring: its keys cannot travel in blocks")
            return exchange_strategy(ring.pair)
        if mode == "ulysses":
            factor = heads_factor(op, self._graph, self._heads, size, cut)
            if factor is None:
                raise PlanError(f"{op.name} has no head for each of {size} ranks")
            return f"split:{factor}"
        split = position_split(op, self._graph, self._sequence, size, cut)
        if split is None:
            raise PlanError(f"{op.name} has no positions for each of {size} ranks")
        return split

    def _pieces(self, op: IROp, axis: str) -> Mapping[str, int]:
        """The number of pieces into which the other axes cut each factor of an operator."""
        found: dict[str, int] = {}
        for other, strategy in self._plan.assignment(op.name).items():
            factor = split_factor(strategy)
            if other != axis and factor is not None:
                size = self._meshes[op.name].axis_size(other)
                found[factor] = found.get(factor, 1) * size
        return found


def _dealing(mesh: Mesh, axis: str, turns: int) -> Mesh:
    """The mesh with one axis dealing in so many turns."""
    if axis not in mesh.names:
        return mesh
    others = tuple(entry for entry in mesh.turns if entry[0] != axis)
    return Mesh(mesh.axes, (*others, (axis, turns)) if turns else others)
