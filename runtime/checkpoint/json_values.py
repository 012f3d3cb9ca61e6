"""Python values as JSON: what schedulers, optimizers and users keep beside tensors. No pickle.

``None``, booleans, integers, strings, finite floats and lists are themselves. Everything else is an
object with one key that says what it is: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``,
``{"float": "inf"}``, ``{"tensor": ...}``. Values come back with their types, tensors bit by bit;
numbers of NumPy come back as those of Python.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.argument_kinds import is_too_long
from shardwright.runtime.checkpoint.tensor_bytes import bytes_of
from shardwright.runtime.errors import CheckpointError, brief
from shardwright.runtime.structure import plain_number

_SEQUENCES: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "deque": (deque, deque),
}
_MAPPINGS: dict[str, tuple[type, Callable[[dict[Any, Any]], Any]]] = {
    "dict": (dict, lambda value: value),
    "ordered_dict": (OrderedDict, OrderedDict),
    "counter": (Counter, Counter),
}


def encode(value: Any, path: str) -> Any:
    """``value`` as JSON. ``path`` names it in errors.

    Raises :class:`CheckpointError` for a value that has no form here.
    """
    value = plain_number(value)
    if is_too_long(value) or (isinstance(value, Tensor) and value.is_meta):
        raise CheckpointError(
            f"{path} cannot be saved",
            why="a tensor on the meta device has no values"
            if isinstance(value, Tensor)
            else f"it is {brief(value)}",
        )
    # JSON's own values as they are; everything else under a tag that says its type.
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        # JSON has no infinities.
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    for tag, (kind, _) in _SEQUENCES.items():
        if type(value) is kind and isinstance(value, Iterable):
            return {tag: [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]}
    # A default dict without its factory, which may be any function, is a dict.
    plain = dict(value) if type(value) is defaultdict else value
    for tag, (mapping, _) in _MAPPINGS.items():
        if type(plain) is mapping and isinstance(plain, dict):
            return {
                tag: [
                    [encode(k, f"{path} (a key)"), encode(v, f"{path}[{k!r}]")]
                    for k, v in plain.items()
                ]
            }
    raise CheckpointError(
        f"{path} cannot be saved",
        why=f"it is a {type(value).__name__}; checkpoints hold tensors and plain Python values, "
        "no pickled objects",
        hint="keep numbers, strings, lists, tuples, dicts or tensors there",
    )


def decode(data: Any) -> Any:
    """The reverse of :func:`encode`; ``KeyError``, ``ValueError``, ``TypeError`` or
    ``RuntimeError`` where it is not one.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    # A dict has one entry: its tag, and what it holds.
    ((tag, content),) = data.items()
    if tag == "float":
        return float(content)
    if tag == "tensor":
        return _decode_tensor(content)
    if tag == "dtype":
        return dtype_named(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag][1]([decode(item) for item in content])
    return _MAPPINGS[tag][1]({decode(key): decode(item) for key, item in content})


def _encode_tensor(x: Tensor) -> dict[str, Any]:
    data = base64.b64encode(bytes_of(x)).decode()
    return {"dtype": _name(x.dtype), "shape": list(x.shape), "bytes": data}


def _decode_tensor(data: dict[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(data["bytes"]))
    dtype = dtype_named(data["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(data["shape"]).clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``torch.float32`` of ``"float32"``; ``ValueError`` or ``TypeError`` if there is no such
    dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
