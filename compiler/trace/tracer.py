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

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.known_functions import register_known
from shardwright.compiler.trace.call_recorder import CallRecorder
from shardwright.compiler.trace.calls import inplace
from shardwright.compiler.trace.calls.call_arguments import (
    tensors_in,
    without_inplace_flag,
)
from shardwright.compiler.trace.calls.callables import is_getter, is_setter, plain_name
from shardwright.compiler.trace.calls.chosen_experts import ChosenExperts
from shardwright.compiler.trace.calls.opening import opened
from shardwright.compiler.trace.calls.repeated_calls import RepeatedCalls
from shardwright.compiler.trace.calls.strided import strided
from shardwright.compiler.trace.context.source import user_frame
from shardwright.compiler.trace.recorder import Recorder
from shardwright.compiler.trace.refusals import Refusals
from shardwright.compiler.trace.values.constants import SIZED, Constants
from shardwright.compiler.trace.values.finite_guards import finite_outcome
from shardwright.compiler.trace.values.gradient_facts import FACTS, GradientFacts
from shardwright.compiler.trace.values.literal_constants import LITERALS, Literals
from shardwright.compiler.trace.values.questions import Questions
from shardwright.compiler.trace.values.real_arguments import real_arguments
from shardwright.compiler.trace.values.selecting import UNRECORDED, Selecting
from shardwright.compiler.trace.values.sizes_read import sizes_read
from shardwright.compiler.trace.values.value_checks import Unread, passing, unread
from shardwright.compiler.trace.values.values_needed import VALUE_READERS, explained
from shardwright.compiler.trace.writes import Writes
from shardwright.runtime.errors import ShardwrightError, TraceError

_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "data", "real", "imag"}
_DEVICE_MOVES = {"cpu", "cuda", "xpu"}
_CPU = torch.device("cpu")
"""Where fake tensors live, whatever device the model names: the rank's device takes its place when
the program runs.
"""
_GRADIENT_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_NO_DATA = "its data is not allocated yet"
"""A part of torch's message for code that reads the memory of a fake tensor."""
_NOT_READ = object()
"""Says that no value could be read, as ``None`` and ``False`` are values."""
_NOT_WRITTEN = object()
"""Says that a call writes to no tensor."""


