"""What communication costs in elements that each rank sends, before any hardware is known.

The numbers are those of ring algorithms, which send the least. Example: 4 ranks all-reduce 100
elements, so each sends 2 * 3/4 * 100 = 150; all-gathering 100 elements from pieces of 25 sends 75.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwright.compiler.ir.size import Size, dynamic_sizes
from shardwright.compiler.plan.conversion import REGROUP, AdapterStep
from shardwright.runtime.layout import Layout, Mesh


def estimate(size: Size) -> float:
    """A number for a size. A dynamic size counts as large as it is in the dummy arguments."""
    if isinstance(size, int):
        return float(size)
    return float(size.subs({symbol: symbol.example for symbol in dynamic_sizes(size)}))


def local_elements(layout: Layout, mesh: Mesh) -> float:
    """The elements a rank holds, on average."""
    share = 1.0 if layout.density is None else layout.density.share
    return (
        share
        * math.prod(estimate(size) for size in layout.shape)
        / math.prod(mesh.axis_size(axis) for axis in layout.cut_axes)
    )


def step_elements(step: AdapterStep, mesh: Mesh) -> tuple[float, float]:
    """``(forward, backward)`` elements each rank sends in one adapter step."""
    if step.kind == REGROUP:
        return math.inf, 0.0
    before, after = local_elements(step.before, mesh), local_elements(step.after, mesh)
    return elements_sent(step.kind, step.backward, mesh.num_ranks(step.axes), before, after)


def elements_sent(
    kind: str, backward: str | None, num_ranks: int, before: float, after: float
) -> tuple[float, float]:
    """``(forward, backward)`` elements that each rank sends in a step over ``num_ranks`` ranks.

    Each rank holds ``before`` elements before the step and ``after`` elements behind it.
    """
    # A ring of n ranks has n - 1 rounds, and in each a rank sends 1/n of the whole tensor.
    share = (num_ranks - 1) / num_ranks
    forwards = {
        "all_gather": share * after,
        "reduce_scatter": share * before,
        "all_reduce": 2 * share * after,
        "all_to_all": share * before,
    }
    # The gradient goes the other way: it has ``after`` elements when it comes in.
    backwards = {
        "all_gather": share * before,
        "reduce_scatter": share * after,
        "all_reduce": 2 * share * before,
    }
    # ``grad_all_reduce`` and ``reduce_scatter`` have one backward each; the others name theirs.
    backward_kind = {"reduce_scatter": "all_gather", "grad_all_reduce": "all_reduce"}.get(
        kind, backward
    )
    back = share * before if kind == "all_to_all" else backwards.get(backward_kind or "", 0.0)
    return forwards.get(kind, 0.0), back


def steps_elements(
    steps: Iterable[AdapterStep], mesh: Mesh, *, differentiable: bool = True
) -> float:
    """Forward and backward elements of a whole conversion."""
    total = 0.0
    for step in steps:
        forward, backward = step_elements(step, mesh)
        total += forward + (backward if differentiable else 0.0)
    return total
