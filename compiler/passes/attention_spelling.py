"""Attention in one spelling, for those that look for it: what models write in other words is
written with ``where`` and ``@``.

    scores.masked_fill(hidden, -inf)           where(logical_not(hidden), scores, -inf)
    einsum("bqhd,bkhd->bhqk", query, key)      query.permute(...) @ key.permute(...).transpose(2, 3)
    einsum("bhqk,bkhd->bqhd", weights, value)  (weights @ value.permute(...)).permute(...)

Samples and heads that are one dim of three, as ``bmm`` wants them (BLOOM), are two of four again:

    baddbmm(bias, query, key.mT, alpha=scale).view(B, heads, S, T)
                                               query @ key.transpose(2, 3) * scale + bias.view(...)
    bmm(weights.view(B * heads, S, T), value)  (weights @ value).reshape(B * heads, S, width)

It serves to read a graph. What turns out to be no attention gets its first spelling back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry

_VIEWS = ("view", "reshape")
_FACTORS, _BATCHES = ("input", "other"), ("batch1", "batch2")
"""What is multiplied: by ``bmm``, which is ``@`` of three dims, and by ``baddbmm``."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """A graph in the one spelling. ``first``: operators that were spelled otherwise, by the name of
    what stands for them; each has the name of the operator that makes its result.
    """

    graph: IRGraph
    first: Mapping[str, IROp]
    taken: set[str]
    """The names of all operators and values."""

    @property
    def read(self) -> IRGraph:
        """The graph as the one spelling reads it: without what only other spellings read."""
        return self.graph.live() if self.first else self.graph

    def with_found(self, found: Mapping[str, Sequence[IROp]]) -> IRGraph:
        """The graph with operators that were found in it, by the name of the one that they replace.
        All others have their first spelling.
        """
        ops: list[IROp] = []
        ends = {first.name: name for name, first in self.first.items()}
        for op in self.graph.ops:
            if op.name in found:
                ops += found[op.name]
            # The last operator of a spelling has the name of the first one.
            elif op.name in ends and ends[op.name] not in found:
                ops.append(self.first[ends[op.name]])
            else:
                ops.append(op)
        return self.graph.with_ops(tuple(ops)).live()


def spelled(graph: IRGraph) -> Spelled:
    """The graph in the one spelling."""
    speller = _Speller(graph)
    ops = tuple(spelling for op in graph.ops for spelling in speller.of(op))
    return Spelled(graph.with_ops(ops), speller.first, speller.taken)


class _Speller:
    def __init__(self, graph: IRGraph) -> None:
        self.taken = {value.name for value in graph.sources} | {op.name for op in graph.ops}
        self.taken |= {value.name for op in graph.ops for value in op.results}
        self.first: dict[str, IROp] = {}
        self._producers = graph.producers()

    def of(self, op: IROp) -> list[IROp]:
        """The operators that stand for one; it alone, if its spelling is the one."""
        if op.target == "masked_fill" and isinstance(op.arg("mask"), IRValue):
            return self._where(op)
        if op.target == "einsum":
            return self._product(op) or [op]
        if op.target in _VIEWS:
            return self._joined_scores(op) or [op]
        if op.target == "matmul":
            return self._joined_weights(op) or [op]
        return [op]

    def _where(self, op: IROp) -> list[IROp]:
        """``masked_fill`` as ``where``."""
        scores, hidden, least = (op.arg(name) for name in ("input", "mask", "value"))
        # Scores that a mask spreads out are those of no query and key.
        if hidden.dtype != torch.bool or op.results[0].shape != scores.shape:
            return [op]
        seen = self._value(f"{op.name}_seen", hidden, hidden.shape)
        self.first[op.name] = op
        return [
            self._op(op, "logical_not", seen, hidden),
            self._op(op, "where", op.results[0], seen, scores, least),
        ]

    def _product(self, op: IROp) -> list[IROp] | None:
        """A product of two stacks of matrices that ``einsum`` spells, as one of ``@``; ``None`` if
        it is another one.
        """
        terms = _terms(op)
        if terms is None or any(x.ndim != 4 for x in (*op.operands, *op.results)):
            return None
        *given, result = terms
        one, other = (set(term) for term in given)
        stacks, summed = one & other & set(result), (one & other) - set(result)
        # Rows are of the operand whose own letter comes first in the result.
        own = [letter for letter in result if letter not in stacks]
        if len(stacks) != 2 or len(summed) != 1 or len(own) != 2:
            return None
        row, column = own
        (inner,) = summed
        pairs = list(zip(given, op.operands, strict=True))
        (left, rows), (right, columns) = pairs if row in one else pairs[::-1]
        sizes = dict(zip(left, rows.shape, strict=True))
        if any(sizes.get(x, size) != size for x, size in zip(right, columns.shape, strict=True)):
            return None
        # Samples and heads come in the order of weights, or of scores.
        is_plain = set(left[:2]) == stacks and left[2:] == row + inner
        lead = left[:2] if is_plain else "".join(x for x in result if x in stacks)
        made: list[IROp] = []

        def turned(x: IRValue, before: str, after: str, name: str) -> IRValue:
            if before == after:
                return x
            order = tuple(before.index(letter) for letter in after)
            value = self._value(f"{op.name}_{name}", x, tuple(x.shape[dim] for dim in order))
            made.append(self._op(op, "permute", value, x, dims=order))
            return value

        first = turned(rows, left, lead + row + inner, "rows")
        # Keys have their positions before their width, which the product sums; values behind it.
        if right.index(column) < right.index(inner):
            keys = turned(columns, right, lead + column + inner, "keys")
            shape = (*keys.shape[:2], keys.shape[3], keys.shape[2])
            second = self._value(f"{op.name}_turned", keys, shape)
            made.append(self._op(op, "transpose", second, keys, 2, 3))
        else:
            second = turned(columns, right, lead + inner + column, "columns")
        (value,) = op.results
        after = lead + row + column
        if after == result:
            self.first[op.name] = op
            return [*made, self._op(op, "matmul", value, first, second)]
        shape = tuple(value.shape[result.index(letter)] for letter in after)
        product = self._value(f"{op.name}_product", value, shape)
        self.first[product.name] = op
        matmul = replace(self._op(op, "matmul", product, first, second), name=product.name)
        order = tuple(after.index(letter) for letter in result)
        return [*made, matmul, self._op(op, "permute", value, product, dims=order)]

    def _joined_scores(self, op: IROp) -> list[IROp] | None:
        """A view that parts samples and heads of ``bmm(query, key)``, or of ``baddbmm`` with a bias
        and numbers, as the scores of ``query @ key``; ``None`` for any other view.
        """
        (scores,), product = op.results, self._made_by(op.operands[0], "matmul", "baddbmm")
        if product is None or scores.ndim != 4:
            return None
        biased = product.target == "baddbmm"
        rows, turned = (product.arg(name) for name in (_BATCHES if biased else _FACTORS))
        alpha, beta = (product.arg(name, 1) if biased else 1 for name in ("alpha", "beta"))
        query, back = self._parted(rows), self._made_by(turned, "transpose")
        key = None if back is None or not _turns_last_two(back) else self._parted(back.operands[0])
        if (
            query is None
            or key is None
            or not all(isinstance(x, int | float) for x in (alpha, beta))
        ):
            return None
        joined = product.results[0]
        if (
            scores.shape != (*query.shape[:2], *joined.shape[1:])
            or key.shape[:2] != query.shape[:2]
        ):
            return None
        made: list[IROp] = []

        def make(
            target: str, name: str, shape: Sequence[Size], like: IRValue, *args: Arg
        ) -> IRValue:
            value = self._value(f"{op.name}_{name}", like, shape)
            made.append(self._op(op, target, value, *args))
            return value

        turned_shape = (*key.shape[:2], key.shape[3], key.shape[2])
        found = make("transpose", "turned", turned_shape, key, key, 2, 3)
        found = make("matmul", "product", scores.shape, scores, query, found)
        if alpha != 1:
            found = make("mul", "scaled", scores.shape, scores, found, alpha)
        # ``baddbmm`` does not read what it multiplies by zero.
        if biased and beta != 0:
            bias = product.arg("input")
            if bias.ndim == 3:
                lead = (1, 1) if bias.shape[0] == 1 else query.shape[:2]
                shape = (*lead, *bias.shape[1:])
                bias = make("view", "bias", shape, bias, bias, *shape)
            if beta != 1:
                bias = make("mul", "weighed", bias.shape, bias, bias, beta)
            found = make("add", "biased", scores.shape, scores, found, bias)
        # The last one makes what the view made.
        made[-1] = replace(made[-1], name=op.name, results=op.results)
        self.first[op.name] = op
        return made

    def _joined_weights(self, op: IROp) -> list[IROp] | None:
        """``bmm`` of weights and values with samples and heads in one dim, as ``weights @ value``;
        ``None`` for any other product.
        """
        weights, value = (self._parted(op.arg(name)) for name in _FACTORS)
        if weights is None or value is None or weights.shape[:2] != value.shape[:2]:
            return None
        (result,) = op.results
        shape = (*weights.shape[:2], *result.shape[1:])
        product = self._value(f"{op.name}_product", result, shape)
        self.first[product.name] = op
        matmul = self._op(op, "matmul", product, weights, value)
        return [matmul, self._op(op, "reshape", result, product, *result.shape)]

    def _parted(self, joined: IRValue) -> IRValue | None:
        """What has samples and heads as two dims where ``joined`` has them as one."""
        view = self._made_by(joined, *_VIEWS)
        if view is None or joined.ndim != 3 or view.operands[0].ndim != 4:
            return None
        parted = view.operands[0]
        fits = parted.shape[2:] == joined.shape[1:]
        return parted if fits and product(parted.shape[:2]) == joined.shape[0] else None

    def _made_by(self, value: IRValue, *targets: str) -> IROp | None:
        """The operator of one of these kinds that makes a value."""
        op, _ = self._producers.get(value.name, (None, 0))
        return op if op is not None and op.target in targets else None

    def _value(self, name: str, like: IRValue, shape: Sequence[Size]) -> IRValue:
        """A value with a name of its own, made of another one."""
        return IRValue(
            unused(name, self.taken),
            tuple(shape),
            like.dtype,
            requires_grad=like.requires_grad,
            takes_gradient=like.takes_gradient,
        )

    @staticmethod
    def _op(op: IROp, target: str, result: IRValue, *args: Arg, **named: Arg) -> IROp:
        """An operator in the place of another one. It has its name if it makes its result."""
        opdef = registry.get(target)
        assert opdef is not None
        name = op.name if result is op.results[0] else result.name
        return replace(
            op, name=name, target=target, args=opdef.bind(args, named), results=(result,)
        )


def _turns_last_two(transpose: IROp) -> bool:
    ndim = transpose.operands[0].ndim
    return {transpose.arg(name) % ndim for name in ("dim0", "dim1")} == {ndim - 2, ndim - 1}


def unused(name: str, taken: set[str]) -> str:
    """The name, or a longer one if it is taken; it is taken then."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _terms(op: IROp) -> list[str] | None:
    """The letters of two operands and of the result, each once; two dots' dims are ``0`` and
    ``1``.
    """
    equation = op.arg("equation")
    if not isinstance(equation, str) or "->" not in equation or len(op.operands) != 2:
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    terms = [term.replace("...", "01") for term in (*left.split(","), result)]
    is_one_each = all(len(term) == len(set(term)) == 4 for term in terms)
    return terms if is_one_each and len(terms) == 3 else None
