"""How many bytes of tensors are alive while some code runs, counted at every operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what is made inside the ``with`` block, by storage, on the thread of the block (and in its backward).

    ``peak``: at most, after any operator. ``now``: after the last one. ``known``: tensors that were there before and count too.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for x in known:
            self._count(x)

    @property
    def now(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def _count(self, x: Any) -> None:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._count(leaf)
        self.peak = max(self.peak, self.now)
        return result
