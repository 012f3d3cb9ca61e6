"""Masters in an optimizer's state dict: the copies of low-precision parameters that the optimizer
updates in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwright.runtime.arguments import param_groups_of
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.zero.shards import ParameterShard
from shardwright.runtime.zero.whole_tensors import WHOLE, WholeParameter

if TYPE_CHECKING:
    from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

MASTER = "shardwright.master"
"""The key of a parameter's master beside the optimizer's own state of it."""

StateDict = dict[str, Any]


def with_masters(state_dict: StateDict, optimizer: ParallelOptimizer) -> StateDict:
    """An optimizer's state dict with the masters of its shards."""
    state = dict(state_dict["state"])
    for number, owner in _masters(optimizer):
        state[number] = {**state.get(number, {}), MASTER: owner.value}
    return {**state_dict, "state": state}


def without_masters(state_dict: Mapping[str, Any], optimizer: ParallelOptimizer) -> StateDict:
    """The part of a state dict that the optimizer itself loads.

    Raises :class:`CheckpointError` if the state belongs to other shards than the optimizer's.
    """
    for saved, group in zip(param_groups_of(state_dict), optimizer.param_groups, strict=False):
        there, here = saved.get("param_shards"), group.get("param_shards")
        if there != here and len(saved["params"]) == len(group["params"]):
            raise CheckpointError(
                "the optimizer state is of other shards of the parameters",
                why=_first_difference(group["param_names"], there, here),
                hint="load it on the rank that saved it, under the same plan, number of units and "
                "options of use_zero",
            )
    # An entry with nothing but a master goes: the optimizer has no state there before its first
    # step.
    masters = {number for number, _ in _masters(optimizer)}
    state = dict(state_dict["state"])
    for number in masters & state.keys():
        state[number] = {key: x for key, x in state[number].items() if key != MASTER}
    return {
        **state_dict,
        "state": {
            number: values for number, values in state.items() if values or number not in masters
        },
    }


def load_masters(state_dict: Mapping[str, Any], optimizer: ParallelOptimizer) -> None:
    """Give the shards the masters of ``state_dict``. A master that it lacks becomes what the
    parameter is.
    """
    for number, owner in _masters(optimizer):
        master = state_dict["state"].get(number, {}).get(MASTER)
        if isinstance(master, Tensor):
            owner.load(master)
        else:
            owner.read()


def _masters(optimizer: ParallelOptimizer) -> Iterator[tuple[int, ParameterShard | WholeParameter]]:
    """Everything that has a master, with the number of its tensor in a state dict: shards that are
    no views, and whole tensors that stay between steps.
    """
    owners: dict[int, ParameterShard | WholeParameter] = {
        id(shard.tensor): shard
        for shard in optimizer.shards
        if not shard.is_view and shard.num_elements
    }
    owners |= {id(whole.tensor): whole for whole in optimizer.wholes if whole.has_master}
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    for number, tensor in enumerate(tensors):
        if id(tensor) in owners:
            yield number, owners[id(tensor)]


def _first_difference(names: list[str], there: list[Any] | None, here: list[Any] | None) -> str:
    nothing = [None] * len(names)
    for name, saved, own in zip(names, there or nothing, here or nothing, strict=True):
        if saved != own:
            return f"of {name!r} it has {_range(saved)}, and this rank has {_range(own)}"
    raise AssertionError("there is no difference")


def _range(found: list[int] | str | None) -> str:
    if found is None:
        return "all elements"
    if isinstance(found, str):
        return f"the {WHOLE} tensor"
    start, stop = found
    return f"elements {start} to {stop}" if start < stop else "no element"
