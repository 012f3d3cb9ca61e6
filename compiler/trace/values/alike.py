"""Whether two graphs of one module compute the same for given values of some inputs.

Both come from traces of the same code, which differ in what the code has looked at. So their
operators are mostly equal, one by one, and every value gets a number that equal values share. What
follows from the given inputs and constants alone is a mask or the like: operators that read it are
equal where its values are, and an operator that it makes do nothing is left out.

An example: with ``attention_mask`` of ones, ``attention(q, k, v, mask=tril & attention_mask)`` and
``attention(q, k, v, is_causal=True)`` are equal, and so are ``x * attention_mask`` and ``x``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.serialize import tensor_digest
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.values.constants import RANDOM, Constants

_CASTS = {"to", "contiguous"}
_NEUTRAL = {"mul": 1, "add": 0, "sub": 0}
"""The number that leaves the other operand as it is."""
_RESHAPES = {"view", "reshape"}
_MASKED = {"masked_fill": "mask", "where": "condition", "scaled_dot_product_attention": "attn_mask"}
"""Operators that are compared by the values of a mask, whatever made it, and where it stands among
their arguments.
"""
_HIDDEN = -1e30
"""What is added to a score that does not count: this or less."""


class Likeness:
    """Numbers values of several graphs so that equal values have equal numbers. ``given``: inputs
    whose values are given.
    """

    def __init__(self, given: Collection[str]) -> None:
        self._given = frozenset(given)
        self._numbers: dict[Hashable, int] = {}

    def of(self, graph: IRGraph, constants: Constants) -> Hashable:
        """What a graph computes: equal for two graphs that compute the same. Of values it asks
        ``constants``.
        """
        return _Numbering(graph.live(), constants, self._given, self._numbers).result()


class _Numbering:
    def __init__(
        self,
        graph: IRGraph,
        constants: Constants,
        given: frozenset[str],
        numbers: dict[Hashable, int],
    ) -> None:
        self._graph, self._constants, self._given, self._numbers = graph, constants, given, numbers
        self._number: dict[str, int] = {}
        self._follows: dict[str, frozenset[str]] = {}
        """The inputs that a value follows from, if it follows from them and constants alone."""
        self._made_by: dict[str, IROp] = {}
        self._reshaped: dict[str, tuple[int, tuple[Any, ...]]] = {}
        """The number and the shape that a reshaped value had first."""
        self._broadcast: dict[str, int] = {}
        """Numbers by which values are equal that differ in dims of copies only: attention reads
        these alike.
        """
        # Equal numbers mean equal values: sources first, by what they are.
        for value in (*graph.inputs, *graph.parameters, *graph.buffers):
            self._number[value.name] = self._new((value.kind, value.fqn or value.name))
            if value.name in given:
                self._follows[value.name] = frozenset((value.name,))
        for value, tensor in graph.constants:
            self._number[value.name] = self._new((ValueKind.CONSTANT, tensor_digest(tensor)))
            self._follows[value.name] = frozenset()

    def _new(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def result(self) -> Hashable:
        """The result and the updates of buffers by their numbers."""
        for op in self._graph.ops:
            self._follow(op)
            self._made_by.update((result.name, op) for result in op.results)
            for index, result in enumerate(op.results):
                self._number[result.name] = self._of_result(op, index)
            if (broadcast := self._of_copies(op)) is not None:
                self._broadcast[op.results[0].name] = broadcast
        updates = tuple(
            (before.fqn, self._read(after)) for before, after in self._graph.buffer_updates
        )
        return self._tree(self._graph.output), updates

    def _follow(self, op: IROp) -> None:
        read = [self._follows.get(value.name) for value in op.operands]
        if op.target in RANDOM or any(follows is None for follows in read):
            return
        follows = frozenset().union(*(found for found in read if found is not None))
        self._follows.update((result.name, follows) for result in op.results)

    def _of_result(self, op: IROp, index: int) -> int:
        # What has no effect on numbers is looked through, so that two ways to write one thing get
        # one number.
        if op.results[0].name not in self._follows:
            if (same := self._left_as_it_is(op)) is not None:
                if same.name in self._reshaped:
                    self._reshaped[op.results[0].name] = self._reshaped[same.name]
                return self._read(same)
            if op.target in _RESHAPES:
                return self._reshape(op)
            if op.target == "scaled_dot_product_attention":
                return self._attention(op)
        args = tuple((name, self._arg(op, name, arg)) for name, arg in op.args)
        return self._new((op.target, args, index, op.autocast, op.grad_enabled, op.region is None))

    def _reshape(self, op: IROp) -> int:
        """What is reshaped twice is reshaped once, or not at all."""
        (operand,), (result,) = op.operands, op.results
        first, shape = self._reshaped.get(operand.name) or (self._read(operand), operand.shape)
        self._reshaped[result.name] = first, shape
        if shape == result.shape:
            return first
        return self._new(
            ("reshape", first, tuple(map(str, result.shape)), op.grad_enabled, op.region is None)
        )

    def _of_copies(self, op: IROp) -> int | None:
        """The number of a result by what its dims of copies hold, where that may be another one
        than its own.
        """
        if op.results[0].name in self._follows or not op.operands:
            return None
        if op.target in (*_CASTS, "expand") and op.operands[0].dtype == op.results[0].dtype:
            return self._broadcast.get(op.operands[0].name)
        # ``mask + 0`` and ``mask.expand(...)`` hold what the mask holds, however often.
        if (same := self._left_as_it_is(op, broadcast=True)) is not None:
            return self._read_broadcast(same)
        if op.target not in ("where", "masked_fill"):
            return None
        # Two masks that differ in dims of copies alone choose the same.
        real = self._real(op.arg(_MASKED[op.target]))
        if real is None:
            return None
        others = tuple(
            (name, _hashable(arg, self._read_broadcast))
            for name, arg in op.args
            if name != _MASKED[op.target]
        )
        return self._new(
            (op.target, "copies", tensor_digest(_without_copies(real)), others, op.grad_enabled)
        )

    def _read_broadcast(self, value: IRValue) -> int:
        return self._broadcast.get(value.name, self._read(value))

    def _arg(self, op: IROp, name: str, arg: Arg) -> Hashable:
        if (
            isinstance(arg, IRValue)
            and _MASKED.get(op.target) == name
            and (real := self._real(arg)) is not None
        ):
            return ("values", tensor_digest(real))
        follows = op.results[0].name in self._follows  # it is compared where it is read
        return _hashable(
            arg, lambda value: self._number[value.name] if follows else self._read(value)
        )

    def _read(self, value: IRValue) -> int:
        """The number of a value where it meets what does not follow from given inputs: that of its
        values if it does.
        """
        if self._follows.get(value.name) and (real := self._real(value)) is not None:
            return self._new(("values", tensor_digest(real)))
        return self._number[value.name]

    def _real(self, value: Arg) -> torch.Tensor | None:
        if not isinstance(value, IRValue) or value.name not in self._follows:
            return None
        found = self._constants.in_dummies(value)
        return None if found is None else found[0]

    def _left_as_it_is(self, op: IROp, *, broadcast: bool = False) -> IRValue | None:
        """The operand that an operator returns unchanged, if one is; ``broadcast``: or in
        copies.
        """

        def kept_by(kept: Arg) -> bool:
            same = isinstance(kept, IRValue) and kept.dtype == result.dtype
            return same and (broadcast or kept.shape == result.shape)

        (result, *others), operands = op.results, op.operands
        if others or not operands:
            return None
        if op.target in _CASTS:
            return operands[0] if kept_by(operands[0]) else None
        # x + 0, x * 1 and the like; a subtraction leaves only its first operand as it is.
        if op.target in _NEUTRAL and len(operands) == 2 and not op.has_arg("alpha"):
            pairs = (
                ((operands[0], operands[1]),) if op.target == "sub" else (operands, operands[::-1])
            )
            for kept, given in pairs:
                if kept_by(kept) and self._is(given, _NEUTRAL[op.target]):
                    return kept
        if op.target == "masked_fill" and kept_by(operands[0]) and self._is(op.arg("mask"), 0):
            return operands[0]
        if op.target == "where":
            # where(True, x, y) is x, where(False, x, y) is y.
            for name, holds in (("input", 1), ("other", 0)):
                kept = op.arg(name)
                if (
                    isinstance(kept, IRValue)
                    and kept_by(kept)
                    and self._is(op.arg("condition"), holds)
                ):
                    return kept
        return None

    def _is(self, value: Arg, number: int) -> bool:
        """Whether a value that follows from given inputs holds one number only."""
        if not isinstance(value, IRValue) or not self._follows.get(value.name):
            return False
        real = self._real(value)
        return real is not None and bool((real == number).all())

    def _attention(self, op: IROp) -> int:
        """Attention by its operands, and by which scores count however that is said."""
        query, key, value = (self._read(operand) for operand in op.operands[:3])
        shapes = [operand.shape for operand in op.operands[:3]]
        mask = op.arg("attn_mask")
        counts: Hashable = "all"
        if isinstance(mask, IRValue):
            real = self._real(mask)
            counts = self._read_broadcast(mask) if real is None else _scores_that_count(real)
        elif op.arg("is_causal"):
            # One query and one key: nothing lies in the future.
            counts = "all" if shapes[0][-2] == 1 == shapes[1][-2] else "causal"
        # Heads of keys and values are repeated before the call by one way of a library, and inside
        # by the other. Both are read before the repetition.
        if op.arg("enable_gqa") or shapes[0][-3:-2] == shapes[1][-3:-2]:
            key, value = (self._unrepeated(operand) for operand in op.operands[1:3])
        given = tuple(_hashable(op.arg(name), self._read) for name in ("dropout_p", "scale"))
        return self._new(
            (
                op.target,
                query,
                key,
                value,
                counts,
                given,
                op.autocast,
                op.grad_enabled,
                op.region is None,
            )
        )

    def _unrepeated(self, value: IRValue) -> int:
        """The number of what was repeated for each group of query heads, if ``value`` was: ``x[:,
        :, None].expand(...)`` as heads. Attention with ``enable_gqa`` does the same.
        """
        made = [self._made_by.get(value.name)]
        # Back from the reshape: expand, then the indexing that has opened a dim.
        for _ in range(2):
            made.append(
                self._made_by.get(made[-1].operands[0].name)
                if made[-1] and made[-1].operands
                else None
            )
        if [op.target if op else None for op in made] == ["reshape", "expand", "getitem"]:
            assert made[2] is not None and made[1] is not None
            heads = made[2].operands[0]
            repeated = made[1].results[0].shape
            if (*repeated[:2], *repeated[3:]) == heads.shape and len(repeated) == 5:
                return self._read(heads)
        return self._read(value)

    def _tree(self, tree: Tree) -> Hashable:
        if tree.kind == "leaf":
            return _hashable(tree.value, self._read)
        return (
            tree.kind,
            tree.type_path,
            tuple((key, self._tree(child)) for key, child in tree.children),
        )


def _scores_that_count(mask: torch.Tensor) -> Hashable:
    """``"all"`` or ``"causal"`` for masks that say so; what else a mask says, by its values."""
    counts = mask
    if mask.dtype != torch.bool:
        counts = mask == 0
        # An additive mask: 0 counts, very negative numbers do not. Anything else is a bias.
        if not bool((counts | (mask <= _HIDDEN)).all()):
            return tensor_digest(mask)
    if bool(counts.all()):
        return "all"
    queries, keys = mask.shape[-2:]
    if (
        queries > 1
        and keys > 1
        and bool((counts == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
    ):
        return "causal"
    return tensor_digest(_without_copies(counts))


def _without_copies(mask: torch.Tensor) -> torch.Tensor:
    """The mask without leading dims along which it holds copies; its last two dims stay."""
    while mask.ndim > 2 and bool((mask == mask[:1]).all()):
        mask = mask[0]
    return mask


def _hashable(arg: Arg, number: Any) -> Hashable:
    """An argument with numbers in the place of values, and nothing that has no hash."""

    def leaf(item: Arg) -> Hashable:
        if isinstance(item, IRValue):
            return ("value", number(item))
        return str(item) if isinstance(item, sympy.Basic) else (type(item).__name__, repr(item))

    if isinstance(arg, slice):
        return ("slice", *(_hashable(item, number) for item in (arg.start, arg.stop, arg.step)))
    if isinstance(arg, tuple | list):
        return tuple(_hashable(item, number) for item in arg)
    return leaf(arg)
