"""Where pipeline stages of a graph may begin, and what crosses a cut there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import product
from shardwright.compiler.passes.eval_stages import stage_of_eval_ops
from shardwright.compiler.passes.stages import from_nothing, names_of_updated, uses_of
from shardwright.runtime.errors import PlanError


def cut_traffic(graph: IRGraph, free: set[str]) -> list[float]:
    """Per place, the elements that cross a cut in front of it: forward, and back as gradients;
    infinite where a stage must not begin.
    """
    # Sizes come in behind their maker and go behind their last reader: a running sum is what
    # crosses.
    change = [0.0] * (len(graph.ops) + 1)
    last_use: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        if op.name not in free:
            for value in op.operands:
                last_use[value.name] = index
    for index, op in enumerate(graph.ops):
        if op.name in free:
            continue
        for value in op.results:
            until = last_use.get(value.name, index)
            # A gradient goes back for each value that takes one.
            size = estimate(product(value.shape)) * (2 if value.takes_gradient else 1)
            change[index + 1] += size
            change[until + 1] -= size
    traffic = list(itertools.accumulate(change))[: len(graph.ops)]
    # No stage begins inside of what belongs together.
    for first, last in _kept_together(graph):
        traffic[first + 1 : last + 1] = [float("inf")] * (last - first)
    return traffic


def _kept_together(graph: IRGraph) -> Iterator[tuple[int, int]]:
    """Places of first and last operators that one stage must have, with all between them.

    A recompute region is one. So is what lies between a dispatch of tokens to experts and the sum
    of their rows, as their number is not known before. Another is what reads a buffer that the
    forward updates, as it was before, and what makes its new value: stages run several microbatches
    at a time, so a copy in another stage would be out of date. Evaluation counts too.
    """
    for index in range(1, len(graph.ops)):
        region = graph.ops[index].region
        if region is not None and graph.ops[index - 1].region == region:
            yield index - 1, index
    # From the dispatch that makes a routing to the combine that reads it.
    dispatched: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        if op.target == "dispatch":
            dispatched[op.results[-1].name] = index
        elif op.target == "combine" and op.operands[-1].name in dispatched:
            yield dispatched[op.operands[-1].name], index
    body = graph.eval_graph
    updated = names_of_updated(graph)
    if not updated:
        return
    own = {op.name: index for index, op in enumerate(graph.ops)}
    places = uses_of(updated, graph, own)
    # Evaluation may read a buffer elsewhere than training does.
    if body is not None:
        for name, found in uses_of(updated, body, stage_of_eval_ops(graph, own, body)).items():
            places[name] |= found
    yield from ((min(found), max(found)) for found in places.values() if found)


def starts_at(graph: IRGraph, paths: Sequence[str]) -> list[str]:
    """The first operator of each module path. Raises :class:`PlanError` for a path without
    operators.
    """
    starts = []
    for path in paths:
        found = next(
            (
                op.name
                for op in graph.ops
                if op.module_path == path or op.module_path.startswith(f"{path}.")
            ),
            None,
        )
        if found is None:
            # The paths that are about as long as the one that was asked for.
            every = sorted(
                {op.module_path for op in graph.ops} - {""},
                key=lambda name: (name.count("."), name),
            )
            known = [name for name in every if name.count(".") <= path.count(".")] or every
            more = ", ..." if len(known) > 12 else ""
            raise PlanError(
                f"no operator belongs to module {path!r}",
                hint=f"one of {', '.join(known[:12])}{more}" if known else None,
            )
        starts.append(found)
    return starts


def num_places(graph: IRGraph) -> int:
    """The number of operators at which a stage may begin, other than the first."""
    return sum(
        1 for crossing in cut_traffic(graph, from_nothing(graph))[1:] if math.isfinite(crossing)
    )
