"""How many bytes a call reads and writes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.compiler.cost.local_calls import (
    LocalCall,
    LocalTensor,
)
from shardwright.compiler.cost.time.arithmetic import (
    CONVOLUTIONS,
    PRODUCTS,
)
from shardwright.compiler.cost.time.token_copies import ROUTED, bytes_copied_here
from shardwright.compiler.ops.rule import ATTENTION

VIEWS = frozenset(
    (
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "t",
        "movedim",
    )
    + (
        "swapaxes",
        "detach",
        "alias",
        "view_as_real",
        "view_as_complex",
        "real",
        "positive",
        "resolve_conj",
        "resolve_neg",
    )
)
"""Operators that move no data, neither forward nor backward. (A reshape of a tensor that is not
contiguous copies it once; that is left out.)
"""


SLICES = frozenset(
    (
        "getitem",
        "narrow",
        "select",
        "diagonal",
        "unfold",
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "imag",
    )
)
"""Views of parts of a tensor. Their gradients are written into a tensor of zeros."""


EXPANSIONS = frozenset(("expand", "broadcast_tensors", "meshgrid"))
"""Views that repeat elements. Their gradients are summed."""


PASSES_ON = frozenset(("add", "sub", "clone", "contiguous", "to"))
"""Operators that pass a gradient on as it came in, to an operand that was not broadcast."""


VIEWED_GRADIENTS = frozenset(("cat", "stack"))
"""Operators whose gradients are views of what comes in."""


FACTORS = frozenset(("mul", "div"))
"""Operators whose operands are factors of what comes out."""


BIASES: Mapping[str, int] = {"linear": 2, "addmm": 0}
"""Where products have the bias that they add. Its gradient is a sum over rows, by a kernel of its
own beside those of the two factors.
"""


LOOKUPS = frozenset(
    ("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim")
)
"""Operators that read rows of a table."""


_TABLE = {"embedding": 1, "embedding_bag": 1}
"""The position of the table among the operands, 0 for all others."""


PASSES: Mapping[str, tuple[float, float]] = {
    "cross_entropy": (2.0, 4.0),  # log-softmax; the gradient of the picked entries is made of zeros
    "nll_loss": (0.0, 1.0),
    "dropout": (5.0, 3.0),  # draw, scale, multiply
    "batch_norm": (3.0, 5.0),
    "group_norm": (3.0, 5.0),
    "instance_norm": (3.0, 5.0),
    "rms_norm": (3.0, 6.0),
    "pow": (2.0, 7.0),  # x ** (n - 1), times n, times what came in
    "softmax": (2.0, 3.0),
    "log_softmax": (2.0, 3.0),
    "logsumexp": (3.0, 4.0),
    "cumsum": (2.0, 4.0),
    "var": (2.0, 3.0),
    "std": (2.0, 3.0),
    "normalize": (4.0, 8.0),
    "cosine_similarity": (6.0, 12.0),
    "sort": (8.0, 3.0),
    "topk": (4.0, 2.0),
    "argsort": (8.0, 0.0),
}
"""How often forward and backward go over the largest tensor of the call, where reading and writing
once is too little.
"""


ONE_KERNEL: Mapping[str, tuple[float, float]] = {"dropout": (2.5, 2.5), "rms_norm": (2.0, 3.0)}
"""The passes of operators that are one kernel on a device with a queue of launches, where others
need several. Dropout reads, writes, and keeps a mask of bytes.
"""


SPLIT_PASSES: Mapping[str, tuple[float, float]] = {
    "cross_entropy": (8.0, 4.0),
    "softmax": (8.0, 5.0),
    "log_softmax": (8.0, 5.0),
    "logsumexp": (5.0, 4.0),
    "batch_norm": (9.0, 12.0),
    "group_norm": (9.0, 12.0),
}
"""How often parallel forms go over it, which communicate inside: they consist of several operators.
"""


def call_bytes(call: LocalCall) -> tuple[float, float]:
    """Bytes that a call by itself reads and writes, forward and backward."""
    return traffic(call, call.differentiated, communicates=False, one_kernel=False)


def _bytes(tensors: Sequence[LocalTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def bias_gradient_bytes(call: LocalCall, wanted: Sequence[int]) -> float:
    """What the kernel reads and writes that sums the gradient of a bias: 0 where there is none."""
    bias = BIASES.get(call.op.target)
    if bias is None or bias not in wanted:
        return 0.0
    return _bytes(call.results) + call.operands[bias].num_bytes


def view_gradient_bytes(call: LocalCall, wanted: Sequence[int]) -> float:
    return _bytes(call.results) + _bytes([call.operands[i] for i in wanted]) if wanted else 0.0


def traffic(
    call: LocalCall, wanted: Sequence[int], communicates: bool, one_kernel: bool
) -> tuple[float, float]:
    """Bytes read and written, forward and backward. ``one_kernel``: see :data:`ONE_KERNEL`."""
    target, operands, results = call.op.target, call.operands, call.results
    if target in ROUTED:
        return bytes_copied_here(call, bool(wanted))
    made = _bytes(results)
    if target in LOOKUPS and len(operands) > 1:
        # Forward reads the index and the rows it needs, and writes these. Backward reads index and
        # incoming gradient, fills the whole table with zeros, and adds rows to it.
        table = _TABLE.get(target, 0)
        index = _bytes([x for i, x in enumerate(operands) if i != table])
        return index + 2 * made, index + 3 * made + operands[table].num_bytes if wanted else 0.0
    gradients = _bytes([operands[i] for i in wanted])
    passes = (SPLIT_PASSES if communicates else PASSES).get(target)
    if one_kernel and not communicates:
        passes = ONE_KERNEL.get(target, passes)
    if passes is not None:
        largest = max((tensor.num_bytes for tensor in (*operands, *results)), default=0)
        return passes[0] * largest + made * (passes[0] == 0), passes[1] * largest * bool(wanted)
    forward = _bytes(operands) + made
    if call.op.autocast is not None and target in PRODUCTS:
        # Autocast writes a cast copy of each operand, and the product reads it.
        forward += 2 * sum(x.num_elements for x in operands) * call.op.autocast.itemsize
    if not wanted:
        return forward, 0.0
    if target in PRODUCTS or target in CONVOLUTIONS or target in ATTENTION:
        factors = [i for i in wanted if i != BIASES.get(target)]
        return forward, len(factors) * made + _bytes(operands) + gradients
    if target in PASSES_ON:
        broadcast = [
            operands[i] for i in wanted if operands[i].num_elements != results[0].num_elements
        ]
        cast = gradients + made if target == "to" else 0
        return forward, sum(made + x.num_bytes for x in broadcast) + cast
    if target in VIEWED_GRADIENTS:
        return forward, 0.0
    if target in FACTORS:
        return forward, sum(_factor_gradient_bytes(call, index) for index in wanted)
    return forward, made + _bytes([operands[i] for i in _read_again(call, wanted)]) + gradients


def _factor_gradient_bytes(call: LocalCall, index: int) -> float:
    """What the gradient of one factor takes: autograd has a kernel for each, which reads what came
    in and the other factors. That of a factor which was broadcast is written whole, and summed by
    another kernel.
    """
    made, factor = _bytes(call.results), call.operands[index]
    others = _bytes([x for i, x in enumerate(call.operands) if i != index])
    is_broadcast = factor.num_elements < call.results[0].num_elements
    return made + others + factor.num_bytes + (2 * made if is_broadcast else 0)


def _read_again(call: LocalCall, wanted: Sequence[int]) -> Sequence[int]:
    """The operands that a backward reads. If the call is linear in all wanted operands together,
    their gradients do not depend on them: it reads the others only.
    """
    rule = call.op.rule
    assert rule is not None
    joint = next((found for found in rule.linear_sets if found >= set(wanted)), None)
    return [i for i in range(len(call.operands)) if joint is None or i not in joint]
