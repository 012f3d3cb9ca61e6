"""Literals of forward as constants of the graph: ``torch.tensor([1, 2])``, lists as an index."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwright.compiler.trace.calls.call_arguments import has_traced, is_numbers, is_sizes
from shardwright.compiler.trace.recorder import Recorder
from shardwright.compiler.trace.values.constants import Constants

LITERALS = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that make a tensor of numbers."""


class Literals:
    """The literals of one trace. ``mode``: the function mode under which calls are recorded."""

    def __init__(
        self, recorder: Recorder, constants: Constants, mode: AbstractContextManager[Any]
    ) -> None:
        self._recorder, self._constants, self._mode = recorder, constants, mode

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What a call of one of :data:`LITERALS` gives: a constant, or operators that put together
        sizes and tensors of one element; ``None`` for a call that is recorded as it is.
        """
        if not has_traced(args, kwargs):
            return self._literal(func, args, kwargs)
        if not args:
            return None
        if is_sizes(args[0]):
            with self._mode:
                return _tensor_of_sizes(args[0], kwargs.get("dtype"))
        return self._stacked(args[0], kwargs.get("dtype"))

    def index(self, index: Any) -> Any:
        """An index with tensors in the place of lists: in a graph, a list and a tuple are the
        same.
        """
        if isinstance(index, tuple):
            return tuple(self.index(item) for item in index)
        return self._literal(torch.tensor, (index,), {}) if isinstance(index, list) else index

    def _literal(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")
        }
        requires_grad = kwargs.pop("requires_grad", False)
        made = self._constants.literal(func, args, kwargs).requires_grad_(requires_grad)
        if requires_grad:
            self._recorder.ask_gradient(self._recorder.value(made), leaf=True)
        return made

    def _stacked(self, data: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        """``torch.tensor`` of a list that holds tensors of one element, as a stack; ``None`` for
        anything else.
        """
        if not isinstance(data, tuple | list) or not data or not is_numbers(data):
            return None
        with self._mode, torch.no_grad():
            parts = [part for item in data if (part := self._element(item, dtype)) is not None]
            return torch.stack(parts) if len(parts) == len(data) else None

    def _element(self, item: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        if isinstance(item, tuple | list):
            return self._stacked(item, dtype)
        if isinstance(item, torch.Tensor):
            return item.detach().reshape(()).to(dtype or item.dtype)
        return _tensor_of_sizes(item, dtype)


def _tensor_of_sizes(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """``torch.tensor`` of numbers some of which follow from dynamic sizes, from operators that keep
    them symbolic.
    """
    items = data if isinstance(data, tuple | list) else (data,)
    if dtype is None:
        floating = any(isinstance(item, float | torch.SymFloat) for item in items)
        dtype = torch.get_default_dtype() if floating else torch.int64
    parts = [torch.full((), item, dtype=dtype) for item in items]
    return torch.stack(parts) if isinstance(data, tuple | list) else parts[0]
