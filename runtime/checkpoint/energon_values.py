"""States of Megatron-Energon's own loaders as plain values, and back.

Their states are objects: dataclasses, mappings of a class of theirs, bytes, and numpy's arrays, as
its generator has one. Each becomes a dict with one marked key. On the way back only classes of
``megatron.energon`` are made, from their fields.
"""

from __future__ import annotations

import base64
import dataclasses
from importlib import import_module
from typing import Any

from shardwright.runtime.errors import CheckpointError

PACKAGE = "megatron.energon"

_OBJECT, _MAPPING, _BYTES = "energon object", "energon mapping", "energon bytes"
_ARRAY = "energon array"


def to_plain(value: Any) -> Any:
    """The value with plain ones in the places of Energon's objects."""
    kind = type(value)
    # Each kind is written under a key that no dict of theirs has.
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray") and not value.dtype.hasobject:
        data = base64.b64encode(value.tobytes()).decode()  # in the order of its indices
        return {_ARRAY: [value.dtype.str, list(value.shape), data]}
    if _is_theirs(kind.__module__):
        name = f"{kind.__module__}:{kind.__qualname__}"
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return {_OBJECT: [name, {each: to_plain(getattr(value, each)) for each in names}]}
        if isinstance(value, dict):
            return {_MAPPING: [name, _plain_items(value)]}
    if kind is dict:
        return _plain_items(value)
    if kind in (list, tuple):
        return kind(to_plain(item) for item in value)
    return value


def from_plain(value: Any) -> Any:
    """The reverse of :func:`to_plain`."""
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    if type(value) is not dict:
        return value
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if value.keys() == {_ARRAY}:
        dtype, shape, data = value[_ARRAY]
        # Their loaders need numpy; a machine that only reads checkpoints need not have it.
        numpy = import_module("numpy")
        return numpy.frombuffer(base64.b64decode(data), numpy.dtype(dtype)).reshape(shape).copy()
    if value.keys() == {_OBJECT}:
        name, fields = value[_OBJECT]
        return _class_of(name)(**{each: from_plain(item) for each, item in fields.items()})
    if value.keys() == {_MAPPING}:
        name, items = value[_MAPPING]
        return _class_of(name)({key: from_plain(item) for key, item in items.items()})
    return {key: from_plain(item) for key, item in value.items()}


def _plain_items(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: to_plain(item) for key, item in value.items()}


def _is_theirs(module: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.")


def _class_of(name: str) -> Any:
    """A class of Energon that holds a state."""
    module, _, qualname = name.partition(":")
    found = None
    if _is_theirs(module) and qualname.isidentifier():
        try:
            found = getattr(import_module(module), qualname, None)
        except ImportError as error:
            raise CheckpointError(
                "the checkpoint has the state of a loader of megatron-energon",
                why=f"{module} is not installed: {error}",
                hint="install megatron-energon, or load without loader=",
            ) from error
    is_state = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, dict)
    )
    if not is_state:
        raise CheckpointError(
            f"{name!r} is no state of a loader of megatron-energon",
            why="the checkpoint was written with another version of it, or altered",
            hint="load without loader=",
        )
    return found
