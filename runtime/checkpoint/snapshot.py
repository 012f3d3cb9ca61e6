"""What one rank saves: its part of the index of a checkpoint, and the tensors of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.checkpoint_index import (
    Index,
    OptimizerRecord,
    PieceRecord,
    TensorRecord,
    state_key,
    unused,
)
from shardwright.runtime.checkpoint.holdings import Holding, Holdings
from shardwright.runtime.checkpoint.json_values import encode
from shardwright.runtime.checkpoint.loader_state import loader_states
from shardwright.runtime.checkpoint.optimizer_state import named_state
from shardwright.runtime.checkpoint.state_place import StatePlace, state_places
from shardwright.runtime.checkpoint.tensor_files import TensorSource, check_dtype
from shardwright.runtime.ranks.world import World
from shardwright.runtime.regions import Region


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes: its part of the index, and the tensors by their keys in its file."""

    index: Index
    sources: Mapping[str, TensorSource]
    order: list[str]  # of the parameters in the original model, whichever ranks hold them

    def on_host(self) -> Snapshot:
        """The snapshot with all values copied to host memory now."""
        copies = {key: _host_copy(source.read()) for key, source in self.sources.items()}
        if any(copy.is_pinned() for copy in copies.values()):
            torch.cuda.synchronize()  # copies to pinned memory run on their own
        return replace(self, sources={key: _source(copy) for key, copy in copies.items()})


def take_snapshot(
    world: World,
    module: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Any,
    loader: Any,
    extra: Any,
    step: int | None,
) -> Snapshot:
    # What to write is noted by ``piece_of`` while the index is made.
    holdings = Holdings.of(module)
    sources: dict[str, TensorSource] = {}
    piece_of = partial(_add_piece, sources, tensor_file(world.rank))
    tensors = {h.name: _module_record(h, piece_of) for h in holdings.tensors}
    extra_states = {
        key: encode(value, f"the extra state {key!r}")
        for key, value in holdings.extra_states.items()
    }
    index = Index(
        module_class=holdings.class_name,
        tensors=tensors,
        files={},
        random=holdings.random_states(),
        extra_states=extra_states,
        optimizer=None if optimizer is None else _optimizer_record(optimizer, holdings, piece_of),
        scheduler=None
        if scheduler is None
        else encode(scheduler.state_dict(), "the scheduler's state"),
        loader=None if loader is None else loader_states(loader),
        # What the user adds is one value for the job, and rank 0's counts.
        extra=encode(extra, "extra") if world.rank == 0 else None,
        step=step,
        num_ranks=world.size,
    )
    return Snapshot(index, sources, holdings.parameter_names())


AddPiece = Callable[[str, Tensor, Region], tuple[PieceRecord, ...]]
"""Puts a tensor into this rank's file under a key; no piece if it is empty."""


def _add_piece(
    sources: dict[str, TensorSource], file: str, key: str, value: Tensor, region: Region
) -> tuple[PieceRecord, ...]:
    check_dtype(key, value.dtype)
    if not value.numel():
        return ()
    key = unused(key, sources)
    sources[key] = _source(value.detach())
    return (PieceRecord(file, key, region),)


def _module_record(holding: Holding, piece_of: AddPiece) -> TensorRecord:
    pieces = piece_of(holding.name, holding.tensor, holding.region) if holding.is_owned else ()
    return TensorRecord(holding.shape, holding.tensor.dtype, pieces, holding.names[1:])


def _optimizer_record(
    optimizer: Optimizer, holdings: Holdings, piece_of: AddPiece
) -> OptimizerRecord:
    named = named_state(optimizer, holdings)

    def encoded(options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: encode(value, f"the option {key!r} of the optimizer")
            for key, value in options.items()
        }

    groups = tuple((names, encoded(options)) for names, options in named.groups)
    tensors: dict[str, dict[str, TensorRecord]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, place in state_places(optimizer, holdings).items():
        for key, value in named.state.get(name, {}).items() if place.is_owned else ():
            # Steps and flags are values; moments are tensors like the parameter.
            if place.is_like_parameter(key, value) is None:
                values.setdefault(name, {})[key] = encode(
                    value, f"the optimizer state {state_key(name, key)!r}"
                )
            else:
                tensors.setdefault(name, {})[key] = _state_record(place, key, value, piece_of)
    return OptimizerRecord(type(optimizer).__name__, groups, tensors, values)


def _state_record(place: StatePlace, key: str, value: Tensor, piece_of: AddPiece) -> TensorRecord:
    full_key = state_key(place.name, key)
    if not place.is_like_parameter(key, value):
        shape = tuple(value.shape)
        return TensorRecord(
            shape, value.dtype, piece_of(full_key, value, Region.whole(shape)), like_parameter=False
        )
    # A flat shard of a parameter may begin and end inside rows: then it is several boxes.
    pieces: tuple[PieceRecord, ...] = ()
    for number, (view, region) in enumerate(place.views(value)):
        pieces += piece_of(
            full_key if len(place.regions) == 1 else f"{full_key}/{number}", view, region
        )
    return TensorRecord(place.shape, value.dtype, pieces)


def _source(value: Tensor) -> TensorSource:
    return TensorSource(tuple(value.shape), value.dtype, lambda: value)


def _host_copy(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.clone(memory_format=torch.contiguous_format).to("cpu")
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(
        value, non_blocking=True
    )


def tensor_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
