"""What communication costs in elements that each rank sends, before any hardware is known.

The numbers are those of ring algorithms, which send the least. Example: 4 ranks all-reduce 100
elements, so each sends 2 * 3/4 * 100 = 150; all-gathering 100 elements from pieces of 25 sends 75.
"""

from __future__ import annotations

import functools
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
    forwards, backwards = _coefficients(kind, backward, num_ranks)
    return (
        forwards[0] * before + forwards[1] * after,
        backwards[0] * before + backwards[1] * after,
    )


@functools.lru_cache(maxsize=4096)
def _coefficients(
    kind: str, backward: str | None, num_ranks: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What a rank sends forward and backward, each as shares of the elements before and behind a
    step.
    """
    # A ring of n ranks has n - 1 rounds, and in each a rank sends 1/n of the whole tensor.
    share = (num_ranks - 1) / num_ranks
    nothing = (0.0, 0.0)
    forwards = {
        "all_gather": (0.0, share),
        "reduce_scatter": (share, 0.0),
        "all_reduce": (0.0, 2 * share),
        "all_to_all": (share, 0.0),
    }
    # The gradient goes the other way: it has ``after`` elements when it comes in.
    backwards = {
        "all_gather": (share, 0.0),
        "reduce_scatter": (0.0, share),
        "all_reduce": (2 * share, 0.0),
    }
    # ``grad_all_reduce`` and ``reduce_scatter`` have one backward each; the others name theirs.
    backward_kind = {"reduce_scatter": "all_gather", "grad_all_reduce": "all_reduce"}.get(
        kind, backward
    )
    back = (share, 0.0) if kind == "all_to_all" else backwards.get(backward_kind or "", nothing)
    return forwards.get(kind, nothing), back


def steps_elements(
    steps: Iterable[AdapterStep], mesh: Mesh, *, differentiable: bool = True
) -> float:
    """Forward and backward elements of a whole conversion."""
    total = 0.0
    for step in steps:
        forward, backward = step_elements(step, mesh)
        total += forward + (backward if differentiable else 0.0)
    return total
