"""Attention that a model writes out, followed back from the weights to query and key.

    scores = cap * tanh(query @ key.T * scale / cap) + bias + mask
    probs = dropout(softmax(scores, -1), p)

Only what nobody else reads on the way is followed: what is read elsewhere must be there as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, WhenTraining
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.terms import may_be
from shardwright.compiler.passes.mask_marks import MaskReader


@dataclass(frozen=True, slots=True)
class Products:
    """Queries times keys, times ``scale``, capped: ``cap * tanh(products / cap)``."""

    query: IRValue
    key: IRValue
    scale: float
    cap: float | None


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to scores: ``value``, once ``sums`` stand in the place of the operators of the
    same names. These add one summand after the other to the scores; the sums leave the scores out.
    """

    value: IRValue
    sums: tuple[IROp, ...]


class Chain:
    """The operators of a graph, backwards, as far as each has one reader."""

    def __init__(self, graph: IRGraph, reader: MaskReader) -> None:
        self._reader = reader
        self._uses = graph.uses()
        self._outputs = {value.name for value in graph.outputs}
        self._outputs |= {after.name for _, after in graph.buffer_updates}

    def num_uses(self, value: IRValue) -> int:
        """How many operands a value is."""
        return len(self._uses[value.name])

    def step(self, value: Arg, *targets: str) -> IROp | None:
        """The operator of one of these kinds that makes a value for one reader alone."""
        op = self._reader.made_by(value, *targets)
        if op is None or len(op.results) != 1 or op.results[0].name in self._outputs:
            return None
        return op if self.num_uses(op.results[0]) == 1 else None

    def back(self, value: IRValue, *targets: str) -> IRValue:
        """The value before operators of these kinds that change no number: casts, and dropout that
        drops nothing.
        """
        while (op := self.step(value, *targets)) is not None:
            if op.target == "dropout" and may_be(rate_of(op), lambda p: p > 0):
                break
            if not op.operands[0].dtype.is_floating_point:
                break
            value = op.operands[0]
        return value

    def dropped(self, weights: IRValue) -> tuple[IRValue, Arg]:
        """The weights before dropout, and its rate."""
        weights = self.back(weights, "dropout", "to", "contiguous")
        op = self.step(weights, "dropout")
        if op is None:
            return weights, 0.0
        return self.back(op.operands[0], "dropout", "to", "contiguous"), rate_of(op)

    def products(self, scores: IRValue) -> Products | None:
        """What makes scores to which nothing is added any more."""
        # Backwards: a cap, ``cap * tanh(s / cap)``, then any number of scales, then the product of
        # queries and turned keys.
        scale, cap = 1.0, None
        capped = self.step(scores, "mul")
        curved = self.step(capped.arg("input"), "tanh") if capped else None
        divided = self.step(curved.operands[0], "div") if curved else None
        if capped is not None and divided is not None:
            cap = capped.arg("other")
            if not isinstance(cap, int | float) or divided.arg("other") != cap:
                return None
            scores = divided.arg("input")
        while (scaled := self.step(scores, "mul", "div")) is not None:
            number = scaled.arg("other")
            if not isinstance(number, int | float) or not isinstance(scaled.arg("input"), IRValue):
                return None
            scale *= number if scaled.target == "mul" else 1 / number
            scores = scaled.arg("input")
        product = self.step(self.back(scores, "to"), "matmul")
        if product is None:
            return None
        query, turned = product.operands
        transposed = self._reader.made_by(turned, "transpose")
        if transposed is None or query.ndim != 4:
            return None
        # Only the last two dims may be turned: positions and width.
        if sorted(transposed.arg(name) % 4 for name in ("dim0", "dim1")) != [2, 3]:
            return None
        return Products(query, transposed.operands[0], scale, cap)

    def biased(self, scores: IRValue) -> tuple[Products, Bias | None] | None:
        """Products with what is added to them, of any number of summands."""
        found = self.products(scores)
        if found is not None:
            return found, None
        added = self.step(scores, "add")
        if added is None or added.has_arg("alpha") or len(added.operands) != 2:
            return None
        for kept, other in (added.operands, added.operands[::-1]):
            inner = self.biased(kept) if kept.shape == scores.shape else None
            if inner is None or not other.dtype.is_floating_point:
                continue
            products, bias = inner
            return products, _plus(bias, other, added)
        return None


def rate_of(dropout: IROp) -> Arg:
    """The rate of dropout, in training and in evaluation."""
    rate, training = dropout.arg("p", 0.5), dropout.arg("training", True)
    by_mode = [
        _in_mode(rate, mode) if _in_mode(training, mode) else 0.0 for mode in ("train", "eval")
    ]
    return by_mode[0] if by_mode[0] == by_mode[1] else WhenTraining(by_mode[0], by_mode[1])


def _in_mode(arg: Arg, mode: str) -> Arg:
    return getattr(arg, mode) if isinstance(arg, WhenTraining) else arg


def _plus(bias: Bias | None, other: IRValue, added: IROp) -> Bias:
    """A bias with one summand more, which ``added`` adds to the scores."""
    if bias is None:
        return Bias(other, ())
    terms = (bias.value, other)
    opdef = registry.get("add")
    assert opdef is not None
    (result,) = added.results
    total = replace(
        result,
        shape=broadcast([x.shape for x in terms]),
        requires_grad=any(x.requires_grad for x in terms),
        takes_gradient=any(x.takes_gradient for x in terms),
    )
    sum_of_both = replace(added, args=opdef.bind(terms, {}), results=(total,))
    return Bias(total, (*bias.sums, sum_of_both))


def broadcast(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """The shape of what tensors of these shapes give together."""
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
