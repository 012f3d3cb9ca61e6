"""The choices of an operator: every way it may be computed on a mesh, with the layouts and the time
of each.

Along one axis an operator has the strategies of its rule
(``strategies``); on a mesh it may follow any combination of
one per axis, several axes on one dim included. Assignments that ask for the same layouts and give
the same ones are one choice, of which the fastest stays. Layouts are kept in canonical form and by
number, as the planner compares them all the time. Operators that differ in names only share one
choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwright.compiler.cost.local_calls import signature
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import OpRule, TensorRefs
from shardwright.compiler.ops.strategy import (
    Assignment,
    allowed,
    cut_factor,
    factor_axes,
    placements,
    strategies,
    tensor_layout,
)
from shardwright.compiler.plan.conversion import canonical
from shardwright.runtime.layout import Density, Layout, Mesh

Ids = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


MAX_MIXED = 2
"""The most different strategies that an operator or a stored parameter follows at once on meshes of
more axes than this. All plans of coarser meshes are among them: those of 2 x 2 x 2 have all that 4
x 2 and 2 x 4 have.
"""


def too_mixed(combination: Sequence[object]) -> bool:
    """Whether a combination of one strategy per axis is left out of the space."""
    return len(combination) > MAX_MIXED and len(set(combination)) > MAX_MIXED


@dataclass
class LayoutTable:
    """Layouts in canonical form by number, in the order they were met."""

    layouts: list[Layout] = field(default_factory=list)
    _ids: dict[Layout, int] = field(default_factory=dict)

    def id(self, layout: Layout) -> int:
        found = self._ids.get(layout)
        if found is None:
            found = self._ids[layout] = len(self.layouts)
            self.layouts.append(layout)
        return found

    def __getitem__(self, index: int) -> Layout:
        return self.layouts[index]


@dataclass(frozen=True, eq=False)
class OpChoices:
    """The choices of an operator. ``operands`` / ``results``: layout numbers, [choices, tensors];
    times: seconds, [choices].

    ``num_assignments`` counts the assignments that the choices stand for.
    """

    assignments: tuple[Assignment, ...]
    operands: Ids
    results: Ids
    forward_s: Seconds
    backward_s: Seconds
    num_assignments: int

    def __len__(self) -> int:
        return len(self.assignments)


Allowed = Mapping[str, frozenset[str]]
"""Axis to the strategies that constraints leave an operator there; axes left out are free."""


@dataclass(frozen=True, eq=False)
class _Ways:
    """The ways to compute an operator on a mesh, wherever it lies: by the layouts of operands and
    results, the assignments that have these, each with what it cuts.
    """

    by_layouts: Mapping[
        tuple[tuple[int, ...], tuple[int, ...]], Sequence[tuple[Assignment, Hashable]]
    ]
    num_assignments: int


class AllOpChoices:
    """The op_choices of the operators of one graph on one mesh. ``ranks``: the global ranks the
    mesh lies on, in its order. ``like``: those of the mesh on other ranks, which differ in times
    alone.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        hardware: Hardware,
        times: OperatorTimes | None,
        table: LayoutTable,
        like: AllOpChoices | None = None,
    ) -> None:
        self.mesh, self.ranks, self.hardware, self.times, self.table = (
            mesh,
            tuple(ranks),
            hardware,
            times,
            table,
        )
        self._choices: dict[Hashable, OpChoices] = {}
        self._ways: dict[Hashable, _Ways] = {} if like is None else like._ways
        self._tensors: dict[Hashable, int] = {} if like is None else like._tensors

    def of(self, op: IROp, only: Allowed | None = None) -> OpChoices:
        """The choices of an operator. Its result is one object for all operators alike, so that it
        can be a key.
        """
        key = (signature(op), tuple(sorted((only or {}).items(), key=lambda item: item[0])))
        found = self._choices.get(key)
        if found is None:
            if key not in self._ways:
                self._ways[key] = self._enumerate(op, only or {})
            found = self._choices[key] = self._timed(op, self._ways[key])
        return found

    def _timed(self, op: IROp, ways: _Ways) -> OpChoices:
        """The choices with their times: assignments with equal layouts on both sides are one, of
        which the faster one stays.
        """
        # Times by what is cut: strategies with the same cuts take the same.
        times: dict[Hashable, OpTime] = {}
        best: list[tuple[Assignment, OpTime]] = []
        for alike in ways.by_layouts.values():
            for assignment, cut in alike:
                if cut not in times:
                    times[cut] = op_time(
                        op, assignment, self.mesh, self.hardware, self.times, ranks=self.ranks
                    )
            assignment, cut = min(alike, key=lambda way: (times[way[1]].total_s, len(way[0])))
            best.append((assignment, times[cut]))
        # Columns of a table: ``operands`` and ``results`` are ``[choices, tensors]`` of layout
        # numbers.
        operands, results = (
            np.array([pair[side] for pair in ways.by_layouts], dtype=np.int64).reshape(
                len(best), len(values)
            )
            for side, values in enumerate((op.operands, op.results))
        )
        return OpChoices(
            tuple(assignment for assignment, _ in best),
            operands,
            results,
            np.array([time.forward_s for _, time in best]),
            np.array([time.backward_s for _, time in best]),
            ways.num_assignments,
        )

    def _enumerate(self, op: IROp, only: Allowed) -> _Ways:
        assert op.rule is not None
        rule, mesh = op.rule, self.mesh
        differentiable = any(value.requires_grad for value in (*op.operands, *op.results))
        # Without gradients G is R.
        every = [s for s in strategies(rule) if differentiable or s != "G"]
        per_axis = [
            [s for s in every if axis not in only or s in only[axis]] for axis in mesh.names
        ]
        letters = {strategy: placements(rule, strategy) for strategy in every}
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Assignment, Hashable]]] = {}
        count = 0
        # A strategy for each axis, in all combinations.
        for combination in itertools.product(*per_axis):
            if not only and too_mixed(combination):
                continue
            assignment = {
                axis: s for axis, s in zip(mesh.names, combination, strict=True) if s != "R"
            }
            if not allowed(rule, assignment, mesh):
                continue
            count += 1
            operands, results = (
                self._layouts(
                    values, rule, combination, [letters[s][side] for s in combination], side
                )
                for side, values in enumerate((op.operands, op.results))
            )
            cut = tuple(tuple(factor_axes(assignment, mesh, side).items()) for side in (0, 1))
            found.setdefault((operands, results), []).append((assignment, cut))
        return _Ways(found, count)

    def _layouts(
        self,
        values: Sequence[IRValue],
        rule: OpRule,
        combination: Sequence[str],
        letters: Sequence[Sequence[str]],
        side: int,
    ) -> tuple[int, ...]:
        """The numbers of the layouts of the operands (``side`` 0) or results (1), whose placement
        letters are given per axis.
        """
        densities = rule.densities[side] if rule.densities else (None,) * len(values)
        refs_of = (rule.operands, rule.results)[side]
        numbers = []
        for i, (value, refs) in enumerate(zip(values, refs_of, strict=True)):
            # Along each axis: the letter, and the factor that it cuts if the letter is S.
            placed = [
                (letter[i], cut_factor(rule, strategy, side, i))
                for letter, strategy in zip(letters, combination, strict=True)
            ]
            numbers.append(self.tensor(value, refs, rule, placed, densities[i]))
        return tuple(numbers)

    def tensor(
        self,
        value: IRValue,
        refs: TensorRefs,
        rule: OpRule,
        placed: Sequence[tuple[str, str | None]],
        density: Density | None = None,
    ) -> int:
        """The number of a layout: per axis a letter, and for S the factor that is cut."""
        words = tuple((letter, factor if letter == "S" else None) for letter, factor in placed)
        # The key says all that the layout depends on: many operators ask for the same.
        names = {ref.factor for dim in refs for ref in dim}
        own = tuple(f for f in rule.factors if f.name in names)
        key = (refs, words, value.requires_grad, own, density)
        found = self._tensors.get(key)
        if found is None:
            axes = self.mesh.names
            factors = {axis: factor or "" for axis, (_, factor) in zip(axes, placed, strict=True)}
            placement = {axis: letter for axis, (letter, _) in zip(axes, placed, strict=True)}
            layout = tensor_layout(rule, refs, factors, placement, density)
            found = self._tensors[key] = self.table.id(
                canonical(layout, self.mesh, differentiable=value.requires_grad)
            )
        return found


def used(ids: Iterable[int]) -> tuple[int, ...]:
    """Distinct numbers in ascending order."""
    return tuple(sorted(set(map(int, ids))))
