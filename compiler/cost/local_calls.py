"""An operator call as the busiest rank sees it, with numbers in the place of size expressions.

That rank is the one at index 0 of every mesh axis, which holds the largest pieces. Example: on
``tp=4`` a product ``[8, 768] x [3072, 768]`` whose 3072 output columns are split is, on that rank,
``[8, 768] x [768, 768]``; a dim of 10 over 4 ranks counts as 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.op import IROp, call_form, once
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import DimRefs, OpRule, TensorRefs
from shardwright.compiler.ops.strategy import KNOWN, Assignment, has_factor, split_factor
from shardwright.runtime.layout import Density, Layout, Mesh


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor on one rank. ``requires_grad``: whether a gradient of it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LocalCall:
    """``op`` is the call as traced; ``operands`` and ``results`` are those of the rank, ``factors``
    the local sizes of the rule's factors. ``in_zigzag``: the factors that are dealt so.
    """

    op: IROp
    operands: tuple[LocalTensor, ...]
    results: tuple[LocalTensor, ...]
    factors: Mapping[str, int]
    in_zigzag: frozenset[str] = frozenset()

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The operands that get a gradient from this call."""
        if not self.op.grad_enabled or not any(result.requires_grad for result in self.results):
            return ()
        return tuple(index for index, operand in enumerate(self.operands) if operand.requires_grad)


def local_call(op: IROp, assignment: Assignment, mesh: Mesh) -> LocalCall:
    """The call of the rank at index 0 of every axis. Dynamic sizes are those of the dummy
    arguments.
    """
    cuts = [_cuts(assignment, mesh, side) for side in (0, 1)]
    in_zigzag = frozenset(
        factor
        for factor, axes in cuts[1].items()
        if mesh.turns and any(mesh.turns_of(axis) for axis, _ in axes)
    )
    tensors = _local_tensors(Alike(op), *(tuple(side.items()) for side in cuts))
    return LocalCall(op, *tensors, in_zigzag)


class Alike:
    """A key for an operator: two operators with one :func:`signature` are equal keys.

    The layers of a model repeat, so a cache with this key computes each kind of layer once.
    """

    def __init__(self, op: IROp) -> None:
        self.op, self.key = op, signature(op)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and self.key == other.key


@functools.lru_cache(maxsize=KNOWN)
def _local_tensors(
    asked: Alike, of_operands: CutItems, of_results: CutItems
) -> tuple[tuple[LocalTensor, ...], tuple[LocalTensor, ...], Mapping[str, int]]:
    """Operands, results, and the sizes of factors (in the results, where they differ), all on the
    rank at index 0.

    ``of_operands``, ``of_results``: what :func:`_cuts` says, as tuples, so that it can be a key of
    the cache.
    """
    op, rule = asked.op, asked.op.rule
    assert rule is not None
    # By name of a factor, the sizes of its segments: uncut, and on this rank.
    whole = {factor.name: tuple(map(estimated_size, factor.segments)) for factor in rule.factors}
    # Operands and results by themselves, as an exchange cuts other factors of each.
    sides = []
    for cuts in (dict(of_operands), dict(of_results)):
        local = {
            name: cut_sizes(sizes, [n for _, n in cuts.get(name, ())])
            for name, sizes in whole.items()
        }
        sides.append((cuts, local))
    # A parallel form may give a result whole although its factor is cut.
    exceptions = _exceptions(rule, dict(of_results))

    def tensors(
        values: tuple[IRValue, ...], all_refs: tuple[TensorRefs, ...], side: int
    ) -> tuple[LocalTensor, ...]:
        found = []
        for index, (value, refs) in enumerate(zip(values, all_refs, strict=True)):
            uncut = exceptions.get((side, index))
            if side == 0 and _takes_the_target(rule, index, *(of for of, _ in sides)):
                cuts, local = sides[1]
            else:
                cuts, local = sides[side]
            sizes = local if uncut is None else {**local, **_without_axes(whole, cuts, uncut)}
            shape = tuple(_dim_size(dim, sizes) for dim in refs)
            # Rows of chosen experts: only the pairs that routing chose are stored.
            density = rule.densities[side][index] if rule.densities else None
            if density is not None:
                experts = refs[0][0].factor if refs[0] else ""  # a single expert is no factor
                num_ranks = math.prod(n for _, n in cuts.get(experts, ()))
                shape = stored_shape(shape, density, num_ranks)
            found.append(LocalTensor(shape, value.dtype, value.takes_gradient))
        return tuple(found)

    operands = tensors(op.operands, rule.operands, 0)
    results = tensors(op.results, rule.results, 1)
    factors = {name: sum(sizes) for name, sizes in sides[1][1].items()}
    return operands, results, MappingProxyType(factors)


