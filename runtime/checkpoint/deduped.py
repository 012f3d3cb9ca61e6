"""Deduped state dicts: each rank keeps the pieces it is the first to hold; loading one, ranks give
others what they lack.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.arguments import checked, param_groups_of
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.holdings import EXTRA_STATE, Holding, Holdings, is_extra_state
from shardwright.runtime.checkpoint.json_values import decode, encode
from shardwright.runtime.checkpoint.merged import is_plan
from shardwright.runtime.checkpoint.optimizer_state import (
    NamedState,
    StateDict,
    group_names,
    listed,
    same_class,
    state_dict_for,
)
from shardwright.runtime.checkpoint.state_place import PARAM_SHARDS, StatePlace, state_places
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.regions import Region, copy_shared, num_covered

GROUP = "checkpoint"
"""The name under which communication is counted."""


@checked
def deduped_state_dict(
    module: nn.Module, optimizer: Optimizer | None = None
) -> tuple[StateDict, StateDict | None]:
    """The state dicts of this rank without what an earlier rank has too. No communication.

    The first unit keeps one copy of every piece; of ordinary modules rank 0 keeps everything.
    Layouts, random numbers and the options of the optimizer's groups stay everywhere. Of all ranks
    together these merge to what the full ones do.
    """
    holdings = Holdings.of(module)
    # What this rank keeps. A frozen copy elsewhere has the same bytes.
    owned = {id(holding.tensor) for holding in holdings.tensors if holding.is_owned}
    is_first = current_world().rank == 0
    state: StateDict = OrderedDict()
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_extra_state(key):
            if id(value) in owned:
                state[key] = value.detach()
        # Layouts and random numbers stay on every rank, as each checks its own plan by them.
        elif is_first or is_plan(key, value):
            state[key] = value
    if optimizer is None:
        return state, None
    full, places = optimizer.state_dict(), state_places(optimizer, holdings)
    numbers: set[int] = set()
    groups = []
    # Groups stay complete; only the state of what is not owned goes.
    for group, names in zip(full["param_groups"], group_names(optimizer, holdings), strict=True):
        numbers.update(
            number
            for number, name in zip(group["params"], names, strict=True)
            if places[name].is_owned
        )
        # A shard that is not kept is told as an empty range.
        if PARAM_SHARDS in group:
            kept = [
                bounds if bounds is None or places[name].is_owned else [0, 0]
                for name, bounds in zip(names, group[PARAM_SHARDS], strict=True)
            ]
            group = {**group, PARAM_SHARDS: kept}
        groups.append(group)
    own = {number: value for number, value in full["state"].items() if number in numbers}
    return state, {**full, "state": own, "param_groups": groups}


@checked
def load_deduped_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load what :func:`deduped_state_dict` gave this rank, under the same plan and options of ZeRO.
    Collective: ranks send what others lack.

    ``device``: where the module moves first (default: it stays where it is).

    Raises :class:`CheckpointError` on all ranks if the plan is another one, or if no rank has a
    piece.
    """
    world = current_world()
    # Everything that may be refused, before anything is sent.
    with together(world):
        if device is not None:
            module.to(device)
        holdings = Holdings.of(module)
        for path, part in holdings.compiled.items():
            key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
            if key not in module_state_dict:
                hint = "load what deduped_state_dict returned on this rank"
                raise CheckpointError(f"the state dict has no {key!r}", hint=hint)
            part.set_extra_state(module_state_dict[key])
        holdings.load_extra_states(module_state_dict)
        mine = {
            h.name: value
            for h in holdings.tensors
            if (value := _given(h, module_state_dict)) is not None
        }
        named = (
            None if optimizer is None else _given_state(optimizer, holdings, optimizer_state_dict)
        )
    # Then one broadcast for each piece, from a rank that was given it.
    pieces = _share_out(world, holdings, mine)
    with torch.no_grad():
        for piece in pieces:
            if piece.is_source:
                piece.holding.tensor.copy_(mine[piece.holding.name])
            if piece.communicator is not None and piece.holding.tensor.numel():
                piece.holding.tensor.copy_(
                    piece.communicator.broadcast(piece.holding.tensor.detach(), piece.source)
                )
    # Stages that hold copies get them from the owner.
    for part in holdings.compiled.values():
        part.refresh_copies()
    if optimizer is not None and named is not None:
        shared = _share_state(world, optimizer, holdings, named)
        with same_class(optimizer):
            optimizer.load_state_dict(
                state_dict_for(optimizer, holdings, shared, group_names(optimizer, holdings))
            )


