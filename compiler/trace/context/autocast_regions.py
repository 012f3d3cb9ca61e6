"""Autocast while tracing. Fake tensors live on the CPU whatever device the model will run on, so
every region, for whichever device type it is, becomes one for the CPU: the innermost decides, and a
region with ``enabled=False`` ends the outer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardwright.compiler.trace.context.patches import replaced
from shardwright.runtime.errors import TraceError

DEVICE_TYPES = ("cuda", "cpu")
"""The device types whose autocast blocks around ``parallelize`` count."""


def autocast_dtype() -> torch.dtype | None:
    """The dtype of the autocast region that the traced model is in."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def surrounding_dtype() -> torch.dtype | None:
    """The dtype of the autocast block in which the module is compiled.

    Raises :class:`TraceError` for blocks of two device types that differ.
    """
    active = {
        kind: torch.get_autocast_dtype(kind)
        for kind in DEVICE_TYPES
        if torch.is_autocast_enabled(kind)
    }
    if len(set(active.values())) > 1:
        raise TraceError(
            "the module is compiled inside two autocast blocks that differ",
            why=", ".join(
                f"{kind} is cast to {str(dtype).removeprefix('torch.')}"
                for kind, dtype in active.items()
            ),
            hint="enter autocast for the device that the module will run on only",
        )
    return next(iter(active.values()), None)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Outside of all blocks, for what is computed besides the model."""
    with ExitStack() as stack:
        for kind in DEVICE_TYPES:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def one_autocast(surrounding: torch.dtype | None) -> Iterator[None]:
    """Regions of all device types are the CPU's, beginning with the ``surrounding`` one. What is
    asked of torch about them agrees, and CUDA's count on a machine without it.
    """
    enter, leave, dtype_of = (
        torch.autocast.__enter__,
        torch.autocast.__exit__,
        torch.get_autocast_dtype,
    )
    is_enabled = torch.is_autocast_enabled

    def on_cpu(method: Any) -> Any:
        # A region for any device is entered and left as one of the CPU.
        def moved(region: Any, *args: Any) -> Any:
            device, region.device = region.device, "cpu"
            try:
                return method(region, *args)
            finally:
                region.device = device

        return moved

    def current_dtype(device_type: str) -> torch.dtype:
        # Outside of any region torch has a default by device.
        return dtype_of("cpu" if is_enabled("cpu") else device_type)

    with ExitStack() as stack:
        # Fakes of cast weights must not outlive the trace.
        stack.enter_context(
            torch.autocast("cpu", surrounding, surrounding is not None, cache_enabled=False)
        )
        for owner, name, new in (
            (torch.autocast, "__enter__", on_cpu(enter)),
            (torch.autocast, "__exit__", on_cpu(leave)),
            (torch, "is_autocast_enabled", lambda *_: is_enabled("cpu")),
            (torch, "get_autocast_dtype", current_dtype),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        ):
            stack.enter_context(replaced(owner, name, new))
        yield
