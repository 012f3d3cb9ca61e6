"""The arguments of a call with real values, for calls that read values while nothing has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.compiler.trace.values.constants import Constants


def real_arguments(
    constants: Constants,
    arguments: Any,
    values: Callable[[torch.Tensor], Any] | None = None,
) -> Any:
    """The arguments with real values in the place of fakes; ``None`` if some depend on more
    than constants.

    ``values``: what gives the values of a tensor, if not what follows from constants.
    """
    unknown = False
    # The constants that the values are made of. They are noted at the end, as a call that fails
    # half way has read nothing.
    read: set[str] = set()

    def followed(tensor: torch.Tensor) -> Any:
        found = constants.followed(tensor)
        read.update(found[1] if found else ())
        return found and found[0]

    def known(arg: Any) -> Any:
        nonlocal unknown
        if isinstance(arg, dict):
            return {key: known(item) for key, item in arg.items()}
        if isinstance(arg, tuple | list):
            items = [known(item) for item in arg]
            return items if isinstance(arg, list) else tuple(items)
        if isinstance(arg, slice):
            return slice(known(arg.start), known(arg.stop), known(arg.step))
        if not isinstance(arg, torch.Tensor):
            # A dynamic size has no one value, though it carries the example's.
            unknown |= isinstance(arg, torch.SymInt | torch.SymFloat)
            return arg
        real = (values or followed)(arg)
        unknown |= real is None
        return real

    found = known(arguments)
    if unknown:
        return None
    constants.read |= read
    return found
