"""The graph under construction: which value each tensor stands for, and the operators so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.compiler.ir.op import Arg, IROp, RankDevice, leaves
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.calls.normalise import bind
from shardwright.compiler.trace.context.autocast_regions import autocast_dtype
from shardwright.compiler.trace.context.running_modules import RunningModules
from shardwright.compiler.trace.context.source import assigned_names, location_of, user_frame
from shardwright.compiler.trace.naming import Namer
from shardwright.compiler.trace.values.dynamic import Dynamic
from shardwright.compiler.trace.values.selections import Selection
from shardwright.runtime.errors import TraceError

_PYTHON_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""What torch takes Python's types for where a dtype is asked for."""

STATISTICS = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
"""Operators that update their running statistics themselves: the argument that says whether they
do, and its default.
"""

CUTS = {"detach", "data"}
"""Views that no gradient flows through."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """What an operator's result looks like."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        # views made under no_grad claim to require a gradient, but none flows through them
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.requires_grad and torch.is_grad_enabled()
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call as the user made it, with graph values in the place of tensors."""

    function: Callable[..., Any]
    name: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """An argument by position, or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


@dataclass(eq=False, slots=True)
class Variable:
    """What one tensor object of the running model holds now.

    A view knows its ``parent`` and the ``call`` (which result, ``index``) that made it. ``version``
    counts the writes to the root; a view whose version is behind takes its value from the root
    anew.
    """

    value: IRValue
    parent: Variable | None = None
    call: Call | None = None
    index: int = 0
    version: int = 0
    siblings: list[Variable] = field(default_factory=list)  # all results of the same call
    buffer: str | None = None  # the FQN of the buffer this is

    @property
    def root(self) -> Variable:
        """The variable that this one is a view of in the end, or itself."""
        variable = self
        while variable.parent is not None:
            variable = variable.parent
        return variable


