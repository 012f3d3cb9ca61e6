"""Digests of samples: whether a stream gives the sample that it gave before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_BYTES, _MOST_ITEMS = 2048, 256
"""How much of both ends of an array or a text, and of a list, goes into a digest: enough to tell
samples apart, and a matter of microseconds.
"""


def sample_digest(sample: Any) -> str:
    """A text that is the same for equal samples, on every machine.

    Numbers, texts and arrays count, in dicts, lists and tuples; of other objects only the class
    does.
    """
    digest = hashlib.sha256()
    _add(digest, sample)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    # A mark before each value, so that [1, [2]] and [[1], 2] differ.
    digest.update(f"<{type(value).__name__}".encode())
    if isinstance(value, Tensor) and value.layout == torch.strided:
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        # Bytes, not numbers: nan is not equal to itself, and 0.0 equals -0.0.
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(_ends(data, _MOST_BYTES).tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(str((value.dtype, value.shape)).encode())
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        digest.update(_ends(data, _MOST_BYTES).tobytes())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            digest.update(str(name).encode())
            _add(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(str(len(value)).encode())
        for item in _ends(value, _MOST_ITEMS):
            _add(digest, item)
    elif isinstance(value, str | bytes):
        digest.update(str(len(value)).encode())
        ends = _ends(value, _MOST_BYTES)
        digest.update(ends.encode(errors="replace") if isinstance(ends, str) else ends)
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        digest.update(repr(value).encode())
    digest.update(b">")


def _ends(sequence: Any, count: int) -> Any:
    """Both ends of a long sequence, or all of a short one."""
    if len(sequence) <= 2 * count:
        return sequence
    if isinstance(sequence, np.ndarray):
        return np.concatenate([sequence[:count], sequence[-count:]])
    return sequence[:count] + sequence[-count:]
