"""Whole tensors of parameters that the plan cuts, for optimizers that need them.

Such a parameter has one *owner* among the ranks that hold its pieces. The optimizer sees the whole
tensor there, and an empty one on the other ranks, so its state exists once. ``whole_exchange.py``
brings gradients and values to the owner, and the result back. Nothing is computed on the way: the
optimizer sees what it would see if the parameter had never been cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.runtime.layout import Layout
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.regions import Region
from shardwright.runtime.zero.remainders import is_rounded, placeholder

WHOLE = "whole"
"""What a state dict has in the place of a range of elements, on the owner of a whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class CutParameter:
    """A trained parameter of which this rank holds a piece.

    ``ranks``: this rank's place on the mesh that ``layout`` refers to. ``is_counted``: whether this
    rank counts its piece, when every distinct element is to be counted once.
    """

    name: str
    parameter: nn.Parameter
    layout: Layout
    ranks: RankMesh
    is_counted: bool

    def pieces(self) -> dict[int, Region]:
        """The pieces that make up the whole, this rank's among them, by rank of the world,
        ascending.
        """
        mesh, unit_start = self.ranks.mesh, self.ranks.unit * self.ranks.unit_size
        mine = mesh.rank(self.ranks.coords)
        group = next(group for group in mesh.groups(self.layout.cut_axes) if mine in group)
        held = {
            unit_start + self.ranks.ranks[index]: Region.of(self.layout, mesh, mesh.coords(index))
            for index in group
        }
        return dict(sorted(held.items()))


class WholeParameter:
    """A cut parameter as the optimizer of this rank sees it.

    - ``tensor``: all of it in its own shape on the owner; an empty tensor with as many dims on the
      other ranks. It has values while a step runs. After that only its shape stays, unless it is a
      master.
    - ``has_master``: whether ``tensor`` is a master: of another dtype than the parameter, into
      which it is rounded.
    - ``parameter``: this rank's piece in the module. ``pieces``: what each rank of the world holds.
    - ``is_counted``: whether this rank counts the whole, when every distinct element of the model
      is to be counted once.
    """

    def __init__(
        self, cut: CutParameter, owner: int | None, dtype: torch.dtype, is_counted: bool
    ) -> None:
        self.name = cut.name
        self.parameter = cut.parameter
        self.shape: tuple[int, ...] = cut.layout.shape
        self.pieces = cut.pieces()
        self.owner = owner
        self.is_owner = owner == cut.ranks.world.rank
        self.is_counted = self.is_owner and is_counted
        self.has_master = self.is_owner and dtype != cut.parameter.dtype
        self._is_known = False  # whether the master has values, which the parameter's may confirm
        shape = self.shape if self.has_master else (0, *self.shape[1:])
        self.tensor = nn.Parameter(cut.parameter.detach().new_empty(shape, dtype=dtype))
        self.release()

    @property
    def value(self) -> Tensor:
        """The values that the optimizer updates, as they are now."""
        return self.tensor.detach()

    def read(self) -> None:
        """Take over the values of the parameter at the next step, whatever the master is."""
        self._is_known = False

    def load(self, master: Tensor) -> None:
        """Take over a saved master."""
        self.tensor.detach().copy_(master)
        self._is_known = True

    def receive(self, values: Tensor) -> None:
        """Take the values of the parameter. An element of a master keeps its own value if the
        parameter's is just that one, rounded.
        """
        if not self.has_master:
            self.tensor.data = values
            return
        own, wide = self.tensor.detach(), values.to(self.tensor.dtype)
        own.copy_(torch.where(is_rounded(own, values), own, wide) if self._is_known else wide)
        self._is_known = True

    def release(self) -> None:
        """Let go of the values. Code that reads the tensor nevertheless reads NaN."""
        if self.is_owner and not self.has_master:
            self.tensor.data = placeholder(self.tensor.detach().new_empty(()).expand(self.shape))
