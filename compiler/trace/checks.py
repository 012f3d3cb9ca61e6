"""What tracing would lose, refused before it starts."""

from __future__ import annotations

import warnings

import torch
from torch.nn.modules import module as module_state

from shardwright.runtime.errors import TraceError

_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def check_hooks(module: torch.nn.Module) -> None:
    """Raise :class:`TraceError` for backward hooks of modules and for hooks of parameters: no call of forward shows them."""
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            raise TraceError(
                f"the module {path or '(root)'} ({type(submodule).__name__}) has a backward hook, which tracing would lose",
                hint="remove the hook before compiling, or write its effect as a torch.autograd.Function",
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"the parameter {name} has a gradient hook, which tracing would lose",
                hint="remove the hook before compiling; register reducer hooks on the optimizer instead",
            )
    if module_state._global_backward_hooks or module_state._global_backward_pre_hooks:
        raise TraceError(
            "a global module backward hook is registered, which tracing would lose", hint="remove it before compiling"
        )


def warn_state_hooks(module: torch.nn.Module) -> None:
    """Warn of what the module itself does when its state is saved or loaded: the compiled module does not."""
    for path, submodule in module.named_modules():
        where = f"{path or '(root)'} ({type(submodule).__name__})"
        if any(getattr(submodule, table) for table in _STATE_HOOKS):
            lost, remedy = f"the state dict hooks of {where}", "apply them to merged state dicts"
        elif type(submodule).get_extra_state is not torch.nn.Module.get_extra_state:
            lost, remedy = f"the extra state of {where}", "save it beside the checkpoint"
        else:
            continue
        warnings.warn(f"{lost}: a compiled module saves and loads tensors only, under their names; {remedy}", stacklevel=3)


def warn_mixed_training(module: torch.nn.Module) -> None:
    """Warn when submodules differ from the module in ``training``: the compiled module has one flag."""
    other = [path for path, submodule in module.named_modules() if submodule.training != module.training]
    if other:
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        mode, theirs = ("training", "eval") if module.training else ("eval", "training")
        warnings.warn(
            f"the module is in {mode} mode but these submodules are in {theirs} mode: {shown}; "
            "the compiled module has one training flag and does what module.train() and module.eval() set up",
            stacklevel=3,
        )
