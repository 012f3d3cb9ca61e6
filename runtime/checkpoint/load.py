"""Loading a checkpoint under any plan: every rank reads the elements it holds, from whichever files have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.agreement import together
from shardwright.runtime.checkpoint.contents import Contents, check_complete, check_files
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.holdings import Holding, Holdings
from shardwright.runtime.checkpoint.index import INDEX_FILE, Index, OptimizerRecord, TensorRecord
from shardwright.runtime.checkpoint.optimizer_state import (
    NamedState,
    group_members,
    group_names,
    listed,
    load_named_state,
    read_lacking_masters,
)
from shardwright.runtime.checkpoint.ordering import Groups
from shardwright.runtime.checkpoint.save import finish_pending
from shardwright.runtime.checkpoint.state_place import StatePlace, state_places
from shardwright.runtime.checkpoint.values import decode
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.zero.state import MASTER


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What was loaded: from which ``folder``, saved at which ``step``, with what ``extra``."""

    folder: Path
    step: int | None
    extra: Any


@checked
def load_checkpoint(
    directory: Path | str,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    verify: bool = True,
) -> LoadedCheckpoint:
    """Continue from the current checkpoint of ``directory``, or from one of the folders in it. Collective.

    The plan, the number of ranks and the grouping of the optimizer's parameters may differ from those it was saved under; an
    original module on one device will do too. Every rank reads its own elements only. Seed and step of random numbers,
    and the state of ``scheduler``, are restored. ``verify``: read all files once, shared among the ranks, and compare digests.

    Raises :class:`CheckpointError` on all ranks if there is no checkpoint, if files are missing or altered, or if entries are
    missing, left over or have another shape; nothing has been changed then.
    """
    world, directory = current_world(), Path(directory)
    finish_pending(world)
    folder = _agreed_folder(world, directory)
    with together(world):
        index = Index.read(folder / INDEX_FILE)
        check_complete(folder, index)
        holdings = Holdings.of(module)
        found = _match(folder, index, holdings)
        _check_options(folder, index, optimizer, scheduler)
        if optimizer is not None and index.optimizer is not None:
            group_names(optimizer, holdings)
    _check_left_over(world, folder, index, holdings)
    if verify:
        with together(world):
            check_files(folder, index, sorted(index.files)[world.rank :: world.size])
    with together(world), Contents(folder, index) as contents:
        named = None
        if optimizer is not None and index.optimizer is not None:
            # First, as it may still be refused.
            named = _read_state(contents, index.optimizer, optimizer, holdings)
            load_named_state(optimizer, holdings, named)
        for holding, record in found:
            contents.fill(holding.tensor, holding.region, _exact(index, record, holding))
        if optimizer is not None and named is not None:
            read_lacking_masters(optimizer, holdings, named)
        for part in holdings.compiled.values():
            part.note_loaded()
        holdings.load_random_states(index.random)
        holdings.load_extra_states({key: decode(value) for key, value in index.extra_states.items()})
        if scheduler is not None:
            scheduler.load_state_dict(decode(index.scheduler))
    return LoadedCheckpoint(folder, index.step, decode(index.extra))


def _agreed_folder(world: World, directory: Path) -> Path:
    """The same folder on all ranks, whatever another process makes current meanwhile."""
    folder = None
    with together(world):
        if world.rank == 0:
            folder = find_folder(directory)
    return Path(world.broadcast_object(str(folder)))


def _match(folder: Path, index: Index, holdings: Holdings) -> list[tuple[Holding, TensorRecord]]:
    """Where in the checkpoint to find what this rank holds."""
    records = {name: record for first, record in index.tensors.items() for name in (first, *record.aliases)}
    found, problems = [], []
    for holding in holdings.tensors:
        candidates = [records[name] for name in holding.names if name in records]
        if not candidates:
            problems.append(f"{holding.name!r} is missing")
        elif any(other is not candidates[0] for other in candidates):
            names = " and ".join(repr(name) for name in holding.names if name in records)
            problems.append(f"{names} are one tensor here and several there")
        elif candidates[0].shape != holding.shape:
            problems.append(f"{holding.name!r} is {list(candidates[0].shape)} there and {list(holding.shape)} here")
        elif candidates[0].dtype.is_floating_point != holding.tensor.dtype.is_floating_point:
            problems.append(f"{holding.name!r} is {candidates[0].dtype} there and {holding.tensor.dtype} here")
        else:
            found.append((holding, candidates[0]))
    problems += [f"the extra state {key!r} is missing" for key in holdings.extra_states if key not in index.extra_states]
    if problems:
        raise CheckpointError(f"{folder} does not fit {holdings.class_name}", why=listed(problems))
    return found


