"""What torch must do differently while a trace runs; everything is put back afterwards.

Most calls reach the tracer through torch's function dispatch. These do not: ``torch.vmap``,
``autograd.Function.apply``, activation checkpointing, scripted functions, compiled functions,
checks of values, batch norms that count their batches, and what flex attention calls.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shardwright.compiler.trace.calls.expert_loops import expert_loops_of
from shardwright.compiler.trace.calls.flex_attention import flex_attention_traced
from shardwright.compiler.trace.calls.routed_experts import experts_function, experts_interface
from shardwright.compiler.trace.calls.time_loops import known_functions_of
from shardwright.compiler.trace.calls.transforms import Modes, vmap_traced
from shardwright.compiler.trace.calls.varlen_attention import varlen_attention_traced
from shardwright.compiler.trace.context.mode_reads import is_same_in_both_modes
from shardwright.compiler.trace.context.running_modules import RunningModules
from shardwright.compiler.trace.context.source import called_by_user, user_location
from shardwright.compiler.trace.refusals import Refusals
from shardwright.compiler.trace.values.questions import Questions
from shardwright.runtime.errors import TraceError


class FunctionCalls(Modes, Protocol):
    """Who records the calls that torch does not dispatch."""

    def apply_function(
        self, cls: type, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record ``cls.apply(...)`` of an autograd Function."""

    def run_reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record what runs under a reentrant ``torch.utils.checkpoint``."""


_SYMBOLIC = ("sqrt", "log2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``new`` inside the ``with`` block."""
    own = name in vars(owner)
    old = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


@contextmanager
def patched(
    module: torch.nn.Module,
    running: RunningModules,
    tracer: FunctionCalls,
    note_training: Callable[[], None],
    real_values: Callable[[torch.Tensor], torch.Tensor | None],
    questions: Questions,
) -> Iterator[None]:
    """All patches while ``module`` is traced. ``tracer`` records functions that torch does not
    dispatch.

    ``note_training`` is called when a module reads ``self.training`` and may do another thing for
    another value; ``real_values`` gives those of a tensor that follows from constants alone;
    ``questions`` says whether those of others may be looked at.
    """
    with ExitStack() as stack:
        stack.enter_context(_functions_applied_by(tracer.apply_function))
        stack.enter_context(_checkpoints_traced_through(running, tracer.run_reentrant))
        stack.enter_context(_scripts_inlined(tracer.refusals))
        stack.enter_context(vmap_traced(tracer))
        stack.enter_context(_modules_converted(tracer.refusals))
        stack.enter_context(_training_watched(note_training))
        stack.enter_context(_batches_averaged())
        stack.enter_context(flex_attention_traced(tracer, replaced))
        stack.enter_context(varlen_attention_traced(replaced))
        stack.enter_context(_sizes_computed_with())
        stack.enter_context(_sizes_spelled())
        stack.enter_context(_sizes_cut())
        stack.enter_context(_values_readable(real_values, questions))
        files = {type(part).__module__ for part in module.modules()}
        for owner, name, function in [*known_functions_of(files), *expert_loops_of(module)]:
            stack.enter_context(replaced(owner, name, function))
        if (interface := experts_interface()) is not None:
            stack.enter_context(replaced(interface, "get_interface", experts_function))
        # A check of values: nothing to check, nothing to compute.
        if hasattr(torch, "_check_tensor_all_with"):
            stack.enter_context(
                replaced(torch, "_check_tensor_all_with", lambda *args, **kwargs: None)
            )
        # Checks of values, too.
        stack.enter_context(replaced(torch.distributions.Distribution, "_validate_args", False))
        # Its own calls item() for every element.
        stack.enter_context(replaced(FakeTensor, "tolist", torch.Tensor.tolist))
        # Compiled functions run as the Python they were made from.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


_log2: Callable[[Any], Any] = getattr(torch, "_sym_log2")  # noqa: B009 - these have no types
_float: Callable[[Any], Any] = torch.sym_float

