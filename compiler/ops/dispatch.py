"""Python functions that tracing keeps as one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


def dispatched(function: Callable[..., Any], *, fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``function`` with torch's function dispatch in front, so that a tracer sees one call instead of what it calls.

    The result is what callers must use, and what :func:`registry.define` gets as alias (an ``autograd.Function`` is
    registered as its class, and needs no dispatch). ``fake`` gives tensors like the result for fake arguments where
    ``function`` itself cannot run on them, because it looks at values.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    call.fake = fake  # type: ignore[attr-defined]
    return call
