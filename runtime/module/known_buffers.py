"""Buffers whose values are compiled in: a model that slices by a length which a buffer holds has
other operators for another length.

The generated class has the values (``known_buffers = {"length": 3}``). A checkpoint may bring
others, so they are compared when a call begins: at the first one, and at each that follows a write
to the buffer, which torch counts (``Tensor._version``). Otherwise nothing is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.runtime.errors import UsageError, brief
from shardwright.runtime.pieces import local_piece

if TYPE_CHECKING:
    from shardwright.runtime.module.parallel_module import ParallelModule


class KnownBuffers:
    """The buffers of one module whose values are compiled in."""

    def __init__(self, module: ParallelModule) -> None:
        self._module = module
        self._compared: dict[str, tuple[Tensor, int]] = {}

    def check(self) -> None:
        """Raise :class:`UsageError` where a buffer of this rank holds other values."""
        for name, values in self._module.known_buffers.items():
            if name not in self._module._places:  # it is on a rank of another stage
                continue
            scope, leaf = self._module._places[name][0]
            buffer = scope._buffers[leaf]
            assert buffer is not None
            # Tensors of inference mode count no writes.
            version = -1 if buffer.is_inference() else buffer._version
            compared = self._compared.get(name)
            if compared is not None and compared[0] is buffer and compared[1] == version >= 0:
                continue
            self._compare(name, buffer, torch.tensor(values, dtype=buffer.dtype))
            self._compared[name] = buffer, version

    def _compare(self, name: str, buffer: Tensor, known: Tensor) -> None:
        declaration = self._module._declarations[name]
        ranks = self._module.ranks_of(declaration)
        piece = local_piece(known, declaration.layout, ranks.mesh, ranks.coords)
        if not torch.equal(piece, buffer.detach().cpu()):
            raise UsageError(
                f"the buffer {name!r} of {type(self._module).__name__} holds other values than "
                "those that are compiled in",
                why=f"forward decides by them what it computes; they were {brief(piece.tolist())}, "
                f"and are {brief(buffer.tolist())} now",
                hint="compile the model again with the new values, or put the old ones back",
            )
