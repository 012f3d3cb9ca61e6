"""How many bytes of tensors are alive while some code runs, for sides that manage memory in
different ways.

Unlike :mod:`shardwright.compiler.cost.fake.live_bytes` this reads the size of every storage each
time: FSDP2 frees the weights it has gathered by resizing their storages to nothing, which no
operator tells of. Of a DTensor the local piece counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what is made inside the ``with`` block, by storage, on the thread of the block (and in
    its backward).

    ``peak``: at most, after any operator. ``known``: tensors that were there before and count too.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for x in known:
            self._watch(x)

    @property
    def now(self) -> int:
        """After the last operator."""
        alive = {
            key: storage
            for key, reference in self._storages.items()
            if (storage := reference()) is not None
        }
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def _watch(self, x: Any) -> None:
        x = x._local_tensor if isinstance(x, DTensor) else x
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._watch(leaf)
        self.peak = max(self.peak, self.now)
        return result


def kept_by(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What a side keeps between steps: parameters, buffers, what the optimizer updates in their
    place, gradients, its state.
    """
    owners = [
        *module.parameters(),
        *(p for group in optimizer.param_groups for p in group["params"]),
    ]
    yield from owners
    yield from module.buffers()
    yield from (p.grad for p in owners if p.grad is not None)
    yield from (
        x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)
    )


def peak_mib(step: Callable[[], object], kept: Iterable[Tensor]) -> float:
    """The peak of one step, with what the side keeps between steps."""
    with LiveBytes(kept) as live:
        step()
    return live.peak / 2**20
