"""Where the optimizer's state of a parameter lies on a rank: with its piece of it, or under ZeRO
with a part of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.holdings import Holding, Holdings
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region
from shardwright.runtime.zero.shards import ParameterShard
from shardwright.runtime.zero.whole_tensors import WholeParameter

PARAM_SHARDS = "param_shards"
"""Where groups of a parallel optimizer keep, by parameter, which elements of the flattened local
piece are the rank's, or that it has the state of the whole tensor.
"""

Bounds = tuple[int, int] | str
"""A range of elements of the flattened local piece, or ``"whole"``."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """What of the state of the parameter ``name`` a rank has.

    ``shape``: of the whole parameter. ``regions``: the elements whose state the rank has, one
    region after the other as in its flattened tensors; none where other ranks have all of it.
    ``local_shapes``: the shapes that tensors with one number for each of these elements may have
    here. ``is_owned``: this rank is the one to save it. ``has_master``: it has the optimizer's own
    copy of these elements in a higher precision.
    """

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    is_owned: bool = True
    has_master: bool = False
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, holding: Holding, shard: ParameterShard | WholeParameter | None) -> StatePlace:
        """The place of the state of a parameter that the rank holds. ``shard``: what the rank
        updates of it, if that is something else.
        """
        device = holding.tensor.device
        if isinstance(shard, WholeParameter):
            # One rank updates the whole tensor; the others hold an empty one and nothing of the
            # state.
            whole = (Region.whole(shard.shape),) if shard.is_owner else ()
            shape = tuple(shard.tensor.shape)
            return cls(
                holding.name,
                holding.shape,
                whole,
                (shape,),
                shard.is_counted,
                shard.has_master,
                device,
            )
        # Without ZeRO the rank updates the piece that it computes with.
        if shard is None:
            return cls(
                holding.name,
                holding.shape,
                (holding.region,),
                (holding.region.shape,),
                holding.is_owned,
                False,
                device,
            )
        # A shard is a run of the piece laid flat, so in dims it may be several rectangles.
        regions = holding.region.parts(shard.start, shard.stop)
        is_owned, has_master = (
            bool(regions) and shard.is_counted,
            bool(regions) and not shard.is_view,
        )
        return cls(
            holding.name,
            holding.shape,
            regions,
            (tuple(shard.tensor.shape),),
            is_owned,
            has_master,
            device,
        )

    @classmethod
    def saved(
        cls, name: str, shape: tuple[int, ...], region: Region, bounds: Bounds | None
    ) -> StatePlace:
        """The place as state dicts tell it: ``region`` of the parameter, and ``bounds`` of its
        elements there, or all of them without bounds.

        A state dict does not tell whether an optimizer that has all elements was given them flat.
        """
        if bounds is None:
            return cls(name, shape, (region,), (region.shape,))
        if isinstance(bounds, str):
            return cls(name, shape, (Region.whole(shape),), (shape,))
        flat = (bounds[1] - bounds[0],)
        shapes = (flat, region.shape) if flat == (region.num_elements,) else (flat,)
        return cls(name, shape, region.parts(*bounds), shapes)

    @property
    def is_empty(self) -> bool:
        """Whether other ranks have all of it. What the optimizer keeps here then says nothing."""
        return not self.regions

    @property
    def is_cut(self) -> bool:
        return self.regions != (Region.whole(self.shape),)

    def views(self, value: Tensor) -> Iterator[tuple[Tensor, Region]]:
        """A tensor like the parameter by its regions; views of it if it is contiguous."""
        if len(self.regions) == 1:
            yield value.reshape(self.regions[0].shape), self.regions[0]
            return
        # A flat shard: its regions lie end to end.
        parts = torch.split_with_sizes(
            value.reshape(-1), [region.num_elements for region in self.regions]
        )
        yield from (
            (part.view(region.shape), region)
            for part, region in zip(parts, self.regions, strict=True)
        )

    def new(self, dtype: torch.dtype) -> Tensor:
        """A tensor like the parameter, to be filled."""
        return torch.empty(self.local_shapes[0], dtype=dtype, device=self.device)

    def is_like_parameter(self, key: str, value: Any) -> bool | None:
        """How a value of the state lies: ``True`` if it is a tensor with an element for each of the
        parameter's, ``False`` if it is a tensor that is whole on every rank, ``None`` for what is
        no tensor or a single number.

        Raises :class:`CheckpointError` for a tensor of another shape beside a piece: how it would
        be cut is unknown.
        """
        if not isinstance(value, Tensor):
            return None
        if tuple(value.shape) in self.local_shapes:
            return True
        if value.numel() == 1:
            return None
        if self.is_cut:
            raise CheckpointError(
                f"the optimizer state {key!r} of {self.name!r} cannot be saved",
                why=f"it has shape {list(value.shape)}, and this rank holds a piece "
                f"{list(self.local_shapes[0])} of the parameter",
                hint="state of a parameter that is split over ranks must have the shape of the "
                "piece, or be a single number",
            )
        return False


def shards_of(optimizer: Optimizer) -> tuple[ParameterShard | WholeParameter, ...]:
    """What a parallel optimizer updates of parameters in the place of what the module holds;
    nothing for others.
    """
    wholes: tuple[WholeParameter, ...] = getattr(optimizer, "wholes", ())
    exchanged = {whole.name for whole in wholes}
    return (
        *wholes,
        *(shard for shard in getattr(optimizer, "shards", ()) if shard.name not in exchanged),
    )


def state_places(optimizer: Optimizer, holdings: Holdings) -> dict[str, StatePlace]:
    """The places of the state of everything that this rank holds, by name."""
    shards = {id(shard.parameter): shard for shard in shards_of(optimizer)}
    return {
        holding.name: StatePlace.of(holding, shards.get(id(holding.tensor)))
        for holding in holdings.tensors
    }
