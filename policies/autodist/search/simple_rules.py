"""The ways in which the simple policies use the axes of a mesh: which dims each axis splits.

``tp``, ``data``, ``ep``, ``cp`` and ``tensor`` split dims by rule, and ``hybrid`` several of them
at once. On two axes of two ranks, say, the first splits the batch and the second inner dims. Or
both are those of a mode of ``tensor``, or the first exchanges tokens for experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import Assignment, Strategy, factor_axes
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.axis_roles import renamed
from shardwright.policies.autodist.candidates.mesh_requests import around_attention, every_layer
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES
from shardwright.policies.autodist.cutting.model_chains import ModelChains
from shardwright.policies.autodist.stages.walk import Setting
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import Chooser
from shardwright.policies.context_axes import ContextAxis, split_context, turns_of_axes
from shardwright.policies.partition import with_regions
from shardwright.policies.sequences import Positions, sequence_classes
from shardwright.policies.splits import InsideExperts, split_by_rule, split_dims
from shardwright.policies.tensor import gathers_in_mode, split_in_mode
from shardwright.policies.tensor_modes import AXES as MODE_AXES
from shardwright.policies.tensor_modes import Mode
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

WITH_POSITIONS = "inner, and positions"
"""A rule: an axis splits inner dims, and what it would leave whole along the sequence."""

BESIDE: Mapping[str | None, str] = {
    None: "",
    "batch": " with data",
    "inner": " with tp",
    WITH_POSITIONS: " with tp (sequence_parallel)",
}
"""Which policy splits by a rule what another axis leaves to it, in titles."""

AXIS = "axis"
"""What the axis is called along which a rule is asked."""


@dataclass(frozen=True)
class Way:
    """A way to use the axes of a mesh: what they split, by operator, and the plan, whose making
    takes longer. ``whose``: in words, whose plan it is.
    """

    splits: Mapping[str, Assignment]
    plan: Callable[[], Plan]
    whose: str = "a simple policy"


@dataclass(frozen=True)
class _Dims:
    """The dim classes that an axis splits. ``inside``: what it splits of experts, if not these."""

    classes: frozenset[int]
    inside: InsideExperts | None = None


class Rules:
    """What the rules of the simple policies say of one graph, worked out once for all meshes."""

    def __init__(self, graph: PlannableGraph, config: ComputeConfig) -> None:
        self.graph, self._config = graph, config
        self._choosers: dict[int, Chooser] = {}
        self._plans_along: dict[tuple[str, int], Plan] = {}
        self._splits_along: dict[tuple[str, int], dict[str, Strategy]] = {}
        self._mode_plans: dict[tuple[Mode, tuple[int, ...]], Plan] = {}
        self._recomputing: dict[tuple[str, ...], ModelChains] = {}

    @cached_property
    def needed(self) -> PlannableGraph:
        """The graph of what programs compute."""
        return PlannableGraph.of(needed(self.graph, self._config))

    def recomputing(self, patterns: tuple[str, ...]) -> ModelChains:
        """The chains of that graph with the modules that match patterns computed again."""
        if patterns not in self._recomputing:
            self._recomputing[patterns] = ModelChains(with_regions(self.needed, patterns))
        return self._recomputing[patterns]

    @cached_property
    def every_layer(self) -> tuple[str, ...]:
        """The patterns of all layers."""
        return every_layer(self.needed)

    @cached_property
    def around_attention(self) -> tuple[str, ...]:
        """The patterns of what layers have beside attention."""
        return around_attention(self.needed)

    @property
    def counted(self) -> list[IROp]:
        """The operators whose time counts."""
        return [op for op in self._counted if op is not None]

    @cached_property
    def _counted(self) -> Sequence[IROp | None]:
        """The operators whose time counts, by place. Those that every stage makes for itself do
        not.
        """
        free = from_nothing(self.needed)
        return [None if op.name in free else op for op in self.needed.ops]

    def alone_s(self, mesh: Mesh, way: Way, setting: Setting) -> list[float]:
        """The seconds of the operators alone, by place: less than with adapters between them. What
        is not split takes as long with any other strategy.
        """
        hardware, times, ranks = setting.hardware, setting.times, setting.ranks

        def total_s(op: IROp) -> float:
            return op_time(
                op, way.splits.get(op.name, {}), mesh, hardware, times, ranks=ranks
            ).total_s

        return [0.0 if op is None else total_s(op) for op in self._counted]

    def ways(self, mesh: Mesh) -> Iterator[Way]:
        """All there are, of the whole model. A plan raises :class:`PlanError` if an axis cannot
        split what it is for.
        """
        if mesh.turns:
            yield from self._sequence_ways(mesh)
            return
        # By number of axes, what each of them splits.
        named: dict[int, list[tuple[str, ...]]] = {
            0: [()],
            1: [("batch",), ("inner",)],
            2: [("batch", "inner")],
        }
        if self._experts:
            # Over two axes, experts lie over nodes and the ranks within them.
            named[1].append((EXPERTS,))
            named[2] += [(EXPERTS, "inner"), ("batch", EXPERTS), (EXPERTS, EXPERTS)]
        for rules in named.get(len(mesh.axes), []):
            # A model without a batch has no data parallelism.
            with contextlib.suppress(PlanError):  # no batch
                yield Way(self._splits(mesh, rules), partial(self.plan, mesh, rules))
        # Two axes may both split inner dims, where these are short.
        if len(mesh.axes) == 2 and (pair := self._pair_classes(mesh)) is not None:
            yield Way(self._splits_of_pair(mesh, pair), partial(self._pair, mesh, pair))
        # An axis with a name splits what its name says, and not what a mode would have it split.
        if set(mesh.names) <= set(AXIS_NAMES):
            yield from self._mode_ways(mesh)

    def _mode_ways(self, mesh: Mesh) -> Iterator[Way]:
        """The modes of ``tensor`` that have as many axes as the mesh: what is gathered for a
        product is kept for backward, or gathered again.
        """
        for mode, axes in MODE_AXES.items():
            if mode == "1d" or len(axes) != len(mesh.axes):
                continue
            with contextlib.suppress(PlanError):  # no batch
                plan = self._mode_plan(mesh, mode)
                for words, again in (("kept", False), ("again", True)):
                    gathers = gathers_in_mode(self.graph, again=again)
                    way = partial(_same, replace(plan, gathers=gathers))
                    yield Way(plan.strategies, way, f"mode {mode} ({words})")

    def _mode_plan(self, mesh: Mesh, mode: Mode) -> Plan:
        sizes = tuple(size for _, size in mesh.axes)
        if (mode, sizes) not in self._mode_plans:
            builder = self.graph.builder(mesh=dict(zip(MODE_AXES[mode], sizes, strict=True)))
            split_in_mode(builder, mode)
            self._mode_plans[mode, sizes] = builder.plan("autodist")
        names = dict(zip(MODE_AXES[mode], mesh.names, strict=True))
        return renamed(self._mode_plans[mode, sizes], names)

    def zigzag_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        """The meshes on which an axis deals positions in zigzag, as ``cp`` lets it: where attention
        is causal.
        """
        if not 1 <= len(mesh.axes) <= 2 or not self._turns:
            return
        for axis, size in mesh.axes:
            if axis in (*AXIS_NAMES, "sp") and size > 1:
                yield Mesh(mesh.axes, ((axis, self._turns),))

    @cached_property
    def _turns(self) -> int:
        """The turns in which an axis deals positions; 0 where no attention is the better for it."""
        found = turns_of_axes(self.graph, [ContextAxis(AXIS, 2, "ring")], None, "cp")
        return found[0][1] if found else 0

    def _sequence_ways(self, mesh: Mesh) -> Iterator[Way]:
        """The axis that deals in zigzag splits the sequence, another one the batch or inner dims.
        Keys go round, or are gathered.
        """
        ((along, _),) = mesh.turns
        if not any(sequence_classes(body) for body in self.graph.bodies):
            return
        others = [axis for axis in mesh.names if axis != along]
        rules: tuple[str | None, ...] = ("batch", "inner") if others else (None,)
        if others and mesh.names[0] == along:
            # Positions that the outer axis leaves are cut further, as by sequence_parallel=True.
            rules = (*rules, WITH_POSITIONS)
        for rule in rules:
            for mode in ("ring", "gather"):
                # A model without a batch, or attention that has no ring.
                with contextlib.suppress(PlanError):
                    plan = self._sequence_plan(mesh, along, mode, rule)
                    yield Way(plan.strategies, partial(_same, plan), f"cp ({mode}){BESIDE[rule]}")

    def _sequence_plan(self, mesh: Mesh, along: str, mode: str, rule: str | None) -> Plan:
        builder = self.graph.builder(mesh=mesh)
        for axis, size in mesh.axes:
            if axis != along and rule is not None:
                alone = self._plan_along(rule, size)
                builder.strategies(axis, {op: own[AXIS] for op, own in alone.strategies.items()})
        split_context(builder, [ContextAxis(along, mesh.axis_size(along), mode)], {})
        return builder.plan("autodist")

    def plan(self, mesh: Mesh, way: Sequence[str]) -> Plan:
        """The whole model, where axes of a mesh split the batch or the inner dims. Raises
        :class:`PlanError` if one cannot.
        """
        builder, notes = self.graph.builder(mesh=dict(mesh.axes)), []
        for (axis, size), rule in zip(mesh.axes, way, strict=True):
            along = self._plan_along(rule, size)
            for op, assignment in along.strategies.items():
                builder.strategy(op, axis, assignment[AXIS])
            notes += [replace(note, axis=axis) for note in along.notes]
        return replace(builder.plan("autodist"), notes=tuple(notes))

    def _pair(self, mesh: Mesh, classes: Sequence[set[int]]) -> Plan:
        """The plan of the whole model where both axes split inner dims."""
        builder = self.graph.builder(mesh=dict(mesh.axes))
        for axis, own in zip(mesh.names, classes, strict=True):
            split_dims(builder, axis, own)
        return builder.plan("autodist")

    def _plan_along(self, rule: str, size: int) -> Plan:
        """The plan of the whole model on a mesh of one axis."""
        if (rule, size) not in self._plans_along:
            builder = self.graph.builder(mesh={AXIS: size})
            dims = self._dims(rule, size)
            positions = Positions() if rule == WITH_POSITIONS else None
            split_dims(builder, AXIS, set(dims.classes), dims.inside, positions)
            self._plans_along[rule, size] = builder.plan("autodist")
        return self._plans_along[rule, size]

    @cached_property
    def _experts(self) -> set[int]:
        """The dim classes of experts."""
        assert self.graph.dims is not None
        return {dim.index for dim in self.graph.dims.named(EXPERTS)}

    def _dims(self, rule: str, size: int) -> _Dims:
        """The dim classes that a rule splits over so many ranks."""
        if rule in ("inner", WITH_POSITIONS):
            return _Dims(frozenset(self._chooser(size).choose(size).classes))
        batch = batch_classes(self.graph)
        if rule == EXPERTS:
            # Tokens are exchanged for experts, as in policy ``ep``.
            inside = InsideExperts(self._experts, self._experts, batch)
            return _Dims(frozenset(batch), inside)
        return _Dims(frozenset(batch))

    def _pair_classes(self, mesh: Mesh) -> list[set[int]] | None:
        """The inner dim classes of both axes; ``None`` where no dim is too short for one axis."""
        chooser, outer = self._chooser(mesh.size), mesh.axes[0][1]
        return [axis.classes for axis in chooser.pair(outer)] if chooser.is_short() else None

    def _chooser(self, num_ranks: int) -> Chooser:
        if num_ranks not in self._choosers:
            self._choosers[num_ranks] = Chooser(self.graph, num_ranks)
        return self._choosers[num_ranks]

    def _splits(self, mesh: Mesh, rules: Sequence[str]) -> dict[str, dict[str, Strategy]]:
        """What axes split by these rules, each as if it were alone."""
        found: dict[str, dict[str, Strategy]] = {}
        for (axis, size), rule in zip(mesh.axes, rules, strict=True):
            if (rule, size) not in self._splits_along:
                dims = self._dims(rule, size)
                self._splits_along[rule, size] = self._split_within(dims, size, {}, Mesh(()))
            for name, strategy in self._splits_along[rule, size].items():
                found.setdefault(name, {})[axis] = strategy
        return found

    def _splits_of_pair(
        self, mesh: Mesh, pair: Sequence[set[int]]
    ) -> dict[str, dict[str, Strategy]]:
        """What two axes split that are given these classes, the second what the first has left."""
        found: dict[str, dict[str, Strategy]] = {}
        for (axis, size), own in zip(mesh.axes, pair, strict=True):
            dims = _Dims(frozenset(own))
            for name, strategy in self._split_within(dims, size, found, mesh).items():
                found.setdefault(name, {})[axis] = strategy
        return found

    def _split_within(
        self, dims: _Dims, size: int, before: Mapping[str, Assignment], mesh: Mesh
    ) -> dict[str, Strategy]:
        graph, found = self.graph, dict[str, Strategy]()
        for op in self.needed.ops:
            axes = factor_axes(before.get(op.name, {}), mesh)
            cut = {factor: math.prod(map(mesh.axis_size, names)) for factor, names in axes.items()}
            split = split_by_rule(op, graph, set(dims.classes), dims.inside, size, cut)
            if split is not None:
                found[op.name] = split
        return found


def _same(plan: Plan) -> Plan:
    return plan
