"""Jobs of processes that train with torch's FSDP2 and save with its distributed checkpoints."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import checkpoints
import torch.distributed.checkpoint as dcp
import zoo
from precision import float64_casts
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


def save(name: str, folder: str) -> Any:
    """Train a model of the zoo for two steps and save it: as a dict of state dicts (``nested``),
    and as torchtitan does (``flat``). Returns the whole state.
    """
    model, optimizer = _trained(name, 2)
    module_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"app": {"model": module_state, "optim": optimizer_state, "step": 2, "odd": _Odd()}},
        checkpoint_id=f"{folder}/nested",
    )
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save({**module_state, "optimizer": flat}, checkpoint_id=f"{folder}/flat")
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def load(name: str, folder: str) -> Any:
    """Load what was written for DCP into a model and its optimizer; returns the whole state."""
    model, optimizer = _trained(name, 1)
    module_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": module_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return *whole, state["step"]


class _Odd:
    """An object of a class that no reader knows."""


def _trained(name: str, steps: int) -> tuple[Any, Any]:
    model: Any = copy.deepcopy(checkpoints.model_of(name))
    fully_shard(model)
    optimizer = checkpoints.adamw(model.parameters())
    with warnings.catch_warnings(), float64_casts():
        warnings.simplefilter("ignore")
        for number in range(steps):
            optimizer.zero_grad()
            zoo.loss_of(model(**zoo.get(name).inputs(seed=100 + number))).backward()
            optimizer.step()
    return model, optimizer