class Recorder:
    """Collects operators; tensors are known by identity and kept alive for that."""

    def __init__(self, running: RunningModules, dynamic: Dynamic) -> None:
        self.running = running
        self.dynamic = dynamic
        self.names = Namer()
        self.ops: list[IROp] = []
        self.op_names = Namer()
        self.makers: dict[str, IROp] = {}  # value name -> the operator that makes it
        self._label: str | None = None  # names the next results, if set
        self.calls: dict[
            str, tuple[Call, int]
        ] = {}  # value name -> the call that made it, which result
        self.constants: list[tuple[IRValue, torch.Tensor]] = []
        self.variables: dict[int, Variable] = {}
        self.selections: dict[int, Selection] = {}  # what fakes that stand for x[mask] would hold
        self.captured: set[str] = set()  # constants that belong to somebody outside of forward
        # Values made of something whose gradient the user asks for, outside of the module.
        self._asked: set[str] = set()
        self._leaves: set[str] = set()  # values at which torch's own graph of such gradients begins
        self._checked: dict[str, IRValue] = {}  # value name -> what was checked
        # Tensors by ``id``, which Python gives anew once an object is gone.
        self._kept: list[Any] = []
        # Set by the tracer.
        self.make_constant: Callable[[torch.Tensor], torch.Tensor] | None = None

    # values of tensors

    def bind_source(self, tensor: torch.Tensor, value: IRValue) -> None:
        """Let ``tensor`` stand for a value that no operator makes."""
        self.bind(
            tensor, Variable(value, buffer=value.fqn if value.kind is ValueKind.BUFFER else None)
        )

    def bind(self, tensor: torch.Tensor, variable: Variable) -> None:
        """Let ``tensor`` stand for a variable."""
        self.variables[id(tensor)] = variable
        self.keep(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` alive, so that no other object gets its identity."""
        self._kept.append(tensor)

    def variable(self, tensor: torch.Tensor) -> Variable:
        """What ``tensor`` stands for. A tensor that was never seen is a constant the model
        captured.
        """
        variable = self.variables.get(id(tensor))
        if variable is None:
            assert self.make_constant is not None
            if id(tensor) in self.selections:
                raise self.selections[id(tensor)].error
            if isinstance(tensor, FakeTensor):
                raise TraceError(
                    "forward uses a tensor that it kept outside of the module in an earlier call",
                    where=self.where(),
                    why=f"its shape is {list(tensor.shape)}; it was made while the module was "
                    "traced, and has no values",
                    hint="empty the global dict or list that keeps it, and keep such tensors in "
                    "attributes of the module",
                )
            variable = self.variables[id(self.make_constant(tensor))]
        return variable

    def value(self, tensor: torch.Tensor) -> IRValue:
        """The value ``tensor`` holds now."""
        return self.current(self.variable(tensor))

    def current(self, variable: Variable) -> IRValue:
        """The value of a variable, taken from its root anew where that was written to since."""
        root = variable.root
        if variable.version != root.version:
            assert variable.parent is not None and variable.call is not None
            whole = self.current(variable.parent)
            # The view is taken again, of what its parent is now: a graph has values and no memory.
            call = replace(variable.call, args=(whole, *variable.call.args[1:]))
            flows = whole.requires_grad and call.name not in CUTS
            values = self.emit(
                call, [TensorType(v.value.shape, v.value.dtype, flows) for v in variable.siblings]
            )
            for sibling, value in zip(variable.siblings, values, strict=True):
                sibling.value, sibling.version = value, root.version
        return variable.value

    def check(self, function: Callable[..., Any], value: IRValue, *args: Arg) -> None:
        """Append an operator that checks ``value`` and returns it: all tensors that hold ``value``
        hold its result from here on. Gradients pass, also where the check stands under ``no_grad``.
        """
        like = TensorType(value.shape, value.dtype, value.requires_grad)
        with torch.enable_grad():
            checked = self.emit_one(function, like, value, *args)
        self._checked[checked.name] = value
        for variable in self.variables.values():
            if variable.value is value:
                variable.value = checked

    def unchecked(self, value: IRValue) -> IRValue:
        """What a check was given that has ``value`` for its result; any other value itself."""
        while value.name in self._checked:
            value = self._checked[value.name]
        return value

    def is_parameter(self, value: IRValue) -> bool:
        """Whether a value is a parameter, or one that was checked."""
        return self.unchecked(value).kind is ValueKind.PARAMETER

    # gradients

    def ask_gradient(self, value: IRValue, *, leaf: bool) -> None:
        """The user asks for the gradient of an input, or by ``requires_grad_()`` for that of
        another value.

        ``leaf``: whether nothing that it is made of gets one.
        """
        self._asked.add(value.name)
        if leaf:
            self._leaves.add(value.name)

    def requires_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` requires a gradient outside of a trace, in which every floating input
        does.
        """
        return tensor.requires_grad and self.gets_gradient(self.value(tensor))

    def gets_gradient(self, value: IRValue) -> bool:
        """Whether a gradient comes to ``value`` where the arguments are like the dummy ones."""
        return value.takes_gradient or value.name in self._asked

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a leaf of autograd's graph outside of a trace."""
        return (
            tensor.is_leaf
            or not self.requires_gradient(tensor)
            or self.value(tensor).name in self._leaves
        )

    def follows_inputs(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` requires a gradient if and only if the arguments of the call do."""
        return tensor.requires_grad and not self.value(tensor).takes_gradient

    # operators

    def emit(self, call: Call, results: Iterable[TensorType]) -> list[IRValue]:
        """Append the canonical operator for ``call``; the values of its results."""
        frame = user_frame()
        bound = bind(call.function, call.args, call.kwargs, where=lambda: self.where(frame))
        # All values that the call reads, also those inside of lists.
        operands: list[IRValue] = []
        for _, arg in bound.args:
            if type(arg) is IRValue:
                operands.append(arg)
            else:
                operands += [leaf for leaf in leaves(arg) if isinstance(leaf, IRValue)]
        trained = any(value.takes_gradient for value in operands)
        names_from = user_frame(naming=True)
        values = self._name_results(list(results), bound.name, names_from, trained=trained)
        # A gradient that the user asks for begins at what is made from nothing, and goes on from
        # there.
        if not operands or any(value.name in self._asked for value in operands):
            self._asked.update(value.name for value in values if value.requires_grad)
        self.calls.update({value.name: (call, index) for index, value in enumerate(values)})
        op = IROp(
            name=self.op_names.unique(values[0].name if values else bound.name),
            target=bound.target,
            args=bound.args,
            results=tuple(values),
            module_path=self.running.path,
            module_type=self.running.type_name,
            source=location_of(frame),
            region=self.running.region,
            autocast=autocast_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            updates_buffers=_updates_statistics(bound.target, dict(bound.args)),
        )
        self.ops.append(op)
        self.makers.update({value.name: op for value in values})
        return values

    def emit_one(
        self, function: Callable[..., Any], like: IRValue | TensorType, *args: Arg, **kwargs: Arg
    ) -> IRValue:
        """Append a call of ``function`` that has one result, shaped as ``like``."""
        result = TensorType(like.shape, like.dtype, like.requires_grad)
        return self.emit(Call(function, getattr(function, "__name__", ""), args, kwargs), [result])[
            0
        ]

    @contextmanager
    def named(self, label: str | None) -> Iterator[None]:
        """Name results after ``label`` (if any) instead of the user's variables, for writes to
        buffers.
        """
        outer, self._label = self._label, label
        try:
            yield
        finally:
            self._label = outer

    def _name_results(
        self, results: list[TensorType], word: str, frame: FrameType | None, *, trained: bool
    ) -> list[IRValue]:
        """The values of results, with names of their own. ``trained``: whether they are made of
        something that takes a gradient.
        """
        values = []
        for label, result in zip(self._labels(len(results), word, frame), results, strict=True):
            value = IRValue(
                self.names.unique(label),
                tuple(self.dynamic.size(size) for size in result.shape),
                result.dtype,
                result.requires_grad,
                ValueKind.ACTIVATION,
                takes_gradient=trained and result.requires_grad,
            )
            values.append(value)
        return values

    def _labels(self, count: int, word: str, frame: FrameType | None) -> list[str]:
        """The words that results are named by: the module's path, and the user's variable or the
        operator.
        """
        if self._label is not None:
            return [self._label] * count
        path = self.running.path
        if self.running.is_leaf and path:
            return [path] * count
        assigned = () if self.running.is_library else assigned_names(frame)
        # ``q, k, v = x.chunk(3)``: each result has its own name.
        if len(assigned) == count:
            return [f"{path}.{name}" for name in assigned]
        return [f"{path}.{assigned[0] if len(assigned) == 1 else word}"] * count

    # arguments

    def arg(self, arg: Any, caller: str = "an operator") -> Arg:
        """An argument of a call of the running model as an argument of the graph. ``caller``:
        whose, for errors.
        """
        # By type, from the most frequent to what no graph can hold.
        if isinstance(arg, torch.Tensor):
            return self.value(arg)
        if isinstance(arg, np.generic):  # before the Python numbers: np.float64 is a float
            return arg.item()
        if arg is None or isinstance(
            arg, bool | int | float | complex | str | torch.dtype | RankDevice | IRValue
        ):
            return arg
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.dynamic.size(arg)
        if isinstance(arg, type) and arg in _PYTHON_DTYPES:
            return _PYTHON_DTYPES[arg]
        if isinstance(arg, tuple | list):
            return tuple(self.arg(item, caller) for item in arg)
        if isinstance(arg, slice):
            return slice(self.arg(arg.start), self.arg(arg.stop), self.arg(arg.step))
        # Every device becomes that of the rank that runs the file.
        if isinstance(arg, torch.device):
            return RankDevice()
        if isinstance(arg, np.ndarray):
            assert self.make_constant is not None
            return self.value(self.make_constant(torch.from_numpy(arg)))
        if isinstance(arg, range):
            return tuple(arg)
        if arg is Ellipsis or isinstance(arg, torch.memory_format | torch.layout):
            return arg
        hint = (
            "pass tensors, numbers, strings, dtypes and tuples of these, of an object or dict "
            "what is used of it"
        )
        if isinstance(arg, torch.nn.Module):
            hint = (
                "call the module outside, or in a function under torch.utils.checkpoint, which is "
                "traced through"
            )
        elif callable(arg):
            hint = (
                "register a function that calls it with this one, or let it choose the function "
                "by a name"
            )
        raise TraceError(
            f"{caller} got an argument of type {type(arg).__name__}, which a graph cannot hold",
            where=self.where(),
            why="a call is written into the generated file, with tensors, numbers, strings and "
            "tuples",
            hint=hint,
        )

    # errors

    def where(self, frame: FrameType | None = None) -> str:
        """The user's file and line that runs now, and the module it runs for."""
        location = location_of(frame or user_frame())
        module = f"{self.running.path or '(root)'} ({self.running.type_name})"
        return f"{location} in {module}" if location else module

    def refusal(self, what: str, hint: str, why: str | None = None) -> TraceError:
        """The error for a call that no graph can hold, at the user's line that runs now."""
        return TraceError(what, where=self.where(), why=why, hint=hint)


def _updates_statistics(target: str, args: Mapping[str, Arg]) -> bool:
    """Whether a call writes to the running statistics among its arguments."""
    if target not in STATISTICS:
        return False
    name, default = STATISTICS[target]
    return isinstance(args.get("running_mean"), IRValue) and args.get(name, default) is True
