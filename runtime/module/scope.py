"""Scopes: the tree of plain modules that gives tensors their original dotted names.

A generated class keeps its parameters where the user's model had them, so that ``named_parameters()`` and ``state_dict()``
speak the original names and generated code reads ``self.transformer.h[0].attn.c_attn.weight``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Scope(nn.Module):
    """One level of names. It adds nothing to ``nn.Module`` but indexing, so a name that worked there works here."""

    def __getitem__(self, path: int | str) -> Any:
        """What lies at a path of names, ``scope[0]`` or ``scope["a-b.weight"]``: a scope, parameter or buffer.

        For names that are numbers or no identifiers, and for those that mean something else as an attribute.
        """
        found: Any = self
        for name in str(path).split("."):
            found = _named(found, name)
        return found

    def _get_name(self) -> str:
        return ""  # the tree prints as names, not as a class nobody wrote


def _named(scope: nn.Module, name: str) -> Any:
    for children in (scope._parameters, scope._buffers, scope._modules):
        if name in children:
            return children[name]
    raise KeyError(name)


class Place(NamedTuple):
    """Where a tensor lives: a module and the last part of the tensor's name."""

    scope: nn.Module
    leaf: str

    def put_parameter(self, parameter: nn.Parameter) -> None:
        """Put a parameter there, where nothing lies yet."""
        self._check_free()
        # register_parameter refuses names that nn.Module uses itself; those are read by indexing.
        self.scope._parameters[self.leaf] = parameter

    def put_buffer(self, buffer: Tensor, *, persistent: bool) -> None:
        """Put a buffer there, where nothing lies yet."""
        self._check_free()
        self.scope._buffers[self.leaf] = buffer
        if not persistent:
            self.scope._non_persistent_buffers_set.add(self.leaf)

    def _check_free(self) -> None:
        taken = (self.scope._parameters, self.scope._buffers, self.scope._modules)
        assert not any(self.leaf in names for names in taken), f"{self.leaf} is declared twice"


def place(root: nn.Module, fqn: str) -> Place:
    """Where ``fqn`` belongs below ``root``; scopes on the way are made as needed."""
    *path, leaf = fqn.split(".")
    scope = root
    for name in path:
        child = scope._modules.get(name)
        if child is None:
            child = _add_child(scope, name)
        scope = child
    return Place(scope, leaf)


def _add_child(scope: nn.Module, name: str) -> Scope:
    """A new child, also as an ordinary attribute: Python finds those without a call of ``nn.Module.__getattr__``, which
    generated code would make several times for every weight. (Parameters are left to it, as torch may replace them.)
    """
    is_free = not hasattr(scope, name)  # else the name means something there, and the child is read by indexing
    child = scope._modules[name] = Scope()
    if is_free:
        scope.__dict__[name] = child
    return child
