"""Turn a callable and its arguments into a canonical operator with bound arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.ir.op import Arg, RankDevice
from shardwright.compiler.ops import registry
from shardwright.compiler.trace.calls.callables import import_path, plain_name
from shardwright.runtime.errors import AnnotationError, TraceError

FACTORIES = frozenset(
    {
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tril_indices",
        "triu_indices",
        "zeros",
    }
)
"""Functions that make a tensor from numbers: they get the rank's device, and a floating dtype is
written down.
"""


@dataclass(frozen=True)
class Bound:
    """A canonical call. ``name`` is a word for it: ``add``, ``linear``."""

    target: str
    args: tuple[tuple[str, Arg], ...]
    name: str


def bind(
    function: Any, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], *, where: Callable[[], str]
) -> Bound:
    """The canonical operator ``function`` means, with its arguments bound to the names of its
    signature.

    A function without an entry in the registry keeps its positional arguments under ``"0"``,
    ``"1"``, ... ``where`` says where the call stands, and only errors ask it.

    Raises :class:`TraceError` for a function that cannot be imported, or arguments its operator
    does not know.
    """
    # Arguments that change nothing about what is computed.
    kwargs = {
        key: value for key, value in kwargs.items() if key not in ("_stacklevel", "pin_memory")
    }
    found = registry.find(function)
    if found is None:
        path = import_path(function)
        if path is None:
            name = getattr(function, "__qualname__", repr(function))
            raise TraceError(
                f"the function {name} cannot be imported by generated code",
                where=where(),
                why="it is local to another function, or has no name in its module",
                hint="move it to the top level of a module",
            )
        # Unknown to the tables: positional arguments are named by number.
        named = tuple((str(index), value) for index, value in enumerate(args))
        return Bound(path, (*named, *kwargs.items()), plain_name(function))
    opdef, normalise = found
    try:
        if normalise is not None:
            args, kwargs = normalise(args, dict(kwargs))
        return Bound(opdef.name, opdef.bind(tuple(args), kwargs), opdef.name.rpartition(".")[2])
    except AnnotationError as error:
        raise TraceError(
            f"a call of {opdef.name} does not fit its entry in the operator table",
            where=where(),
            why=str(error),
        ) from error


def on_rank_device(function: Any, kwargs: Mapping[str, Arg], dtype: torch.dtype) -> dict[str, Arg]:
    """The keyword arguments of a factory with device and, where the default dtype would decide,
    dtype written down.
    """
    kwargs = dict(kwargs)
    if plain_name(function) in FACTORIES:
        kwargs["device"] = RankDevice()
        if dtype.is_floating_point and kwargs.get("dtype") is None:
            kwargs["dtype"] = dtype
    return kwargs
