"""Activation recomputation: a part of the program keeps its inputs only, and runs again in the
backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.gathered_weights import WeightGathering
from shardwright.runtime.ops.random import RngState


class _Calls(threading.local):
    """How often :func:`recompute` was called on each thread."""

    count = 0


_calls = _Calls()


def num_recomputed() -> int:
    """How many regions this thread has run that will be recomputed: the difference of two calls
    tells of what ran between.
    """
    return _calls.count


# A graph cannot hold the random state of the second run, so a region lies between two graphs.
@_disable_dynamo
def recompute(
    function: Callable[..., Any],
    *args: Any,
    rng: RngState | None = None,
    gathering: WeightGathering | None = None,
) -> Any:
    """``function(*args)``, of which nothing but ``args`` is kept for the backward, which computes
    the rest a second time.

    With ``rng`` the second time draws the random numbers of the first: those of its step and
    microbatch, however many forwards have begun in between. Without, nothing is drawn. With
    ``gathering`` the second time gathers its weights ahead.
    """
    _calls.count += 1
    if gathering is not None:
        function = gathering.region(function)
    if rng is None:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    moment = rng.moment
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing draws from the global generators
        context_fn=lambda: (nullcontext(), rng.at(moment)),
    )
