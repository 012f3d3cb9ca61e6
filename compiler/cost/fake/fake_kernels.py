"""Two repairs of torch's fake forms of kernels.

**Workspaces.** On a CPU torch gives an LSTM of float32, bfloat16 or float16 to oneDNN, layer by
layer. Each call returns a workspace for its backward, which is a multiple of the activations. The
fake form of the call returns an empty one. Only oneDNN knows how large the workspace is, so it is
asked, with a call on zeros.

**Generators.** The fake form that draws exponential numbers (Gumbel softmax, sampling without
replacement) refuses a generator. So it is called without one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_EXPONENTIALS = (torch.ops.aten.exponential_.default, torch.ops.aten.exponential.default)

MOST_WEIGHTS = 2**22
"""The most elements of the weights of a call that asks oneDNN; larger calls are scaled down."""
MOST_HIDDEN = 2**14
"""The most elements of its hidden state."""
MOST_STEPS = 32
"""The most time steps of it."""


class FakeKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is active, those kernels treat fake tensors as they treat real ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _EXPONENTIALS and isinstance(args[0], FakeTensor):
            return func(*args, **{**kwargs, "generator": None})
        result = func(*args, **kwargs)
        if func is not torch.ops.aten.mkldnn_rnn_layer.default or not isinstance(
            result[3], FakeTensor
        ):
            return result
        if not torch.is_grad_enabled():  # for inference oneDNN makes no workspace
            return result
        steps, batch, inputs = args[0].shape
        hidden, dtype, rest = args[10], args[0].dtype, (args[7], (), args[9])
        size = rnn_workspace_bytes(steps, batch, inputs, hidden, dtype, rest, tuple(args[11:]))
        return *result[:3], result[3].new_empty(size)


@lru_cache(maxsize=1024)
def rnn_workspace_bytes(
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    dtype: torch.dtype,
    before: tuple[Any, ...],
    after: tuple[Any, ...],
) -> int:
    """The bytes of the workspace of one layer.

    They grow linearly with the number of time steps. In a large call they are also in proportion to
    batch and widths: oneDNN rounds each part of the workspace up to a page, which matters in a
    small call only. So a large call is asked for at a smaller size, and the answer scaled.
    """
    scale = 1
    # Halve widths and batch until the question is small, and note by how much.
    while hidden > 1 and 4 * hidden * (inputs + hidden) > MOST_WEIGHTS:
        inputs, hidden, scale = -(-inputs // 2), -(-hidden // 2), 2 * scale
    while batch > 1 and batch * hidden > MOST_HIDDEN:
        batch, scale = -(-batch // 2), 2 * scale

    def asked(steps: int) -> int:
        shapes = (
            (steps, batch, inputs),
            (4 * hidden, inputs),
            (4 * hidden, hidden),
            (4 * hidden,),
            (4 * hidden,),
        )
        # Meta tensors give no workspace: the call is made on real zeros.
        with _disable_current_modes(), torch.enable_grad():
            tensors = [
                torch.zeros(shape, dtype=dtype)
                for shape in (*shapes, (batch, hidden), (batch, hidden))
            ]
            found = torch.ops.aten.mkldnn_rnn_layer(*tensors, *before, hidden, *after)
        return int(found[3].nbytes)

    if steps <= MOST_STEPS:
        # Beyond that a straight line through two answers.
        return scale * asked(steps)
    some, more = asked(MOST_STEPS // 2), asked(MOST_STEPS)
    return scale * round(
        more + (more - some) * (steps - MOST_STEPS) / (MOST_STEPS - MOST_STEPS // 2)
    )