@dataclass(frozen=True, slots=True)
class _SharedPiece:
    """A piece this rank holds. ``communicator``: of all ranks that hold it, if there are several;
    member ``source`` has it.
    """

    holding: Holding
    communicator: Communicator | None
    source: int
    is_source: bool


def _share_out(world: World, holdings: Holdings, mine: Mapping[str, Tensor]) -> list[_SharedPiece]:
    """Find out who has what. The result is in one order on all ranks."""
    # A piece is known by its tensor and its region.
    by_key = {(h.name, _region_key(h.region)): h for h in holdings.tensors if not h.is_copy}
    tables = world.all_gather_object([[name, region, name in mine] for name, region in by_key])
    holders: dict[tuple[str, str], list[int]] = {}
    sources: dict[tuple[str, str], int] = {}
    # The first rank that was given a piece is its source.
    for rank, table in enumerate(tables):
        for name, region, has_value in table:
            holders.setdefault((name, region), []).append(rank)
            if has_value:
                sources.setdefault((name, region), rank)
    missing = [
        f"{name!r} on ranks {ranks}"
        for (name, region), ranks in holders.items()
        if (name, region) not in sources
    ]
    if missing:
        hint = "load on all ranks what each of them saved"
        raise CheckpointError("no rank was given some pieces", why=listed(missing), hint=hint)
    # Groups are made by all ranks, members or not, in one order.
    groups = {
        ranks: world.group(ranks, GROUP)
        for ranks in sorted({tuple(r) for r in holders.values()})
        if len(ranks) > 1
    }
    pieces = []
    for key, ranks in holders.items():
        if key in by_key:
            source = sources[key]
            pieces.append(
                _SharedPiece(
                    by_key[key], groups.get(tuple(ranks)), ranks.index(source), source == world.rank
                )
            )
    return pieces


def _share_state(
    world: World, optimizer: Optimizer, holdings: Holdings, named: NamedState
) -> NamedState:
    """The optimizer's state of everything this rank updates: who has a part of it gives it to those
    that lack it.

    Parts may overlap only partly: of a parameter that lies in copies, ranks with other neighbours
    in a bucket split the state elsewhere than the ranks that keep it.
    """
    # Copies in other stages follow their owner, and have no state.
    copies = {holding.name for holding in holdings.tensors if holding.is_copy}
    updated = set(named.names)
    places = {
        name: place
        for name, place in state_places(optimizer, holdings).items()
        if not place.is_empty and name not in copies and name in updated
    }
    with together(world):
        offered = {
            name: {key: _describe(place, key, value) for key, value in named.state[name].items()}
            for name, place in places.items()
            if named.state.get(name)
        }
    # Of each parameter: the regions that the rank updates, and what it was given of the state.
    mine = {
        name: ([region.to_json() for region in place.regions], offered.get(name))
        for name, place in places.items()
    }
    parts = _state_parts(world.all_gather_object(mine))
    # Groups are made by all ranks, members or not, in one order.
    groups = {
        ranks: world.group(ranks, GROUP)
        for ranks in sorted({part.ranks for part in parts})
        if len(ranks) > 1
    }
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        if world.rank in part.ranks:
            given = named.state[part.name] if part.source == world.rank else {}
            _receive(
                state.setdefault(part.name, {}),
                given,
                part,
                places[part.name],
                groups.get(part.ranks),
            )
    return NamedState(named.groups, state)


@dataclass(frozen=True, slots=True)
class _StatePart:
    """The state of a parameter that rank ``source`` has for ``regions``. ``ranks``: who needs some
    of it, and itself.
    """

    name: str
    regions: tuple[Region, ...]
    source: int
    ranks: tuple[int, ...]
    described: Mapping[str, Any]


