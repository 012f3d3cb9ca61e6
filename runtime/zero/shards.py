"""Shards: the tensors that the user's optimizer is made of under ZeRO, one for each trained
parameter, never a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Layout
from shardwright.runtime.zero.remainders import Remainder, is_rounded, placeholder


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """What the optimizer of this rank updates of one trained parameter.

    - ``name``: the parameter's FQN in the module.
    - ``parameter``: what the module holds of it on this rank: its *local piece*, as ``layout``
      says.
    - ``tensor``: what the optimizer sees. It is elements ``start`` to ``stop`` of the flattened
      local piece [stop - start], or all of it in its own shape for optimizers that need whole
      tensors.
    - ``is_view``: whether ``tensor`` shares the memory of the local piece. Otherwise it is a copy,
      such as a float32 master of a bfloat16 parameter.
    - ``remainder``: what the parameter lacks of the master, if that is how it is stored. Then
      ``tensor`` has values only while the optimizer steps.
    - ``pieces``: the range of every rank that has a part of the state of this local piece, as
      ``(rank of the world, start, stop)``. Together these ranges tile the local piece.
    - ``copies``: the ranks of the world that have exactly this rank's part, ascending. They are
      more than one if ``zero_ngroups`` is above 1.
    - ``is_counted``: whether this rank counts its part, when every distinct element of the model is
      to be counted once.
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
    remainder: Remainder | None = None

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def value(self) -> Tensor:
        """The values that the optimizer updates, as they are now. If there is a remainder, this is
        a new tensor.
        """
        if self.remainder is not None and self.remainder.is_current:
            return self.remainder.joined(self._mine()).view(self.tensor.shape)
        return self.tensor.detach()

    def load(self, master: Tensor) -> None:
        """Take over a master that was saved."""
        if self.remainder is None:
            self.tensor.detach().copy_(master)
        else:
            self.tensor.data = master.to(self.tensor, copy=True).view(self.tensor.shape)
            self.remainder.is_current = False

    def read(self) -> None:
        """Take over the values of the parameter, after something else than the optimizer has set
        them.

        Raises :class:`UsageError` if the parameter is of another dtype or on another device by now.
        """
        mine = self._mine()
        if self.remainder is not None:
            self.remainder.low.zero_()
            self._let_go()
        elif not self.is_view:
            self.tensor.detach().view(-1).copy_(mine)
            note_written(self.parameter)
        elif self.num_elements and self.tensor.data_ptr() != mine.data_ptr():
            self.tensor.data = mine.view(self.tensor.shape)

    def refresh(self) -> None:
        """Prepare ``tensor`` for a step of the optimizer.

        - A view is made anew if the parameter has been given other memory.
        - A copy takes over the elements that something else has written into the parameter since
          the last step. An element that is just the copy's own value, rounded, keeps that value.
        - A remainder is added to the parameter, whatever has been written there.
        """
        if self.is_view:
            self.read()
        elif self.remainder is not None and self.remainder.is_current:
            self.tensor.data = self.value
            self.remainder.is_current = False
        # Somebody has written to the parameter. Elements that are still their master rounded keep
        # the master, which has more digits; the others are taken over.
        elif getattr(self.parameter, _WRITTEN, None) != self.parameter._version:
            own, mine = self.tensor.detach(), self._mine().view(self.tensor.shape)
            own.copy_(torch.where(is_rounded(own, mine), own, mine.to(own.dtype)))
            note_written(self.parameter)

    def write(self, target: Tensor) -> None:
        """Round the values that the optimizer has updated into ``target``, of as many elements."""
        if self.remainder is not None:
            self.remainder.split(self.tensor.detach(), target)
        else:
            fill(target, self.tensor.detach().view(target.shape))

    def settle(self) -> None:
        """Let go of what can be made again, after the values of a step were written."""
        if self.remainder is not None:
            self._let_go()

    def _let_go(self) -> None:
        assert self.remainder is not None
        self.remainder.is_current = True
        self.tensor.data = placeholder(self.tensor)

    def _mine(self) -> Tensor:
        """The parameter's elements of this shard's range, flat."""
        data = self.parameter.detach()
        # Only a copy can follow a parameter into another dtype.
        dtype = data.dtype
        if self.is_view:
            dtype = self.tensor.dtype
        elif self.remainder is not None:
            dtype = torch.bfloat16
        if data.device != self.tensor.device or data.dtype != dtype:
            raise UsageError(
                f"parameter {self.name!r} has moved since the optimizer was built",
                why=f"it is {data.dtype} on {data.device}, and the optimizer's state is made for "
                f"{dtype} on {self.tensor.device}",
                hint="move or convert the module before build_optimizer",
            )
        return data.reshape(-1)[self.start : self.stop]


# Torch counts how often a tensor was written in place. The mark on a parameter is that count when
# the optimizer wrote it last.
_WRITTEN = "_shardwright_written"


def note_written(parameter: nn.Parameter) -> None:
    """Remember that the values of ``parameter`` are those of the optimizer's copies."""
    setattr(parameter, _WRITTEN, parameter._version)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy, unless both are the same memory."""
    if target.numel() and target.data_ptr() != source.data_ptr():
        target.copy_(source)


def shard_tensor(
    parameter: nn.Parameter, start: int, stop: int, dtype: torch.dtype, *, flat: bool
) -> tuple[nn.Parameter, bool]:
    """The tensor that an optimizer updates of a local piece, and whether it is a view of the piece.

    ``flat``: the tensor has one dim. Otherwise it is the whole piece in its shape, or an empty
    tensor with as many dims.
    """
    data = parameter.detach()
    shape = (stop - start,) if flat else tuple(data.shape)
    # Nothing of it is this rank's: an optimizer gets an empty tensor, so that its groups are those
    # of all ranks.
    if start == stop:
        empty = (0, *data.shape[1:]) if data.ndim and not flat else (0,)
        return nn.Parameter(data.new_empty(empty, dtype=dtype)), dtype == data.dtype
    if dtype == data.dtype and data.is_contiguous():
        return nn.Parameter(data.view(-1)[start:stop].view(shape)), True
    note_written(parameter)
    copy: Tensor = data.reshape(-1)[start:stop].to(dtype, copy=True)
    return nn.Parameter(copy.view(shape)), False
