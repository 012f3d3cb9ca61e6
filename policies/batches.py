"""The dims of a model that are its batch."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.runtime.errors import PlanError


def batch_classes(graph: IRGraph) -> set[int]:
    """The dim classes of the batch: dim 0 of the first input, of every input of that many rows, and
    batches laid end to end.
    """
    assert graph.dims is not None
    with_rows = [value for value in graph.inputs if value.ndim]
    classes = {
        graph.dims.values[value.name][0][0]
        for value in with_rows
        if value.shape[0] == with_rows[0].shape[0] and graph.dims.values[value.name][0]
    }
    if not classes:
        raise PlanError(
            "there is no batch to split",
            why=f"the inputs have shapes {[tuple(value.shape) for value in graph.inputs]}",
            hint="trace with a batch of at least 2: of one row nothing can be told from the shapes",
        )
    return classes | _joined_batches(graph, classes)


def _joined_batches(graph: IRGraph, batch: set[int]) -> set[int]:
    """The classes of dims that are nothing but batches laid end to end.

    Example: ``torch.cat((images, prompts), dim=0)`` of 4 and 4 rows has a dim of ``4+4`` rows, a
    class of its own. Cut segment by segment, a rank has its rows of both, so nothing is gathered
    for the concatenation.
    """
    assert graph.dims is not None
    joined: set[int] = set()
    for op in graph.ops:
        assert op.rule is not None
        parts: dict[str, set[bool]] = {}  # by factor, whether each of its segments is a batch
        # Segments of a concatenation: is each of them a batch?
        for value, refs in zip(op.operands, op.rule.operands, strict=True):
            for dim, factors in enumerate(refs):
                for ref in factors:
                    if ref.segment is not None:
                        known = set(graph.dims.values[value.name][dim])
                        parts.setdefault(ref.factor, set()).add(
                            bool(known) and known <= batch | joined
                        )
        joined |= {
            graph.dims.factors[op.name, factor]
            for factor, found in parts.items()
            if found == {True}
        }
    return joined
