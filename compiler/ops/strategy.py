"""The strategies of an operator along one mesh axis, and the layouts they ask of its operands and
give to its results.

A strategy is a short string, as it stands in a plan:

    ``R``  ``G``            everything replicated; everything gradient-partial
    ``split:<factor>``      one factor is cut
    ``linear:<i>``          operands of linear set ``i``, results: partial; other operands: ``G``

An operator has one strategy per mesh axis. Several axes may cut one factor, major to minor in mesh
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from shardwright.compiler.ops.rule import OpRule, RuleForm, TensorRefs
from shardwright.runtime.layout import Atom, Layout, Mesh

Strategy = str
Assignment = Mapping[str, Strategy]
"""Mesh axis to the operator's strategy along it; an axis left out means ``R``."""

KNOWN = 2**14
"""The number of latest answers that are kept. The operators of a model have few rules that differ,
and all are asked for often.
"""


def strategies(rule: OpRule) -> tuple[Strategy, ...]:
    """Every strategy the rule allows along one axis."""
    return _strategies(rule.form)


@lru_cache(maxsize=KNOWN)
def _strategies(form: RuleForm) -> tuple[Strategy, ...]:
    rule = form.rule
    found = ["R", "G"] if rule.grad_linear else ["R"]
    found += [f"split:{factor.name}" for factor in rule.factors if rule.splittable(factor.name)]
    return (*found, *(f"linear:{i}" for i in range(len(rule.linear_sets))))


def allowed(rule: OpRule, assignment: Assignment, mesh: Mesh) -> bool:
    """Whether the operator may follow all strategies of an assignment together."""
    known = strategies(rule)
    sizes = {
        factor: math.prod(mesh.axis_size(axis) for axis in axes)
        for factor, axes in factor_axes(assignment, mesh).items()
    }
    return all(s in known for s in assignment.values()) and all(
        rule.splittable(f, n) for f, n in sizes.items()
    )


def split_factor(strategy: Strategy) -> str | None:
    """The factor a strategy cuts, if it cuts one."""
    return strategy.removeprefix("split:") if strategy.startswith("split:") else None


def placements(rule: OpRule, strategy: Strategy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(operand placements, result placements)`` along one axis; each is ``S``, ``R``, ``G`` or
    ``P``.
    """
    return _placements(rule.form, strategy)


@lru_cache(maxsize=KNOWN)
def _placements(form: RuleForm, strategy: Strategy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rule = form.rule
    num_operands, num_results = len(rule.operands), len(rule.results)
    if strategy in ("R", "G"):
        return (strategy,) * num_operands, (strategy,) * num_results
    if strategy.startswith("linear:"):
        linear_set = rule.linear_sets[int(strategy.removeprefix("linear:"))]
        return tuple("P" if i in linear_set else "G" for i in range(num_operands)), (
            "P",
        ) * num_results
    factor = strategy.removeprefix("split:")
    results = tuple("S" if has_factor(refs, factor) else "P" for refs in rule.results)
    summed = "P" in results

    def letter(index: int, refs: TensorRefs) -> str:
        if has_factor(refs, factor):
            return "S"
        # An operand that is added to a sum, such as a bias, is a summand where the sum is one.
        return "P" if summed and index in rule.additive else "G"

    operands = tuple(letter(index, refs) for index, refs in enumerate(rule.operands))
    parallel = rule.parallel.factors.get(factor) if rule.parallel else None
    return (parallel and parallel.operands) or operands, (parallel and parallel.results) or results


def has_factor(tensor: TensorRefs, factor: str) -> bool:
    """Whether a factor stands in some dim of a tensor."""
    return any(ref.factor == factor for dim in tensor for ref in dim)


def factor_axes(assignment: Assignment, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The axes that cut each factor, major to minor; only factors that are cut."""
    axes: dict[str, tuple[str, ...]] = {}
    for axis in mesh.names:
        factor = split_factor(assignment.get(axis, "R"))
        if factor is not None:
            axes[factor] = (*axes.get(factor, ()), axis)
    return axes


def layouts(
    rule: OpRule, assignment: Assignment, mesh: Mesh
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layout of every operand and every result under one strategy per axis."""
    return _layouts(rule.form, tuple((axis, assignment.get(axis, "R")) for axis in mesh.names))


@lru_cache(maxsize=KNOWN)
def _layouts(
    form: RuleForm, strategies: tuple[tuple[str, Strategy], ...]
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts that strategies give. ``strategies``: those of every axis, in mesh order."""
    rule, assignment = form.rule, dict(strategies)
    per_axis = {axis: placements(rule, strategy) for axis, strategy in strategies}
    operands = tuple(
        tensor_layout(rule, refs, assignment, {axis: p[0][i] for axis, p in per_axis.items()})
        for i, refs in enumerate(rule.operands)
    )
    results = tuple(
        tensor_layout(rule, refs, assignment, {axis: p[1][i] for axis, p in per_axis.items()})
        for i, refs in enumerate(rule.results)
    )
    return operands, results


def tensor_layout(
    rule: OpRule, tensor: TensorRefs, assignment: Assignment, placement: Mapping[str, str]
) -> Layout:
    """The layout of one operand or result, from its placement letter along every axis, in mesh
    order.
    """
    cuts: dict[str, tuple[str, ...]] = {}
    for axis, letter in placement.items():
        if letter == "S":
            factor = assignment[axis].removeprefix("split:")
            cuts[factor] = (*cuts.get(factor, ()), axis)
    dims = []
    for refs in tensor:
        atoms = []
        for ref in refs:
            segments = rule.factor(ref.factor).segments
            atoms.append(
                Atom(
                    segments if ref.segment is None else (segments[ref.segment],),
                    cuts.get(ref.factor, ()),
                )
            )
        dims.append(tuple(atoms) or (Atom((1,)),))
    return Layout(
        tuple(dims),
        tuple(sorted(axis for axis, letter in placement.items() if letter == "P")),
        tuple(sorted(axis for axis, letter in placement.items() if letter == "G")),
    )
