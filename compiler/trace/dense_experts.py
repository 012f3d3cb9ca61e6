"""Experts that a loop runs on all tokens, as products with a stack of their matrices.

    for index, expert in enumerate(self.experts):        # an nn.ModuleList
        y = y + expert(x) * weights[:, index, None]

Each module computes the same of ``x`` but for its weights. So all of them at once are

    up = stack([experts.0.up, experts.1.up, ...])         # [experts, out, in]
    out = einsum("aei,eoi->aeo", silu(einsum("ai,eoi->aeo", x, up)), down)
    y = y + einsum("aeo,ae->ao", out, stack([weights[:, 0], weights[:, 1], ...], -1))

The dim of experts is then one that may be split: a rank has the matrices of its experts, and the
sum over them is partial. Where the loop does something else with what experts make, this is taken
out of ``out``, and the loop goes on as it is.

Modules are found by the name of their list. Where anything but plain linear layers and operators
that treat every element by itself is in them, the loop is left alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, leaves, map_leaves
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.calls.normalise import bind
from shardwright.compiler.trace.naming import Namer

_MEMBER = re.compile(r"((?:.*\.)?[^.]*expert[^.]*)\.(\d+)(?:\.|$)", re.IGNORECASE)
"""The path of a module in a list of experts: the list, and the number of the expert."""

_BY_ELEMENT = frozenset(
    ("silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "sigmoid", "tanh", "softplus", "mish")
    + ("hardswish", "mul", "add", "sub", "div", "neg", "square", "exp")
)

_TOKENS = "abcd"
"""The letters of the dims of tokens in an einsum."""

Lanes = list[list[IROp]]
"""The operators of each expert, in order."""


def merge_dense_experts(graph: IRGraph) -> IRGraph:
    """The graph with products of all experts at once, for each list of which this is the same."""
    lists: dict[str, dict[int, list[IROp]]] = {}
    for op in graph.ops:
        if "expert" not in op.module_path.lower():
            continue
        found = _MEMBER.match(op.module_path)
        if found:
            lists.setdefault(found[1], {}).setdefault(int(found[2]), []).append(op)
    for experts in lists.values():
        if len(experts) > 1 and sorted(experts) == list(range(len(experts))):
            graph = _merged(graph, [experts[index] for index in range(len(experts))]) or graph
    return graph


def _merged(graph: IRGraph, lanes: Lanes) -> IRGraph | None:
    """The graph with one list of experts as a stack, if that can be shown to be the same."""
    found, weights = [_end(graph, lane) for lane in lanes], _weights(lanes)
    ends = [end for end in found if end is not None]
    if weights is None or len(ends) < len(lanes):
        return None
    stack = _Stack(graph, len(lanes), weights)
    if not all(map(stack.add, lanes[0])):
        return None
    out = stack.now[ends[0].name]
    gone = {op.name for lane in lanes for op in lane}
    # All that the experts read is there before the first operator of any of them.
    first = next(index for index, op in enumerate(graph.ops) if op.name in gone)
    total = _Sum.of(graph, ends)
    if total is None:
        for index, end in enumerate(ends):
            stack.emit(torch.select, end, lanes[index][-1], out, out.ndim - 2, index)
        before, behind = stack.made, []
    else:
        before, stack.made = stack.made, []
        stack.add_up(total, out)
        behind = stack.made
        gone |= {op.name for op in total.ops}
    ops = list(graph.ops[:first]) + before
    for op in graph.ops[first:]:
        # The weights of all experts are there before the last of them is added.
        if total is not None and op is total.ops[-1]:
            ops += behind
        if op.name not in gone:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


@dataclass(frozen=True)
class _Sum:
    """How a loop adds up what experts made, each times a weight of the token. ``gains``: the weight
    by expert, ``before``: what is added to, ``ops``: all operators of it, the last one at the end.
    """

    gains: list[IRValue]
    before: IRValue
    ops: list[IROp]

    @classmethod
    def of(cls, graph: IRGraph, ends: Sequence[IRValue]) -> _Sum | None:
        """The sum that reads ``ends``, if nobody reads anything in between."""
        readers, order = _Readers(graph), {op.name: index for index, op in enumerate(graph.ops)}
        gains: list[IRValue] = []
        steps: list[tuple[IROp, IROp]] = []  # the product with a weight, and the sum that reads it
        for end in ends:
            product = readers.only(end, "mul")
            total = product and readers.only(product.results[0], "add")
            if product is None or total is None:
                return None
            gain = _other(product, end)
            column = gain.shape == (*end.shape[:-1], 1) and gain.dtype == end.dtype
            if not column or product.results[0].dtype != end.dtype:
                return None
            gains.append(gain)
            steps.append((product, total))
        steps.sort(key=lambda step: order[step[1].name])
        # Each adds to the sum of those before it, which nobody else reads.
        for (_, total), (product, following) in itertools.pairwise(steps):
            made = total.results[0]
            chained = readers.only(made, "add") is following
            if not chained or _other(following, product.results[0]) is not made:
                return None
        results = [total.results[0] for _, total in steps]
        if any((r.shape, r.dtype) != (ends[0].shape, ends[0].dtype) for r in results):
            return None
        product, first = steps[0]
        before = _other(first, product.results[0])
        return cls(gains, before, [op for side in zip(*steps, strict=True) for op in side])


class _Readers:
    """Who reads the values of a graph."""

    def __init__(self, graph: IRGraph) -> None:
        self._uses = graph.uses()
        self._returned = {v.name for _, v in graph.output.leaves() if isinstance(v, IRValue)}
        self._returned |= {after.name for _, after in graph.buffer_updates}

    def only(self, value: IRValue, target: str) -> IROp | None:
        """The operator on two tensors that alone reads a value, if it is that of ``target``."""
        readers = {op.name: op for op, _ in self._uses.get(value.name, [])}
        if len(readers) != 1 or value.name in self._returned:
            return None
        (op,) = readers.values()
        plain = op.target == target and len(op.operands) == 2 and not op.has_arg("alpha")
        return op if plain and not op.autocast and not op.region else None


def _other(op: IROp, value: IRValue) -> IRValue:
    """The operand beside ``value`` of an operator on two tensors, which may be ``value`` again."""
    first, second = op.operands
    return second if first is value else first


def _end(graph: IRGraph, lane: Sequence[IROp]) -> IRValue | None:
    """What other operators read of a lane, if it is one value."""
    own, made = {op.name for op in lane}, {r.name: r for op in lane for r in op.results}
    read = [v.name for op in graph.ops if op.name not in own for v in op.operands]
    read += [v.name for _, v in graph.output.leaves() if isinstance(v, IRValue)]
    read += [after.name for _, after in graph.buffer_updates]
    ends = dict.fromkeys(name for name in read if name in made)
    return made[next(iter(ends))] if len(ends) == 1 else None


def _weights(lanes: Lanes) -> dict[str, list[IRValue]] | None:
    """The parameters of all experts by the name of the first one's; ``None`` if lanes differ in
    anything else.
    """
    first = lanes[0]
    weights: dict[str, list[IRValue]] = {}
    for lane in lanes:
        if len(lane) != len(first):
            return None
        same: dict[str, IRValue] = {}
        for op, other in zip(first, lane, strict=True):
            if not _is_alike(op, other):
                return None
            for a, b in _leaves(op, other):
                if not isinstance(a, IRValue):
                    if a != b or type(a) is not type(b):
                        return None
                elif a.name in same:
                    if same[a.name] is not b:
                        return None
                elif a.kind is ValueKind.PARAMETER and isinstance(b, IRValue):
                    if b.kind is not a.kind or (b.shape, b.dtype) != (a.shape, a.dtype):
                        return None
                    weights.setdefault(a.name, []).append(b)
                elif a is not b:
                    return None
            same.update((r.name, s) for r, s in zip(op.results, other.results, strict=True))
    # Each has its own weights, once.
    everyone = [value.name for found in weights.values() for value in found]
    complete = all(len(found) == len(lanes) for found in weights.values())
    return weights if complete and len(set(everyone)) == len(everyone) else None


def _is_alike(op: IROp, other: IROp) -> bool:
    facts = ("target", "grad_enabled", "only_in")
    if any(getattr(op, name) != getattr(other, name) for name in facts):
        return False
    if [key for key, _ in op.args] != [key for key, _ in other.args]:
        return False
    # Autocast and regions that are computed again say more of an operator than its arguments.
    return not any(one.autocast or one.region for one in (op, other))


def _leaves(op: IROp, other: IROp) -> list[tuple[Arg, Arg]]:
    pairs = zip(op.args, other.args, strict=True)
    return [
        pair
        for (_, ours), (_, theirs) in pairs
        for pair in itertools.zip_longest(leaves(ours), leaves(theirs))
    ]


class _Stack:
    """What the first of ``num_experts`` computes, written for all of them."""

    def __init__(self, graph: IRGraph, num_experts: int, weights: dict[str, list[IRValue]]) -> None:
        self.num_experts, self.weights = num_experts, weights
        self.made: list[IROp] = []
        self.now: dict[str, IRValue] = {}  # what stands for values of the first expert
        self.names = Namer()
        for value in (*graph.sources, *(r for op in graph.ops for r in op.results)):
            self.names.unique(value.name)

    def add(self, op: IROp) -> bool:
        """Write one operator of the first expert for all, if it is known how."""
        if op.target == "linear":
            return self._linear(op)
        tensors = op.operands
        inside = all(value.name in self.now for value in tensors)
        if op.target == "chunk" and inside and op.arg("dim", 0) == -1:
            self._same(op)
            return True
        shapes = {value.shape for value in (*tensors, *op.results)}
        if op.target not in _BY_ELEMENT or not inside or len(shapes) != 1:
            return False
        self._same(op)
        return True

    def _same(self, op: IROp) -> None:
        """Write the same operator on values with a dim of experts before the last one."""

        def now(leaf: Arg) -> Arg:
            return self.now.get(leaf.name, leaf) if isinstance(leaf, IRValue) else leaf

        for result in op.results:
            self.now[result.name] = self._value(result, self._with_experts(result))
        results = tuple(self.now[result.name] for result in op.results)
        args = tuple((key, map_leaves(value, now)) for key, value in op.args)
        name = self.names.unique(op.name)
        self.made.append(replace(op, name=name, args=args, results=results))

    def _linear(self, op: IROp) -> bool:
        x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
        known = all(w is None or w.name in self.weights for w in (weight, bias))
        if not known or not 2 <= x.ndim <= 1 + len(_TOKENS) or x.name in self.weights:
            return False
        tokens, own = _TOKENS[: x.ndim - 1], "e" if x.name in self.now else ""
        (result,) = op.results
        out = self._value(result, self._with_experts(result))
        equation = f"{tokens}{own}i,eoi->{tokens}eo"
        self.emit(
            torch.einsum, out, op, equation, self.now.get(x.name, x), self._stacked(weight, op)
        )
        if bias is not None:
            product, out = out, self._value(result, out.shape)
            self.emit(torch.add, out, op, product, self._stacked(bias, op))
        self.now[result.name] = out
        return True

    def add_up(self, total: _Sum, out: IRValue) -> None:
        """Write the sum over experts, each times its weight."""
        last, end = total.ops[-1], total.ops[-1].results[0]
        gains = []
        for gain in total.gains:
            gains.append(self._value(gain, gain.shape[:-1]))
            self.emit(torch.squeeze, gains[-1], last, gain, -1)
        every = self._value(gains[0], (*gains[0].shape, self.num_experts))
        self.emit(torch.stack, every, last, tuple(gains), -1)
        tokens, made = _TOKENS[: out.ndim - 2], self._value(end, end.shape)
        self.emit(torch.einsum, made, last, f"{tokens}eo,{tokens}e->{tokens}o", out, every)
        self.emit(torch.add, end, last, total.before, made)

    def _with_experts(self, value: IRValue) -> tuple[Any, ...]:
        return (*value.shape[:-1], self.num_experts, value.shape[-1])

    def _stacked(self, weight: IRValue, op: IROp) -> IRValue:
        parts = self.weights[weight.name]
        made = self._value(weight, (len(parts), *weight.shape))
        made = replace(made, takes_gradient=any(part.takes_gradient for part in parts))
        self.emit(torch.stack, made, op, tuple(parts))
        return made

    def _value(self, like: IRValue, shape: tuple[Any, ...]) -> IRValue:
        name = self.names.unique(f"{like.name}_of_all")
        return replace(like, name=name, shape=shape, kind=ValueKind.ACTIVATION, fqn=None)

    def emit(self, function: Any, result: IRValue, at: IROp, *args: Arg) -> None:
        """Append a call that makes ``result``, in the place of an operator."""
        bound = bind(function, args, {}, where=lambda: at.place)
        name = self.names.unique(f"{result.name}_")
        self.made.append(
            replace(at, name=name, target=bound.target, args=bound.args, results=(result,))
        )
