"""Compiled modules and ``torch.autocast``: which regions there are was settled when the module was
compiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from shardwright.runtime.errors import UsageError


def as_compiled(
    owner: str, compiled_in: torch.dtype | None, device: torch.device
) -> AbstractContextManager[None]:
    """Run a program as it was compiled, also inside a block of autocast.

    Each operator stands in the regions that it was traced in. So a block around the call adds
    nothing, and must be the one that was active then; inside it, operators of regions with
    ``enabled=False`` must not be cast.

    ``compiled_in``: the dtype of the block in which ``owner`` was compiled, if there was one.
    Raises :class:`UsageError` for a block of another dtype, or if there was none.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    active = torch.get_autocast_dtype(device.type)
    if active != compiled_in:
        raise UsageError(
            f"{owner} was called inside autocast to {_name(active)}, which it was not compiled for",
            why="it was compiled "
            + (
                "outside of autocast"
                if compiled_in is None
                else f"inside autocast to {_name(compiled_in)}"
            )
            + ", and the dtypes of its values were settled then",
            hint="call parallelize inside the same `with torch.autocast(...)`, or let forward of "
            "the model enter it",
        )
    # Regions inside keep no copies of weights: they would live until the block ends, and be found
    # by later calls.
    return torch.autocast(device.type, enabled=False, cache_enabled=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
