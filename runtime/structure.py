"""Nested Python structures around tensors: the arguments of ``forward``, and its result.

The tracer takes structures apart with :func:`children`, generated code puts results together with
:func:`rebuild` and takes arguments apart with :func:`flatten`; all three share one notion of what a
container is:

================================  ==========================  ====================================
container                         children                    rebuilt by
================================  ==========================  ====================================
``tuple``, ``list``, ``dict``     items                       the literal
named tuple                       fields                      ``cls(**fields)``
``torch.return_types``            items                       ``cls(items)``
dataclass (also ``ModelOutput``)  fields other than ``None``  ``cls(**fields)``, then other fields
other subclasses of ``dict``      items                       ``cls(items)``
``BlockMask`` of flex attention   lengths, and its function   ``cls.from_kv_blocks``
any other object                  attributes, also slots; of  ``cls.__new__``, then its attributes
                                  one to call, its class too
================================  ==========================  ====================================

Everything in :data:`LEAF_TYPES` is a leaf, and so is what has a state that no attribute shows:
numbers and arrays of NumPy, ``Decimal``, ``deque``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.runtime.errors import InputError
from shardwright.runtime.left_out import LeftOut
from shardwright.runtime.mask_functions import BLOCK_MASK, block_mask_children, block_mask_of

LEAF_TYPES = (
    torch.Tensor,
    torch.Size,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    set,
    frozenset,
    type(Ellipsis),
    type,
    enum.Enum,
    functools.partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.nn.Module,
    LeftOut,
)


_EXACT: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}


def kind(obj: Any) -> str:
    """``leaf``, ``tuple``, ``list``, ``dict`` or ``object``."""
    # Containers first: a look-up costs less than a comparison with all kinds of leaves.
    found = _EXACT.get(type(obj))
    if found is not None:
        return found
    return "leaf" if isinstance(obj, LEAF_TYPES) or hides_state(obj) else "object"


_IN_PYTHON = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: what a ``class`` statement makes has it, types written in C do not."""

_SHOWS_ALL = (object, types.SimpleNamespace)
"""Types written in C whose objects are as their attributes say."""


@functools.cache
def _hides(cls: type) -> bool:
    if issubclass(cls, Mapping | list | tuple):
        return False
    return any(not base.__flags__ & _IN_PYTHON and base not in _SHOWS_ALL for base in cls.__mro__)


def hides_state(obj: Any) -> bool:
    """Whether an object has a state that none of its attributes shows, as arrays of NumPy have.
    It cannot be built again from attributes. Of what is in :data:`LEAF_TYPES` nobody asks.
    """
    return not isinstance(obj, LEAF_TYPES) and _hides(type(obj))  # type: ignore[arg-type]


def plain_number(value: Any) -> Any:
    """A number of NumPy as Python's own; anything else as it is."""
    is_number = (
        type(value).__module__ == "numpy"
        and getattr(value, "shape", None) == ()
        and not hasattr(value, "__array_finalize__")
    )
    return value.item() if is_number else value


def children(obj: Any) -> tuple[tuple[Any, Any], ...]:
    """``(key, child)`` of a container: indices, dict keys, or attribute names, in their own
    order.
    """
    if type(obj) is dict:
        return tuple(obj.items())
    if _is_named_tuple(obj):
        return tuple(zip(obj._fields, obj, strict=True))
    if isinstance(obj, list | tuple):
        return tuple(enumerate(obj))
    if dataclasses.is_dataclass(obj):
        # Model outputs of transformers have None for what they do not hold, and leave it out as
        # mappings do.
        fields = ((f.name, getattr(obj, f.name, None)) for f in dataclasses.fields(obj))
        return tuple((name, value) for name, value in fields if value is not None)
    if isinstance(obj, Mapping):
        return tuple(obj.items())
    if type_path(obj) == BLOCK_MASK:
        return block_mask_children(obj)
    slots = (name for cls in type(obj).__mro__ for name in _slots(cls) if hasattr(obj, name))
    found = (*((name, getattr(obj, name)) for name in slots), *getattr(obj, "__dict__", {}).items())
    # What an object does when it is called is told by its class.
    return (("__class__", type(obj)), *found) if callable(obj) else found


