"""The strategies of an operator along one mesh axis, and the layouts they ask of its operands and
give to its results.

A strategy is a short string, as it stands in a plan:

    ``R``  ``G``            everything replicated; everything gradient-partial
    ``split:<factor>``      one factor is cut
    ``split:<factor>@1``    the same, within the axes that cut it in place 0
    ``linear:<i>``          operands of linear set ``i``, results: partial; other operands: ``G``
    ``exchange:<a>><b>``    operands are cut in factor ``a``, results in factor ``b``

An operator has one strategy per mesh axis. Several axes may cut one factor, major to minor in mesh
order, those in place 0 before those in place 1. On ``r=2 x c=2`` 8 columns that ``r`` splits in
place 1 and ``c`` in place 0 are ``[8/c/r]``: the ranks of the second ``c`` have columns 4 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwright.compiler.ops.rule import (
    ExchangeKind,
    FactorPair,
    OpRule,
    RuleForm,
    TensorRefs,
)
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Density, Layout, Mesh

Strategy = str
Assignment = Mapping[str, Strategy]
"""Mesh axis to the operator's strategy along it; an axis left out means ``R``."""

SPLIT = "split:"

MOST_PLACES = 100
"""The number of places that an axis can have among those that cut one factor."""

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
    found += [SPLIT + factor.name for factor in rule.factors if rule.splittable(factor.name)]
    found += [f"linear:{i}" for i in range(len(rule.linear_sets))]
    return (*found, *(exchange_strategy(exchange.pair) for exchange in rule.exchanges))


def allowed(rule: OpRule, assignment: Assignment, mesh: Mesh) -> bool:
    """Whether the operator may follow all strategies of an assignment together."""
    return _allowed(rule.form, tuple(assignment.items()), mesh)


@lru_cache(maxsize=KNOWN)
def _allowed(form: RuleForm, given: tuple[tuple[str, Strategy], ...], mesh: Mesh) -> bool:
    """Whether operators of one form may follow ``given``, the strategies by axis."""
    rule, assignment = form.rule, dict(given)
    if not all(is_known(rule, strategy) for strategy in assignment.values()):
        return False
    exchanging = [axis for axis in mesh.names if exchange(assignment.get(axis, "R"))]
    pairs = {pair for s in assignment.values() if (pair := exchange(s))}
    exchanges = [found for found in rule.exchanges if found.pair in pairs]
    for side in (0, 1):
        exchanged = {found.pair[side]: found.kind for found in exchanges}
        for factor, axes in factor_axes(assignment, mesh, side).items():
            if not _may_cut(rule, factor, axes, exchanging, exchanged, mesh):
                return False
            # The ranks of these axes exchange what lies together: the piece that the axes before
            # them leave them. So no axis within cuts it further on both sides.
            by_exchange = [axis in exchanging for axis in axes]
            if by_exchange != sorted(by_exchange) and on_both_sides(rule, factor):
                return False
    # Keys go round on one axis. Tokens go to experts along several, one after the other, and edges
    # are exchanged of several dims, of which each may be cut by several axes.
    ring = any(found.kind is ExchangeKind.RING for found in exchanges)
    return len(exchanging) <= 1 or not ring


def is_known(rule: OpRule, strategy: Strategy) -> bool:
    """Whether the rule has a strategy, in whatever place."""
    plain, at, place = strategy.partition("@")
    places = map(str, range(1, MOST_PLACES))
    if at and not (plain.startswith(SPLIT) and place in places):
        return False
    return plain in strategies(rule)


def _may_cut(
    rule: OpRule,
    factor: str,
    axes: tuple[str, ...],
    exchanging: list[str],
    exchanged: Mapping[str, ExchangeKind],
    mesh: Mesh,
) -> bool:
    """Whether axes may cut a factor of one side. ``exchanged``: the factors of this side that are
    exchanged, and how: a form that does so takes any piece of them, also of a frozen one.
    """
    free = list(axes) == exchanging or (rule.frozen(factor) and factor in exchanged)
    if not free and not rule.splittable(factor, mesh.num_ranks(axes)):
        return False
    form = rule.parallel
    if form is None or form.knows_runs or not any(map(mesh.turns_of, axes)):
        return True
    # The form may ask where in the factor its piece begins, which says all of a single run only. So
    # do edges.
    own = form.factors.get(factor)
    has_edges = exchanged.get(factor) is ExchangeKind.EDGES
    return list(axes) != exchanging and not has_edges and (own is None or own.anywhere)


def on_both_sides(rule: OpRule, factor: str) -> bool:
    """Whether the first operand and the first result have a factor."""
    return has_factor(rule.operands[0], factor) and has_factor(rule.results[0], factor)


def split_factor(strategy: Strategy, side: int = 1) -> str | None:
    """The factor that a strategy cuts, if it cuts one: of the operands (``side`` 0), or of the
    results (1). They differ where two factors are exchanged.
    """
    if strategy.startswith(SPLIT):
        return strategy.removeprefix(SPLIT).partition("@")[0]
    exchanged = exchange(strategy)
    return exchanged[side] if exchanged else None


def split_strategy(factor: str, place: int = 0) -> Strategy:
    """The strategy that cuts a factor, in a place among the axes that cut it."""
    return f"{SPLIT}{factor}@{place}" if place else SPLIT + factor


def split_place(strategy: Strategy) -> int:
    """The place of an axis with this strategy among those that cut the same factor: the higher, the
    further within.
    """
    return int(strategy.partition("@")[2] or 0)


def cut_factor(rule: OpRule, strategy: Strategy, side: int, index: int) -> str | None:
    """The factor that a strategy cuts of one operand (``side`` 0) or result (1)."""
    pair = exchange(strategy)
    return _exchanged(rule, index, pair) if pair and side == 0 else split_factor(strategy, side)


