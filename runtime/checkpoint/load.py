"""Loading a checkpoint under any plan: every rank reads the elements it holds, from whichever files
have them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.argument_kinds import Stateful
from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.checkpoint_index import (
    Index,
    OptimizerRecord,
    TensorRecord,
)
from shardwright.runtime.checkpoint.contents import (
    Contents,
    check_complete,
    check_files,
    read_index,
)
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.holdings import Holding, Holdings
from shardwright.runtime.checkpoint.json_values import decode
from shardwright.runtime.checkpoint.loader_state import give_states
from shardwright.runtime.checkpoint.optimizer_state import (
    NamedState,
    StateDict,
    group_members,
    group_names,
    listed,
    same_class,
    state_dict_for,
)
from shardwright.runtime.checkpoint.ordering import Groups
from shardwright.runtime.checkpoint.save import finish_pending
from shardwright.runtime.checkpoint.state_place import StatePlace, state_places
from shardwright.runtime.checkpoint.undo import taking, undone_on_error
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer
from shardwright.runtime.zero.state_masters import MASTER, load_masters


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
    scheduler: Stateful | None = None,
    loader: Any = None,
    verify: bool = True,
) -> LoadedCheckpoint:
    """Continue from the current checkpoint of ``directory``, or from one of the folders in it, or
    from a folder of ``torch.distributed.checkpoint``. Collective.

    The plan, the number of ranks and the grouping of the optimizer's parameters may differ from
    those it was saved under; an original module on one device will do too. Every rank reads its own
    elements only. Seed and step of random numbers, and the states of ``scheduler`` and ``loader``
    (a loader of :mod:`shardwright.data`), are restored.
    ``verify``: read all files once, shared among the ranks, and compare digests.

    Raises :class:`CheckpointError` on all ranks if there is no checkpoint, if files are missing or
    altered, or if entries are missing, left over or have another shape; nothing has been changed
    then.
    """
    world, directory = current_world(), Path(directory)
    finish_pending(world)
    folder = _agreed_folder(world, directory)
    # Find everything, and refuse whatever does not fit, before anything is changed.
    with together(world):
        index = read_index(folder, warns=world.rank == 0)
        check_complete(folder, index)
        holdings = Holdings.of(module)
        found = [
            (holding, _exact(index, record, holding))
            for holding, record in _match(folder, index, holdings)
        ]
        _check_options(folder, index, optimizer, scheduler, loader)
        _check_groups(folder, index, optimizer, scheduler, holdings)
    _check_left_over(world, folder, index, holdings)
    # Files are shared out: each rank checks every ``world.size``-th.
    if verify:
        with together(world):
            check_files(folder, index, sorted(index.files)[world.rank :: world.size])
    with Contents(folder, index) as contents:
        with together(world):
            # Whatever may be refused is found out here, before anything is written.
            contents.check(record for _, record in found)
            restored = _restored(contents, holdings, optimizer, scheduler, loader)
        # The user's objects may refuse; then all that was given is taken back.
        with undone_on_error(holdings, optimizer, scheduler, loader), together(world):
            restored.give()
        # From here on nothing can be refused: tensors are filled in place.
        with together(world):
            for holding, record in found:
                contents.fill(holding.tensor, holding.region, record)
            restored.give_masters()
            for part in holdings.compiled.values():
                part.note_loaded()
    return LoadedCheckpoint(folder, index.step, decode(index.extra))


def _agreed_folder(world: World, directory: Path) -> Path:
    """Choose one folder for all ranks, whatever another process makes current meanwhile."""
    folder = None
    with together(world):
        if world.rank == 0:
            folder = find_folder(directory)
    return Path(world.broadcast_object(str(folder)))


def _match(folder: Path, index: Index, holdings: Holdings) -> list[tuple[Holding, TensorRecord]]:
    """Where in the checkpoint to find what this rank holds."""
    # A tied tensor may be saved under any of its names.
    records = {
        name: record for first, record in index.tensors.items() for name in (first, *record.aliases)
    }
    found, problems = [], []
    for holding in holdings.tensors:
        candidates = [records[name] for name in holding.names if name in records]
        if not candidates:
            problems.append(f"{holding.name!r} is missing")
        # Tied here, apart there: which of them would be right? Software that does not know of ties
        # saves such a tensor twice.
        elif not _are_alike(folder, index, holding, candidates):
            names = " and ".join(repr(name) for name in holding.names if name in records)
            problems.append(f"{names} are one tensor here and several there")
        elif candidates[0].shape != holding.shape:
            problems.append(
                f"{holding.name!r} is {list(candidates[0].shape)} there and "
                f"{list(holding.shape)} here"
            )
        elif candidates[0].dtype.is_floating_point != holding.tensor.dtype.is_floating_point:
            problems.append(
                f"{holding.name!r} is {candidates[0].dtype} there and {holding.tensor.dtype} here"
            )
        else:
            found.append((holding, candidates[0]))
    missing = [key for key in holdings.extra_states if key not in index.extra_states]
    problems += [f"the extra state {key!r} is missing" for key in missing]
    if problems:
        raise CheckpointError(
            f"{folder} does not fit {holdings.class_name}",
            why=listed(problems),
            hint="a parallel module saves no extra states (get_extra_state) of its parts; to take "
            "the tensors alone: load_state_dict(read_checkpoint(folder).module, strict=False)"
            if missing
            else None,
        )
    return found


def _are_alike(
    folder: Path, index: Index, holding: Holding, candidates: Sequence[TensorRecord]
) -> bool:
    """Whether all records are of one tensor, or have the same values where this rank needs them."""
    first, *others = {id(record): record for record in candidates}.values()
    if any((other.shape, other.dtype) != (first.shape, first.dtype) for other in others):
        return False
    if not others or first.shape != holding.shape:
        return not others
    with Contents(folder, index) as contents:
        value = contents.read(first, holding.region)
        return all(torch.equal(contents.read(other, holding.region), value) for other in others)


def _exact(index: Index, record: TensorRecord, holding: Holding) -> TensorRecord:
    """What to read a parameter from: its master, if it is of another dtype here than the rounded
    one that was saved.
    """
    if index.optimizer is None or holding.tensor.dtype == record.dtype:
        return record
    name = next(name for name, other in index.tensors.items() if other is record)
    return index.optimizer.tensors.get(name, {}).get(MASTER, record)


def _check_left_over(world: World, folder: Path, index: Index, holdings: Holdings) -> None:
    """Raise on all ranks if no rank holds something that was saved."""
    mine = {name for holding in holdings.tensors for name in holding.names}
    unknown = [
        name for name, record in index.tensors.items() if mine.isdisjoint((name, *record.aliases))
    ]
    # A stage of a pipeline does not hold what others do: only what nobody holds is left over.
    everywhere = set.intersection(*(set(names) for names in world.all_gather_object(unknown)))
    if everywhere:
        problems = [
            f"{name!r} is not in the module" for name in index.tensors if name in everywhere
        ]
        raise CheckpointError(f"{folder} does not fit {holdings.class_name}", why=listed(problems))


def _check_options(
    folder: Path, index: Index, optimizer: Optimizer | None, scheduler: Any, loader: Any
) -> None:
    for wanted, there, title in (
        (optimizer, index.optimizer, "optimizer"),
        (scheduler, index.scheduler, "scheduler"),
        (loader, index.loader, "loader"),
    ):
        if wanted is not None and there is None:
            raise CheckpointError(
                f"{folder} has no state of the {title}",
                why=f"it was saved without {title}=",
                hint=f"load it without the {title}, which then starts afresh",
            )
    if loader is None and index.loader is not None:
        warnings.warn(
            f"{folder} has the state of a loader, which is not restored: samples start afresh\n"
            "  try:   load_checkpoint(..., loader=loader)",
            stacklevel=4,
        )


def _check_groups(
    folder: Path, index: Index, optimizer: Optimizer | None, scheduler: Any, holdings: Holdings
) -> None:
    """Refuse groups that the optimizer's state, or the scheduler's, does not fit: a scheduler has
    one value per group, by position.
    """
    problem = None
    # Groups continue saved ones, position by position.
    if optimizer is not None and index.optimizer is not None:
        groups = _groups_here(index.optimizer, index, optimizer, holdings)
        sources = NamedState(groups, {}).sources(group_members(optimizer, holdings))
        if sources != list(range(len(groups))):
            problem = (
                f"{len(groups)} groups were saved, and the {len(sources)} here continue those at "
                f"positions {sources}"
            )
    # A scheduler has a rate for each group.
    there, here = (
        _num_rates(decode(index.scheduler)),
        _num_rates(vars(scheduler) if hasattr(scheduler, "__dict__") else None),
    )
    if there is not None and here is not None and there != here:
        problem = f"it was saved for {there} groups, here are {here}"
    if scheduler is not None and problem is not None:
        raise CheckpointError(
            f"the scheduler in {folder} is of other parameter groups",
            why=problem,
            hint="group the parameters as in the run that saved it, or load without scheduler= "
            "and make a new one at this step",
        )


def _num_rates(scheduler_state: Any) -> int | None:
    """The number of parameter groups for which a scheduler was made, if its state tells it."""
    rates = scheduler_state.get("base_lrs") if isinstance(scheduler_state, Mapping) else None
    return len(rates) if isinstance(rates, list) else None


@dataclass(frozen=True, slots=True)
class _Restored:
    """What is loaded beside the tensors of the module, read and decoded. ``state_dict``: of the
    optimizer on this rank.
    """

    holdings: Holdings
    random: Mapping[str, Mapping[str, int]]
    extra_states: Mapping[str, Any]
    optimizer: Optimizer | None
    state_dict: StateDict
    scheduler: Any
    scheduler_state: Any
    loader: Any
    loader_states: Mapping[str, Any]

    def give(self) -> None:
        """Load all of it but masters. Classes of the user may refuse theirs."""
        if self.optimizer is not None:
            with same_class(self.optimizer), taking("the optimizer"):
                if isinstance(self.optimizer, ParallelOptimizer):
                    self.optimizer.load_all_but_masters(self.state_dict)
                else:
                    self.optimizer.load_state_dict(self.state_dict)
        with taking("a module with an extra state"):
            self.holdings.load_extra_states(self.extra_states)
        self.holdings.load_random_states(self.random)
        if self.scheduler is not None:
            with taking("the scheduler"):
                self.scheduler.load_state_dict(self.scheduler_state)
        if self.loader is not None:
            with taking("the loader"):
                give_states(self.loader, self.loader_states)

    def give_masters(self) -> None:
        """Load masters; those that were not saved are the parameters, which have their values by
        now.
        """
        if isinstance(self.optimizer, ParallelOptimizer):
            load_masters(self.state_dict, self.optimizer)


def _restored(
    contents: Contents,
    holdings: Holdings,
    optimizer: Optimizer | None,
    scheduler: Any,
    loader: Any,
) -> _Restored:
    index, state_dict = contents.index, {}
    # The optimizer's state, cut to what this rank updates.
    if optimizer is not None and index.optimizer is not None:
        named = _read_state(contents, index.optimizer, optimizer, holdings)
        state_dict = state_dict_for(optimizer, holdings, named)
    extra_states = {key: decode(value) for key, value in index.extra_states.items()}
    loader_states = {name: decode(value) for name, value in (index.loader or {}).items()}
    return _Restored(
        holdings,
        index.random,
        extra_states,
        optimizer,
        state_dict,
        scheduler,
        decode(index.scheduler),
        loader,
        loader_states,
    )


def _read_state(
    contents: Contents, record: OptimizerRecord, optimizer: Optimizer, holdings: Holdings
) -> NamedState:
    """The pieces on this rank of the optimizer's state."""
    names = group_names(optimizer, holdings)
    mine = {name for group in names for name in group}
    by_name = _by_own_name(record, contents.index, holdings)
    state: dict[str, dict[str, Any]] = {}
    # Parts of state that this rank does not update are not read.
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


