"""``torch.autograd.grad`` of parameters whose gradients several ranks have summands of.

``backward`` leaves gradients where the optimizer finds and sums them. What ``torch.autograd.grad``
returns goes to the caller as it is: the summand of this rank. A warning says so, at each line that
asks for one.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.errors import format_error
from shardwright.runtime.training.clipping import PART

ask_gradients = torch.autograd.grad
"""The function as torch has it, for those who sum what it returns."""

_lock = threading.Lock()


def watch_asked_gradients() -> None:
    """Look at each call of ``torch.autograd.grad`` from now on. A second call does nothing."""
    with _lock:
        if torch.autograd.grad is ask_gradients:
            torch.autograd.grad = _checked


@functools.wraps(ask_gradients)
def _checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(inputs, Tensor | tuple):
        inputs = tuple(inputs)
    marks = (
        getattr(asked, PART, None)
        for asked in ((inputs,) if isinstance(inputs, Tensor) else inputs)
    )
    mark = next((mark for mark in marks if mark is not None and mark.needs_sum), None)
    if mark is not None:
        warnings.warn(
            format_error(
                f"torch.autograd.grad returns this rank's summand of the gradient of {mark.name!r} "
                f"of {mark.owner}",
                why="the gradient of one device is the sum of what several ranks return, and "
                "nobody adds them",
                hint="loss.backward(), then optimizer.sync_shard_grad(), and read parameter.grad",
            ),
            stacklevel=2,
        )
    return ask_gradients(outputs, inputs, *args, **kwargs)
