"""Choose for operators along a sequence whether an axis cuts them there, so that little is sent: a
minimum cut.

Some operators have a strategy by now; the *free* ones may be computed whole or cut along the
sequence. Along one axis of ``n`` ranks a value of ``m`` bytes costs, in units of ``(n-1)/n m``:

| from, to | cut alike | whole (R) | whole, gradients summed (G) |
|---|---|---|---|
| cut alike | 0 | 1 | 2 |
| whole (R) | 1 | 0 | 2 |
| whole (G) | 0 | 0 | 0 |
| summands (P) | 2 | 2 | 4 |

(1 from R to a cut is the gradient's gather; without gradients it costs nothing.) So a norm between
a row-parallel product (P) and a column-parallel one (G) costs 4 whole and 4 cut, and is cut, as
each rank then computes and keeps an n-th of it. The gradients of its weights are summed over the
ranks then, which is paid for, too.

A value that is read whole by one and cut by another is gathered once, and cut for nothing. Values
that are read cut in several ways are priced one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import Strategy, placements
from shardwright.policies.labels import num_bytes, piece, result_piece, rule_of
from shardwright.policies.minimum_cut import HIGH, LOW, MinimumCut
from shardwright.policies.sequences import positional

WORTH = 1 / 4
"""What it is worth that a rank makes a byte less, in bytes that are sent. An operator on whole
values reads and writes a byte of its result about five times in forward and backward, of memory
that is several times as fast as links; and the result may be kept.
"""


LITTLE = WORTH / 64
"""What it is worth of masks and positions, which are small, or made once for all layers."""


def cut_of_free(
    graph: IRGraph,
    known: Mapping[str, Strategy],
    free: Mapping[str, Strategy],
    axis_size: int,
    whole: str = "R",
) -> dict[str, Strategy]:
    """The free operators that are best cut, with their strategies.

    ``known``: the strategies of the other operators; R where one is left out. ``free``: how each
    free operator would be cut. ``whole``: how those with gradients would be whole, R or G.
    """
    return _Positions(graph, known, free, axis_size, whole).solve()


@dataclass
class _Readers:
    """Who reads a value how, as nodes. ``cut``: by the way it is cut, high if somebody reads it so.
    ``whole``: low if somebody reads it whole. ``replicated``: low if somebody reads it as R.
    ``summand``: high if somebody reads it as G.
    """

    cut: dict[str, int]
    whole: int
    replicated: int
    summand: int


@dataclass
class _Positions:
    graph: IRGraph
    known: Mapping[str, Strategy]
    free: Mapping[str, Strategy]
    axis_size: int
    whole: str
    problem: MinimumCut = field(default_factory=MinimumCut)
    nodes: dict[str, int] = field(default_factory=dict)  # of a free operator: high if it is cut

    def solve(self) -> dict[str, Strategy]:
        """The strategies of the operators that are cut."""
        # A cut of least cost: HIGH is "computed in pieces", LOW "computed whole on every rank".
        # What crosses the cut is a value that must be gathered.
        cheap = positional(self.graph)
        for op in self.graph.ops:
            if op.name in self.free:
                self.nodes[op.name] = node = self.problem.node()
                worth = LITTLE if op.name in cheap else WORTH
                self.problem.pay(node, HIGH, worth * sum(map(self._moved, op.results)))
        uses, producers = self.graph.uses(), self.graph.producers()
        outputs = {value.name for value in self.graph.outputs}
        for value in self.graph.sources:
            self._price_source(value, self._readers(value, uses.get(value.name, []), False))
        for name, (op, index) in producers.items():
            value = op.results[index]
            readers = self._readers(value, uses.get(name, []), name in outputs)
            self._price(value, op, index, readers)
        high = self.problem.solve()
        return {name: self.free[name] for name, node in self.nodes.items() if node in high}

    def _moved(self, value: IRValue) -> float:
        return num_bytes(value) * (self.axis_size - 1) / self.axis_size

    def _readers(
        self, value: IRValue, uses: Sequence[tuple[IROp, int]], is_output: bool
    ) -> _Readers:
        node, forbid = self.problem.node, self.problem.forbid
        readers = _Readers({}, node(), node(), node())
        forbid(readers.replicated, readers.whole)  # whoever reads R reads it whole
        if is_output:
            forbid(LOW, readers.replicated)
        for op, position in uses:
            reader = self.nodes.get(op.name)
            strategy = self.free.get(op.name) or self.known.get(op.name, "R")
            self._read(readers, op, position, strategy, HIGH if reader is None else reader)
            if reader is not None:  # or it reads the operand whole
                forbid(reader, readers.replicated if self.whole == "R" else readers.whole)
        return readers

    def _read(self, readers: _Readers, op: IROp, position: int, strategy: str, when: int) -> None:
        """Note how an operator with this strategy reads a value, where node ``when`` is high."""
        forbid = self.problem.forbid
        letter = placements(rule_of(op), strategy)[0][position]
        if letter == "S":
            text = piece(op, position, strategy, self.axis_size)
            # One node for each piece that is wanted: however many read it, it is made once.
            wanted = readers.cut.setdefault(text, self.problem.node())
            forbid(wanted, when)
        elif letter == "R":
            forbid(LOW, readers.replicated)
        elif letter == "G":
            forbid(readers.summand, when)
            forbid(LOW, readers.whole)

    def _price_source(self, value: IRValue, readers: _Readers) -> None:
        if value.kind is ValueKind.PARAMETER and value.takes_gradient:
            # Its gradient is summed afterwards.
            self.problem.pay(LOW, readers.summand, 1.98 * self._moved(value))
        elif value.takes_gradient:
            for wanted in readers.cut.values():
                self.problem.pay(LOW, wanted, self._moved(value))

    def _price(self, value: IRValue, op: IROp, index: int, readers: _Readers) -> None:
        """The costs between what makes a value and what reads it."""
        pay, moved = self.problem.pay, self._moved(value)
        gradient = moved if value.takes_gradient else 0.0
        strategy = self.free.get(op.name) or self.known.get(op.name, "R")
        letter = placements(rule_of(op), strategy)[1][index]
        if letter == "S":
            made = result_piece(op, index, strategy, self.axis_size)
            self._price_cut(made, self.nodes.get(op.name, HIGH), readers, moved, gradient)
        elif letter == "P":
            any_cut = self.problem.node()
            for wanted in readers.cut.values():
                self.problem.forbid(any_cut, wanted)
            pay(readers.replicated, any_cut, moved)  # both ways: summed whole, and cut out of that
            pay(LOW, readers.summand, 2 * gradient)
        elif letter == "R":
            for wanted in readers.cut.values():
                pay(LOW, wanted, gradient)
            pay(LOW, readers.summand, 2 * gradient)

    def _price_cut(
        self, made: str, is_cut: int, readers: _Readers, moved: float, gradient: float
    ) -> None:
        """The costs of a value that is made in a cut, ``made``, or whole where node ``is_cut`` is
        low.
        """
        pay = self.problem.pay
        if self.whole == "G":  # whoever reads it whole has summands of the gradient
            pay(readers.whole, is_cut, moved + gradient)
        else:
            pay(readers.whole, is_cut, moved)
            # From a cut to G the gradient is scattered as it is summed, from R it is all-reduced.
            pay(LOW, readers.summand, gradient)
            pay(is_cut, readers.summand, gradient)
        for text, wanted in readers.cut.items():
            if text != made:  # an all-to-all
                both = (moved + gradient) / self.axis_size
                pay(LOW, wanted if is_cut == HIGH else is_cut, both)
            if self.whole == "R":
                pay(is_cut, wanted, gradient)
