"""Experts on other axes than the rest of the model, on the same ranks.

The ranks of a stage are two grids at once. Outside of the experts they are ``dp x tp``, for the
experts ``edp x ep x etp``, each written major to minor. The axes of the mesh are the common
refinement of both, so that each axis has one role outside and one inside:

    dp=4, tp=2 and ep=4, etp=2    ->  ep=4 (dp, ep), tp=2 (tp, etp)
    dp=4, tp=2 and ep=2, etp=2    ->  dp=2 (dp, edp), ep=2 (dp, ep), tp=2 (tp, etp)
    dp=2, tp=2 and ep=4, etp=1    ->  ep=2 (dp, ep), tp_ep=2 (tp, ep)

Where tokens are cut outside and experts inside, they are exchanged.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import exchange_strategy
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.runtime.errors import PlanError

Outside = Literal["dp", "tp"]
Inside = Literal["edp", "ep", "etp"]

_NAMES: dict[tuple[Outside, Inside], str] = {
    ("dp", "edp"): "dp",
    ("dp", "ep"): "ep",
    ("dp", "etp"): "etp",
    ("tp", "edp"): "tp_edp",
    ("tp", "ep"): "tp_ep",
    ("tp", "etp"): "tp",
}


@dataclass(frozen=True, slots=True)
class ExpertAxis:
    """One axis: its name and size, and what it is for outside and inside of the experts."""

    size: int
    outside: Outside
    inside: Inside

    @property
    def name(self) -> str:
        return _NAMES[self.outside, self.inside]


def expert_axes(dp: int, tp: int, ep: int, etp: int | None, policy: str) -> list[ExpertAxis]:
    """The axes of ``dp x tp`` ranks that hold experts ``ep x etp``, major to minor. ``etp=None``:
    as much of ``tp`` as there are ranks for.

    Raises :class:`PlanError` if the two grids have no common refinement.
    """
    ranks = dp * tp
    if ep < 1 or ranks % ep:
        raise PlanError(
            f"policy {policy!r} cannot place ep={ep} on {ranks} ranks",
            why=f"experts lie on the ranks that are dp={dp} x tp={tp} outside of them",
            hint=f"ep is one of {', '.join(map(str, _divisors(ranks)))}",
        )
    if etp is None:
        etp = max(size for size in _divisors(tp) if ranks % (ep * size) == 0)
    if etp < 1 or ranks % (ep * etp):
        raise PlanError(
            f"policy {policy!r} cannot place ep={ep} x etp={etp} on {ranks} ranks",
            why=f"these are {ep * etp} ranks, which do not divide {ranks}",
            hint=f"with ep={ep}, etp is one of {', '.join(map(str, _divisors(ranks // ep)))}",
        )
    # Where axes of either grid end, counted in ranks: between two ends there is one axis.
    ends = sorted({1, tp, ranks, etp, ep * etp})
    if any(large % small for small, large in pairwise(ends)):
        raise PlanError(
            f"policy {policy!r} cannot place ep={ep} x etp={etp} on {ranks} ranks",
            why=f"ranks that are dp={dp} x tp={tp} outside of the experts do not divide into these",
            hint="choose sizes of which one divides the other: etp and tp, ep * etp and tp * dp",
        )
    # Major first: inner axes belong to ``tp``.
    return [
        ExpertAxis(large // small, "dp" if small >= tp else "tp", _inside(small, ep, etp))
        for small, large in reversed(list(pairwise(ends)))
    ]


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
