"""The exchange between the ranks that hold pieces of parameters and the owners of the whole
tensors.

Gradients come to the owner when the reducer has summed each piece. Values come before a step, and
the result goes back after it. All pieces of a batch of parameters travel in one all-to-all, so a
rank sends and receives each of its elements once.

Example: ranks 0 and 1 hold halves of two matrices, and own one each. Rank 0 sends its half of the
second matrix and receives the other half of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.dealing import Entry, deal_buckets, deal_owners
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.failures import concerning, listed
from shardwright.runtime.ranks.world import World
from shardwright.runtime.regions import Region, copy_shared
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.shards import ParameterShard
from shardwright.runtime.zero.whole_tensors import CutParameter, WholeParameter

WHOLES = "wholes"
"""The name under which the exchange is counted."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Parameters of one dtype whose pieces lie on the same ranks, in one order on all of them.

    ``pieces``: this rank's piece of each: the parameter itself, or under ZeRO the shard that has
    its gradient.
    """

    communicator: Communicator
    members: Sequence[WholeParameter]
    pieces: Sequence[Tensor]

    @property
    def owned(self) -> list[WholeParameter]:
        """The members whose whole tensors this rank has."""
        return [member for member in self.members if member.is_owner]

    def gather(
        self, tensor_of: Callable[[Tensor], Tensor | None], dtype: torch.dtype
    ) -> Iterator[tuple[WholeParameter, Any]]:
        """Bring pieces to their owners. Yields each member that this rank owns, with its whole.

        The whole is put together of ``tensor_of`` each piece. It is ``None`` if no rank has one.
        Collective.
        """
        ranks, owned, device = self.communicator.ranks, self.owned, self.pieces[0].device
        # One message for each owner: its members' pieces end to end, [elements, flag] of each. The
        # flag is 1 if this rank has a tensor there; zeros stand for one that it lacks.
        sent = {
            rank: torch.zeros(self._size_of(rank), dtype=dtype, device=device) for rank in ranks
        }
        ends = dict.fromkeys(ranks, 0)
        for member, piece in zip(self.members, self.pieces, strict=True):
            assert member.owner is not None
            start, ends[member.owner] = ends[member.owner], ends[member.owner] + piece.numel() + 1
            value = tensor_of(piece)
            if value is not None:
                sent[member.owner][start : start + piece.numel()].copy_(value.detach().reshape(-1))
                sent[member.owner][start + piece.numel()] = 1
        # What comes in, by sender: the pieces of all members that this rank owns.
        sizes = {rank: [member.pieces[rank].num_elements + 1 for member in owned] for rank in ranks}
        shapes = [(sum(sizes[rank]),) for rank in ranks]
        with concerning(self._subject):
            arrived = self.communicator.all_to_all(
                [sent[rank] for rank in ranks], shapes, phase="gradients"
            )
        parts = {rank: _cut(flat, sizes[rank]) for rank, flat in zip(ranks, arrived, strict=True)}
        for index, member in enumerate(owned):
            # No rank had a tensor for it, so there is none.
            if not any(bool(parts[rank][index][-1]) for rank in ranks):
                yield member, None
                continue
            whole = torch.zeros(member.shape, dtype=dtype, device=device)
            # Each rank's piece lies in a region of the whole.
            for rank, region in member.pieces.items():
                copy_shared(
                    whole,
                    Region.whole(member.shape),
                    parts[rank][index][:-1].view(region.shape),
                    region,
                )
            yield member, whole

    def scatter(self) -> None:
        """Write the owners' values into all pieces. Collective."""
        ranks, owned, sent = self.communicator.ranks, self.owned, []
        # The way back: an owner sends each rank its region of every member.
        for rank in ranks:
            regions = [member.pieces[rank] for member in owned]
            sent.append(
                self.pieces[0].detach().new_empty(sum(region.num_elements for region in regions))
            )
            parts = _cut(sent[-1], [region.num_elements for region in regions])
            for member, region, part in zip(owned, regions, parts, strict=True):
                copy_shared(
                    part.view(region.shape),
                    region,
                    member.tensor.detach(),
                    Region.whole(member.shape),
                )
        # What comes in, by owner, in the order of the members.
        coming = [
            [p.detach() for m, p in zip(self.members, self.pieces, strict=True) if m.owner == rank]
            for rank in ranks
        ]
        shapes = [(sum(piece.numel() for piece in pieces),) for pieces in coming]
        with concerning(self._subject):
            arrived = self.communicator.all_to_all(sent, shapes, phase="gradients")
        for pieces, flat in zip(coming, arrived, strict=True):
            for piece, part in zip(
                pieces, _cut(flat, [piece.numel() for piece in pieces]), strict=True
            ):
                piece.copy_(part.view(piece.shape))

    def _subject(self) -> str:
        """What the exchange is for, as error messages say it."""
        return f"the exchange with the owners of {listed([member.name for member in self.members])}"

    def _size_of(self, owner: int) -> int:
        """The number of elements that this rank sends to one owner, flags included."""
        return sum(
            p.numel() + 1
            for m, p in zip(self.members, self.pieces, strict=True)
            if m.owner == owner
        )


