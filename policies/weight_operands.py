"""Which operands of a product are weights: parameters, and what is made of parameters alone, such
as a transposed or normalised weight, or the rows of the chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.rule import ATTENTION

PRODUCTS = frozenset(
    [
        "linear",
        "matmul",
        "bmm",
        "mm",
        "addmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        *ATTENTION,
        "grouped_linear",
        "grouped_mm",
        "bilinear",
        "embedding",
    ]
)

CONVOLUTIONS = frozenset(name for name in PRODUCTS if name.startswith("conv"))

Sources = Mapping[str, tuple[IRValue, ...]]
"""The parameters that each value is made of, by its name. Values that depend on inputs otherwise
than by integers have none.
"""


def is_convolution(op: IROp) -> bool:
    """Whether a product slides a kernel."""
    return op.target in CONVOLUTIONS


def weight_sources(graph: IRGraph) -> Sources:
    """The parameters behind every value that is made of parameters alone, without a product or a
    lookup between: what a model computes of token ids is no weight.
    """
    sources: dict[str, tuple[IRValue, ...]] = {value.name: (value,) for value in graph.parameters}
    fixed = {v.name for v in graph.sources if v.kind in (ValueKind.BUFFER, ValueKind.CONSTANT)}
    for op in graph.ops:
        # Masks and positions beside the weights do not count.
        operands = [v for v in op.operands if v.dtype.is_floating_point and v.name not in fixed]
        # Transposed, cast or scaled weights are weights.
        if op.target not in PRODUCTS and operands and all(v.name in sources for v in operands):
            found = {source.name: source for v in operands for source in sources[v.name]}
            sources |= {
                result.name: tuple(found.values())
                for result in op.results
                if result.dtype.is_floating_point
            }
    return sources


def weights_of(op: IROp, sources: Sources) -> list[int]:
    """The positions of a product's weights: its parameters if it has any of two or more dims, else
    what is made of such.
    """
    direct = [i for i, v in enumerate(op.operands) if v.kind is ValueKind.PARAMETER]
    if any(op.operands[i].ndim > 1 for i in direct):
        return direct
    return [i for i, v in enumerate(op.operands) if v.name in sources]
