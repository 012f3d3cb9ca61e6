"""Hooks on the calls of all modules (``register_module_forward_hook`` and the like, of
``torch.nn.modules.module``).

They run where a module is called. Of a parallel module only the whole is called, so for its parts
they never run. That is said once.
"""

from __future__ import annotations

import warnings

from torch.nn.modules import module as torch_module

_KINDS = {
    "register_module_forward_pre_hook": "_global_forward_pre_hooks",
    "register_module_forward_hook": "_global_forward_hooks",
    "register_module_full_backward_pre_hook": "_global_backward_pre_hooks",
    "register_module_full_backward_hook": "_global_backward_hooks",
}
"""The tables of torch with hooks on all modules, by the functions that fill them."""

_HOOKS = tuple(
    hooks for table in _KINDS.values() if (hooks := getattr(torch_module, table, None)) is not None
)
"""The tables themselves: dicts of hooks, which are empty in nearly every program."""

_said: set[str] = set()
"""The kinds of which this process has spoken."""


def warn_of_global_hooks(owner: str) -> None:
    """Warn, once for each kind, of hooks on all modules. ``owner``: the parallel module that is
    called.
    """
    if not any(_HOOKS):
        return
    for function, table in _KINDS.items():
        if getattr(torch_module, table, None) and function not in _said:
            _said.add(function)
            warnings.warn(
                f"hooks of {function} run for the parallel module {owner} alone, not for its "
                "parts\n"
                "  why:   hooks run where a module is called, and generated code computes what the "
                "parts did without calls\n"
                "  try:   return the values from forward, so that they are outputs; or hook the "
                "original module",
                stacklevel=4,
            )
