"""Deduped state dicts: each rank keeps the pieces it is the first to hold; loading one, ranks give others what they lack."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.agreement import together
from shardwright.runtime.checkpoint.holdings import EXTRA_STATE, Holding, Holdings
from shardwright.runtime.checkpoint.merged import is_plan
from shardwright.runtime.checkpoint.optimizer_state import (
    NamedState,
    StateDict,
    group_names,
    is_like_parameter,
    listed,
    load_named_state,
)
from shardwright.runtime.checkpoint.regions import Region
from shardwright.runtime.checkpoint.values import decode, encode
from shardwright.runtime.communicator import Communicator
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.world import World, current_world

GROUP = "checkpoint"
"""The name under which communication is counted."""


def deduped_state_dict(module: nn.Module, optimizer: Optimizer | None = None) -> tuple[StateDict, StateDict | None]:
    """The state dicts of this rank without what an earlier rank has too. No communication.

    The first unit keeps one copy of every piece; of ordinary modules rank 0 keeps everything. Layouts, random numbers and the
    options of the optimizer's groups stay everywhere. Of all ranks together these merge to what the full ones do.
    """
    holdings = Holdings.of(module)
    owned = {id(holding.tensor) for holding in holdings.tensors if holding.is_owned}
    is_first = current_world().rank == 0
    state: StateDict = OrderedDict()
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) in owned:
                state[key] = value.detach()
        elif is_first or is_plan(key, value):
            state[key] = value
    if optimizer is None:
        return state, None
    names = {name for holding in holdings.tensors if holding.is_owned for name in holding.names}
    full = optimizer.state_dict()
    numbers = {
        number
        for group, group_name in zip(full["param_groups"], group_names(optimizer, holdings), strict=True)
        for number, name in zip(group["params"], group_name, strict=True)
        if name in names
    }
    return state, {**full, "state": {number: value for number, value in full["state"].items() if number in numbers}}


def load_deduped_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load what :func:`deduped_state_dict` gave this rank, under the same plan. Collective: ranks send what others lack.

    ``device``: where the module moves first (default: it stays where it is).

    Raises :class:`CheckpointError` on all ranks if the plan is another one, or if no rank has a piece.
    """
    world = current_world()
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
        mine = {h.name: value for h in holdings.tensors if (value := _given(h, module_state_dict)) is not None}
        named = None if optimizer is None else _given_state(optimizer, holdings, optimizer_state_dict)
    pieces = _share_out(world, holdings, mine)
    with torch.no_grad():
        for piece in pieces:
            if piece.is_source:
                piece.holding.tensor.copy_(mine[piece.holding.name])
            if piece.communicator is not None and piece.holding.tensor.numel():
                piece.holding.tensor.copy_(piece.communicator.broadcast(piece.holding.tensor.detach(), piece.source))
    for part in holdings.compiled.values():
        part.refresh_copies()
    if optimizer is not None and named is not None:
        load_named_state(optimizer, holdings, _share_state(world, holdings, pieces, named))


@dataclass(frozen=True, slots=True)
class _SharedPiece:
    """A piece this rank holds. ``communicator``: of all ranks that hold it, if there are several; member ``source`` has it."""

    holding: Holding
    communicator: Communicator | None
    source: int
    is_source: bool


def _share_out(world: World, holdings: Holdings, mine: Mapping[str, Tensor]) -> list[_SharedPiece]:
    """Find out who has what. The result is in one order on all ranks."""
    by_key = {(h.name, _region_key(h.region)): h for h in holdings.tensors if not h.is_copy}
    tables = world.all_gather_object([[name, region, name in mine] for name, region in by_key])
    holders: dict[tuple[str, str], list[int]] = {}
    sources: dict[tuple[str, str], int] = {}
    for rank, table in enumerate(tables):
        for name, region, has_value in table:
            holders.setdefault((name, region), []).append(rank)
            if has_value:
                sources.setdefault((name, region), rank)
    missing = [f"{name!r} on ranks {ranks}" for (name, region), ranks in holders.items() if (name, region) not in sources]
    if missing:
        hint = "load on all ranks what each of them saved"
        raise CheckpointError("no rank was given some pieces", why=listed(missing), hint=hint)
    # Groups are made by all ranks, members or not, in one order.
    groups = {ranks: world.group(ranks, GROUP) for ranks in sorted({tuple(r) for r in holders.values()}) if len(ranks) > 1}
    pieces = []
    for key, ranks in holders.items():
        if key in by_key:
            source = sources[key]
            pieces.append(_SharedPiece(by_key[key], groups.get(tuple(ranks)), ranks.index(source), source == world.rank))
    return pieces


def _share_state(world: World, holdings: Holdings, pieces: list[_SharedPiece], named: NamedState) -> NamedState:
    """The optimizer state of all pieces this rank holds."""
    offered: dict[str, dict[str, Any]] = {}
    with together(world):
        for holding in holdings.tensors:
            for key, value in named.state.get(holding.name, {}).items():
                offered.setdefault(holding.name, {})[key] = _describe(holding, key, value)
    described: dict[str, dict[str, Any]] = {}
    for table in world.all_gather_object(offered):
        for name, keys in table.items():
            for key, description in keys.items():
                described.setdefault(name, {}).setdefault(key, description)
    state: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        holding = piece.holding
        for key, description in described.get(holding.name, {}).items():
            if "value" in description:
                value = decode(description["value"])
            else:
                shape = holding.region.shape if description["shape"] is None else tuple(description["shape"])
                given = named.state.get(holding.name, {}).get(key) if piece.is_source else None
                if given is None:
                    given = torch.zeros(shape, dtype=decode(description["dtype"]), device=holding.tensor.device)
                value = given.to(holding.tensor.device, copy=True)
                if piece.communicator is not None and value.numel():
                    value = piece.communicator.broadcast(value, piece.source)
            state.setdefault(holding.name, {})[key] = value
    return NamedState(named.groups, state)


def _describe(holding: Holding, key: str, value: Any) -> dict[str, Any]:
    """What another rank must know to receive a value of the optimizer's state, as JSON."""
    like = is_like_parameter(holding.name, key, value, holding.region.shape, holding.is_cut)
    if like is None:
        return {"value": encode(value, f"the optimizer state {key!r} of {holding.name!r}")}
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


def _given_state(optimizer: Optimizer, holdings: Holdings, state_dict: Mapping[str, Any] | None) -> NamedState:
    if state_dict is None:
        raise CheckpointError("there is no state for the optimizer", hint="pass optimizer_state_dict too")
    names = group_names(optimizer, holdings)
    there, here = [len(group["params"]) for group in state_dict["param_groups"]], [len(group) for group in names]
    if there != here:
        why = f"its groups have {there} parameters, here they have {here}"
        raise CheckpointError("the state dict does not fit the optimizer", why=why)
    return NamedState.of(state_dict, names)


def _region_key(region: Region) -> str:
    """A short name of a region, the same on all ranks."""
    return hashlib.blake2b(json.dumps(region.to_json()).encode(), digest_size=8).hexdigest()