_OF_SIZES: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(torch, f"_sym_{name}") for name in _SYMBOLIC if hasattr(torch, f"_sym_{name}")
    },
    "log": lambda x, base=math.e: _log2(x) / math.log2(base),
    "log10": lambda x: _log2(x) / math.log2(10),
    "exp": lambda x: math.e ** _float(x),
    "pow": lambda x, y: _float(x) ** y,
    "isqrt": lambda x: math.floor(torch._sym_sqrt(x)),  # type: ignore[attr-defined]
}
"""What the functions of ``math`` are of a dynamic size, which they would take as a number."""


@contextmanager
def _sizes_computed_with() -> Iterator[None]:
    """Functions of ``math`` keep dynamic sizes."""

    def made(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
        def function(x: Any, *args: Any) -> Any:
            return (symbolic if isinstance(x, torch.SymInt | torch.SymFloat) else plain)(x, *args)

        return function

    with ExitStack() as stack:
        for name, symbolic in _OF_SIZES.items():
            stack.enter_context(replaced(math, name, made(getattr(math, name), symbolic)))
        yield


@contextmanager
def _sizes_spelled() -> Iterator[None]:
    """A dynamic size that is made into text reads as that of the dummy arguments.

    torch writes the name of its symbol, ``s0``. A model that looks up ``f"{height}x{width}"`` in a
    table would take another way than it does alone, and nothing would notice.
    """

    def spelled(
        number: torch.SymInt | torch.SymFloat, spell: Callable[[Any], str], plain: Callable[[], str]
    ) -> str:
        if not called_by_user():  # torch's own messages speak of symbols
            return plain()
        text = spell(number.node.hint)
        warnings.warn(
            f"{user_location()}: forward makes text of a dynamic size, which reads {text} in every "
            "call, as in this one. Messages may do so; decide by the size, not by its text.",
            UserWarning,
            stacklevel=2,
        )
        return text

    with ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            write = kind.__repr__

            def written(self: Any, write: Callable[[Any], str] = write) -> str:
                return spelled(self, repr, lambda: write(self))

            def formatted(self: Any, spec: str, write: Callable[[Any], str] = write) -> str:
                return spelled(self, lambda hint: format(hint, spec), lambda: write(self))

            stack.enter_context(replaced(kind, "__repr__", written))
            stack.enter_context(replaced(kind, "__format__", formatted))
        yield


@contextmanager
def _sizes_cut() -> Iterator[None]:
    """Say where ``int(size * 0.5)`` makes a number of what follows from a dynamic size.

    Python's ``int`` gives plain numbers alone. So the number becomes a condition, and calls with
    sizes that give another one are refused; whoever has written the line does not expect that.
    """
    plain: Callable[[Any], int] = torch.SymFloat.__int__

    def cut(number: torch.SymFloat) -> int:
        made = plain(number)
        if called_by_user():
            warnings.warn(
                f"{user_location()}: int() makes the number {made} of what follows from a dynamic "
                "size, and calls whose sizes give another one are refused. Write math.floor(), "
                "math.ceil() or //, which follow the size.",
                UserWarning,
                stacklevel=2,
            )
        return made

    with replaced(torch.SymFloat, "__int__", cut):
        yield


@contextmanager
def _values_readable(
    real_values: Callable[[torch.Tensor], torch.Tensor | None], questions: Questions
) -> Iterator[None]:
    """Let transformers look at values that are known.

    Its ``is_tracing(tensor)`` asks whether values can be read; for any fake tensor it says they
    cannot. The tracer does know the values of positions that are counted from shapes, so a causal
    mask without padding stays ``is_causal=True``. Other values are a question. Whatever else
    transformers and torch ask (``torch.compiler.is_compiling()``, ``torch.jit.is_tracing()``) has
    the answer that it has without a trace.
    """
    original = getattr(sys.modules.get("transformers.utils.import_utils"), "is_tracing", None)
    if original is None:
        yield
        return

    def is_tracing(tensor: Any = None) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        with torch._C.DisableTorchFunction():  # computing the values is no part of the model
            known = real_values(tensor) is not None
        return original() if known or questions.may_look(sys._getframe(1)) else original(tensor)

    with ExitStack() as stack:
        # Modules of transformers import the function by name, so each has a copy to replace.
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and vars(module).get("is_tracing") is original:
                stack.enter_context(replaced(module, "is_tracing", is_tracing))
        yield


@contextmanager
def _functions_applied_by(apply_function: Callable[..., Any]) -> Iterator[None]:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply_function(cls, original.__get__(None, cls), args, kwargs)

    with replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def _checkpoints_traced_through(
    running: RunningModules, run_reentrant: Callable[..., Any]
) -> Iterator[None]:
    """Both modes of ``torch.utils.checkpoint`` just run the function, in a recompute region."""

    # In the place of autograd Functions whose forward runs without a graph, so that nothing in it
    # would be recorded with gradients.
    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return run_reentrant(function, args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        with running.recompute():
            yield

    with (
        replaced(checkpointing, "CheckpointFunction", Reentrant),
        replaced(checkpointing, "_checkpoint_without_reentrant_generator", generator),
    ):
        yield


@contextmanager
def _scripts_inlined(refusals: Refusals) -> Iterator[None]:
    """Scripted functions run as the Python they were made from."""
    call = torch.jit.ScriptFunction.__call__

    def inlined(self: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(self, "_torchdynamo_inline", None)
        if python is None:
            with refusals:
                raise TraceError(
                    f"the scripted function {getattr(self, 'name', '')} cannot be traced",
                    why="its Python source is not attached (it was loaded or traced, not made by "
                    "torch.jit.script)",
                    hint="call the Python function it was made from",
                )
        return python(*args, **kwargs)

    with replaced(torch.jit.ScriptFunction, "__call__", inlined):
        yield
    assert torch.jit.ScriptFunction.__call__ is call


@contextmanager
def _modules_converted(refusals: Refusals) -> Iterator[None]:
    """``module.to(dtype)`` leaves parameters alone that have this dtype. Others are not changed by
    forward.
    """
    original = torch.nn.Module._apply

    def apply(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        # What would ``fn`` make of each tensor? Only a change of dtype is a change.
        for name, tensor in (
            *self.named_parameters(recurse=recurse),
            *self.named_buffers(recurse=recurse),
        ):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                dtype = fn(tensor).dtype
            if dtype != tensor.dtype:
                with refusals:
                    raise TraceError(
                        f"forward converts {name} of a {type(self).__name__} from {tensor.dtype} "
                        f"to {dtype}",
                        where=str(user_location()),
                        why="it would be of another dtype after the first call than before",
                        hint="convert the module before compiling, or cast in forward what it is "
                        "given",
                    )
        return self

    with replaced(torch.nn.Module, "_apply", apply):
        yield
    assert torch.nn.Module._apply is original


@contextmanager
def _training_watched(note_training: Callable[[], None]) -> Iterator[None]:
    """A property in front of the attribute ``training`` that every module keeps."""

    def read(module: torch.nn.Module) -> bool:
        if not is_same_in_both_modes(sys._getframe(1)):
            note_training()
        return bool(module.__dict__["training"])

    def store(module: torch.nn.Module, training: bool) -> None:
        module.__dict__["training"] = training

    with replaced(torch.nn.Module, "training", property(read, store)):
        yield


@contextmanager
def _batches_averaged() -> Iterator[None]:
    """Batch norms with ``momentum=None`` keep the average over all batches. Their forward reads the
    number of batches as a float; here it stays a tensor.
    """
    original = _BatchNorm.forward

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
        if (
            self.momentum is not None
            or not self.training
            or count is None
            or mean is None
            or var is None
        ):
            return original(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            # The running average, as tensors: torch's own forward reads the count as a number.
            count.add_(1)
            share = 1.0 / count.to(mean.dtype)
            of_batch = torch.var_mean(input.to(mean.dtype), [0, *range(2, input.ndim)])
            for running, new in zip((var, mean), of_batch, strict=True):
                running.add_((new - running) * share)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    with replaced(_BatchNorm, "forward", forward):
        yield
