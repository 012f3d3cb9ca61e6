"""Calls that write to their first argument, recorded as operators that make a new value of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwright.compiler.ops.stand_ins import unclamped
from shardwright.compiler.trace.call_recorder import CallRecorder
from shardwright.compiler.trace.calls import inplace
from shardwright.compiler.trace.calls.assignment import assign, fitted
from shardwright.compiler.trace.calls.callables import plain_name
from shardwright.compiler.trace.calls.view_writes import write
from shardwright.compiler.trace.recorder import CUTS, Recorder, TensorType
from shardwright.compiler.trace.values.literal_constants import Literals


class Writes:
    """The writes of one trace. ``mode``: the function mode under which calls are recorded.

    Each method records what a call writes, lets torch write it to the fake tensor too, and tells
    the tensor's variable of its new value.
    """

    def __init__(
        self,
        recorder: Recorder,
        calls: CallRecorder,
        literals: Literals,
        mode: AbstractContextManager[Any],
    ) -> None:
        self._recorder, self._calls, self._literals = recorder, calls, literals
        self._mode = mode

    def functional(
        self,
        func: Any,
        functional: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pure_args: tuple[Any, ...],
        pure_kwargs: dict[str, Any],
    ) -> Any:
        """Record ``functional`` in the place of ``func``, which writes to its first argument."""
        tensor, recorder = args[0] if args else kwargs["input"], self._recorder
        target, old = recorder.variable(tensor), recorder.value(tensor)
        with recorder.named(target.root.buffer):
            fresh = recorder.value(
                self._calls.record(functional, plain_name(functional), pure_args, pure_kwargs)
            )
            # Written in place, a result is cast to the dtype and spread to the shape that are
            # there.
            value = fitted(recorder, TensorType(old.shape, old.dtype, fresh.requires_grad), fresh)
            out = self._calls.run(func, args, kwargs)
            write(recorder, target, value)
        return out

    def clamped_parameter(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """The range that a whole parameter is clamped to in place; ``None`` for anything else."""
        variable = self._recorder.variable(args[0])
        whole = variable.parent is None or (
            variable.call is not None and variable.call.name in CUTS
        )
        is_parameter = self._recorder.is_parameter(variable.root.value)
        return inplace.bounds(name, args[1:], kwargs) if whole and is_parameter else None

    def check_range(self, parameter: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
        """Take a parameter for one that its clamp leaves alone, which the program checks: only
        optimizers change parameters.
        """
        self._recorder.check(unclamped, self._recorder.variable(parameter).root.value, low, high)
        return parameter

    def redraw(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.normal_()`` and the like, as the operators that draw and scale."""
        recorder = self._recorder
        if kwargs.pop("generator", None) is not None:
            hint = "leave it out: a compiled module draws from generators of its own, by its seed"
            raise self._recorder.refusal(
                f"{name}() is given a generator, which a graph cannot hold", hint
            )
        target, old = recorder.variable(args[0]), recorder.value(args[0])
        with torch.no_grad(), self._mode:
            fresh = inplace.drawn(name, args[0], args[1:], kwargs)
        value = fitted(recorder, old, recorder.value(fresh))
        out = self._calls.run(func, args, kwargs)
        write(recorder, target, value)
        return out

    def reshaped(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: torch.Tensor
    ) -> Any:
        """``x.unsqueeze_(0)`` and the like: ``x`` becomes ``view``, a view of what it was."""
        variable = self._recorder.variable(view)
        out = self._calls.run(func, args, kwargs)
        self._recorder.bind(args[0], variable)
        return out

    def overwrite(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x[index] = y``, ``x.copy_(y)``, ``x.fill_(y)``: nothing of what was there is read."""
        recorder = self._recorder
        target, old = recorder.variable(args[0]), recorder.value(args[0])
        with recorder.named(target.root.buffer):
            if name != "__setitem__":
                new = 0 if name == "zero_" else next(iter((*args[1:2], *kwargs.values())))
                value = fitted(recorder, old, recorder.arg(new))
            else:
                value = assign(
                    recorder,
                    old,
                    recorder.arg(self._literals.index(args[1])),
                    recorder.arg(args[2]),
                )
            out = self._calls.run(func, args, kwargs)
            write(recorder, target, value)
        return out