def _takes_the_target(rule: OpRule, index: int, of_operands: Cuts, of_results: Cuts) -> bool:
    """Whether an operand is cut as results are, under a strategy that exchanges two factors."""
    if any(index in exchange.follows_target for exchange in rule.exchanges):
        return True
    given = [factor for factor in of_operands if factor not in of_results]
    return not any(has_factor(rule.operands[index], factor) for factor in given)


@once
def signature(op: IROp) -> Hashable:
    """What two calls must share to cost the same however they are split: target, arguments, dtypes,
    the form of the rule, which gradients are added to others.
    """
    assert op.rule is not None, f"{op.name} has no rule"
    return *call_form(op), op.rule.form, op.summed


def local_shape(layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest piece of a tensor."""
    shape = []
    for dim in layout.dims:
        size = 1
        for atom in dim:
            segments = tuple(map(estimated_size, atom.segments))
            cuts = [mesh.axis_size(axis) for axis in atom.axes]
            if atom.element:
                index, count = atom.element
                # One element of a dim: rank 0, whose piece is the largest, has it or has not.
                size *= index < cut_sizes((count,), cuts)[0]
            else:
                size *= sum(cut_sizes(segments, cuts))
        shape.append(size)
    if layout.density is None:
        return tuple(shape)
    # Rows of experts: how many there are follows from what routers choose, not from the shape.
    return stored_shape(tuple(shape), layout.density, mesh.num_ranks(layout.dims[0][0].axes))


def stored_shape(shape: tuple[int, ...], density: Density, num_ranks: int) -> tuple[int, ...]:
    """The shape in which the rows of chosen pairs are stored, if so many ranks share the
    experts.
    """
    rows = math.ceil(density.rows(math.prod(shape[: density.dims]), num_ranks))
    return (rows, *(1,) * (density.dims - 1), *shape[density.dims :])


def local_bytes(layout: Layout, dtype: torch.dtype, mesh: Mesh) -> int:
    """The bytes of the largest piece of a tensor."""
    return math.prod(local_shape(layout, mesh)) * dtype.itemsize


def cut_sizes(segments: tuple[int, ...], nums_pieces: list[int]) -> tuple[int, ...]:
    """The size of each segment in piece 0, when each cut divides what the one before it left."""
    for num_pieces in nums_pieces:
        # Rounded up: piece 0 is largest.
        segments = tuple(-(-size // num_pieces) for size in segments)
    return segments


Cuts = Mapping[str, tuple[tuple[str, int], ...]]
"""The axes that cut each factor, with their sizes, major to minor: ``{"k": (("tp", 4),)}``."""


CutItems = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""The items of :data:`Cuts`."""


def _cuts(assignment: Assignment, mesh: Mesh, side: int = 1) -> Cuts:
    cuts: dict[str, tuple[tuple[str, int], ...]] = {}
    for axis, size in mesh.axes:
        factor = split_factor(assignment.get(axis, "R"), side) if size > 1 else None
        if factor is not None:
            cuts[factor] = (*cuts.get(factor, ()), (axis, size))
    return cuts


def _exceptions(rule: OpRule, cuts: Cuts) -> dict[tuple[int, int], set[str]]:
    """The factors to leave uncut in tensors that a parallel form takes whole.

    A parallel form is a function that computes on pieces in its own way, so it may want an operand
    whole although one of its factors is cut. The keys are ``(side, position)``, with side 0 for
    operands and 1 for results.
    """
    found: dict[tuple[int, int], set[str]] = {}
    if rule.parallel is None:
        return found
    for factor in cuts:
        form = rule.parallel.factors.get(factor)
        for side, letters in enumerate((form.operands, form.results) if form is not None else ()):
            for index, letter in enumerate(letters or ()):
                # ``R`` or ``G``: the form reads this tensor whole, though the factor is cut.
                if letter != "S":
                    found.setdefault((side, index), set()).add(factor)
    return found


def _without_axes(
    whole: Mapping[str, tuple[int, ...]], cuts: Cuts, factors: set[str]
) -> dict[str, tuple[int, ...]]:
    return {factor: whole[factor] for factor in factors if factor in cuts}


def _dim_size(refs: DimRefs, sizes: Mapping[str, tuple[int, ...]]) -> int:
    size = 1
    for ref in refs:
        segments = sizes[ref.factor]
        if ref.element is not None:
            size *= ref.element < segments[0]
            continue
        size *= segments[ref.segment] if ref.segment is not None else sum(segments)
    return size


def estimated_size(size: Size) -> int:
    """A whole number for a size, as estimates count dynamic ones."""
    return size if isinstance(size, int) else _estimated(size)


@functools.cache
def _estimated(size: Size) -> int:
    return max(1, round(estimate(size)))
