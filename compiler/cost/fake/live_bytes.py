"""Counts the bytes of all tensors that are alive.

It counts storages, so views of a tensor and several references to it count once. It sees what
torch's operators make, on fake tensors as well as on real ones, but not the buffers inside of
kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts living bytes inside its ``with`` block: ``now``, and ``peak`` so far. The
    tensors that :meth:`watch` was told of count too.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}
        self.watch(known)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count these too, until they are gone."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                size = self._sizes[key] = storage.nbytes()
                self._watchers[key] = weakref.finalize(storage, self._forget, key)
                self.now += size
        self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.now

    def _forget(self, key: int) -> None:
        # A thread of gloo may free what a collective used: no call between reading and writing
        # ``now``, where Python may go on with another thread.
        size = self._sizes.pop(key)
        del self._watchers[key]
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
