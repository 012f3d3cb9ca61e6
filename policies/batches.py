"""The dims of a model that are its batch."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule_builder import dim_of
from shardwright.runtime.errors import PlanError


def batch_classes(graph: IRGraph) -> set[int]:
    """The dim classes of the batch: dim 0 of the first input, of every input of that many rows,
    batches laid end to end, and batches whose rows were taken apart and put together again.
    """
    assert graph.dims is not None
    # A number, such as a temperature, has no batch.
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
            hint="trace with a batch of at least 2: of one row nothing can be told from the "
            "shapes; policies 'tp' and 'cp' split one row, too",
        )
    classes |= _put_together(graph, classes)
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


def _put_together(graph: IRGraph, batch: set[int]) -> set[int]:
    """The classes of dims that are made of one piece per row of the batch, in the order of the
    rows.

    Example: ``torch.stack([self.embed(row) for row in images])``. Rows are computed one by one on
    every rank, as each has operators of its own. What follows the stack is as long as the batch
    again, and may be split. The same holds for ``torch.cat`` of the patches of all images, whose
    number differs from image to image.
    """
    assert graph.dims is not None
    found: set[int] = set()
    row_of: dict[str, int] = {}  # by value, the one row of the batch that it was made of
    num_rows = 0
    for op in graph.ops:
        rows = [row_of.get(value.name) for value in op.operands]
        if op.target == "unbind" and _is_batch(graph, op, batch):
            num_rows = len(op.results)
            row_of |= {value.name: row for row, value in enumerate(op.results)}
        elif op.target in ("stack", "cat") and num_rows and rows == list(range(num_rows)):
            (result,) = op.results
            # The outermost class of the dim: pieces of 4 x 6 places are joined along the 4.
            found |= set(graph.dims.values[result.name][dim_of(op, result.ndim)][:1])
        elif len(different := set(rows) - {None}) == 1:
            (row,) = different
            assert row is not None
            row_of |= {value.name: row for value in op.results}
    return found


def _is_batch(graph: IRGraph, op: IROp, batch: set[int]) -> bool:
    assert graph.dims is not None
    (source,) = op.operands
    dims = graph.dims.values[source.name][dim_of(op, source.ndim)]
    return bool(dims) and set(dims) <= batch
