"""Loops over time steps that a model has written in Python (``compiler/trace/roll_steps.py``).

The rule follows from the rules of the operators of one step. A dim may be split where every
operator of the step may be split along it by itself, and nothing is sent: then each rank runs all
steps for its part of the dim. The batch of a recurrent cell is such a dim, and the channels of a
state space whose steps are computed channel by channel.

What a step sums over may be split, too, if the sum is only added to from step to step, as the loss
of a batch is: then each rank carries its summand. What a step multiplies with a matrix that makes
the next state stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.op import Arg, IROp, once
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ir.time_steps import TIME_STEPS, StepIndex, TimeSteps
from shardwright.compiler.ops import definitions
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import (
    DimRefs,
    Factor,
    FactorKind,
    FactorRef,
    LocalSizes,
    OpRule,
    ParallelForm,
    TensorRefs,
)
from shardwright.compiler.ops.rule_builder import annotation_text
from shardwright.compiler.ops.strategy import has_factor


def steps_of(op: IROp) -> TimeSteps:
    """The steps of an operator ``time_steps``."""
    steps = op.arg("steps")
    assert isinstance(steps, TimeSteps)
    return steps


@dataclass(eq=False, slots=True)
class _Node:
    """One dim of the values of a step. ``parent``: the node that it was found to be."""

    size: Size
    is_whole: bool = False
    parent: _Node | None = None

    def root(self) -> _Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node


def _join(left: Sequence[_Node], right: Sequence[_Node]) -> None:
    """Let two descriptions of a dim be the same. What is described in two ways stays whole."""
    if [node.size for node in left] != [node.size for node in right]:
        for node in (*left, *right):
            node.root().is_whole = True
        return
    for x, y in zip(left, right, strict=True):
        a, b = x.root(), y.root()
        if a is not b:
            a.is_whole |= b.is_whole
            b.parent = a


Dims = list[list[_Node]]
"""The dims of a value, each as the product of nodes."""


class StepDims:
    """The dims of one step, found by following values from operator to operator.

    ``rules``: those of the operators of the step. ``factor_names``: for every operator of the step,
    the factor of the rule of the whole operator for each of its own, where there is one.
    ``rule``: the rule of the whole operator.
    """

    def __init__(self, op: IROp) -> None:
        self.steps = steps_of(op)
        self.rules = tuple(
            instantiate(definitions.OPS[inner.target], inner) for inner in self.steps.in_step(0)
        )
        self._nodes: list[dict[str, _Node]] = []
        self._values: dict[str, Dims] = {}
        self._time = _Node(self.steps.count, is_whole=True)
        self._sums: set[int] = set()  # the dims that some result lacks
        self.additive: tuple[int, ...] = ()
        self._walk()
        results = self._results()
        self._freeze(results)
        operands = [self._values[value.name] for value in self.steps.inputs]
        self._names = self._named((*operands, *results))
        self.rule = self._rule(operands, results)
        self.factor_names = tuple(
            {name: self._names.get(id(node.root())) for name, node in nodes.items()}
            for nodes in self._nodes
        )

    def _walk(self) -> None:
        """Follow values through the operators of a step, and from the end of a step to the
        beginning of the next one.
        """
        steps = self.steps
        for value in steps.inputs:
            self._values[value.name] = [[] if n == 1 else [_Node(n)] for n in value.shape]
        for op, rule in zip(steps.ops, self.rules, strict=True):
            nodes = {
                factor.name: _Node(factor.size, _is_whole(factor, rule)) for factor in rule.factors
            }
            self._nodes.append(nodes)
            for value, refs in zip(op.operands, rule.operands, strict=True):
                for dim, dim_refs in zip(self._values[value.name], refs, strict=True):
                    _join(dim, _nodes_of(dim_refs, nodes))
            for value, refs in zip(op.results, rule.results, strict=True):
                self._values[value.name] = [_nodes_of(dim_refs, nodes) for dim_refs in refs]
            self._follow_time(op)
        for before, after in zip(steps.inputs, steps.carried, strict=False):
            for x, y in zip(self._values[before.name], self._values[after.name], strict=True):
                _join(x, y)

    def _follow_time(self, op: IROp) -> None:
        """Let the dim that a step takes its own place of be that of the steps, if they take all."""
        index = op.arg("index")
        if op.target != "getitem" or not isinstance(index, tuple) or Ellipsis in index:
            return
        dims = self._values[op.operands[0].name]
        position = 0
        for item in index:
            if isinstance(item, StepIndex) and len(dims[position]) == 1:
                ends = sorted((item.at(0), item.at(self.steps.count - 1)))
                node = dims[position][0]
                if node.size == self.steps.count and ends == [0, self.steps.count - 1]:
                    _join([self._time], [node])
            position += item is not None

    def _results(self) -> list[Dims]:
        results = []
        for made in self.steps.stacked:
            dims = list(self._values[made.value.name])
            if made.is_new:
                dims.insert(made.dim, [self._time])
            else:
                dims[made.dim] = [self._time, *dims[made.dim]]
            results.append(dims)
        return [*results, *(self._values[value.name] for value in self.steps.last)]

    def _freeze(self, results: Sequence[Dims]) -> None:
        """Let stay whole what cannot be cut, and find which carried values are summands where a dim
        is cut that they lack.
        """
        tensors = (*self._values.values(), *results)
        roots = {id(r): r for dims in tensors for dim in dims for n in dim for r in [n.root()]}
        given = [{id(node.root()) for dim in dims for node in dim} for dims in results]
        if not all(rule.grad_linear for rule in self.rules):
            for root in roots.values():
                root.is_whole = True
        for root in roots.values():
            occurrences = (
                [node.root() for dim in dims for node in dim].count(root) for dims in tensors
            )
            if root.is_whole or max(occurrences) > 1:
                root.is_whole = True
                continue
            summed = self._summed(root, [id(root) in found for found in given])
            # One list of what is added serves all dims.
            is_sum = not all(id(root) in found for found in given)
            if summed is None or (is_sum and self._sums and summed != self.additive):
                root.is_whole = True
            elif is_sum:
                self._sums.add(id(root))
                self.additive = summed

    def _summed(self, root: _Node, has: Sequence[bool]) -> tuple[int, ...] | None:
        """The inputs that are summands where ``root`` is cut, or ``None`` if it cannot be. ``has``:
        which results have the dim.
        """
        summands: set[str] = set()  # by the names of values

        def follow() -> bool:
            steps = zip(self.steps.ops, self.rules, self._nodes, strict=True)
            can_run = [self._follows(*step, root, summands) for step in steps]
            return all(can_run)

        # A step hands on summands to the next one, until no more are found. Before that an operator
        # may seem to add a summand to something whole.
        before = -1
        while len(summands) > before:
            before = len(summands)
            can_run = follow()
            for value, later in zip(self.steps.inputs, self.steps.carried, strict=False):
                if later.name in summands:
                    summands.add(value.name)
        if not can_run:
            return None
        carried = list(zip(self.steps.inputs, self.steps.carried, strict=False))
        if any(value.name in summands and later.name not in summands for value, later in carried):
            return None
        results = (*(made.value for made in self.steps.stacked), *self.steps.last)
        sums = [value.name in summands for value in results]
        if not all(a or b for a, b in zip(has, sums, strict=True)):
            return None
        found = tuple(i for i, (value, _) in enumerate(carried) if value.name in summands)
        return found if not found or any(sums) else None

    def _follows(
        self,
        op: IROp,
        rule: OpRule,
        nodes: Mapping[str, _Node],
        root: _Node,
        summands: set[str],
    ) -> bool:
        """Whether an operator of the step can run where ``root`` is cut; its results join the
        summands if they are some.
        """
        own = [name for name, node in nodes.items() if node.root() is root]
        partial = {i for i, value in enumerate(op.operands) if value.name in summands}
        if not own:
            if partial:
                summands |= {value.name for value in op.results}
            return not partial or frozenset(partial) in rule.linear_sets
        if len(own) > 1:
            return False
        lacking = [not has_factor(refs, own[0]) for refs in rule.results]
        if any(lacking) != all(lacking) or (any(lacking) and rule.additive):
            return False
        if any(lacking):
            summands |= {value.name for value in op.results}
        return not partial

    def _named(self, tensors: Sequence[Dims]) -> dict[int, str]:
        """The names of the factors of the whole operator, by node."""
        names: dict[int, str] = {}
        self._roots: list[_Node] = []
        for node in (node for dims in tensors for dim in dims for node in dim):
            root = node.root()
            if id(root) not in names:
                turn, letter = divmod(len(names), 26)
                names[id(root)] = chr(ord("a") + letter) + (str(turn) if turn else "")
                self._roots.append(root)
        return names

    def _kind(self, root: _Node) -> FactorKind:
        if root.is_whole:
            return FactorKind.FROZEN
        return FactorKind.SUMMED if id(root) in self._sums else FactorKind.FREE

    def _rule(self, operands: Sequence[Dims], results: Sequence[Dims]) -> OpRule:
        factors = tuple(
            Factor(
                self._names[id(root)],
                (root.size,),
                self._kind(root),
            )
            for root in self._roots
        )

        def refs(dims: Dims) -> TensorRefs:
            return tuple(
                tuple(FactorRef(self._names[id(node.root())]) for node in dim) for dim in dims
            )

        of_operands, of_results = tuple(map(refs, operands)), tuple(map(refs, results))
        text = annotation_text(factors, of_operands, of_results)
        return OpRule(
            text,
            factors,
            of_operands,
            of_results,
            additive=self.additive,
            grad_linear=all(rule.grad_linear for rule in self.rules),
            localise=_localise,
            nonempty=any(rule.nonempty for rule in self.rules),
        )


def _is_whole(factor: Factor, rule: OpRule) -> bool:
    """Whether an operator of a step cannot be cut along a factor without more ado."""
    form = rule.parallel
    told = form is not None and factor.name in form.factors and not _only_counts(form, factor.name)
    tensors = (*rule.operands, *rule.results)
    refs = [ref for tensor in tensors for dim in tensor for ref in dim if ref.factor == factor.name]
    in_parts = any(ref.segment is not None or ref.element is not None for ref in refs)
    return told or in_parts or factor.kind is FactorKind.FROZEN or len(factor.segments) > 1


def _only_counts(form: ParallelForm, factor: str) -> bool:
    """Whether a parallel form sends nothing, but must know how long the whole factor is: a mean."""
    entry = form.factors[factor]
    plain = entry.operands is None and entry.results is None
    return plain and entry.anywhere and factor not in form.keywords


def _nodes_of(refs: DimRefs, nodes: Mapping[str, _Node]) -> list[_Node]:
    """The nodes of a dim. A part of a factor has a node of its own, which stays whole."""
    found = []
    for ref in refs:
        node = nodes[ref.factor]
        if ref.element is None and node.size != 1:
            found.append(node if ref.segment is None else _Node(node.size, is_whole=True))
    return found


@once
def step_dims(op: IROp) -> StepDims:
    """The dims of the steps of an operator ``time_steps``."""
    return StepDims(op)


def pieces_of(rule: OpRule, name: str) -> list[str]:
    """The factors into which a factor of the rule was refined."""
    return [f.name for f in rule.factors if f.name == name or f.name.startswith(f"{name}.")]


def _localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    """The steps of a rank: the calls of its operators with the sizes of its pieces."""
    dims, ops = step_dims(op), []
    for inner, own, names in zip(dims.steps.ops, dims.rules, dims.factor_names, strict=True):
        sizes = _sizes(own, names, rule, local)
        if own.localise is not None and any(sizes.axes.values()):
            # The rule's function reads numbers. What differs between two steps follows the step.
            made = [own.localise(_in_step(inner, step), own, sizes) for step in range(2)]
            inner = inner.with_args(
                **{name: _of_steps(arg, made[1][name]) for name, arg in made[0].items()}
            )
        form = own.parallel
        if form is not None and any(sizes.axes.get(factor) for factor in form.factors):
            counts = form.local_args(inner, sizes) if form.local_args else {}
            inner = inner.with_args(**counts).retarget(form.target)
        ops.append(inner)
    return {"steps": replace(dims.steps, ops=tuple(ops))}


def _in_step(op: IROp, step: int) -> IROp:
    return op.map_args(lambda leaf: leaf.at(step) if isinstance(leaf, StepIndex) else leaf)


def _of_steps(first: Arg, second: Arg) -> Arg:
    """The argument of all steps, from those of the first two."""
    if isinstance(first, tuple):
        return tuple(_of_steps(x, y) for x, y in zip(first, second, strict=True))
    if isinstance(first, slice):
        bounds = ((first.start, second.start), (first.stop, second.stop), (first.step, second.step))
        return slice(*(_of_steps(x, y) for x, y in bounds))
    if type(first) is int and type(second) is int and first != second:
        return StepIndex(first, second - first)
    return first


def _sizes(
    own: OpRule, names: Mapping[str, str | None], rule: OpRule, local: LocalSizes
) -> LocalSizes:
    """What a rank sees of the factors of an operator of a step."""
    segments: dict[str, tuple[Size, ...]] = {}
    offsets: dict[str, Size] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for factor in own.factors:
        name = names[factor.name]
        pieces = [] if name is None else pieces_of(rule, name)
        cut = tuple(axis for piece in pieces for axis in local.axes.get(piece, ()))
        axes[factor.name] = cut
        segments[factor.name] = factor.segments
        offsets[factor.name] = 0
        if cut:
            segments[factor.name] = (product(sum(local.segments[p]) for p in pieces),)
            # Where a piece begins is known of a factor in one part only; no operator that asks for
            # it is cut inside of a loop.
            offsets[factor.name] = local.offsets[pieces[0]] if len(pieces) == 1 else 0
    full = {factor.name: factor.size for factor in own.factors}
    return LocalSizes(segments, offsets, axes, full)


def step_sizes(op: IROp, factors: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes of the factors of every operator of a step, where the whole operator has those of
    ``factors``.
    """
    dims = step_dims(op)
    assert op.rule is not None
    found = []
    for own, names in zip(dims.rules, dims.factor_names, strict=True):
        sizes = {}
        for factor in own.factors:
            name = names[factor.name]
            pieces = [] if name is None else pieces_of(op.rule, name)
            whole = factor.size
            assert isinstance(whole, int)
            sizes[factor.name] = math.prod(factors[p] for p in pieces) if pieces else whole
        found.append(sizes)
    return found


def _rule(op: IROp) -> OpRule:
    return step_dims(op).rule


def can_be_a_step(op: IROp) -> bool:
    """Whether an operator may stand in a loop: it has a rule, and does the same in every call."""
    opdef = definitions.OPS.get(op.target)
    if opdef is None or op.target == TIME_STEPS or op.only_in or op.updates_buffers:
        return False
    rule = instantiate(opdef, op)
    sizes = [size for value in (*op.operands, *op.results) for size in value.shape]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return rule.known and not (rule.random or rule.updates or rule.densities)


define(TIME_STEPS, "operands, steps", TIME_STEPS, _rule)
