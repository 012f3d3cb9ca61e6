"""Initialising parameters of a parallel module in place, by the functions of ``torch.nn.init``.
What is random is refused.

A rank has a piece of a parameter: its fans are not those of the whole, and ranks with one seed draw
the same numbers for different rows. Ranks with several seeds draw different numbers for what must
be copies. ``zeros_``, ``ones_`` and ``constant_`` give every piece what the whole would get, and
work.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from shardwright.runtime.errors import UsageError
from shardwright.runtime.training.clipping import PART

_FUNCTIONS = (
    "_calculate_fan_in_and_fan_out",  # of the Xavier and Kaiming functions
    "_no_grad_normal_",
    "_no_grad_trunc_normal_",
    "_no_grad_uniform_",
    "dirac_",
    "eye_",
    "orthogonal_",
    "sparse_",
)
"""What the functions of ``torch.nn.init`` call by these names, also where a program has imported
them before.
"""

_lock = threading.Lock()


def watch_initialising() -> None:
    """Look at each call of these functions from now on. A second call does nothing."""
    with _lock:
        for name in _FUNCTIONS:
            function = getattr(nn.init, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(nn.init, name, _checked(function))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        mark = getattr(tensor, PART, None)
        if mark is not None:
            _refuse(mark.owner, mark.name)
        return function(tensor, *args, **kwargs)

    return call


def _refuse(owner: str, name: str) -> NoReturn:
    raise UsageError(
        f"parameter {name!r} of {owner} cannot be initialised in place",
        why="each rank has a piece or a copy of it: the sizes that its spread follows from, and "
        "the numbers that are drawn, "
        "would not be those of the whole",
        hint="initialise the original module before parallelize; zeros_, ones_ and constant_ work "
        "here",
    )
