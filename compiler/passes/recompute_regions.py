"""Mark the modules whose activations are computed again in the backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import suggestion
from shardwright.runtime.errors import PlanError

WILDCARDS = frozenset("*?[")
"""The characters that make a name of a pattern match others than itself."""


def mark_planned(graph: PlannableGraph) -> IRGraph:
    """The graph with the modules that its plan computes again in the backward marked."""
    plan = graph.decided
    if not plan.recompute:
        return graph
    stages = stage_of_ops(graph, plan) if plan.stages else {}
    return mark_recompute(graph, plan.recompute, stages)


def mark_recompute(
    graph: IRGraph, patterns: Sequence[str], stages: Mapping[str, int] | None = None
) -> IRGraph:
    """The graph with every module that matches a pattern as a recompute region of its own.

    A pattern is a module path with ``*`` for any one name (``model.layers.*``), or ``stage:1`` for
    all of a pipeline stage; ``stages`` maps operators to stages. Regions that the model has already
    are kept: the outermost counts. Raises :class:`PlanError` for a pattern that matches nothing.
    """
    # Patterns that matched something; the others are refused below.
    matched: set[str] = set()

    # Most patterns of a search are plain paths, hundreds of them, which are looked up by the fronts
    # of a path; only those with wildcards are compared one by one.
    order = {pattern: place for place, pattern in reversed(list(enumerate(patterns)))}
    wild = [pattern for pattern in order if not WILDCARDS.isdisjoint(pattern)]
    plain = order.keys() - set(wild)

    @functools.cache  # a module has many operators
    def region_of_path(path: str) -> str | None:
        # ``model.layers.*`` matches ``model.layers.3.mlp``: a pattern is compared with the front of
        # a path.
        parts = path.split(".")
        found = [front for front in itertools.accumulate(parts, "{}.{}".format) if front in plain]
        found += [pattern for pattern in wild if _matches_front(parts, pattern.split("."))]
        if not found:
            return None
        first = min(found, key=order.__getitem__)
        matched.add(first)
        return "recompute_" + "_".join(parts[: first.count(".") + 1])

    def region(op: IROp) -> str | None:
        if op.region is not None:
            return op.region
        stage = f"stage:{(stages or {}).get(op.name)}"
        if stage in patterns:
            matched.add(stage)
            return f"recompute_{stage.replace(':', '_')}"
        return region_of_path(op.module_path)

    ops = tuple(op.changed(region=region(op)) for op in graph.ops)
    for pattern in patterns:
        if pattern not in matched:
            raise PlanError(
                f"recompute names {pattern!r}, but no operator belongs to such a module",
                hint=(
                    None
                    if "*" in pattern
                    else suggestion(pattern, {op.module_path for op in graph.ops if op.module_path})
                )
                or "give module paths as in named_modules(), with * for any one name: "
                "'model.layers.*'",
            )
    return replace(graph, ops=ops)


def _matches_front(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the first names of a path match those of a pattern."""
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))
