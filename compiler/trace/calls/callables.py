"""Callables and their import paths."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "torch._C._nn",
    "torch._VF",
)


def plain_name(function: Any) -> str:
    """The last part of the name: ``add``, ``__getitem__``; the property's name for the getter of a
    property.
    """
    if _is_property_access(function):
        return str(function.__self__.__name__)
    return str(getattr(function, "__name__", type(function).__name__)).split(".")[0]


def is_getter(function: Any) -> bool:
    """Whether ``function`` reads a property of a tensor, such as ``Tensor.shape``."""
    return getattr(function, "__name__", "") == "__get__"


def is_setter(function: Any) -> bool:
    """Whether ``function`` sets or deletes a property of a tensor, such as ``Tensor.grad``."""
    return _is_property_access(function) and not is_getter(function)


def _is_property_access(function: Any) -> bool:
    return getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__") and hasattr(
        function, "__self__"
    )


def import_path(function: Any) -> str | None:
    """A dotted path under which ``function`` can be imported, or ``None`` (lambdas, local
    functions).
    """
    # By kind: properties of tensors, operators, methods, functions of torch, the user's.
    if is_getter(function):
        return f"torch.Tensor.{plain_name(function)}"
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops.{function.namespace}.{function._opname}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return "torch.ops." + str(function).replace("::", ".")
    name = getattr(function, "__name__", None)
    if name and _same(getattr(torch.Tensor, name, None), function):
        return f"torch.Tensor.{name}"
    for home in _HOMES if name else ():
        if _same(getattr(importlib.import_module(home), name or "", None), function):
            return f"{home}.{name}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):  # a class method, such as autograd.Function.apply
        path = _path_of(owner)
        return f"{path}.{name}" if path else None
    return _path_of(function)


def _path_of(obj: Any) -> str | None:
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        return None
    path = f"{module}.{qualname}"
    try:
        return path if _same(resolve(path), obj) else None
    except (ImportError, AttributeError):
        return None


def _same(found: Any, wanted: Any) -> bool:
    return found is not None and (
        found is wanted or type(found) is type(wanted) and bool(found == wanted)
    )


@functools.lru_cache(maxsize=4096)
def resolve(path: str) -> Callable[..., Any]:
    """The object at a dotted import path; the getter for a property of ``torch.Tensor``."""
    parts = path.split(".")
    # ``torch.nn.functional.linear``: the longest part that is a module, then attributes.
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found.__get__ if type(found).__name__ == "getset_descriptor" else found  # type: ignore[no-any-return]
    raise ImportError(f"nothing can be imported from {path!r}")