def type_path(obj: Any) -> str:
    """The import path of the class of ``obj``: ``package.module:Outer.Inner``."""
    return f"{type(obj).__module__}:{type(obj).__qualname__}"


def import_type(path: str) -> type:
    """The class at an import path made by :func:`type_path`."""
    module, _, qualname = path.partition(":")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))  # type: ignore[return-value]


def rebuild(cls: type | str, fields: Mapping[Any, Any]) -> Any:
    """An object of ``cls`` (or of the class at that import path) from the children that
    :func:`children` gave.

    The constructor runs for named tuples, dataclasses and dicts only; other objects get their
    attributes back unseen.
    """
    cls = import_type(cls) if isinstance(cls, str) else cls
    # Named tuples take fields, plain ones a sequence.
    if issubclass(cls, tuple):
        return cls(**fields) if hasattr(cls, "_fields") else cls(fields.values())
    if dataclasses.is_dataclass(cls):
        # Fields that the constructor does not take are set behind it. (torch.compile reads this,
        # and knows no dataclasses.fields of a class.)
        late = [name for name in fields if not cls.__dataclass_fields__[name].init]
        obj: Any = cls(**{name: value for name, value in fields.items() if name not in late})
        for name in late:
            object.__setattr__(obj, name, fields[name])
        return obj
    if issubclass(cls, Mapping):
        return cls(fields)  # type: ignore[call-arg]
    if f"{cls.__module__}:{cls.__qualname__}" == BLOCK_MASK:
        return block_mask_of(cls, fields)
    # Without calling its constructor, which may want other things.
    obj = cls.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(obj, name, value)
    return obj


def join(path: str, key: Any) -> str:
    """The path of what lies under ``key`` in the container at ``path``."""
    return f"{path}.{key}" if path else str(key)


def flatten(obj: Any, path: str = "") -> dict[str, Any]:
    """Path to leaf, depth first; paths are like ``past_key_values.layers.0.keys``, and ``""`` for a
    lone leaf.

    Raises :class:`InputError` for what is nested in itself, or more deeply than Python can follow.
    """
    leaves: dict[str, Any] = {}
    try:
        _flatten(obj, path, leaves)
    except RecursionError:
        raise _too_deep(obj) from None
    return leaves


def _flatten(obj: Any, path: str, leaves: dict[str, Any]) -> None:
    """Put the leaves of ``obj`` into ``leaves``: this runs for every call of a module."""
    if kind(obj) == "leaf":
        leaves[path] = obj
        return
    for key, child in children(obj):
        _flatten(child, join(path, key), leaves)


def map_leaves(obj: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of the structure with ``function(path, leaf)`` in the place of each leaf; see
    :func:`flatten` for deep ones.
    """
    try:
        return _map_leaves(obj, function, path)
    except RecursionError:
        raise _too_deep(obj) from None


def _too_deep(obj: Any) -> InputError:
    return InputError(
        f"a {type(obj).__name__} is nested in itself, or more deeply than can be followed",
        hint="pass and return tensors in a few levels of lists, tuples, dicts or objects",
    )


def _map_leaves(obj: Any, function: Callable[[str, Any], Any], path: str) -> Any:
    form = kind(obj)
    if form == "leaf":
        return function(path, obj)
    items = {key: _map_leaves(child, function, join(path, key)) for key, child in children(obj)}
    if form == "dict":
        return items
    if form in ("list", "tuple"):
        return (list if form == "list" else tuple)(items.values())
    return rebuild(type(obj), items)


def tensors_of(obj: Any) -> Any:
    """The tensors of a structure, depth first, as a tuple; a lone one as it is: ``(out, None)``
    gives ``out``.
    """
    tensors = tuple(leaf for leaf in flatten(obj).values() if isinstance(leaf, torch.Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


def _is_named_tuple(obj: Any) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def values_digest(tensor: torch.Tensor) -> str:
    """A digest in hex of the values of a tensor of integers or truth values."""
    numbers = tensor.detach().cpu().to(torch.int64).contiguous()
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:32]
