"""What an operator sends of a cut dim to ranks that read beyond their own piece.

Example: rows of 4 KB on 4 ranks, and a convolution with a kernel of 3. Ranks in the middle send a
row to each side, 8 KB, and as much of the gradient on the way back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.local_calls import Alike, estimated_size, local_call
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.strategy import KNOWN, Assignment
from shardwright.runtime.layout import Mesh
from shardwright.runtime.windows import Edge, Window, most_read, most_sent


@dataclass(frozen=True, slots=True)
class EdgeMessage:
    """What the rank that sends most sends along one axis, in bytes. ``copied_bytes``: what is
    copied to join it with the own piece.
    """

    axis: str
    forward_bytes: float
    backward_bytes: float
    copied_bytes: float


def edge_messages(op: IROp, assignment: Assignment, mesh: Mesh) -> tuple[EdgeMessage, ...]:
    """The messages of a call, in the order in which they are sent; none if nothing is cut that has
    edges. ``op`` is the call as traced.
    """
    return _messages(Alike(op), tuple(assignment.items()), mesh)


@functools.lru_cache(maxsize=KNOWN)
def _messages(
    asked: Alike, strategies: tuple[tuple[str, str], ...], mesh: Mesh
) -> tuple[EdgeMessage, ...]:
    op, assignment = asked.op, dict(strategies)
    assert op.rule is not None
    words = dict(localise(op, op.rule, assignment, mesh).args).get("edges", ())
    if not words:
        return ()
    operand = local_call(op, assignment, mesh).operands[0]
    shape = list(operand.shape)
    found = []
    for edge, axes in (_edge(word, mesh) for word in words):
        # The dims before this one have their edges by now.
        row_bytes = operand.dtype.itemsize * math.prod(
            size for dim, size in enumerate(shape) if dim != edge.dim
        )
        shape[edge.dim] = most_read(edge)
        copied = row_bytes * shape[edge.dim]
        # The rank that sends most decides, as all ranks wait for it.
        for axis, (forward, backward) in zip(axes, most_sent(edge), strict=True):
            backward_bytes = row_bytes * backward if operand.requires_grad else 0
            found.append(EdgeMessage(axis, row_bytes * forward, backward_bytes, copied))
    return tuple(found)


def _edge(words: Sequence[Any], mesh: Mesh) -> tuple[Edge, list[str]]:
    """An edge and its axes from what generated code is told. Sizes that are dynamic are those of
    the dummy arguments.
    """
    dim, size, result_size, window, axes = words
    # Generated code writes a size as a number of units, ``(2, "seq")``, where the unit varies, and
    # as a plain number, of units of 1, where nothing does.
    (num, unit), (result_num, result_unit) = (
        n if isinstance(n, tuple) else (n, 1) for n in (size, result_size)
    )
    names = [axis.name for axis in axes]
    units = estimated_size(unit), estimated_size(result_unit)
    edge = Edge(
        dim,
        estimated_size(num) * units[0],
        estimated_size(result_num) * units[1],
        Window(*(_number(n) for n in window)),
        tuple(map(mesh.axis_size, names)),
        *units,
        tuple(map(mesh.turns_of, names)),
    )
    return edge, names


def _number(size: Any) -> Any:
    """A field of a window in numbers: the start of a slice may be dynamic, and below 0."""
    return size if isinstance(size, int) else round(estimate(size))
