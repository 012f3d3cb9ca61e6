"""Experts on other axes than the rest of the model, on the same ranks.

The ranks of a stage are two grids at once. Outside of the experts they are ``dp x cp x tp``, for
the experts ``edp x ep x etp``, each written major to minor. The axes of the mesh are the common
refinement of both, so that each axis has one role outside and one inside:

    dp=4, tp=2 and ep=4, etp=2    ->  ep=4 (dp, ep), tp=2 (tp, etp)
    dp=4, tp=2 and ep=2, etp=2    ->  dp=2 (dp, edp), ep=2 (dp, ep), tp=2 (tp, etp)
    dp=2, tp=2 and ep=4, etp=1    ->  ep=2 (dp, ep), tp_ep=2 (tp, ep)
    dp=2, cp=2 and ep=4           ->  ep=2 (dp, ep), cp=2 (cp, ep)
    dp=8 and ep=(2, 4)            ->  ep=2 (dp, ep), ep2=4 (dp, ep)

The last is for experts over 2 nodes of 4 ranks: along ``ep`` a token crosses to the other node
once, and goes on from there along ``ep2``.

Where tokens are cut outside and experts inside, they are exchanged, over all such axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import exchange_strategy
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.runtime.errors import PlanError

Inside = Literal["edp", "ep", "etp"]

_NAMES: dict[tuple[str, Inside], str] = {
    ("dp", "edp"): "dp",
    ("dp", "ep"): "ep",
    ("dp", "etp"): "etp",
    ("tp", "edp"): "tp_edp",
    ("tp", "ep"): "tp_ep",
    ("tp", "etp"): "tp",
}


@dataclass(frozen=True, slots=True)
class ExpertAxis:
    """One axis: its size, and what it is for outside and inside of the experts. ``outside`` is
    ``dp``, ``tp`` or the name of an axis of the sequence. ``number``: which of the axes it is that
    are for the same, the major one being 1.
    """

    size: int
    outside: str
    inside: Inside
    number: int = 1

    @property
    def name(self) -> str:
        name = _NAMES.get((self.outside, self.inside), self.outside)
        return name if self.number == 1 else f"{name}{self.number}"


def expert_axes(
    dp: int,
    tp: int,
    ep: int | tuple[int, ...],
    etp: int | None,
    policy: str,
    context: Sequence[tuple[str, int]] = (),
) -> list[ExpertAxis]:
    """The axes of ``dp x tp`` ranks that hold experts ``ep x etp``, major to minor. ``ep``: how
    many ranks share them, or how many nodes, and ranks within each. ``etp=None``: as much of ``tp``
    as there are ranks for. ``context``: names and sizes of axes of the sequence, between ``dp`` and
    ``tp``.

    Raises :class:`PlanError` if the two grids have no common refinement.
    """
    outside = [("dp", dp), *context, ("tp", tp)]
    ranks, grid = math.prod(size for _, size in outside), _text(outside)
    nodes, within = (1, ep) if isinstance(ep, int) else (1, 1, *ep)[-2:]
    title = f"policy {policy!r} cannot place ep={ep if isinstance(ep, int) else list(ep)}"
    told = "ep" if isinstance(ep, int) else "the product of ep"
    if not isinstance(ep, int) and not 1 <= len(ep) <= 2:
        raise PlanError(
            f"{title} on ranks",
            hint="pass a number of ranks, or those of nodes and of ranks within each",
        )
    ep = nodes * within
    if min(nodes, within) < 1 or ranks % ep:
        raise PlanError(
            f"{title} on {ranks} ranks",
            why=f"experts lie on the ranks that are {grid} outside of them",
            hint=f"{told} is one of {', '.join(map(str, _divisors(ranks)))}",
        )
    if etp is None:
        etp = max(size for size in _divisors(tp) if ranks % (ep * size) == 0)
    if etp < 1 or ranks % (ep * etp):
        raise PlanError(
            f"{title} x etp={etp} on {ranks} ranks",
            why=f"these are {ep * etp} ranks, which do not divide {ranks}",
            hint=f"with ep={ep}, etp is one of {', '.join(map(str, _divisors(ranks // ep)))}",
        )
    # Where axes of either grid begin and end, counted in ranks from the innermost: between two ends
    # there is one axis.
    begins, begin = dict[str, int](), ranks
    for name, size in outside:
        begin //= size
        begins[name] = begin
    ends = sorted({1, ranks, etp, within * etp, ep * etp, *begins.values()})
    if any(large % small for small, large in pairwise(ends)):
        raise PlanError(
            f"{title} x etp={etp} on {ranks} ranks",
            why=f"ranks that are {grid} outside of the experts do not divide into these",
            hint="choose sizes of which one divides the other: etp and tp, ep * etp and tp * dp",
        )
    found = list[ExpertAxis]()
    for small, large in reversed(list(pairwise(ends))):  # major first
        name = next(name for name, begin in begins.items() if begin <= small)
        inside = _inside(small, ep, etp)
        alike = sum((axis.outside, axis.inside) == (name, inside) for axis in found)
        found.append(ExpertAxis(large // small, name, inside, alike + 1))
    _check_whole(found, context, f"{title} x etp={etp}")
    return found


def _check_whole(
    axes: Sequence[ExpertAxis], context: Sequence[tuple[str, int]], title: str
) -> None:
    """Raise :class:`PlanError` if experts take a part of an axis of the sequence: attention goes
    round on an axis, or gathers over it, as a whole.
    """
    for name, size in context:
        parts = [axis for axis in axes if axis.outside == name]
        if len(parts) > 1:
            told = " x ".join(f"{axis.inside}={axis.size}" for axis in parts)
            raise PlanError(
                f"{title} on a part of {name}={size}",
                why=f"its ranks would be {told} for the experts",
                hint=f"sizes of ep and etp for which {name} is all of one kind, or two axes: "
                f"cp=[{parts[0].size}, {parts[1].size}]",
            )


def _text(sizes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes)


def _inside(small: int, ep: int, etp: int) -> Inside:
    """What an axis is for among experts, if it is major to ``small`` ranks."""
    if small < etp:
        return "etp"
    return "ep" if small < ep * etp else "edp"


def experts_of(graph: IRGraph, policy: str) -> set[int]:
    """The dim classes of experts.

    Raises :class:`PlanError` for a model without.
    """
    assert graph.dims is not None
    found = {dim.index for dim in graph.dims.named(EXPERTS)}
    if not found:
        raise PlanError(
            f"policy {policy!r} finds no experts to split",
            why="no tokens are dispatched to several experts in this model, and it has no weights "
            "[experts, in, out] in a module that is called so",
            hint="split something else, as policy 'tp' does without ep and etp; docs/experts.md "
            "says which forms of experts are known",
        )
    return found


def runs_experts(op: IROp, graph: IRGraph, experts: Set[int]) -> bool:
    """Whether an operator is part of what experts compute: it is told of chosen rows, or makes or
    reads a tensor that has experts beside two other dims, as a router's scores have not.
    """
    assert op.rule is not None and graph.dims is not None
    if op.rule.densities is not None:
        return True
    dims = graph.dims
    for value in (*op.operands, *op.results):
        classes = {index for dim in dims.values.get(value.name, ()) for index in dim}
        # A stack of their biases has no third dim.
        if classes & experts and (len(classes) > 2 or op.target == "stack"):
            return True
    return False


def exchange_of(op: IROp, graph: IRGraph, tokens: Set[int], experts: Set[int]) -> str | None:
    """The strategy that exchanges a dim of the tokens for the experts, if the operator has one."""
    assert op.rule is not None and graph.dims is not None
    factors = graph.dims.factors
    for exchange in op.rule.exchanges:
        classes = {factors.get((op.name, factor)) for factor in exchange.pair}
        if classes & tokens and classes & experts:
            return exchange_strategy(exchange.pair)
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
