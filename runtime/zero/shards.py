"""Shards: the tensors that the user's optimizer is made of under ZeRO, one for each trained parameter, never a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """What the optimizer of this rank updates of one trained parameter.

    ``name``: the parameter's FQN in the module. ``parameter``: what the module holds of it on this rank, a piece as
    ``layout`` says, here called the local piece. ``tensor``: what the optimizer sees: elements ``start`` to ``stop`` of the
    flattened local piece [stop - start], or all of it in its own shape where optimizers need whole tensors. It shares the
    memory of the local piece where ``is_view``; otherwise it is a copy, such as a float32 master of a bfloat16 parameter.

    ``pieces``: the same range of every rank that has a part of the state of this local piece, ``(rank, start, stop)`` by rank
    of the world; together they tile it. ``copies``: the ranks of the world that have exactly this rank's part, ascending; more
    than one where ``zero_ngroups`` is above 1. ``is_counted``: this rank counts its part where every distinct element of the
    model is counted once.
    """

    name: str
    parameter: nn.Parameter
    layout: Layout
    tensor: nn.Parameter
    start: int
    stop: int
    is_view: bool
    pieces: tuple[tuple[int, int, int], ...]
    copies: tuple[int, ...]
    is_counted: bool

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def read(self) -> None:
        """Take over the values of the parameter, after somebody else than the optimizer has set them.

        Raises :class:`UsageError` if the parameter is of another dtype or on another device by now.
        """
        data = self.parameter.detach()
        if data.device != self.tensor.device or (self.is_view and data.dtype != self.tensor.dtype):
            raise UsageError(
                f"parameter {self.name!r} has moved since the optimizer was built",
                why=f"it is {data.dtype} on {data.device}, and the optimizer's state is made for "
                f"{self.tensor.dtype} on {self.tensor.device}",
                hint="move or convert the module before build_optimizer",
            )
        mine = data.reshape(-1)[self.start : self.stop]
        if not self.is_view:
            self.tensor.detach().view(-1).copy_(mine)
            note_written(self.parameter)
        elif self.num_elements and self.tensor.data_ptr() != mine.data_ptr():
            self.tensor.data = mine.view(self.tensor.shape)

    def refresh(self) -> None:
        """See that a view is one still: the parameter may have been given other memory. A copy takes over what somebody else
        has written into the parameter since, where that is not just its own value, rounded.
        """
        if self.is_view:
            self.read()
        elif getattr(self.parameter, _WRITTEN, None) != self.parameter._version:
            own = self.tensor.detach().clone()
            self.read()
            same = own.to(self.parameter.dtype) == self.tensor.detach().to(self.parameter.dtype)
            self.tensor.detach().copy_(torch.where(same, own, self.tensor.detach()))


# Torch counts how often a tensor was written in place. The mark on a parameter is that count when the optimizer wrote it last.
_WRITTEN = "_shardwright_written"


def note_written(parameter: nn.Parameter) -> None:
    """Remember that the values of ``parameter`` are those of the optimizer's copies."""
    setattr(parameter, _WRITTEN, parameter._version)


def shard_tensor(
    parameter: nn.Parameter, start: int, stop: int, dtype: torch.dtype, *, flat: bool
) -> tuple[nn.Parameter, bool]:
    """What an optimizer updates of a local piece, and whether it is a view of it.

    ``flat``: one-dimensional; else the whole piece in its shape, or nothing of it with as many dims.
    """
    data = parameter.detach()
    shape = (stop - start,) if flat else tuple(data.shape)
    if start == stop:
        empty = (0, *data.shape[1:]) if data.ndim and not flat else (0,)
        return nn.Parameter(data.new_empty(empty, dtype=dtype)), dtype == data.dtype
    if dtype == data.dtype and data.is_contiguous():
        return nn.Parameter(data.view(-1)[start:stop].view(shape)), True
    note_written(parameter)
    copy: Tensor = data.reshape(-1)[start:stop].to(dtype, copy=True)
    return nn.Parameter(copy.view(shape)), False
