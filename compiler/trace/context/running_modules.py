"""Which module's ``forward`` runs now, and in which recompute region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModules:
    """The stack of running modules, followed by global forward hooks."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._paths: dict[int, str] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), path)
        self._stack: list[tuple[str, torch.nn.Module]] = [("", root)]
        self._regions: list[str] = []
        self._num_regions = 0

    @property
    def path(self) -> str:
        """The path of the module whose forward runs."""
        return self._stack[-1][0]

    @property
    def type_name(self) -> str:
        """The name of its class."""
        return type(self._stack[-1][1]).__name__

    @property
    def is_library(self) -> bool:
        """Whether the running module comes from ``torch.nn``: its variables are not the user's."""
        return type(self._stack[-1][1]).__module__.startswith("torch.nn.")

    @property
    def is_leaf(self) -> bool:
        """Whether the running module is of ``torch.nn`` and has no parts: its own name is the best
        one for its result.
        """
        return self.is_library and not self._stack[-1][1]._modules

    @property
    def region(self) -> str | None:
        """The outermost recompute region: recomputing it recomputes what is nested in it."""
        return self._regions[0] if self._regions else None

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """A region whose activations are computed again in backward."""
        self._regions.append(f"recompute_{self._num_regions}")
        self._num_regions += 1
        try:
            yield
        finally:
            self._regions.pop()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of modules."""

        def enter(module: torch.nn.Module, inputs: Any) -> None:
            # a module made inside forward has no path: it counts as part of its caller
            self._stack.append((self._paths.get(id(module), self.path), module))

        def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._stack.pop()

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
