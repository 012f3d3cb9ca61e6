"""Float64 all the way: casts to float32 inside model code made to mean float64.

Model code casts to float32 in norms, rotary embeddings, softmax and losses. Such a cast costs 1e-7, a thousand times the
bound that parity is held to, and would hide a wrong formula behind rounding. Parity checks therefore build, trace
and run models inside :func:`float64_casts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import shardwright.compiler.api  # noqa: F401  (no table of dtypes may be made while the names are rebound)
from shardwright.compiler.ops.registry import load_tables


def _to_float64(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.to(torch.float64, *args, **kwargs)


@contextlib.contextmanager
def float64_casts() -> Iterator[None]:
    """While active, ``torch.float32``, ``torch.float``, ``Tensor.float`` and the default dtype are float64.

    The rebinding is global to the process: enter it before starting threads, never inside one of them. Contexts nest.
    Code that took its own reference before (``from torch import float32``) is not reached; C++ code is not either, apart
    from the default dtype.
    """
    load_tables()  # they know torch's functions by what their names mean now
    names = {"float32": torch.float32, "float": torch.float}
    default = torch.get_default_dtype()
    method = torch.Tensor.__dict__.get("float")  # None: inherited from the C base class, the normal state
    try:
        for name in names:
            setattr(torch, name, torch.float64)
        setattr(torch.Tensor, "float", _to_float64)  # noqa: B010 (a method is not assigned to, says mypy)
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        if method is None:
            del torch.Tensor.float
        else:
            setattr(torch.Tensor, "float", method)  # noqa: B010
        for name, dtype in names.items():
            setattr(torch, name, dtype)