def exchange_strategy(pair: FactorPair) -> Strategy:
    """The strategy that exchanges two factors; :func:`exchange` is the reverse."""
    return f"exchange:{pair[0]}>{pair[1]}"


def exchange(strategy: Strategy) -> FactorPair | None:
    """The two factors that a strategy exchanges, if it does."""
    if not strategy.startswith("exchange:"):
        return None
    a, _, b = strategy.removeprefix("exchange:").partition(">")
    return a, b


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
    pair = exchange(strategy)
    if pair is not None:
        letters = ("S" if _exchanged(rule, i, pair) else "G" for i in range(num_operands))
        return tuple(letters), tuple(
            "S" if has_factor(refs, pair[1]) else "P" for refs in rule.results
        )
    factor = split_factor(strategy) or ""
    results = tuple("S" if has_factor(refs, factor) else "P" for refs in rule.results)
    summed = "P" in results

    def letter(index: int, refs: TensorRefs) -> str:
        if has_factor(refs, factor):
            return "S"
        # An operand that is added to a sum, such as a bias, is a summand where the sum is one.
        return "P" if summed and index in rule.additive else "G"

    operands = tuple(letter(index, refs) for index, refs in enumerate(rule.operands))
    # A form that communicates inside may give placements that the general law does not know.
    parallel = rule.parallel.factors.get(factor) if rule.parallel else None
    return (parallel and parallel.operands) or operands, (parallel and parallel.results) or results


def _exchanged(rule: OpRule, index: int, pair: FactorPair) -> str | None:
    """The factor that an exchange wants an operand cut in, if it has one of the two."""
    found = rule.exchange_of(pair)
    follows_target = found is not None and index in found.follows_target
    wanted = pair[1:] if follows_target else pair
    return next((factor for factor in wanted if has_factor(rule.operands[index], factor)), None)


def has_factor(tensor: TensorRefs, factor: str) -> bool:
    """Whether a factor stands in some dim of a tensor."""
    return any(ref.factor == factor for dim in tensor for ref in dim)


def factor_axes(assignment: Assignment, mesh: Mesh, side: int = 1) -> dict[str, tuple[str, ...]]:
    """The axes that cut each factor, major to minor; only factors that are cut. ``side``: of the
    operands (0), or of the results (1).
    """
    axes: dict[str, tuple[str, ...]] = {}
    for axis, strategy in by_place(assignment, mesh):
        factor = split_factor(strategy, side)
        if factor is not None:
            axes[factor] = (*axes.get(factor, ()), axis)
    return axes


def layouts(
    rule: OpRule, assignment: Assignment, mesh: Mesh
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layout of every operand and every result under one strategy per axis."""
    return _layouts(rule.form, tuple(assignment.items()), mesh)


def by_place(assignment: Assignment, mesh: Mesh) -> list[tuple[str, Strategy]]:
    """The strategies of all axes in mesh order, those in place 0 first."""
    found = [(axis, assignment.get(axis, "R")) for axis, _ in mesh.axes]
    if any("@" in strategy for _, strategy in found):
        found.sort(key=lambda item: split_place(item[1]))
    return found


@lru_cache(maxsize=KNOWN)
def _layouts(
    form: RuleForm, given: tuple[tuple[str, Strategy], ...], mesh: Mesh
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts that ``given``, the strategies by axis, give to operators of one form."""
    rule, strategies = form.rule, by_place(dict(given), mesh)  # outermost first
    assignment = dict(strategies)
    per_axis = {axis: placements(rule, strategy) for axis, strategy in strategies}
    # Both sides by themselves: an exchange cuts one factor of the operands, another of the results.
    sides = []
    for side, tensors in enumerate((rule.operands, rule.results)):
        densities = rule.densities[side] if rule.densities else (None,) * len(tensors)
        found = []
        for i, (refs, density) in enumerate(zip(tensors, densities, strict=True)):
            cut = {axis: cut_factor(rule, s, side, i) or "" for axis, s in assignment.items()}
            placement = {axis: p[side][i] for axis, p in per_axis.items()}
            found.append(tensor_layout(rule, refs, cut, placement, density))
        sides.append(tuple(found))
    return sides[0], sides[1]


def tensor_layout(
    rule: OpRule,
    tensor: TensorRefs,
    factors: Mapping[str, str],
    placement: Mapping[str, str],
    density: Density | None = None,
) -> Layout:
    """The layout of one operand or result, from its placement letter along every axis, outermost
    first, and the factor that each axis cuts.
    """
    # The axes that cut each factor, outermost first.
    cuts: dict[str, tuple[str, ...]] = {}
    for axis, letter in placement.items():
        if letter == "S":
            factor = factors[axis]
            cuts[factor] = (*cuts.get(factor, ()), axis)
    dims = []
    for refs in tensor:
        # A dim is the product of its factors: ``(b s)`` with ``b`` cut over dp is ``[b/dp, s]``.
        atoms = []
        for ref in refs:
            segments, axes = rule.factor(ref.factor).segments, cuts.get(ref.factor, ())
            if ref.element is not None:
                atoms.append(Atom((1,), axes, (ref.element, *segments) if axes else ()))
            elif ref.segment is not None:
                atoms.append(Atom((segments[ref.segment],), axes))
            else:
                atoms.append(Atom(segments, axes))
        # A dim without factors has size 1: it was left out of the rule, as nothing can cut it.
        dims.append(tuple(atoms) or (Atom((1,)),))
    return Layout(
        tuple(dims),
        tuple(sorted(axis for axis, letter in placement.items() if letter == "P")),
        tuple(sorted(axis for axis, letter in placement.items() if letter == "G")),
        density,
    )
