"""The function mode that sees every torch call of a running model, and records it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.known_functions import register_known
from shardwright.compiler.ops.stand_ins import unclamped
from shardwright.compiler.trace.calls import inplace
from shardwright.compiler.trace.calls.call_arguments import (
    has_traced,
    is_numbers,
    is_sizes,
    only_first_differentiable,
    tensors_in,
    without_empty,
    without_inplace_flag,
)
from shardwright.compiler.trace.calls.callables import is_getter, is_setter, plain_name
from shardwright.compiler.trace.calls.fake_forms import FAKE_FORMS
from shardwright.compiler.trace.calls.normalise import on_rank_device
from shardwright.compiler.trace.calls.opening import opened
from shardwright.compiler.trace.calls.strided import strided
from shardwright.compiler.trace.context.source import user_frame
from shardwright.compiler.trace.recorder import CUTS, Call, Recorder, TensorType, Variable
from shardwright.compiler.trace.refusals import Refusals
from shardwright.compiler.trace.values.constants import SIZED, Constants
from shardwright.compiler.trace.values.finite_guards import finite_outcome
from shardwright.compiler.trace.values.gradient_facts import FACTS, GradientFacts
from shardwright.compiler.trace.values.questions import Questions
from shardwright.compiler.trace.values.selecting import UNRECORDED, Selecting
from shardwright.compiler.trace.values.value_checks import Unread, passing, unread
from shardwright.compiler.trace.values.values_needed import VALUE_READERS, explained
from shardwright.runtime.errors import ShardwrightError, TraceError

_LITERALS = {torch.tensor, torch.as_tensor, torch.asarray}
_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "data", "real", "imag"}
_CASTS = {"to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as"}
_DEVICE_MOVES = {"cpu", "cuda", "xpu"}
_CPU = torch.device("cpu")
"""Where fake tensors live, whatever device the model names: the rank's device takes its place when
the program runs.
"""
_PIECES = {
    "split",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "chunk",
    "unsafe_chunk",
    "tensor_split",
}
_PIECES |= {"unbind"}
_GRADIENT_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_STATISTICS = {"batch_norm", "instance_norm"}
"""Operators that update their running statistics themselves when they run."""
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_NO_DATA = "its data is not allocated yet"
"""A part of torch's message for code that reads the memory of a fake tensor."""


