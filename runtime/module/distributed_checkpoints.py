"""``torch.distributed.checkpoint``, which would save the pieces of a module as its tensors.

It takes a plain tensor for the same on all ranks, and keeps one rank's. Of a module whose
parameters are cut these are pieces under the names of whole parameters, and nothing says so until
somebody loads them. What is saved is known by the extra state that every state dict of a parallel
module has.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from shardwright.runtime.errors import UsageError
from shardwright.runtime.mesh import Mesh

_SAVER = "torch.distributed.checkpoint.state_dict_saver"

_FUNCTIONS = ("_stateful_to_state_dict", "_save_state_dict")
"""What every way of saving goes through: the first before anything is sent, also where the rest
runs in a thread.
"""

_AXIS_OF_A_CUT = re.compile(r"/\s*(\w+)")
"""An axis in the text of a layout: ``tp`` in ``[10/tp, 6]``."""

LEVELS = 8
"""How deep in dicts a state dict is looked for."""


def watch_distributed_checkpoints() -> None:
    """Let torch's functions that save checkpoints look at whose tensors they are given. A second
    call does nothing.

    Called where a state dict is made: the import takes most of a second, and who has no process
    group and has not imported it does not save with it.
    """
    if _SAVER not in sys.modules and not (dist.is_available() and dist.is_initialized()):
        return
    saver = importlib.import_module(_SAVER)
    with _lock:
        for name in _FUNCTIONS:
            function = getattr(saver, name)
            if not hasattr(function, _MARK):
                setattr(saver, name, _checked(function))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(state_dict: Any, *args: Any, **settings: Any) -> Any:
        _refuse_pieces(state_dict)
        made = function(state_dict, *args, **settings)
        # Objects with a state_dict() have become dicts here.
        _refuse_pieces(made)
        return made

    setattr(checked, _MARK, True)
    return checked


def _refuse_pieces(state_dict: Any) -> None:
    for state in _extra_states(state_dict, LEVELS):
        sizes = dict(Mesh.from_json(state["mesh"]).axes)
        # Axes that are none of the mesh are the units over which ZeRO-3 cuts.
        cut = next(
            (
                name
                for name, layout in state["layouts"].items()
                if any(sizes.get(axis) != 1 for axis in _AXIS_OF_A_CUT.findall(layout))
            ),
            None,
        )
        if cut is None and set(sizes.values()) <= {1}:
            continue
        example = f": {cut!r} is {state['layouts'][cut]}" if cut is not None else ""
        raise UsageError(
            f"torch.distributed.checkpoint would save what plan rank {state['rank']} holds as the "
            "whole model",
            why="it keeps plain tensors of one rank, and the ranks of a parallel module hold "
            f"different ones{example}",
            hint="shardwright.save_checkpoint(directory, model, optimizer) on all ranks; "
            "shardwright.merge_checkpoint makes one of whole tensors of it",
        )


def _extra_states(value: Any, levels: int) -> Iterator[Mapping[str, Any]]:
    """The extra states of parallel modules in nested dicts."""
    if not isinstance(value, Mapping) or not levels:
        return
    for key, item in value.items():
        if isinstance(key, str) and key.rpartition(".")[2] == "_extra_state":
            if isinstance(item, Mapping) and {"mesh", "rank", "unit", "layouts"} <= item.keys():
                yield item
        else:
            yield from _extra_states(item, levels - 1)


_MARK = "_shardwright_checks"
_lock = threading.Lock()
