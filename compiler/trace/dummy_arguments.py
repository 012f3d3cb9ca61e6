"""Dummy arguments bound to the parameters of ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.ir.identifier import is_name
from shardwright.runtime import structure
from shardwright.runtime.errors import TraceError, did_you_mean


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call. ``given``: the dummy arguments in the order of the signature.
    ``defaults``: the absent ones. ``order``: all names.
    """

    given: tuple[tuple[str, Any], ...]
    defaults: tuple[tuple[str, Any], ...]
    order: tuple[str, ...] = ()

    def tensor_shapes(self) -> dict[str, torch.Size]:
        """Path to shape of every tensor among the arguments."""
        leaves = {
            path: leaf
            for name, value in self.given
            for path, leaf in structure.flatten(value, name).items()
        }
        return {path: leaf.shape for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def bind_arguments(module: torch.nn.Module, dummy_args: Mapping[str, Any]) -> Arguments:
    """Bind ``dummy_args`` to ``module.forward``.

    Raises :class:`TraceError` for a positional-only parameter, an unknown name, or a missing
    argument.
    """
    name = type(module).__name__
    if not isinstance(dummy_args, Mapping):
        raise TraceError(
            f"the dummy arguments of {name}.forward are a dict from its arguments' names to "
            "examples",
            why=f"they are a {type(dummy_args).__name__}",
            hint="for example "
            f"{{{next(iter(inspect.signature(module.forward).parameters), 'x')!r}: ...}}",
        )
    signature = inspect.signature(module.forward)
    parameters = signature.parameters.values()
    where = f"{name}.forward{signature}" if len(str(signature)) < 200 else f"{name}.forward"
    # A generated forward is called by name.
    positional_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional_only:
        raise TraceError(
            f"{name}.forward has positional-only parameters: {', '.join(positional_only)}",
            where=where,
            why="arguments are bound and checked by name",
            hint="remove the '/' from the signature, or wrap the module in one that takes keywords",
        )
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in dummy_args:
        if key not in named and not open_ended:
            raise TraceError(
                f"{name}.forward has no parameter {key!r}",
                where=where,
                hint=did_you_mean(key, named),
            )
    for key in (*named, *dummy_args):
        if not is_name(key):  # of a function without source, or among **kwargs
            raise TraceError(
                f"{name}.forward is given an argument called {key!r}",
                where=where,
                why="the generated forward has the same arguments, and that is no name of a "
                "variable in Python",
                hint="give it another name, or pass a dict that has this key",
            )
    missing = [
        p.name
        for p in parameters
        if p.name in named and p.default is p.empty and p.name not in dummy_args
    ]
    if missing:
        raise TraceError(
            f"the dummy arguments lack {', '.join(missing)}",
            where=where,
            hint="give an example for every parameter without default",
        )
    # In the order of the signature; ``**kwargs`` behind it.
    order = [
        *(key for key in named if key in dummy_args),
        *(key for key in dummy_args if key not in named),
    ]
    defaults = tuple(
        (p.name, p.default) for p in parameters if p.name in named and p.name not in dummy_args
    )
    extra = [key for key in order if key not in named]
    return Arguments(tuple((key, dummy_args[key]) for key in order), defaults, (*named, *extra))
