"""What torch's fake forms of kernels lack.

**Workspaces.** On a CPU torch gives an LSTM of float32, bfloat16 or float16 to oneDNN, layer by
layer. Each call returns a workspace for its backward, a multiple of the activations; the fake form
of the call returns an empty one. How large it is only oneDNN knows, so it is asked, with a call on
zeros.

**Generators.** Exponential numbers (Gumbel softmax, sampling without replacement) have a fake form
that refuses a generator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_EXPONENTIALS = (torch.ops.aten.exponential_.default, torch.ops.aten.exponential.default)

MOST_WEIGHTS = 2**22
"""Elements of the weights of a call that is made to ask."""
MOST_HIDDEN = 2**14
"""Elements of its hidden state."""
MOST_STEPS = 32


class FakeKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, fake tensors go through those calls as real ones do."""

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
        if not torch.is_grad_enabled():  # then oneDNN infers
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
    """Of one layer. The size grows with the steps, and where a call would be large, with batch and
    widths: each of its parts is rounded up to a page, which does not count there.
    """
    scale = 1
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
        with _disable_current_modes(), torch.enable_grad():
            tensors = [
                torch.zeros(shape, dtype=dtype)
                for shape in (*shapes, (batch, hidden), (batch, hidden))
            ]
            found = torch.ops.aten.mkldnn_rnn_layer(*tensors, *before, hidden, *after)
        return int(found[3].nbytes)

    if steps <= MOST_STEPS:
        return scale * asked(steps)
    some, more = asked(MOST_STEPS // 2), asked(MOST_STEPS)
    return scale * round(
        more + (more - some) * (steps - MOST_STEPS) / (MOST_STEPS - MOST_STEPS // 2)
    )
