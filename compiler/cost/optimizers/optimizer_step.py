"""What a step of any optimizer does: its matrix products, and the bytes that it makes meanwhile.

The optimizer runs a step on tensors without memory, and a mode notes both. Products are most of the
work of Muon and its like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwright.compiler.cost.fake.live_bytes import LiveBytes

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

STEP_TEMPORARIES = 2
"""The number of tensors as large as a parameter that torch's optimizers with state make while they
update it.
"""


@dataclass(frozen=True, slots=True)
class StepProduct:
    """``batch`` products ``[m, k] x [k, n]`` in ``dtype``."""

    m: int
    n: int
    k: int
    dtype: str
    batch: int = 1


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does to one parameter.

    ``temporary_bytes``: the most bytes that it makes and lets go of again. It is ``None`` for a
    step that did not run to its end, as it needs numbers. Then ``products`` are those up to there.
    """

    products: tuple[StepProduct, ...]
    temporary_bytes: int | None


def work_of_step(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> StepWork:
    """What a step does to a parameter of ``shape``. The step is the second one: the first one makes
    the state.
    """
    # On the meta device a step costs nothing, and every operator is seen.
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    seen = _Seen()
    with torch.compiler.set_stance("force_eager"):
        try:
            with seen:
                optimizer.step()
            # The first step makes the state; the second is that of every later step.
            seen.products.clear()
            with (
                LiveBytes(
                    [parameter, parameter.grad, *tensors_of_state(optimizer, parameter).values()]
                ) as live,
                seen,
            ):
                before = live.now
                optimizer.step()
        except Exception:  # whatever a user's optimizer raises
            return StepWork(tuple(seen.products), None)
    return StepWork(tuple(seen.products), live.peak - before)


def tensors_of_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """The tensors that an optimizer keeps of a parameter, in lists and dicts too, by where they
    are.
    """
    found, _ = tree_flatten_with_path(dict(optimizer.state.get(parameter, {})))
    return {keystr(path): leaf for path, leaf in found if isinstance(leaf, torch.Tensor)}


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes the matrix products that run. An optimizer that asks a tensor without
    memory for its number is told 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[StepProduct] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # ``.item()`` of a tensor on the meta device, which would raise: most read a step count.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        if func.overloadpacket in FACTORS:
            left, right = (args[index] for index in FACTORS[func.overloadpacket])
            dtype = str(left.dtype).removeprefix("torch.")
            # ``[batch, m, k] x [batch, k, n]``, or a matrix and a vector (n is 1).
            *batch, m, k = left.shape
            if left.is_floating_point():
                n = right.shape[-1] if right.ndim > 1 else 1
                self.products.append(StepProduct(m, n, k, dtype, *batch))
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
FACTORS = {
    _ATEN.mm: (0, 1),
    _ATEN.mv: (0, 1),
    _ATEN.bmm: (0, 1),
    _ATEN.addmm: (1, 2),
    _ATEN.addmv: (1, 2),
    _ATEN.addbmm: (1, 2),
    _ATEN.baddbmm: (1, 2),
}
"""Where the two factors of a product stand among the operands; all others are made of these."""
