"""Composite functions of torch, opened: run as Python so that their parts are recorded instead of
them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

_DISPATCH = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: Any) -> bool:
    return False


def opened(function: Any) -> Callable[..., Any] | None:
    """``function`` without its dispatch to function modes, or ``None`` if it is not a Python
    function of torch.
    """
    if not isinstance(function, types.FunctionType) or not (function.__module__ or "").startswith(
        "torch"
    ):
        return None
    return _without_dispatch(function)


@functools.lru_cache(maxsize=256)
def _without_dispatch(function: types.FunctionType) -> Callable[..., Any] | None:
    names = function.__code__.co_names
    if not any(name in names for name in _DISPATCH):
        return None
    scope = {**function.__globals__, **dict.fromkeys(_DISPATCH, _never)}
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
