"""Attention in one spelling, for those that look for it: what models write in other words is
written with ``where`` and ``@``.

    scores.masked_fill(hidden, -inf)           where(logical_not(hidden), scores, -inf)
    einsum("bqhd,bkhd->bhqk", query, key)      query.permute(...) @ key.permute(...).transpose(2, 3)
    einsum("bhqk,bkhd->bqhd", weights, value)  (weights @ value.permute(...)).permute(...)

It serves to read a graph. What turns out to be no attention gets its first spelling back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry


@dataclass(frozen=True, slots=True)
class Spelled:
    """A graph in the one spelling. ``first``: operators that were spelled otherwise, by the name of
    what stands for them; each has the name of the operator that makes its result.
    """

    graph: IRGraph
    first: Mapping[str, IROp]
    taken: set[str]
    """The names of all operators and values."""

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

    def of(self, op: IROp) -> list[IROp]:
        """The operators that stand for one; it alone, if its spelling is the one."""
        if op.target == "masked_fill" and isinstance(op.arg("mask"), IRValue):
            return self._where(op)
        if op.target == "einsum":
            return self._product(op) or [op]
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