class WholeParameters:
    """The whole tensors of this rank's optimizer. ``members`` has those of other owners, too."""

    def __init__(
        self, members: Sequence[WholeParameter] = (), batches: Sequence[Batch] = ()
    ) -> None:
        self.members = tuple(members)
        self._batches = batches

    @property
    def pieces(self) -> Iterator[Tensor]:
        """The pieces that this rank holds of them, see :class:`Batch`."""
        return (piece for batch in self._batches for piece in batch.pieces)

    def take_gradients(self) -> None:
        """Bring the reduced gradients to the owners. A parameter that no rank used gets ``None``.
        Collective.
        """
        for batch in self._batches:
            dtype = batch.pieces[0].grad_dtype
            assert dtype is not None
            for member, gradient in batch.gather(lambda piece: piece.grad, dtype):
                member.tensor.grad = None if gradient is None else gradient.to(member.tensor.dtype)

    def take_values(self) -> None:
        """Bring the values to the owners. Collective."""
        for batch in self._batches:
            for member, values in batch.gather(lambda piece: piece, batch.pieces[0].dtype):
                member.receive(values)

    def give_values(self) -> None:
        """Bring the owners' values to all ranks, in the dtype of the parameters. Collective."""
        for batch in self._batches:
            batch.scatter()

    def release(self) -> None:
        """Let go of the values until the next step."""
        for member in self.members:
            member.release()


def whole_parameters(
    world: World,
    cut: Sequence[CutParameter],
    shards: Collection[ParameterShard],
    settings: ReductionSettings,
) -> WholeParameters:
    """The whole tensors of the parameters ``cut``. Owners are balanced over all ranks, the largest
    first. Collective.

    ``shards``: all shards of this rank. Under ZeRO one rank among the copies of a piece has a shard
    that is the whole piece. The same ranks have those of the other pieces, and the exchange runs
    between these ranks.

    Raises :class:`ConfigError`, on all ranks, if masters are to be kept as remainders of the
    parameters.
    """
    by_name = {shard.name: shard for shard in shards}
    exchanged = {item.name for item in cut}
    load = sum(shard.num_elements for shard in shards if shard.name not in exchanged)
    pieces: list[Tensor] = [
        by_name[item.name].tensor if item.name in by_name else item.parameter for item in cut
    ]
    held = [
        [item.name, list(item.pieces()), piece.numel()]
        for item, piece in zip(cut, pieces, strict=True)
    ]
    owners = _owners(world.all_gather_object([load, held]))
    if owners and settings.stores_remainders:
        raise ConfigError(
            "store_param_remainders is not possible for an optimizer that needs whole "
            "tensors of parameters that the plan cuts",
            why=f"all of the master of {min(owners)[0]!r} lies on one rank, which holds a piece "
            "of the parameter",
            hint="leave it out, or use an optimizer that treats every element by itself",
        )
    # Groups are made by all ranks, members or not, in one order.
    groups = {ranks: world.group(ranks, WHOLES) for ranks in sorted({ranks for _, ranks in owners})}
    members, together = [], dict[tuple[Ranks, torch.dtype], list[tuple[WholeParameter, Tensor]]]()
    for item, piece in sorted(zip(cut, pieces, strict=True), key=lambda pair: pair[0].name):
        ranks, dtype = tuple(item.pieces()), item.parameter.dtype
        owner = owners.get((item.name, ranks))
        # If copies split the state, the unit that counts the piece need not be the unit that has
        # the state. Then the shard says whether its rank counts.
        is_counted = by_name[item.name].is_counted if item.name in by_name else item.is_counted
        members.append(WholeParameter(item, owner, settings.state_dtype(dtype), is_counted))
        if owner is not None:
            together.setdefault((ranks, dtype), []).append((members[-1], piece))
    batches = []
    for (ranks, dtype), pairs in sorted(together.items(), key=lambda item: item[0][0]):
        communicator = groups[ranks]
        assert communicator is not None, f"rank {world.rank} is not one of {ranks}"
        element_bytes = settings.gradient_dtype(dtype).itemsize
        sizes = [
            sum(region.num_elements for region in member.pieces.values()) for member, _ in pairs
        ]
        entries = [Entry(ranks, dtype, size * element_bytes) for size in sizes]
        dealt = deal_buckets(entries, settings.bucket_cap_bytes)
        batches += [
            Batch(communicator, *zip(*(pairs[index] for index in indices), strict=True))
            for indices in dealt
        ]
    return WholeParameters(members, batches)


def _owners(
    tables: Sequence[tuple[int, Sequence[tuple[str, Sequence[int], int]]]],
) -> dict[tuple[str, Ranks], int]:
    """The rank that owns each whole, by the parameter's name and the ranks that hold its pieces.

    ``tables``: of each rank, its load and ``(name, ranks, elements)`` of what it holds. If all of
    some ranks hold no element of a parameter, they have copies for use only, and nobody among them
    owns it.
    """
    loads = {rank: load for rank, (load, _) in enumerate(tables)}
    sizes: dict[tuple[str, Ranks], int] = {}
    for _, held in tables:
        for name, ranks, size in held:
            sizes[name, tuple(ranks)] = sizes.get((name, tuple(ranks)), 0) + size
    return deal_owners(((key, size, key[1]) for key, size in sizes.items() if size), loads)


def _cut(flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Consecutive parts of a flat tensor. No sizes give no parts, where torch would make one."""
    return torch.split(flat, list(sizes)) if sizes else ()
