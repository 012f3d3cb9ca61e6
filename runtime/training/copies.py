"""Copies of trained parameters, and whether ranks still hold the same values in them.

Example: two units of ``tp=2``, so ranks 0, 1 and 2, 3. A weight ``[64/tp, 128]`` has copies on
ranks 0, 2 and on ranks 1, 3. A layer norm that is computed alike along ``tp`` has copies on all
four. Two things keep copies equal:

- *summed*: the ranks add up one gradient, here ranks 0, 2 and ranks 1, 3. All of them get the same
  bits, and take the same step with them;
- *computed*: ranks compute the same gradient from the same values, here the layer norm along
  ``tp``. Kernels that add in no fixed order (an embedding's backward on a GPU) round it
  differently, so such copies may differ a little.

Neither sees what a script writes into parameters. ``p.add_(torch.randn_like(p))`` draws other
numbers on every rank, and the copies stay different from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.ranks.checksum import alike, checksum
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import UNITS
from shardwright.runtime.ranks.world import World


@dataclass(frozen=True, slots=True)
class CopiesDiffer:
    """Copies of a parameter that are not the same. ``ranks``: those that agree with each other.

    ``gap``, ``largest``: how far copies that are *computed* are apart, and their largest absolute
    value; ``None`` for those that are *summed*, where any bit counts.
    """

    name: str
    ranks: list[list[int]]
    gap: float | None = None
    largest: float | None = None

    def to_json(self) -> list[Any]:
        return [self.name, self.ranks, self.gap, self.largest]

    def __str__(self) -> str:
        groups = "; ".join(", ".join(map(str, ranks)) for ranks in self.ranks)
        text = f"these ranks agree with each other: {groups}"
        if self.gap is not None:
            text += f"; they are up to {self.gap:.3g} apart, in values of up to {self.largest:.3g}"
        return text


class Copies:
    """The trained parameters of this rank, by the ranks that hold the same elements of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._summed: dict[tuple[int, ...], _Group] = {}
        self._computed: dict[tuple[int, ...], _Group] = {}

    def add(
        self, name: str, parameter: Tensor, summed: Communicator, holders: Iterable[int]
    ) -> None:
        """Compare ``parameter``, too. ``summed``: the ranks that add up its gradient. ``holders``:
        all ranks with these elements that compute it alike, as ranks of the world.
        """
        if summed.size > 1:
            group = self._summed.setdefault(summed.ranks, _Group(summed, {}))
            group.tensors[name] = parameter
        ranks = tuple(sorted(holders))
        if not set(ranks) <= set(summed.ranks):
            self._computed.setdefault(ranks, _Group(None, {})).tensors[name] = parameter

    def find_on_all_ranks(self) -> CopiesDiffer | None:
        """The copies that the first rank with different ones has found; ``None`` where none has.
        Collective: all ranks get the same, so none goes on alone.
        """
        mine = self._find()
        is_found = torch.tensor([int(mine is not None)], device=self._world.device)
        if not int(self._world.everyone.all_reduce(is_found, "max", phase="setup")):
            return None
        everyones = self._world.all_gather_object(None if mine is None else mine.to_json())
        return next(CopiesDiffer(*found) for found in everyones if found is not None)

    def _find(self) -> CopiesDiffer | None:
        """The first copies of this rank that are not the same. Collective.

        A collective for each group with its checksums, and one value of each parameter where
        checksums of *computed* copies differ.
        """
        checksums = {
            id(tensor): checksum(tensor)
            for groups in (self._summed, self._computed)
            for group in groups.values()
            for tensor in group.tensors.values()
        }
        found: list[CopiesDiffer] = []
        # All ranks go through their groups in one order, or two would wait for each other.
        for _, group in sorted(self._summed.items()):
            found += [
                CopiesDiffer(name, ranks) for name, ranks in group.differing(checksums).items()
            ]
        for members, group in sorted(self._computed.items()):
            if group.communicator is None:
                group.communicator = self._world.group_among_members(members, UNITS)
            for name, ranks in group.differing(checksums).items():
                gap, largest = _spread(group.tensors[name], group.communicator)
                eps = torch.finfo(group.tensors[name].dtype).eps
                if gap > eps**0.5 * largest:  # more than steps of rounding add up to
                    found.append(CopiesDiffer(name, ranks, gap, largest))
        return found[0] if found else None


@dataclass(slots=True)
class _Group:
    """Parameters with copies on the same ranks. All of these have the same names."""

    communicator: Communicator | None
    tensors: dict[str, Tensor]

    def differing(self, checksums: dict[int, Tensor]) -> dict[str, list[list[int]]]:
        """The parameters whose bits differ, and which ranks agree on them. Collective."""
        assert self.communicator is not None
        # Stages of a pipeline use the parameters that they share in orders of their own.
        names = sorted(self.tensors)
        mine = torch.stack([checksums[id(self.tensors[name])] for name in names])
        gathered = self.communicator.all_gather(mine, phase="setup")
        per_parameter = torch.stack(gathered, dim=1).tolist()  # [parameter][rank]
        return {
            name: alike(values, self.communicator.ranks)
            for name, values in zip(names, per_parameter, strict=True)
            if len(set(values)) > 1
        }


def _spread(tensor: Tensor, communicator: Communicator) -> tuple[float, float]:
    """The largest difference between two ranks of one element, and the largest absolute value."""
    x = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # NaN on all ranks is no difference, NaN on one of them is.
    x = torch.nan_to_num(x)
    high = communicator.all_reduce(x, "max", phase="setup").double()
    low = communicator.all_reduce(x, "min", phase="setup").double()
    return float((high - low).max()), float(torch.maximum(high.abs(), low.abs()).max())
