"""Choose P, R or G for every operator that an axis does not split, so that the least is
communicated: minimum cuts.

Along one axis, some operators split a dim. All others may be computed on every rank, either with
whole gradients (R) or with summands of gradients (G); those that are linear in a partial sum may
also pass it on (P). Between neighbours the three are a ladder, P < R < G: a step up costs an
all-reduce, from P to R that of the value and from R to G that of its gradient, a step down nothing.
A value made in pieces costs a gather for R and as much again for G; a piece cut out of P costs half
an all-reduce, and its gradient, below G, as much. Such costs never prefer unlike neighbours, so
with a node for each step of the ladder the best labels of the whole graph are a minimum cut
(Ishikawa 2003, "Exact optimization for Markov random fields with convex priors").

Fewer key/value heads than ranks come out of it as G, as Megatron users know them; layer norms
between row- and column-parallel products as R; and what experts compute is weighted and summed over
the chosen ones as P, before the one all-reduce. Of equal choices R is made, so that a sum is
deferred only where less is sent for it.

One cost is of another kind: where an operator passes a partial sum on, the gradients of its other
operands (the routing weights) are summands, so that P wants these in G. The first cut charges the
all-reduce of such a gradient in any case, which is never too little; a second one finds the R and G
that are best for the sums deferred by then. So these never cost more than sums reduced at once,
though one that might have been deferred may not be. (Not pairwise, and priced as if they were: a
value that a split operator cuts along one dim and others read cut along another, and one that is
read in three or more cuts.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.rule import OpRule, RuleForm
from shardwright.compiler.ops.strategy import KNOWN, Strategy, layouts, placements
from shardwright.compiler.passes.chosen_rows import stored_shares
from shardwright.compiler.plan.conversion import canonical
from shardwright.policies.minimum_cut import HIGH, LOW, UNIT, MinimumCut
from shardwright.runtime.layout import Mesh


class _Label(NamedTuple):
    """A place on the ladder, as two nodes of the cut: ``whole`` is high from R on, ``summand`` (of
    the gradient) for G only.
    """

    whole: int
    summand: int


_LABELS = {"P": _Label(LOW, LOW), "R": _Label(HIGH, LOW), "G": _Label(HIGH, HIGH)}


def label(graph: IRGraph, splits: Mapping[str, Strategy], axis_size: int) -> dict[str, Strategy]:
    """The strategy of every operator not in ``splits``: ``R``, ``G``, or ``linear:<i>`` where it
    passes a partial sum on.

    ``splits``: operator name to ``split:<factor>``.
    """
    found = _Labelling(graph, splits, axis_size, _may_pass_on(graph, splits)).solve()
    deferred = {name: strategy for name, strategy in found.items() if strategy not in _LABELS}
    return (
        found
        if not deferred
        else deferred | _Labelling(graph, {**splits, **deferred}, axis_size).solve()
    )


def _may_pass_on(graph: IRGraph, splits: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """The operators that a partial sum may reach through linear ones, and the strategy by which
    each would pass it on: the linear set with most of such operands.
    """
    found: dict[str, Strategy] = {}
    # Values that may be partial sums, along the graph.
    partial: set[str] = set()
    for op in graph.ops:
        if op.name in splits:
            made = placements(rule_of(op), splits[op.name])[1]
            partial |= {
                value.name for value, letter in zip(op.results, made, strict=True) if letter == "P"
            }
            continue
        # By how many bytes would pass through each linear set.
        sizes = [num_bytes(value) if value.name in partial else 0.0 for value in op.operands]
        reached = [sum(sizes[i] for i in members) for members in rule_of(op).linear_sets]
        if any(reached):
            found[op.name] = f"linear:{reached.index(max(reached))}"
            partial |= {value.name for value in op.results}
    return found


@dataclass
class _Labelling:
    """A cut for the operators that have no strategy in ``fixed``. ``passing``: how those that may
    be P would be.
    """

    graph: IRGraph
    fixed: Mapping[str, Strategy]
    axis_size: int
    passing: Mapping[str, Strategy] = field(default_factory=dict)
    cut: MinimumCut = field(default_factory=MinimumCut)
    labels: dict[str, _Label] = field(default_factory=dict)

    @cached_property
    def stored(self) -> Mapping[str, float]:
        """The share of its rows that is stored, of values of which not all are."""
        return stored_shares(self.graph)

    @cached_property
    def outputs(self) -> frozenset[str]:
        """The names of the values that the graph returns."""
        return frozenset(value.name for value in self.graph.outputs)

    def solve(self) -> dict[str, Strategy]:
        """The strategies of these operators in the cheapest labelling."""
        for op in self.graph.ops:
            if op.name not in self.fixed:
                self.labels[op.name] = self._label(op)
        uses, producers = self.graph.uses(), self.graph.producers()
        # Every value has a price where its maker and its readers differ.
        for value in (
            *self.graph.sources,
            *(result for op in self.graph.ops for result in op.results),
        ):
            self._price(value, producers.get(value.name), uses.get(value.name, []))
        # A cut of least cost: the labels on the high side.
        high = self.cut.solve()

        def strategy(name: str, label: _Label) -> Strategy:
            if label.whole not in high:
                return self.passing[name]
            return "G" if label.summand in high else "R"

        return {name: strategy(name, label) for name, label in self.labels.items()}

    def _label(self, op: IROp) -> _Label:
        """The label of an operator: nodes where it has a choice."""
        differentiable = any(value.takes_gradient for value in (*op.operands, *op.results))
        label = _Label(
            whole=self.cut.node() if op.name in self.passing else HIGH,
            summand=self.cut.node() if differentiable and rule_of(op).grad_linear else LOW,
        )
        self.cut.forbid(label.whole, label.summand)
        self.cut.pay(LOW, label.summand, 1 / UNIT)  # a tie goes to R
        return label

    def _price(
        self, value: IRValue, producer: tuple[IROp, int] | None, uses: Sequence[tuple[IROp, int]]
    ) -> None:
        """The costs between what makes a value and what reads it. ``wanted`` is the highest label
        that a reader asks for.
        """
        stored = self.stored.get(value.name, 1.0) * num_bytes(value)
        moved = stored * (self.axis_size - 1) / self.axis_size
        asked = [self._asked(op, position) for op, position in uses]
        pieces = {form for form in asked if isinstance(form, str)}
        labels = [form for form in asked if not isinstance(form, str)]
        if value.name in self.outputs:
            labels.append(_LABELS["R"])
        if value.kind is ValueKind.PARAMETER and pieces and not labels:
            return  # stored as its pieces
        wanted = _Label(self.cut.node(), self.cut.node())
        for label in labels:
            self.cut.forbid(wanted.whole, label.whole)
            self.cut.forbid(wanted.summand, label.summand)
        made = self._made(value, producer, moved)
        # In pieces: gathered, and for G the gradient is reduced as it is scattered.
        if made is None:
            made, cut_out, all_reduce = _LABELS["P"], 0.0, moved
        else:
            # A piece is scattered as it is reduced, and its gradient gathered; what is all-reduced
            # anyway is cut for nothing.
            cut_out = min(len(pieces), 2) * moved
            all_reduce = 2 * moved - cut_out
        for below, above in list(zip(made, wanted, strict=True))[
            : 2 if value.takes_gradient else 1
        ]:
            self.cut.pay(below, above, all_reduce)
            self.cut.pay(below, HIGH, cut_out)
        if value.takes_gradient:
            self._charge(
                [op for op, position in uses if self._is_fixed_in(op, position)], 2 * moved
            )

    def _charge(self, ops: Sequence[IROp], cost: float) -> None:
        """Pay ``cost`` once if any of the operators is P."""
        if ops:
            none = self.cut.node()
            for op in ops:
                self.cut.forbid(self.labels[op.name].whole, none)
            self.cut.pay(none, HIGH, cost)

    def _is_fixed_in(self, op: IROp, position: int) -> bool:
        """Whether an operator that may be P is linear in others only than this operand: its
        gradient would be a summand.
        """
        strategy = self.passing.get(op.name)
        return strategy is not None and placements(rule_of(op), strategy)[0][position] != "P"

    def _asked(self, op: IROp, position: int) -> _Label | str:
        """The label an operator wants an operand with, or, in words, how it wants it cut."""
        if op.name in self.labels:
            label = self.labels[op.name]
            return label._replace(whole=HIGH) if self._is_fixed_in(op, position) else label
        strategy = self.fixed[op.name]
        letter = placements(rule_of(op), strategy)[0][position]
        return piece(op, position, strategy, self.axis_size) if letter == "S" else _LABELS[letter]

    def _made(
        self, value: IRValue, producer: tuple[IROp, int] | None, moved: float
    ) -> _Label | None:
        """The label a value is made with; ``None``: in pieces."""
        if producer is not None:
            op, index = producer
            return self.labels.get(op.name) or _LABELS.get(
                placements(rule_of(op), self.fixed[op.name])[1][index]
            )
        if value.kind is not ValueKind.PARAMETER or not value.takes_gradient:
            return _LABELS["R"]
        stored = _Label(HIGH, self.cut.node())
        # The reducer sums a G parameter's gradient, in buckets.
        self.cut.pay(LOW, stored.summand, 1.98 * moved)
        return stored


def rule_of(op: IROp) -> OpRule:
    """The rule of an operator, which it has by now."""
    assert op.rule is not None, f"{op.name} has no rule"
    return op.rule


def num_bytes(value: IRValue) -> float:
    """The bytes of a whole value; of dynamic sizes, an estimate."""
    return _num_bytes(value.shape, value.dtype)


@lru_cache(maxsize=KNOWN)
def _num_bytes(shape: tuple[Size, ...], dtype: torch.dtype) -> float:
    return estimate(product(shape)) * dtype.itemsize


def piece(op: IROp, position: int, strategy: Strategy, axis_size: int) -> str:
    """How a split operator wants one of its operands cut."""
    return _pieces(rule_of(op).form, strategy, axis_size)[0][position]


def result_piece(op: IROp, index: int, strategy: Strategy, axis_size: int) -> str:
    """How a split operator makes one of its results."""
    return _pieces(rule_of(op).form, strategy, axis_size)[1][index]


@lru_cache(maxsize=KNOWN)
def _pieces(form: RuleForm, strategy: Strategy, axis_size: int) -> tuple[tuple[str, ...], ...]:
    """The layouts of all operands and of all results along one axis, as texts in canonical form."""
    mesh = Mesh((("axis", axis_size),))
    sides = layouts(form.rule, {"axis": strategy}, mesh)
    return tuple(tuple(str(canonical(layout, mesh)) for layout in side) for side in sides)
