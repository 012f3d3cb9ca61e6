"""How each rank holds what a program begins with: inputs, parameters, buffers and constants.

A plan's own layout comes first. Otherwise a parameter is stored as its uses need it, and a buffer
that an operator updates in place as that operator writes it.

Example, on ``tp=2``: ``up`` reads its weight [64, 16] in pieces of 32 rows, and nothing else reads
it. So [64/tp, 16] is stored, and no adapter is needed. Under ZeRO-3 on two units, which both have
the whole gradient's summands, each unit stores half of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.compiler.cost.communication import local_elements, steps_elements
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import KNOWN
from shardwright.compiler.plan.conversion import convert
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.zero import in_pieces, is_large
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True, slots=True)
class Sources:
    """How sources are held. ``layouts``: of each, by name. ``over_units``: the names of the
    parameters that are stored in pieces over the units.
    """

    declarations: tuple[Declaration, ...]
    layouts: Mapping[str, Layout]
    over_units: Set[str]


def place_sources(
    graph: IRGraph,
    plan: Plan,
    produced: Mapping[str, Layout],
    wanted: Mapping[str, Sequence[Layout]],
    updated: Mapping[str, Layout],
    whole_in_units: Set[str],
) -> Sources:
    """Decide how inputs, parameters, buffers and constants are held.

    ``produced``: the layouts in which operators make values. ``wanted``: those in which values are
    read. ``updated``: those in which operators write buffers in place. ``whole_in_units``:
    parameters that ZeRO-3 does not cut.
    """
    replaced = {before.name: after.name for before, after in graph.buffer_updates}
    found: dict[str, Layout] = {}
    for value in graph.inputs:
        found[value.name] = plan.inputs.get(value.name, Layout.whole(value.shape))
    declarations: list[Declaration] = []
    over_units: set[str] = set()
    for value in (*graph.parameters, *graph.buffers, *(value for value, _ in graph.constants)):
        uses = wanted.get(value.name, ())
        stored = plan.stored.get(value.fqn or "")
        if stored is None and value.kind is ValueKind.PARAMETER:
            stored = _best_storage(
                Layout.whole(value.shape),
                tuple(uses),
                plan.computing_mesh,
                value.requires_grad,
                value.takes_gradient,
            )
        # What replaces a buffer may be made by an operator, or be a source itself.
        new = replaced.get(value.name, "")
        layout = (
            stored
            or updated.get(value.name)
            or _as_replaced(value, found.get(new, produced.get(new)), uses)
            or Layout.whole(value.shape)
        )
        if _is_stored_in_pieces(value, plan, whole_in_units):
            layout = _in_pieces(value, layout, uses, plan)
            if plan.zero > 1:
                over_units.add(value.name)
        # A frozen weight is G to its operators, but nobody sums a gradient of it.
        if not value.requires_grad:
            layout = replace(layout, grad_partial=())
        found[value.name] = layout
        declarations.append(Declaration(value, layout))
    return Sources(tuple(declarations), found, over_units)


def _as_replaced(value: IRValue, made: Layout | None, uses: Sequence[Layout]) -> Layout | None:
    """The layout of a buffer whose new value, ``made`` so, comes in pieces as its old value is
    read, such as a cache of keys. Held so, it is not sent at all. Vectors stay whole: running
    statistics cost little, and people read them.
    """
    if made is None or value.ndim < 2 or not made.cut_axes or made.partial:
        return None
    layout = replace(made, grad_partial=())
    return layout if layout in [replace(use, grad_partial=()) for use in uses] else None


def _is_stored_in_pieces(value: IRValue, plan: Plan, whole_in_units: Set[str]) -> bool:
    """Whether ZeRO-3 cuts this tensor."""
    if not plan.zero or value.kind is not ValueKind.PARAMETER or value.fqn in whole_in_units:
        return False
    return is_large(value)


def _in_pieces(value: IRValue, layout: Layout, uses: Sequence[Layout], plan: Plan) -> Layout:
    """The layout of a parameter under ZeRO-3: cut along the axes on which it is whole and its
    gradient is a summand.

    A frozen parameter has no gradient that says so. It is cut along the axes on which all its uses
    are G.
    """
    mesh = plan.computing_mesh
    summed = layout.grad_partial if value.requires_grad else mesh.names
    axes = (
        [axis for axis in summed if all(use.placement(axis) == "G" for use in uses)] if uses else []
    )
    # An axis on which the plan stores it S already cuts it there; along P there is no whole value.
    axes = [
        axis for axis in axes if mesh.axis_size(axis) > 1 and layout.placement(axis) in ("R", "G")
    ]
    return in_pieces(layout, axes, mesh, plan.zero)


@lru_cache(maxsize=KNOWN)
def _best_storage(
    whole: Layout, uses: tuple[Layout, ...], mesh: Mesh, requires_grad: bool, takes_gradient: bool
) -> Layout:
    """The layout of a parameter that costs its uses the least. Reductions of its gradient count,
    and of two equal layouts the one with smaller pieces is taken.
    """
    # By text, so that equal layouts count once and the order is the same in every process.
    # Candidates are what some use asks for, and all of it everywhere. Nobody stores summands.
    candidates = {str(layout): replace(layout, partial=()) for layout in [whole, *uses]}
    targets = {str(use): use for use in uses}.values()

    def cost(layout: Layout) -> tuple[float, float, str]:
        paths = (convert(layout, t, mesh, differentiable=requires_grad) for t in targets)
        moved = sum(steps_elements(path, mesh, differentiable=takes_gradient) for path in paths)
        elements = local_elements(layout, mesh)
        # Summed over the ranks of all axes at once: a ring all-reduce over ``n`` ranks sends
        # each element ``2 (n - 1) / n`` times.
        summed_over = mesh.num_ranks(layout.grad_partial)
        reduced = 2 * elements * (1 - 1 / summed_over) if takes_gradient else 0.0
        # At equal size a reduction is cheaper than an adapter, as the reducer puts many into one
        # bucket.
        return moved + 0.99 * reduced, elements, str(layout)

    return min(candidates.values(), key=cost)