class Tracer(TorchFunctionMode):
    """Runs each call on fake tensors and hands it to the recorder."""

    def __init__(self, recorder: Recorder, constants: Constants, questions: Questions) -> None:
        super().__init__()
        self._recorder, self._constants, self._questions = recorder, constants, questions
        self._selecting, self._facts = Selecting(recorder, constants, self), GradientFacts(recorder)
        self._running = 0  # calls being executed: what they call themselves is not recorded
        self._unseen = False
        self._open: list[Any] = []  # composites that run opened now
        self.refusals = Refusals()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._unseen:
            return func(*args, **(kwargs or {}))
        with self.refusals:
            return self._see(func, args, dict(kwargs or {}))

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, or say why it cannot be traced."""
        name = plain_name(func)
        # ``_running`` tells calls of the model's code from those that an operator makes inside.
        if not self._running and self._selecting.is_read((args, kwargs)):
            return self._selecting.read(func, name, args, kwargs)
        if name in FACTS and is_getter(func) and args[0] is not None and not self._running:
            return self._facts.read(func, name, args[0])
        if (
            name in ("requires_grad", "requires_grad_")
            and not is_getter(func)
            and not self._running
        ):
            asks = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            return self._facts.ask(func, name, args[0], asks=bool(asks))
        if is_setter(func):
            if name == "data":
                raise self._error("forward assigns to x.data", "use x.copy_(y), or a new tensor")
            return func(*args)
        formats_value = name == "__format__" and args[1]
        if (
            is_getter(func)
            and name not in _TENSOR_PROPERTIES
            or (name in UNRECORDED and not formats_value)
        ):
            return func(*args, **kwargs)
        if is_getter(func) and name in ("H", "mH"):
            func = torch.adjoint
        try:
            return self._call(func, name, args, kwargs)
        except ShardwrightError:
            raise
        except (*_DATA_DEPENDENT, UnsupportedOperatorException) as error:
            # The call needs numbers, which fake tensors do not have. It may ask whether all of them
            # are finite, be a check of the library's, read constants alone, or choose by a mask.
            if (
                name in ("__bool__", "is_nonzero", "item")
                and (outcome := finite_outcome(self._recorder, args[0])) is not None
            ):
                return outcome
            if (passes := self._passing_check(name)) is not None:
                return passes
            chooses = name in ("__getitem__", "masked_select") and any(
                map(self._constants.is_assumed, tensors_in((args, kwargs)))
            )
            if not chooses and (real := self._real_values((args, kwargs))) is not None:
                with unset_fake_temporarily():
                    return func(*real[0], **real[1])
            untraceable = self._untraceable(func, name, args, error)
            if (chosen := self._selecting.select(name, args, kwargs, untraceable)) is not None:
                return chosen
            raise untraceable from error
        except Exception as error:
            # Some readers of values raise an exception of their own kind on fake tensors.
            if name in VALUE_READERS or _NO_DATA in str(error):
                raise self._untraceable(func, name, args, error) from error
            raise

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one call. The kinds of calls that are not recorded as they are come first:
        literals, refusals, readers of values, in-place forms, composites.
        """
        if func is torch.Tensor.new_tensor:  # a literal: of the tensor, only the dtype is used
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if func in _LITERALS and not has_traced(args, kwargs):
            return self._literal(func, args, kwargs)
        if func in _LITERALS and args and is_sizes(args[0]):
            with self:
                return _tensor_of_sizes(args[0], kwargs.get("dtype"))
        if (
            func in _LITERALS
            and args
            and (stacked := self._stacked(args[0], kwargs.get("dtype"))) is not None
        ):
            return stacked
        if func is torch.autograd.grad or func is torch.Tensor.backward:
            raise self._error(
                f"forward calls {'torch.autograd.grad' if name == 'grad' else 'Tensor.backward'}()",
                "put it into a function together with all it takes the gradient of, "
                "parameters as arguments, and register_op "
                "that function",
                "what runs in that backward is not seen, and would not be in the graph",
            )
        if name in _GRADIENT_HOOKS:
            raise self._error(
                f"forward calls {name}() on a tensor, which tracing would lose",
                "write it as a torch.autograd.Function",
            )
        if name in VALUE_READERS and (question := self._questions.looks()) is not None:
            if (real := self._real_values((args, kwargs), self._constants.look)) is not None:
                self._questions.have_looked = True
                with unset_fake_temporarily():
                    return func(*real[0], **real[1])
            self._questions.unanswered[question] = None
        assumed = name in VALUE_READERS and any(map(self._constants.is_assumed, tensors_in(args)))
        # A check of an input is taken to pass. Reading it would make the input a constant.
        if assumed and (passes := self._passing_check(name)) is not None:
            return passes
        if name in VALUE_READERS and (real := self._real_values((args, kwargs))) is not None:
            with unset_fake_temporarily():
                return func(*real[0], **real[1])
        # ``f(x, out=y)`` is ``y.copy_(f(x))``.
        if isinstance(kwargs.get("out"), torch.Tensor):
            result = self._call(
                func, name, args, {key: value for key, value in kwargs.items() if key != "out"}
            )
            return self._overwrite(torch.Tensor.copy_, "copy_", (kwargs["out"], result), {})
        if name in _DEVICE_MOVES:
            return args[0]
        args, kwargs = (
            self.on_fakes(args),
            {key: self.on_fakes(value) for key, value in kwargs.items()},
        )
        # Fake tensors are on the CPU, whatever device the code asks for.
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        if name == "to":
            args = tuple(_CPU if isinstance(arg, str) else arg for arg in args)
        if name == "__setitem__":
            args = (args[0], self._constants.slices(args[1]), *args[2:])
        if name in ("__setitem__", "copy_", "fill_", "zero_"):
            return self._overwrite(func, name, args, kwargs)
        if name in inplace.DRAWS and func is getattr(torch.Tensor, name):
            return self._redraw(func, name, args, kwargs)
        if (
            name in inplace.CLAMPS
            and (range_ := self._clamped_parameter(name, args, kwargs)) is not None
        ):
            return self._check_range(args[0], *range_)
        if (written := without_inplace_flag(func, args, kwargs)) is not None:
            return self._in_place(func, func, args, kwargs, *written)
        if name in inplace.METADATA_CHANGES:
            return self._reshaped_in_place(func, name, args, kwargs)
        if (functional := inplace.functional_form(func, name)) is not None:
            return self._in_place(func, functional, args, kwargs, args, kwargs)
        # A function that no table knows is run as the calls it consists of, if these are known.
        if (
            func not in self._open
            and registry.find(func) is None
            and (parts := opened(func)) is not None
        ):
            return self._run_open(func, parts, args, kwargs)
        if name == "as_strided":
            return self._run_strided(func, args, kwargs)
        if name == "__getitem__":
            args = (args[0], self._constants.slices(args[1]))
        if name in SIZED:
            args, kwargs = self._constants.sizes(name, args, kwargs)
        return self.record(func, name, args, kwargs)

    def _run_open(
        self, func: Any, parts: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite so that its parts come back to this mode. If it calls itself
        (``Tensor.unflatten``), that call is recorded.
        """
        self._open.append(func)
        try:
            with self:
                return parts(*args, **kwargs)
        finally:
            self._open.pop()

    def _run_strided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.as_strided(...)`` as slices and windows of dims, see ``strided.py``."""
        self._run(func, args, kwargs)  # torch's own checks
        with self:
            out = strided(*args, **kwargs)
        if out is None:
            raise self._error(
                "as_strided() reads memory in a way that is not along the dims of its tensor",
                "index, slice or unfold the tensor instead",
                "a rank's tensors lie in memory in another way than the model's on one device",
            )
        return out

    # recording

    def record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None
    ) -> Any:
        """Run a call that changes none of its arguments, and record it if it makes tensors."""
        recorder = self._recorder
        inputs = list(tensors_in((args, kwargs)))
        # Torch counts in-place writes to each tensor. The counts tell whether a call that claims to
        # be functional has changed an argument.
        versions = [tensor._version for tensor in inputs if not tensor.is_inference()]
        out = self._run(run or func, args, kwargs)
        results = list(tensors_in(out))
        # In a graph, an operator of one result gives no tuple.
        if name in _PIECES and len(results) == 1:
            return type(out)((self._only_piece(name, args, kwargs),))
        found = registry.find(func)
        changed = versions != [tensor._version for tensor in inputs if not tensor.is_inference()]
        if changed and not (found and found[0].name in _STATISTICS or name in _STATISTICS):
            hint = "use the form that returns a new tensor"
            if name.startswith("embedding"):
                hint = (
                    "leave out max_norm, and after optimizer.step() let torch.renorm shorten the "
                    "rows of the table"
                )
            raise self._error(
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
            raise self._error(
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
        out, results = _distinct(out, results, inputs)
        if not inputs:
            kwargs = on_rank_device(func, kwargs, results[0].dtype)
        if name == "__getitem__":
            args = (args[0], self._index(args[1]))
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
            memory = inputs[0].untyped_storage()._cdata
            for index, (result, variable) in enumerate(zip(results, variables, strict=True)):
                if result.untyped_storage()._cdata == memory:
                    variable.parent, variable.call, variable.index = base, call, index
                    variable.version, variable.siblings = base.root.version, variables
        for result, variable in zip(results, variables, strict=True):
            recorder.bind(result, variable)

    def _index(self, index: Any) -> Any:
        """An index with tensors in the place of lists: in a graph, a list and a tuple are the
        same.
        """
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        return self._literal(torch.tensor, (index,), {}) if isinstance(index, list) else index

    # in-place operators

    def _in_place(
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
                self.record(functional, plain_name(functional), pure_args, pure_kwargs)
            )
            value = inplace.fitted(
                recorder, TensorType(old.shape, old.dtype, fresh.requires_grad), fresh
            )
            out = self._run(func, args, kwargs)
            inplace.write(recorder, target, value)
        return out

    def _clamped_parameter(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """The range that a whole parameter is clamped to in place; ``None`` for anything else."""
        variable = self._recorder.variable(args[0])
        whole = variable.parent is None or (
            variable.call is not None and variable.call.name in CUTS
        )
        is_parameter = self._recorder.is_parameter(variable.root.value)
        return inplace.bounds(name, args[1:], kwargs) if whole and is_parameter else None

    def _check_range(self, parameter: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
        """Take a parameter for one that its clamp leaves alone, which the program checks: only
        optimizers change parameters.
        """
        self._recorder.check(unclamped, self._recorder.variable(parameter).root.value, low, high)
        return parameter

    def _redraw(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.normal_()`` and the like, as the operators that draw and scale."""
        recorder = self._recorder
        if kwargs.pop("generator", None) is not None:
            hint = "leave it out: a compiled module draws from generators of its own, by its seed"
            raise self._error(f"{name}() is given a generator, which a graph cannot hold", hint)
        target, old = recorder.variable(args[0]), recorder.value(args[0])
        with torch.no_grad(), self:
            fresh = inplace.drawn(name, args[0], args[1:], kwargs)
        value = inplace.fitted(recorder, old, recorder.value(fresh))
        out = self._run(func, args, kwargs)
        inplace.write(recorder, target, value)
        return out

    def _reshaped_in_place(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``x.unsqueeze_(0)`` and the like: ``x`` becomes a view of what it was."""
        view = getattr(torch.Tensor, name[:-1])
        variable = self._recorder.variable(self._call(view, plain_name(view), args, kwargs))
        out = self._run(func, args, kwargs)
        self._recorder.bind(args[0], variable)
        return out

    def _overwrite(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``x[index] = y``, ``x.copy_(y)``, ``x.fill_(y)``: nothing of what was there is read."""
        recorder = self._recorder
        target, old = recorder.variable(args[0]), recorder.value(args[0])
        with recorder.named(target.root.buffer):
            if name != "__setitem__":
                new = 0 if name == "zero_" else next(iter((*args[1:2], *kwargs.values())))
                value = inplace.fitted(recorder, old, recorder.arg(new))
            else:
                value = inplace.assign(
                    recorder, old, recorder.arg(self._index(args[1])), recorder.arg(args[2])
                )
            out = self._run(func, args, kwargs)
            inplace.write(recorder, target, value)
        return out

    # constants

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
        with self, torch.no_grad():
            parts = [part for item in data if (part := self._element(item, dtype)) is not None]
            return torch.stack(parts) if len(parts) == len(data) else None

    def _element(self, item: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        if isinstance(item, tuple | list):
            return self._stacked(item, dtype)
        if isinstance(item, torch.Tensor):
            return item.detach().reshape(()).to(dtype or item.dtype)
        return _tensor_of_sizes(item, dtype)

    def _real_values(
        self, arguments: Any, values: Callable[[torch.Tensor], Any] | None = None
    ) -> Any:
        """The arguments with real values in the place of fakes; ``None`` if some depend on more
        than constants.

        ``values``: what gives the values of a tensor, if not what follows from constants.
        """
        unknown = False
        read: set[str] = set()

        def followed(tensor: torch.Tensor) -> Any:
            found = self._constants.followed(tensor)
            read.update(found[1] if found else ())
            return found and found[0]

        def known(arg: Any) -> Any:
            nonlocal unknown
            if isinstance(arg, dict):
                return {key: known(item) for key, item in arg.items()}
            if isinstance(arg, tuple | list):
                items = [known(item) for item in arg]
                return items if isinstance(arg, list) else tuple(items)
            if isinstance(arg, slice):
                return slice(known(arg.start), known(arg.stop), known(arg.step))
            if not isinstance(arg, torch.Tensor):
                unknown |= isinstance(arg, torch.SymInt | torch.SymFloat)
                return arg
            real = (values or followed)(arg)
            unknown |= real is None
            return real

        found = known(arguments)
        if unknown:
            return None
        self._constants.read |= read
        return found

    # running

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Calls run without being recorded."""
        outer, self._unseen = self._unseen, True
        try:
            yield
        finally:
            self._unseen = outer

    def untransformed(self, name: str) -> TraceError:
        """The error for an operator under ``torch.vmap`` that has no function of torch by its
        name.
        """
        return self._error(
            f"forward calls {name} under torch.vmap",
            "write the batch dim out, or hide the call behind register_op",
            "the operator on whole tensors has no form that can be recorded",
        )

    def on_fakes(self, arg: Any) -> Any:
        """An argument with captured tensors as fakes, and every device the CPU."""
        if isinstance(arg, FakeTensor):
            return arg
        if isinstance(arg, torch.Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(arg):
                raise self._error(
                    "forward uses a transform of torch.func",
                    "write the batch dim out, or hide the call behind register_op",
                    "operators under a transform are not seen as they run",
                )
            return self._constants.fake(arg)
        if isinstance(arg, torch.device):
            return _CPU
        if type(arg) in (tuple, list):
            return type(arg)(self.on_fakes(item) for item in arg)
        return arg

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = FAKE_FORMS.get(func, func)
        self._running += 1
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not differentiable with respect to argument" not in str(error):
                raise
            return func(*only_first_differentiable(args), **kwargs)
        finally:
            self._running -= 1

    def apply_function(
        self, cls: type, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record ``cls.apply(...)`` of an autograd Function as one operator."""
        with self.refusals:
            return self._apply_function(cls, original, args, kwargs)

    def _apply_function(
        self, cls: type, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._unseen:  # under torch.vmap: the gradient will be that of the operators in forward
            if not cls.__module__.startswith("torch."):
                raise self.untransformed(cls.__name__)
            return cls.forward(*args, **kwargs)  # type: ignore[attr-defined]
        if self._running:
            return original(*args, **kwargs)
        args = self.on_fakes(args)
        # What TransformGetItemToIndex makes of x[i].
        if cls.__module__.startswith("torch.") and cls.__name__ == "ModIndex":
            return args[0][tuple(args[1])]

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return original(*args, **kwargs)

        register_known(cls)
        target = cls if registry.find(cls) else original
        return self.record(target, cls.__name__, args, kwargs, run=run)

    def run_reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record what runs under a reentrant ``torch.utils.checkpoint``, which is an autograd
        Function of its tensor arguments: where none of them requires a gradient, nothing inside
        gets one, parameters included.
        """
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not torch.is_grad_enabled() or any(map(self._recorder.requires_gradient, tensors)):
            with self._recorder.running.recompute():
                return function(*args)
        warnings.warn(
            f"no argument of the reentrant checkpoint at {self._recorder.where()} requires a "
            "gradient, so nothing inside gets "
            "one, parameters included, as in torch; pass use_reentrant=False to train what "
            "is inside",
            stacklevel=2,
        )
        with torch.no_grad():
            return function(*args)

    # checks

    def _passing_check(self, name: str) -> bool | Unread | None:
        """What a call that reads a value returns where nothing but a check of values depends on it;
        else ``None``.
        """
        passes: bool | Unread | None = (
            passing(user_frame()) if name in ("__bool__", "item") else None
        )
        if passes is None and name == "item":
            passes = unread(user_frame())
        if passes is not None:
            warnings.warn(
                f"the compiled module leaves out a check of values: {self._recorder.where()}; "
                "it goes on where forward would raise",
                stacklevel=3,
            )
        return passes

    # errors

    def _error(self, what: str, hint: str, why: str | None = None) -> TraceError:
        return TraceError(what, where=self._recorder.where(), why=why, hint=hint)

    def _untraceable(
        self, func: Any, name: str, args: tuple[Any, ...], error: Exception
    ) -> TraceError:
        if isinstance(error, UnsupportedOperatorException):
            return self._error(
                f"{name}() has no rule for fake tensors",
                "hide the call behind register_op",
                str(error),
            )
        drawn = name in VALUE_READERS and any(map(self._constants.is_drawn, tensors_in(args)))
        inputs = list(
            dict.fromkeys(
                input
                for tensor in tensors_in(args)
                for input in self._constants.whole_inputs(tensor)
            )
        )
        why, hint = explained(func, name, drawn=drawn, inputs=inputs)
        return self._error(f"{name}() needs the values of a tensor while tracing", hint, why)


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


def _distinct(
    out: Any, results: list[torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """The result as an object of its own where a call gave its argument back (``contiguous``,
    dropout in eval mode).
    """
    if not isinstance(out, torch.Tensor) or not any(out is tensor for tensor in inputs):
        return out, results
    with torch.set_grad_enabled(True):
        out = torch.ops.aten.alias(out)
    return out, [out]