def _groups_here(
    record: OptimizerRecord, index: Index, optimizer: Optimizer, holdings: Holdings
) -> Groups:
    """The saved groups with the names that the parameters have here, on all ranks."""
    first = holdings.first_names()
    members = {name for group in group_members(optimizer, holdings) for name in group}
    held = {name for holding in holdings.tensors for name in holding.names}
    groups = []
    for names, options in record.groups:
        here: dict[str, None] = {}
        for name in names:
            # A tied parameter has several names, and may have been saved under another one than it
            # has here.
            known = dict.fromkeys(
                first[other] for other in (name, *index.tensors[name].aliases) if other in first
            )
            here |= {other: None for other in known if other in members or other in held}
        groups.append((tuple(here), {key: decode(value) for key, value in options.items()}))
    return tuple(groups)


def _read_part(contents: Contents, record: TensorRecord, place: StatePlace) -> Tensor:
    """The part that this rank has of a tensor of the optimizer's state."""
    if not record.like_parameter:
        return contents.read(record, device=place.device)
    contents.check([record])
    mine = place.new(record.dtype)
    for view, region in place.views(mine):
        contents.fill(view, region, record)
    return mine


def _by_own_name(record: OptimizerRecord, index: Index, holdings: Holdings) -> dict[str, str]:
    """The names of parameters in the checkpoint, by their first names here. Of tied parameters
    another one may come first there.
    """
    saved = {alias: name for name in record.names for alias in (name, *index.tensors[name].aliases)}
    pairs = (
        (h.name, next((saved[name] for name in h.names if name in saved), None))
        for h in holdings.tensors
    )
    return {own: name for own, name in pairs if name is not None}
