"""The call one rank makes: view sizes, split sizes and counts of its own pieces, and the parallel
form where one is needed.

The result is the same text on every rank: sizes that differ between ranks stay expressions over the
rank's axis groups (``tp.local_size(50257)``), so one program serves all ranks of a stage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from sympy import Symbol

from shardwright.compiler.ir.op import AxisRef, IROp
from shardwright.compiler.ir.size import LocalSize, Size, local_size, offset
from shardwright.compiler.ops.rule import Exchanged, LocalSizes, OpRule, RuleForm
from shardwright.compiler.ops.strategy import (
    KNOWN,
    Assignment,
    Strategy,
    by_place,
    exchange,
    factor_axes,
)
from shardwright.runtime.layout import Mesh

CutBy = tuple[tuple[str, tuple[str, ...]], ...]
"""Factors that are cut, each with the axes that cut it."""


def localise(op: IROp, rule: OpRule, assignment: Assignment, mesh: Mesh) -> IROp:
    """``op`` as a rank executes it when each mesh axis follows its strategy."""
    given = tuple(assignment.items())
    cut_by, exchanges = _cut_by(given, mesh), _exchanges(given, mesh)
    axes = dict(cut_by)
    # Arguments that are sizes: ``view(8, 12, 64)`` becomes ``view(8, tp.local_size(12), 64)``.
    if axes and rule.localise is not None:
        op = op.with_args(**rule.localise(op, rule, _known_sizes(rule.form, cut_by, mesh)))
    # A split that needs communication inside is run by another function.
    if rule.parallel is not None and (
        rule.random or exchanges or any(factor in axes for factor in rule.parallel.factors)
    ):
        form, local = rule.parallel, _known_sizes(rule.form, cut_by, mesh)
        if exchanges:
            # Of an exchange the function needs both sizes: with the cuts along its axes, and
            # without.
            exchanging = {found.axis for found in exchanges}
            uncut = {f: tuple(a for a in cut if a not in exchanging) for f, cut in axes.items()}
            local = replace(local, exchanges=exchanges, uncut=local_sizes(rule, uncut, mesh))
        keywords: dict[str, tuple[AxisRef, ...]] = {}
        # It is told of the axes that cut each factor: ``class_axes=tp``.
        for factor, keyword in form.keywords.items():
            if factor in axes:
                keywords[keyword] = keywords.get(keyword, ()) + tuple(
                    AxisRef(axis) for axis in axes[factor]
                )
        extra = form.local_args(op, local) if form.local_args else {}
        op = op.with_args(**{**extra, **keywords}).retarget(form.target)
    return op


@lru_cache(maxsize=KNOWN)
def _cut_by(given: tuple[tuple[str, Strategy], ...], mesh: Mesh) -> CutBy:
    """The factors that strategies cut, each with its axes, major to minor. ``given``: the
    strategies by axis.
    """
    # A factor that is exchanged is cut on one side only: of the operands, or of the results.
    sides = [factor_axes(dict(given), mesh, side) for side in (0, 1)]
    ordered = [axis for axis, _ in by_place(dict(given), mesh)]
    axes = {
        factor: tuple(a for a in ordered if any(a in side.get(factor, ()) for side in sides))
        for factor in dict.fromkeys((*sides[1], *sides[0]))
    }
    return tuple(
        (factor, cut)
        for factor, cut in axes.items()
        if any(mesh.axis_size(axis) > 1 for axis in cut)
    )


@lru_cache(maxsize=KNOWN)
def _exchanges(given: tuple[tuple[str, Strategy], ...], mesh: Mesh) -> tuple[Exchanged, ...]:
    """What strategies exchange, in the order of the axes. ``given``: the strategies by axis."""
    assignment = dict(given)
    return tuple(
        Exchanged(axis, *pair)
        for axis, size in mesh.axes
        if size > 1 and (pair := exchange(assignment.get(axis, "R")))
    )


@lru_cache(maxsize=KNOWN)
def _known_sizes(form: RuleForm, cut_by: CutBy, mesh: Mesh) -> LocalSizes:
    """:func:`local_sizes` of rules that say the same: those of a thousand layers are a few."""
    return local_sizes(form.rule, dict(cut_by), mesh)


def local_sizes(
    rule: OpRule, axes: dict[str, tuple[str, ...]], mesh: Mesh, *, spelled: bool = False
) -> LocalSizes:
    """What a rank sees of every factor when ``axes`` cut them. ``spelled``: sizes of pieces are
    expressions, numbers or not.
    """
    segments: dict[str, tuple[Size, ...]] = {}
    offsets: dict[str, Size] = {}
    for factor in rule.factors:
        sizes: list[Size] = list(factor.segments)
        start: Size | None = 0
        # A rank has a piece of each segment. Its first element is counted along the axes, outermost
        # first.
        for axis in axes.get(factor.name, ()):
            if mesh.turns_of(axis):
                start = None  # several runs have no one beginning
            elif start is not None:
                start += offset(sizes[0], axis)
            if mesh.axis_size(axis) > 1 or not spelled:
                if spelled:
                    sizes = [LocalSize(n, Symbol(axis)) for n in sizes]
                else:
                    sizes = [local_size(n, axis, mesh.axis_size(axis)) for n in sizes]
        segments[factor.name], offsets[factor.name] = tuple(sizes), start
    return LocalSizes(
        segments, offsets, axes, {factor.name: factor.size for factor in rule.factors}
    )