def _exact(index: Index, record: TensorRecord, holding: Holding) -> TensorRecord:
    """What to read a parameter from: its master, if it is of another dtype here than the rounded one that was saved."""
    if index.optimizer is None or holding.tensor.dtype == record.dtype:
        return record
    name = next(name for name, other in index.tensors.items() if other is record)
    return index.optimizer.tensors.get(name, {}).get(MASTER, record)


def _check_left_over(world: World, folder: Path, index: Index, holdings: Holdings) -> None:
    """Raise on all ranks if no rank holds something that was saved."""
    mine = {name for holding in holdings.tensors for name in holding.names}
    unknown = [name for name, record in index.tensors.items() if mine.isdisjoint((name, *record.aliases))]
    everywhere = set.intersection(*(set(names) for names in world.all_gather_object(unknown)))
    if everywhere:
        problems = [f"{name!r} is not in the module" for name in index.tensors if name in everywhere]
        raise CheckpointError(f"{folder} does not fit {holdings.class_name}", why=listed(problems))


def _check_options(folder: Path, index: Index, optimizer: Optimizer | None, scheduler: Any) -> None:
    for wanted, there, title in (
        (optimizer, index.optimizer, "optimizer"),
        (scheduler, index.scheduler, "scheduler"),
    ):
        if wanted is not None and there is None:
            raise CheckpointError(
                f"{folder} has no state of the {title}",
                why=f"it was saved without {title}=",
                hint=f"load it without the {title}, which then starts afresh",
            )


def _read_state(contents: Contents, record: OptimizerRecord, optimizer: Optimizer, holdings: Holdings) -> NamedState:
    """The pieces on this rank of the optimizer's state."""
    names = group_names(optimizer, holdings)
    mine = {name for group in names for name in group}
    by_name = _by_own_name(record, contents.index, holdings)
    state: dict[str, dict[str, Any]] = {}
    for name, place in state_places(optimizer, holdings).items():
        saved = by_name.get(name)
        if name in mine and saved is not None and record.keys(saved) and not place.is_empty:
            values = {key: decode(value) for key, value in record.values.get(saved, {}).items()}
            tensors = {
                key: _read_part(contents, tensor, place)
                for key, tensor in record.tensors.get(saved, {}).items()
                if key != MASTER or place.has_master
            }
            state[name] = {**values, **tensors}
    return NamedState(_groups_here(record, contents.index, optimizer, holdings), state)


def _groups_here(record: OptimizerRecord, index: Index, optimizer: Optimizer, holdings: Holdings) -> Groups:
    """The saved groups with the names that the parameters have here, on all ranks."""
    first = holdings.first_names()
    members = {name for group in group_members(optimizer, holdings) for name in group}
    held = {name for holding in holdings.tensors for name in holding.names}
    groups = []
    for names, options in record.groups:
        here: dict[str, None] = {}
        for name in names:
            known = dict.fromkeys(first[other] for other in (name, *index.tensors[name].aliases) if other in first)
            here |= {other: None for other in known if other in members or other in held}
        groups.append((tuple(here), {key: decode(value) for key, value in options.items()}))
    return tuple(groups)


def _read_part(contents: Contents, record: TensorRecord, place: StatePlace) -> Tensor:
    """The part that this rank has of a tensor of the optimizer's state."""
    if not record.like_parameter:
        return contents.read(record, device=place.device)
    mine = place.new(record.dtype)
    for view, region in place.views(mine):
        contents.fill(view, region, record)
    return mine


def _by_own_name(record: OptimizerRecord, index: Index, holdings: Holdings) -> dict[str, str]:
    """By first names here, what the parameters are called in the checkpoint: a tied one may come first there."""
    saved = {alias: name for name in record.names for alias in (name, *index.tensors[name].aliases)}
    pairs = ((h.name, next((saved[name] for name in h.names if name in saved), None)) for h in holdings.tensors)
    return {own: name for own, name in pairs if name is not None}