class Tracer(TorchFunctionMode):
    """Runs each call on fake tensors and hands it to the recorder."""

    def __init__(
        self,
        recorder: Recorder,
        constants: Constants,
        questions: Questions,
        repeated: RepeatedCalls,
    ) -> None:
        super().__init__()
        self._recorder, self._constants, self._questions = recorder, constants, questions
        self._chosen_experts = ChosenExperts(recorder, self)
        self._selecting, self._facts = Selecting(recorder, constants, self), GradientFacts(recorder)
        self._literals = Literals(recorder, constants, self)
        self._calls = CallRecorder(recorder, self._literals, repeated)
        self._writes = Writes(recorder, self._calls, self._literals, self)
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
        # Calls of the model's code, not those that an operator makes inside.
        if not self._calls.is_running:
            if (filled := self._selecting.filled(func, name, args, kwargs)) is not None:
                return filled
            if self._selecting.is_read((args, kwargs)):
                return self._selecting.read(func, name, args, kwargs)
            if name in FACTS and is_getter(func) and args[0] is not None:
                return self._facts.read(func, name, args[0])
            if name in ("requires_grad", "requires_grad_") and not is_getter(func):
                asks = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                return self._facts.ask(func, name, args[0], asks=bool(asks))
        if is_setter(func):
            if name == "data":
                raise self._recorder.refusal(
                    "forward assigns to x.data", "use x.copy_(y), or a new tensor"
                )
            return func(*args)
        # ``x.shape`` makes no tensor, ``x.T`` does.
        if is_getter(func) and name not in _TENSOR_PROPERTIES:
            return func(*args, **kwargs)
        # ``f"{x}"`` prints a tensor. ``f"{x:.2f}"`` needs its value.
        formats_value = name == "__format__" and args[1]
        if name in UNRECORDED and not formats_value:
            return func(*args, **kwargs)
        if is_getter(func) and name in ("H", "mH"):
            func = torch.adjoint
        try:
            return self._call(func, name, args, kwargs)
        except ShardwrightError:
            raise
        except (*_DATA_DEPENDENT, UnsupportedOperatorException) as error:
            return self._call_that_needs_values(func, name, args, kwargs, error)
        except Exception as error:
            # Some readers of values raise an exception of their own kind on fake tensors.
            if name in VALUE_READERS or _NO_DATA in str(error):
                if self._constants.assume(sizes_read(name, args, kwargs)):
                    return self._see(func, args, kwargs)
                raise self._untraceable(func, name, args, error) from error
            raise

    def _call_that_needs_values(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> Any:
        """What a call gives that needs numbers, which fake tensors do not have. It may ask whether
        all of them are finite, be a check of the library's, read constants alone, ask which tokens
        chose an expert, or choose by a mask.
        """
        # Branches on whether numbers are finite take the one for finite numbers.
        if (outcome := self._finite_outcome(name, args)) is not None:
            return outcome
        if (passes := self._passing_check(name)) is not None:
            return passes
        # A mask that follows from an undeclared input is not read: it would become a constant.
        chooses = name in ("__getitem__", "masked_select") and any(
            map(self._constants.is_assumed, tensors_in((args, kwargs)))
        )
        if not chooses:
            read = self._run_on_values(func, args, kwargs)
            if read is not _NOT_READ:
                return read
        if name == "repeat_interleave" and (copies := self._repeated(*args, **kwargs)) is not None:
            return copies
        if (answer := self._chosen_experts.answer(name, args, kwargs)) is not None:
            return answer
        # Elements that a mask chooses get a stand-in; everything else is refused.
        untraceable = self._untraceable(func, name, args, error)
        chosen = self._selecting.select(name, args, kwargs, untraceable)
        if chosen is not None:
            return chosen
        # Sizes that follow from integer inputs: from here on these inputs are constants.
        if self._constants.assume(sizes_read(name, args, kwargs)):
            return self._see(func, args, kwargs)
        raise untraceable from error

    def _repeated(self, input: Any, repeats: Any = None, dim: int | None = None) -> Any:
        """``input.repeat_interleave(repeats, dim)`` as a choice of elements by known indices;
        ``None`` where the repeats are not known.
        """
        input, repeats = self.on_fakes((input, repeats))
        indices = self._constants.repeats(input, repeats, dim)
        if indices is None:
            return None
        with self:
            source = input.flatten() if dim is None else input
            return source.index_select(dim or 0, indices)

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives on real values; ``_NOT_READ`` if an argument follows from more than
        constants.
        """
        real = real_arguments(self._constants, (args, kwargs))
        return _NOT_READ if real is None else _on_values(func, real)

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one call. The kinds of calls that are not recorded as they are come first:
        literals, refusals, readers of values, in-place forms, composites.
        """
        if func is torch.Tensor.new_tensor:  # a literal: of the tensor, only the dtype is used
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if func in LITERALS and (made := self._literals.make(func, args, kwargs)) is not None:
            return made
        self._refuse_gradients(func, name)
        if name in VALUE_READERS:
            read = self._read_value(func, name, args, kwargs)
            if read is not _NOT_READ:
                return read
        # ``f(x, out=y)`` is ``y.copy_(f(x))``.
        if isinstance(kwargs.get("out"), torch.Tensor):
            others = {key: value for key, value in kwargs.items() if key != "out"}
            result = self._call(func, name, args, others)
            return self._writes.overwrite(torch.Tensor.copy_, "copy_", (kwargs["out"], result), {})
        if name in _DEVICE_MOVES:
            return args[0]
        args = self.on_fakes(args)
        kwargs = {key: self.on_fakes(value) for key, value in kwargs.items()}
        # Fake tensors are on the CPU, whatever device the code asks for.
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        # ``x.to("cuda")``: a device in words, among the positional arguments.
        if name == "to":
            args = tuple(_CPU if isinstance(arg, str) else arg for arg in args)
        written = self._write(func, name, args, kwargs)
        if written is not _NOT_WRITTEN:
            return written
        # A function that no table knows is run as the calls it consists of, if these are known.
        if func not in self._open and registry.find(func) is None:
            parts = opened(func)
            if parts is not None:
                return self._run_open(func, parts, args, kwargs)
        if name == "as_strided":
            return self._run_strided(func, args, kwargs)
        if name == "__getitem__":
            args = (args[0], self._constants.slices(args[1]))
        if name in SIZED:
            args, kwargs = self._constants.sizes(name, args, kwargs)
        return self._calls.record(func, name, args, kwargs)

    def _refuse_gradients(self, func: Any, name: str) -> None:
        """Refuse what runs a backward inside of forward, or asks to be called in one."""
        if func is torch.autograd.grad or func is torch.Tensor.backward:
            raise self._recorder.refusal(
                f"forward calls {'torch.autograd.grad' if name == 'grad' else 'Tensor.backward'}()",
                "put it into a function together with all it takes the gradient of, "
                "parameters as arguments, and register_op "
                "that function",
                "what runs in that backward is not seen, and would not be in the graph",
            )
        if name in _GRADIENT_HOOKS:
            raise self._recorder.refusal(
                f"forward calls {name}() on a tensor, which tracing would lose",
                "write it as a torch.autograd.Function",
            )

    def _read_value(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``x.item()`` and the like give; ``_NOT_READ`` if the value is not known."""
        # Where the library looks at values only if it is not traced: those of the dummy arguments.
        if (question := self._questions.looks()) is not None:
            real = real_arguments(self._constants, (args, kwargs), self._constants.look)
            if real is not None:
                self._questions.have_looked = True
                return _on_values(func, real)
            self._questions.unanswered[question] = None
        # A check of an input is taken to pass. Reading it would make the input a constant.
        if any(map(self._constants.is_assumed, tensors_in(args))):
            passes = self._passing_check(name)
            if passes is not None:
                return passes
            if (outcome := self._finite_outcome(name, args)) is not None:
                return outcome
        return self._run_on_values(func, args, kwargs)

    def _finite_outcome(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """What a call that reads one truth value gives for finite numbers, if it asks for these."""
        if name not in ("__bool__", "is_nonzero", "item"):
            return None
        return finite_outcome(self._recorder, args[0])

    def _write(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives that writes to its first argument; ``_NOT_WRITTEN`` for other calls."""
        if name == "__setitem__":
            args = (args[0], self._chosen_experts.index(args[1], args[1]), *args[2:])
            args = (args[0], self._known_slices(func, name, args), *args[2:])
        # From the most special to the most general: overwrites, draws, clamps, views, then any
        # ``f_``.
        if name in ("__setitem__", "copy_", "fill_", "zero_"):
            return self._writes.overwrite(func, name, args, kwargs)
        if name in inplace.DRAWS and func is getattr(torch.Tensor, name):
            return self._writes.redraw(func, name, args, kwargs)
        if name in inplace.CLAMPS:
            range_ = self._writes.clamped_parameter(name, args, kwargs)
            if range_ is not None:
                return self._writes.check_range(args[0], *range_)
        # ``relu(x, inplace=True)``
        if (pure := without_inplace_flag(func, args, kwargs)) is not None:
            return self._writes.functional(func, func, args, kwargs, *pure)
        if name in inplace.METADATA_CHANGES:
            method = getattr(torch.Tensor, name[:-1])
            view = self._call(method, plain_name(method), args, kwargs)
            return self._writes.reshaped(func, args, kwargs, view)
        if (functional := inplace.functional_form(func, name)) is not None:
            return self._writes.functional(func, functional, args, kwargs, args, kwargs)
        return _NOT_WRITTEN

    def _known_slices(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """The index of a write, with numbers for the bounds of slices. A place that is written to
        is a fact of the graph, so bounds with unknown values are refused here.
        """
        index = self._constants.slices(args[1])
        unknown = list(sizes_read(name, (args[0], index), {}))
        if unknown and self._constants.assume(unknown):
            index = self._constants.slices(index)
            unknown = list(sizes_read(name, (args[0], index), {}))
        if unknown:
            raise self._untraceable(func, name, tuple(unknown), TypeError(name))
        return index

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
        self._calls.run(func, args, kwargs)  # torch's own checks
        with self:
            out = strided(*args, **kwargs)
        if out is None:
            raise self._recorder.refusal(
                "as_strided() reads memory in a way that is not along the dims of its tensor",
                "index, slice or unfold the tensor instead",
                "a rank's tensors lie in memory in another way than the model's on one device",
            )
        return out

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
        return self._recorder.refusal(
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
                raise self._recorder.refusal(
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
        if self._calls.is_running:
            return original(*args, **kwargs)
        args = self.on_fakes(args)
        # What TransformGetItemToIndex makes of x[i].
        if cls.__module__.startswith("torch.") and cls.__name__ == "ModIndex":
            return args[0][tuple(args[1])]

        def run(*args: Any, **kwargs: Any) -> Any:
            # The calls inside of its forward are this one operator's own.
            with torch._C.DisableTorchFunction():
                return original(*args, **kwargs)

        register_known(cls)
        target = cls if registry.find(cls) else original
        return self._calls.record(target, cls.__name__, args, kwargs, run=run)

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
            # Only what may be a condition: ``if (x > 0).all()`` asks for a truth value.
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

    def _untraceable(
        self, func: Any, name: str, args: tuple[Any, ...], error: Exception
    ) -> TraceError:
        if isinstance(error, UnsupportedOperatorException):
            return self._recorder.refusal(
                f"{name}() has no rule for fake tensors",
                "hide the call behind register_op",
                str(error),
            )
        # The refusal says where the numbers come from: a draw, an input, or neither.
        drawn = name in VALUE_READERS and any(map(self._constants.is_drawn, tensors_in(args)))
        inputs = list(
            dict.fromkeys(
                input
                for tensor in tensors_in(args)
                for input in self._constants.whole_inputs(tensor)
            )
        )
        why, hint = explained(func, name, drawn=drawn, inputs=inputs)
        return self._recorder.refusal(
            f"{name}() needs the values of a tensor while tracing", hint, why
        )


def _on_values(func: Any, real: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """What a function gives for real arguments."""
    with unset_fake_temporarily():
        return func(*real[0], **real[1])
