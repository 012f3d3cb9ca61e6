"""What tracing would lose, refused before it starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as module_state

from shardwright.runtime.errors import TraceError

_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def check_hooks(module: torch.nn.Module) -> None:
    """Raise :class:`TraceError` for backward hooks of modules and for hooks of parameters: no call
    of forward shows them.
    """
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            raise TraceError(
                f"the module {path or '(root)'} ({type(submodule).__name__}) has a backward "
                "hook, which tracing would lose",
                hint="remove the hook before compiling, or write its effect as a "
                "torch.autograd.Function",
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"the parameter {name} has a gradient hook, which tracing would lose",
                hint="remove the hook before compiling; register reducer hooks on the optimizer "
                "instead",
            )
    if module_state._global_backward_hooks or module_state._global_backward_pre_hooks:
        raise TraceError(
            "a global module backward hook is registered, which tracing would lose",
            hint="remove it before compiling",
        )


def warn_state_hooks(module: torch.nn.Module) -> None:
    """Warn of what the module itself does when its state is saved or loaded: the compiled module
    does not.
    """
    for path, submodule in module.named_modules():
        where = f"{path or '(root)'} ({type(submodule).__name__})"
        if any(getattr(submodule, table) for table in _STATE_HOOKS):
            lost, remedy = f"the state dict hooks of {where}", "apply them to merged state dicts"
        # The class overrides it: something is saved that is no tensor.
        elif type(submodule).get_extra_state is not torch.nn.Module.get_extra_state:
            lost, remedy = f"the extra state of {where}", "save it beside the checkpoint"
        else:
            continue
        warnings.warn(
            f"{lost}: a compiled module saves and loads tensors only, under their names; {remedy}",
            stacklevel=4,
        )


@contextmanager
def watched_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Trace inside the block, and be warned of forward hooks that return nothing: what they store
    or print is not traced.

    What a hook returns is a part of the graph. Left out are hooks of torch's own, which make
    weights, and those by which libraries ask for the gradient of embeddings, where a checkpointed
    layer of theirs needs it: one of ours does not.
    """
    # A dict, so that each hook is told once, in order.
    silent: dict[str, None] = {}
    replaced = []
    for path, submodule in module.named_modules():
        where = f"{path or '(root)'} ({type(submodule).__name__})"
        for table in (submodule._forward_pre_hooks, submodule._forward_hooks):
            # Replaced for the time of the trace by one that looks at what it returns.
            for key, hook in table.items():
                if not _is_torchs(hook) and not _asks_for_gradient(hook):
                    replaced.append((table, key, hook))
                    table[key] = _watched(hook, where, silent)
    try:
        yield
    finally:
        for table, key, hook in replaced:
            table[key] = hook
    for where in silent:
        warnings.warn(
            f"a forward hook of {where} returns nothing, so it ran for the trace and will "
            "not run again: what it stores or "
            "prints is not part of the program; let forward return what you want to look at",
            stacklevel=4,
        )


def _watched(hook: Callable[..., Any], where: str, silent: dict[str, None]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            silent[where] = None
        return result

    return watched


def _asks_for_gradient(hook: object) -> bool:
    """Whether it is the hook of ``gradient_checkpointing_enable`` of transformers or peft."""
    home = (getattr(hook, "__module__", None) or "").partition(".")[0]
    name = getattr(hook, "__name__", "")
    return home in ("transformers", "peft") and name.startswith("make_inputs_require_grad")


def _is_torchs(hook: object) -> bool:
    function = getattr(hook, "__func__", hook)
    home = getattr(function, "__module__", None) or type(hook).__module__
    return home == "torch" or home.startswith("torch.")


def warn_mixed_training(module: torch.nn.Module) -> None:
    """Warn when submodules differ from the module in ``training``: the compiled module has one
    flag.
    """
    other = [
        path for path, submodule in module.named_modules() if submodule.training != module.training
    ]
    if other:
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        mode, theirs = ("training", "eval") if module.training else ("eval", "training")
        warnings.warn(
            f"the module is in {mode} mode but these submodules are in {theirs} mode: {shown}; "
            "the compiled module has one training flag and does what module.train() and "
            "module.eval() set up",
            stacklevel=4,
        )