def _state_parts(
    tables: Sequence[Mapping[str, tuple[Any, Mapping[str, Any] | None]]],
) -> list[_StatePart]:
    """Who gives what to whom, in one order on all ranks. ``tables``: by rank, then by name, regions
    and what is there.

    Raises :class:`CheckpointError` if a rank would not get all it needs.
    """
    # By name: the regions that each rank needs, and the first rank that has each set of regions.
    needed: dict[str, dict[int, tuple[Region, ...]]] = {}
    sources: dict[str, dict[tuple[Region, ...], int]] = {}
    for rank, table in enumerate(tables):
        for name, (regions, described) in table.items():
            needed.setdefault(name, {})[rank] = found = tuple(map(Region.from_json, regions))
            if described is not None:
                sources.setdefault(name, {}).setdefault(found, rank)
    parts, missing = [], []
    for name, by_regions in sources.items():
        for regions, source in by_regions.items():
            # How many elements of the part each rank needs.
            shared = {rank: num_covered(theirs, regions) for rank, theirs in needed[name].items()}
            ranks = tuple(
                rank for rank, number in shared.items() if number or needed[name][rank] == regions
            )
            parts.append(_StatePart(name, regions, source, ranks, tables[source][name][1] or {}))
        # All parts together must cover what a rank needs.
        given = [region for regions in by_regions for region in regions]
        lacking = [
            rank
            for rank, theirs in needed[name].items()
            if num_covered(theirs, given) < sum(region.num_elements for region in theirs)
        ]
        missing += [f"that of {name!r} on ranks {lacking}"] if lacking else []
    if missing:
        hint = "load on all ranks what each of them saved"
        raise CheckpointError(
            "no rank was given some state of the optimizer", why=listed(missing), hint=hint
        )
    return parts


def _receive(
    state: dict[str, Any],
    given: Mapping[str, Any],
    part: _StatePart,
    place: StatePlace,
    communicator: Communicator | None,
) -> None:
    """Put a part into this rank's state of the parameter. Collective over ``part.ranks``.
    ``given``: what the source has.
    """
    source = part.ranks.index(part.source)
    # Numbers and the like travel as JSON, tensors as a flat message.
    for key, description in part.described.items():
        if "value" in description:
            state[key] = decode(description["value"])
            continue
        like, dtype = description["shape"] is None, decode(description["dtype"])
        if like:
            flat = torch.empty(
                sum(region.num_elements for region in part.regions),
                dtype=dtype,
                device=place.device,
            )
        else:
            flat = torch.empty(tuple(description["shape"]), dtype=dtype, device=place.device)
        if key in given:
            flat.copy_(given[key].reshape(flat.shape))
        if communicator is not None and flat.numel():
            flat = communicator.broadcast(flat, source)
        if not like:
            state[key] = flat
            continue
        # What this rank needs of the part goes to its place.
        target = state.setdefault(key, place.new(dtype))
        pieces = torch.split_with_sizes(flat, [region.num_elements for region in part.regions])
        for piece, region in zip(pieces, part.regions, strict=True):
            for view, own in place.views(target):
                copy_shared(view, own, piece.view(region.shape), region)


def _describe(place: StatePlace, key: str, value: Any) -> dict[str, Any]:
    """What another rank must know to receive a value of the optimizer's state, as JSON."""
    like = place.is_like_parameter(key, value)
    if like is None:
        return {"value": encode(value, f"the optimizer state {key!r} of {place.name!r}")}
    return {"dtype": encode(value.dtype, key), "shape": None if like else list(value.shape)}


def _given(holding: Holding, state: Mapping[str, Any]) -> Tensor | None:
    """The value of a piece in this rank's state dict."""
    value = next((state[name] for name in holding.names if name in state), None)
    if value is not None and tuple(value.shape) != holding.region.shape:
        raise CheckpointError(
            f"the piece of {holding.name!r} has another shape",
            why=f"{list(value.shape)} in the state dict, {list(holding.region.shape)} here",
        )
    return value


def _given_state(
    optimizer: Optimizer, holdings: Holdings, state_dict: Mapping[str, Any] | None
) -> NamedState:
    if state_dict is None:
        raise CheckpointError(
            "there is no state for the optimizer", hint="pass optimizer_state_dict too"
        )
    names = group_names(optimizer, holdings)
    there, here = (
        [len(group["params"]) for group in param_groups_of(state_dict)],
        [len(group) for group in names],
    )
    # A state dict has numbers, not names: only equal groups can be told to be the same.
    if there != here:
        why = f"its groups have {there} parameters, here they have {here}"
        raise CheckpointError("the state dict does not fit the optimizer", why=why)
    return NamedState.of(state_dict, names)


def _region_key(region: Region) -> str:
    """A short name of a region, the same on all ranks."""
    return hashlib.blake2b(json.dumps(region.to_json()).encode(), digest_size=8).hexdigest()
