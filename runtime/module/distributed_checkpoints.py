"""``torch.distributed.checkpoint`` (DCP), which would save the pieces of a module as its tensors,
and load whole tensors into pieces.

It takes a plain tensor for the same on all ranks, and keeps one rank's. Of a module whose
parameters are cut these are pieces under the names of whole parameters, and nothing says so until
somebody loads them. Its functions are refused such tensors. Checkpoints of its form are read by
:func:`shardwright.load_checkpoint`, and written by ``shardwright convert``.

What is a piece is known by its memory, which is that of a living module or optimizer; and of a
state dict by the extra state that every state dict of a parallel module has.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.errors import UsageError
from shardwright.runtime.mesh import ZERO, Mesh
from shardwright.runtime.module.compiled import CompiledModule, compiled_parts

_DCP = "torch.distributed.checkpoint"

_AXIS_OF_A_CUT = re.compile(r"/\s*(\w+)")
"""An axis in the text of a layout: ``tp`` in ``[10/tp, 6]``."""

LEVELS = 8
"""How deep in dicts and lists a state dict is looked for."""

_SAVE_HINT = (
    "shardwright.save_checkpoint(directory, model, optimizer) on all ranks; `shardwright convert "
    f"directory out --to dcp` makes a checkpoint of {_DCP} of it"
)
_LOAD_HINT = (
    "shardwright.load_checkpoint(directory, model, optimizer), which reads checkpoints of "
    f"{_DCP} too"
)


def watch_distributed_checkpoints(part: CompiledModule | Optimizer) -> None:
    """Let DCP's functions look at whose tensors they are given. ``part``: a module or an optimizer,
    noted as long as it lives.

    Importing DCP takes a second and more, so nothing is imported: its functions are replaced when
    somebody else imports them.
    """
    global _is_watching
    with _lock:
        _live.add(part)
        if _is_watching:
            return
        _is_watching = True
        # DCP may be imported later: then its functions are replaced as the import ends.
        sys.meta_path.insert(0, _AtImport())
        for name in _WATCHED:
            if name in sys.modules:
                _replace(sys.modules[name])


class _AtImport(importlib.abc.MetaPathFinder):
    """Replaces functions of modules when these have been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # The module is imported later, if at all: it is changed right after it has run, before
            # anybody sees it.
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                _replace(module)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType) -> None:
    for name, check in _WATCHED[module.__name__].items():
        function = getattr(module, name)
        if not hasattr(function, _MARK):
            setattr(module, name, check(function))


def _checked_save(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(state_dict: Any, *args: Any, **settings: Any) -> Any:
        what = f"{_DCP} would save what {{}} holds as the whole model"
        why = "it keeps plain tensors of one rank, and the ranks of a parallel module hold "
        _refuse_pieces(state_dict, what, f"{why}different ones", _SAVE_HINT)
        made = function(state_dict, *args, **settings)
        # Objects with a state_dict() have become dicts here.
        _refuse_pieces(made, what, f"{why}different ones", _SAVE_HINT)
        return made

    setattr(checked, _MARK, True)
    return checked


def _checked_load(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(state_dict: Any, *args: Any, **settings: Any) -> Any:
        what = f"{_DCP} would load whole tensors into what {{}} holds"
        _refuse_pieces(state_dict, what, "the ranks of a parallel module hold pieces", _LOAD_HINT)
        return function(state_dict, *args, **settings)

    setattr(checked, _MARK, True)
    return checked


def _checked_model(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(model: Any, *args: Any, **settings: Any) -> Any:
        for part in compiled_parts(model).values() if isinstance(model, nn.Module) else ():
            owner = type(part).__name__
            if _holds_pieces(part):
                raise UsageError(
                    f"the state dicts of {_DCP}.state_dict cannot be made of {owner}, a parallel "
                    "module",
                    why=f"they are of whole tensors, and plan rank {part.rank} holds pieces",
                    hint=f"model.state_dict() for this rank alone; {_SAVE_HINT}; {_LOAD_HINT}",
                )
            for name, child in part.named_children():
                if getattr(part, name) is not child:
                    raise UsageError(
                        f"the state dicts of {_DCP}.state_dict cannot be made of {owner}, a "
                        "parallel module",
                        why=f"they look for its submodule {name!r} as an attribute, and a parallel "
                        "module has another one of that name",
                        hint="model.state_dict() and optimizer.state_dict()",
                    )
        return function(model, *args, **settings)

    setattr(checked, _MARK, True)
    return checked


_WATCHED: Mapping[str, Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    # What every way of saving goes through: the first before anything is sent, also where the rest
    # runs in a thread.
    f"{_DCP}.state_dict_saver": {
        "_stateful_to_state_dict": _checked_save,
        "_save_state_dict": _checked_save,
    },
    f"{_DCP}.state_dict_loader": {"_load_state_dict": _checked_load},
    f"{_DCP}.state_dict": {"_verify_options": _checked_model},
}
"""The functions that are replaced, by module, and by what."""


def _refuse_pieces(state_dict: Any, what: str, why: str, hint: str) -> None:
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
            what.format(f"plan rank {state['rank']}"), why=f"{why}{example}", hint=hint
        )
    known = _memory_of_pieces()
    if not known:
        return
    for path, tensor in _tensors(state_dict, "", LEVELS):
        owner = known.get(_memory(tensor))
        if owner is not None:
            raise UsageError(what.format(f"a rank of {owner}"), why=f"{why}: {path!r}", hint=hint)


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


def _tensors(value: Any, path: str, levels: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts and lists, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if not levels:
        return
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    for key, item in items:
        yield from _tensors(item, f"{path}.{key}" if path else str(key), levels - 1)


Memory = tuple[int, int]
"""Where a tensor lies, and its number of elements."""


def _memory(tensor: Tensor) -> Memory | None:
    """``None`` for a tensor without memory of its own, as subclasses may be."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return None
    return tensor.data_ptr(), tensor.numel()


def _memory_of_pieces() -> dict[Memory | None, str]:
    """The class of what holds each piece that a living module or optimizer has."""
    with _lock:
        live = list(_live)
    known: dict[Memory | None, str] = {}
    for part in live:
        if isinstance(part, CompiledModule) and _holds_pieces(part):
            for tensor in (*part.parameters(), *part.buffers()):
                known[_memory(tensor)] = type(part).__name__
    for part in live:
        if isinstance(part, Optimizer) and _updates_pieces(part, known):
            for state in part.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        known[_memory(value)] = type(part).__name__
    known.pop(None, None)
    return known


def _holds_pieces(part: CompiledModule) -> bool:
    """Whether ranks hold different tensors of a module."""
    return part.mesh.size > 1 or any(ZERO in d.layout.cut_axes for d in part.declarations)


def _updates_pieces(optimizer: Optimizer, known: Mapping[Memory | None, str]) -> bool:
    """Whether ranks hold different state of an optimizer."""
    return any(
        "param_shards" in group or any(_memory(x) in known for x in group["params"])
        for group in optimizer.param_groups
    )


_MARK = "_shardwright_checks"
_lock = threading.Lock()
_live: weakref.WeakSet[CompiledModule | Optimizer] = weakref.WeakSet()
_is_watching = False
