"""Runs one call that changes none of its arguments, and records it as an operator of the graph."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import originals, registry
from shardwright.compiler.trace.calls.call_arguments import (
    only_first_differentiable,
    tensors_in,
    without_empty,
)
from shardwright.compiler.trace.calls.fake_forms import FAKE_FORMS
from shardwright.compiler.trace.calls.normalise import on_rank_device
from shardwright.compiler.trace.calls.repeated_calls import RepeatedCalls
from shardwright.compiler.trace.recorder import (
    STATISTICS,
    Call,
    Recorder,
    TensorType,
    Variable,
)
from shardwright.compiler.trace.values.literal_constants import Literals

_CASTS = {"to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as"}
_PIECES = {
    "split",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "chunk",
    "unsafe_chunk",
    "tensor_split",
    "unbind",
}
"""Operators that return a tuple of pieces."""


class CallRecorder:
    """Records the calls of one trace.

    ``is_running``: a call is being executed now, so what it calls itself is not recorded.
    """

    def __init__(self, recorder: Recorder, literals: Literals, repeated: RepeatedCalls) -> None:
        self._recorder, self._literals, self._repeated = recorder, literals, repeated
        self._depth = 0  # calls being executed, one inside the other
        # Operators, and functions that are none, whose names in torch all mean what torch calls so.
        self._unreplaced: set[Any] = set()

    @property
    def is_running(self) -> bool:
        return self._depth > 0

    def record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None
    ) -> Any:
        """Run a call that changes none of its arguments, and record it if it makes tensors."""
        recorder = self._recorder
        found = registry.find(func)
        self._refuse_replaced(func, found[0].name if found else None)
        inputs = list(tensors_in((args, kwargs)))
        # Torch counts in-place writes to each tensor. The counts tell whether a call that claims to
        # be functional has changed an argument.
        versions = [tensor._version for tensor in inputs if not tensor.is_inference()]
        out = self._repeated.view(func, args) if run is None else None
        can_repeat = inputs and run is None and out is None
        key = self._repeated.key(func, args, kwargs) if can_repeat else None
        if key is not None:
            out = self._repeated.results(key, inputs)
        is_repeated = out is not None
        if not is_repeated:
            out = self.run(run or func, args, kwargs)
        results = list(tensors_in(out))
        # In a graph, an operator of one result gives no tuple.
        if name in _PIECES and len(results) == 1:
            kind: Any = type(out)
            return kind((self._only_piece(name, args, kwargs),))
        changed = versions != [tensor._version for tensor in inputs if not tensor.is_inference()]
        if key is not None and not is_repeated and not changed:
            self._repeated.keep(key, out, inputs)
        if changed and not (found and found[0].name in STATISTICS or name in STATISTICS):
            hint = "use the form that returns a new tensor"
            if name.startswith("embedding"):
                hint = (
                    "leave out max_norm, and after optimizer.step() let torch.renorm shorten the "
                    "rows of the table"
                )
            raise self._recorder.refusal(
                f"{name}() changes one of its arguments in place",
                hint,
                "its functional form is not known",
            )
        if not results:
            return out
        if any(result.layout != torch.strided for result in results):
            hint = (
                "use index_add, scatter_add or index_select, or register_op a function that takes "
                "and returns dense tensors"
            )
            raise self._recorder.refusal(
                f"{name}() makes a sparse tensor",
                hint,
                "it has no dims that could be split, and cannot be sent",
            )
        # A call that gives back its argument is no operator. With gradients only casts are left out
        # so; without them anything is, as x.contiguous() would cut the gradient of x.
        unchanged = name in _CASTS or not torch.is_grad_enabled()
        if unchanged and any(results[0] is tensor for tensor in inputs):
            return out
        if name == "cat" and (kept := without_empty(args, kwargs)) is not None:
            args, kwargs = kept
            if len(args[0]) == 1:
                recorder.bind(results[0], Variable(recorder.value(args[0][0])))
                return out
        out, results = self._distinct(out, results, inputs)
        if not inputs:
            kwargs = on_rank_device(func, kwargs, results[0].dtype)
        if name == "__getitem__":
            args = (args[0], self._literals.index(args[1]))
        caller = f"{name}()"
        call = Call(
            func,
            name,
            recorder.arg(tuple(args), caller),
            {k: recorder.arg(v, caller) for k, v in kwargs.items()},
        )
        values = recorder.emit(call, [TensorType.of(result) for result in results])
        self._bind(results, values, inputs, call)
        return out

    def _refuse_replaced(self, func: Any, operator: str | None) -> None:
        """Refuse a call of torch's in whose place the program has put a function of its own.

        torch gives its function modes the function that stands there, while that one runs and has
        called torch's own. Recorded, it would run twice. And files call operators by these names.
        """
        known = operator or func
        if known in self._unreplaced:
            return
        if operator is not None:
            names = registry.NAMES.get(operator, [])
        else:
            name = originals.name_of(func)
            names = [name] if name else []
        if (replaced := originals.replacement(names)) is None:
            self._unreplaced.add(known)
            return
        title, function = replaced
        own = getattr(function, "__name__", type(function).__name__)
        raise self._recorder.refusal(
            f"{title} has been replaced by {own}(), and forward calls torch's own",
            "put torch's function back before the module is compiled; in the model, call "
            f"{own}() by its own name",
            f"generated files call torch's functions by name, and would run {own}() for it",
        )

    def _only_piece(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The one piece into which a tensor is cut: all of it, for ``unbind`` without the dim of
        size 1.
        """
        parameter = "tensor" if "tensor" in kwargs else "input"  # as functions call it
        tensor = args[0] if args else kwargs[parameter]
        index: tuple[Any, ...] = (slice(None),)
        if name == "unbind":
            index = (
                *index * ((args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensor.ndim),
                0,
            )
        return self.record(torch.Tensor.__getitem__, "__getitem__", (tensor, index), {})

    def _bind(
        self,
        results: list[torch.Tensor],
        values: list[IRValue],
        inputs: list[torch.Tensor],
        call: Call,
    ) -> None:
        """Let tensors stand for the values of a call's results. A result that shares memory with
        the first input is a view of it.
        """
        recorder = self._recorder
        variables = [Variable(value) for value in values]
        if inputs and call.args and isinstance(call.args[0], IRValue):
            base = recorder.variable(inputs[0])
            # The address of torch's storage object: two tensors with the same one share memory.
            memory = inputs[0].untyped_storage()._cdata
            for index, (result, variable) in enumerate(zip(results, variables, strict=True)):
                if result.untyped_storage()._cdata == memory:
                    variable.parent, variable.call, variable.index = base, call, index
                    variable.version, variable.siblings = base.root.version, variables
        for result, variable in zip(results, variables, strict=True):
            recorder.bind(result, variable)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a call without recording it, or anything that it calls."""
        func = FAKE_FORMS.get(func, func)
        self._depth += 1
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not differentiable with respect to argument" not in str(error):
                raise
            # Some kernels refuse gradients to other arguments than the first, and the fakes of
            # inputs all ask for one.
            return func(*only_first_differentiable(args), **kwargs)
        finally:
            self._depth -= 1

    def _distinct(
        self, out: Any, results: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        """The result as an object of its own where a call gave its argument back (``contiguous``,
        dropout in eval mode).
        """
        if not isinstance(out, torch.Tensor) or not any(out is tensor for tensor in inputs):
            return out, results
        # Also under no_grad: the alias of a tensor with a gradient must have one, or it would be
        # another value to autograd than the argument is.
        with torch.set_grad_enabled(True):
            out = self._repeated.alias(out)
        return out, [out]
