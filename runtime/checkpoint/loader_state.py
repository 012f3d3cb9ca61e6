"""States of loaders of data in a checkpoint.

A loader of :mod:`shardwright.data` has one state that is the same on all ranks
(``state_dict``, ``load_state_dict``). One with Megatron-Energon's interface has a state for each
data-parallel rank (``save_state_rank``, ``restore_state_global``); twins have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.runtime.checkpoint.energon_values import from_plain, to_plain
from shardwright.runtime.checkpoint.json_values import decode, encode
from shardwright.runtime.errors import ArgumentError, CheckpointError, brief

SAME_EVERYWHERE = ""
"""The name of a state that is the same on all ranks."""


def is_by_rank(loader: Any) -> bool:
    """Whether each data-parallel rank has a state of its own.

    Raises :class:`ArgumentError` for an object without either interface.
    """
    if hasattr(loader, "save_state_rank") and hasattr(loader, "restore_state_global"):
        return True
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return False
    raise ArgumentError(
        f"{brief(loader)} is no loader whose state can be saved",
        why="it has neither state_dict and load_state_dict, nor save_state_rank and "
        "restore_state_global",
        hint="pass a loader of shardwright.data; a DataLoader of torch has no state",
    )


def loader_states(loader: Any) -> dict[str, Any]:
    """What this rank adds to a checkpoint, encoded, by data-parallel rank."""
    if not is_by_rank(loader):
        return {SAME_EVERYWHERE: encode(loader.state_dict(), "the loader's state")}
    rank = loader.worker_config.rank
    state = to_plain(loader.save_state_rank())
    return {str(rank): encode(state, f"the loader's state of rank {rank}")}


def check_same_places(by_rank: Sequence[Mapping[str, Any] | None]) -> None:
    """Compare the encoded states of ranks whose loaders are to be at one place. One of them is kept
    for all, so a rank that has taken another number of batches would go on elsewhere.

    Raises :class:`CheckpointError` that names two ranks which differ.
    """
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, states in enumerate(by_rank):
        for name, encoded in (states or {}).items():
            state = decode(encoded)
            # States of other libraries may hold what belongs to a process.
            if not isinstance(state, dict) or "kind" not in state:
                continue
            other, before = first.setdefault(name, (rank, state))
            different = [key for key in before if before[key] != state.get(key)]
            if different:
                key = different[0]
                raise CheckpointError(
                    f"the loaders of ranks {other} and {rank} are not at the same place in the "
                    "same data",
                    why=f"{key} is {brief(before[key])} on rank {other} and "
                    f"{brief(state.get(key))} on rank {rank}",
                    hint="let all ranks take the same number of batches, and give each rank's "
                    "loader the same dataset: it keeps its own part of each batch",
                )


def give_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Load what a checkpoint has, from all ranks.

    Raises :class:`CheckpointError` if it was saved with a loader of the other kind.
    """
    if is_by_rank(loader) == (SAME_EVERYWHERE in states):
        saved = "one position" if SAME_EVERYWHERE in states else "a state for each rank"
        raise CheckpointError(
            "the loader is of another kind than the one that was saved",
            why=f"the checkpoint has {saved}",
            hint="make the loader as in the run that saved it",
        )
    if SAME_EVERYWHERE in states:
        loader.load_state_dict(states[SAME_EVERYWHERE])
    else:
        by_rank = [from_plain(states[str(rank)]) for rank in sorted(map(int, states))]
        loader.restore_state_global(by_rank)


def state_of(loader: Any) -> Any:
    """Where a loader is now, for :func:`give_state`."""
    return loader.save_state_rank() if is_by_rank(loader) else loader.state_dict()


def give_state(loader: Any, state: Any) -> None:
    """Put a loader back to where it was."""
    if is_by_rank(loader):
        loader.restore_state_rank(state)
    else:
        loader.load_state_dict(state)
