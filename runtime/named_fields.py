"""Constructors of settings that refuse a wrong name in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from shardwright.runtime.errors import ConfigError, did_you_mean

T = TypeVar("T")


def named_fields(cls: type[T]) -> type[T]:
    """The dataclass, of which every field is given by name, with a :class:`ConfigError` in the
    place of Python's TypeError for a field that it does not have, one that is missing, and one
    without a name.
    """
    known = tuple(field.name for field in fields(cls) if field.init)  # type: ignore[arg-type]
    needed = tuple(
        field.name
        for field in fields(cls)  # type: ignore[arg-type]
        if field.init and field.default is MISSING and field.default_factory is MISSING
    )
    construct: Callable[..., None] = cls.__init__

    @functools.wraps(construct)
    def checked(self: T, *args: Any, **given: Any) -> None:
        if args:
            example = ", ".join(f"{name}=..." for name in (needed or known)[:2])
            raise ConfigError(
                f"the fields of {cls.__name__} are given by name",
                why=f"{len(args)} are given without one",
                hint=f"{cls.__name__}({example})",
            )
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} has no field {name!r}", hint=did_you_mean(name, known)
                )
        missing = [name for name in needed if name not in given]
        if missing:
            raise ConfigError(
                f"{cls.__name__} lacks {' and '.join(missing)}",
                why="there is no default for it"
                if len(missing) == 1
                else "there are no defaults for them",
                hint=f"{cls.__name__}({', '.join(f'{name}=...' for name in missing)})",
            )
        construct(self, **given)

    cls.__init__ = checked  # type: ignore[assignment,method-assign]
    return cls
