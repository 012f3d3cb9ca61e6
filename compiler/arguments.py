"""Checking the dummy arguments against the signature of ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.runtime.errors import InputError, did_you_mean


def check_dummy_arguments(cls: type[nn.Module], dummy_args: Any) -> None:
    """Raise :class:`InputError` unless ``forward`` can be called with ``dummy_args`` by name."""
    forward = f"{cls.__name__}.forward"
    if not isinstance(dummy_args, Mapping) or not all(isinstance(name, str) for name in dummy_args):
        raise InputError(
            f"the dummy arguments are a dict from the argument names of {forward} to values",
            why=f"they are a {type(dummy_args).__name__}",
            hint="for example {'x': torch.zeros(4, 8)}",
        )
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]  # without self
    kinds = inspect.Parameter
    positional = [p.name for p in parameters if p.kind is kinds.POSITIONAL_ONLY]
    if positional:
        raise InputError(
            f"{forward} has positional-only arguments",
            where=_location(cls),
            why=f"{', '.join(positional)} cannot be passed by name, and a parallel module takes its arguments by name",
            hint="remove the '/' from its signature, or wrap the module in one whose forward has named arguments",
        )
    by_name = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    for name in dummy_args:
        if not takes_any and name not in (p.name for p in by_name):
            known = tuple(p.name for p in by_name)
            raise InputError(
                f"{forward} has no argument {name!r}",
                where=_location(cls),
                hint=did_you_mean(name, known) if known else "it takes none",
            )
    missing = [p.name for p in by_name if p.default is kinds.empty and p.name not in dummy_args]
    if missing:
        raise InputError(
            f"the dummy arguments lack {', '.join(missing)}",
            where=_location(cls),
            why=f"{forward} has no default for {'it' if len(missing) == 1 else 'them'}",
        )


def _location(cls: type[nn.Module]) -> str | None:
    """The user's file and line of ``forward``, where there is one."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None
