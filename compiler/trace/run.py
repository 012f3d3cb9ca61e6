"""One run of ``forward`` under the tracer: a module in one mode gives one graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from shardwright.compiler.ir.graph import DynamicDim, IRGraph
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.calls.repeated_calls import Known, RepeatedCalls
from shardwright.compiler.trace.calls.time_loops import warn_of_unrolled
from shardwright.compiler.trace.context.autocast_regions import one_autocast, surrounding_dtype
from shardwright.compiler.trace.context.fakes import (
    ModuleTensor,
    TraceMode,
    caches_without_fakes,
    fake_like,
    module_tensors,
    source_value,
    unchanged,
    without_logs_of_fakes,
)
from shardwright.compiler.trace.context.patches import patched
from shardwright.compiler.trace.context.running_modules import RunningModules
from shardwright.compiler.trace.context.source import location_of_error
from shardwright.compiler.trace.dense_experts import merge_dense_experts
from shardwright.compiler.trace.dummy_arguments import Arguments
from shardwright.compiler.trace.merge_lanes import merge_expert_lanes
from shardwright.compiler.trace.recorder import Recorder, Variable
from shardwright.compiler.trace.roll_steps import roll_time_steps
from shardwright.compiler.trace.tracer import Tracer
from shardwright.compiler.trace.trees import input_tree, output_tree
from shardwright.compiler.trace.values.constants import Constants
from shardwright.compiler.trace.values.dynamic import Dynamic
from shardwright.compiler.trace.values.known_inputs import KnownInput
from shardwright.compiler.trace.values.questions import Questions
from shardwright.runtime import structure
from shardwright.runtime.errors import ShardwrightError, TraceError

DynamicDims = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Traced:
    """A graph, whether its making depended on ``self.training``, and what is known of its
    values.
    """

    graph: IRGraph
    reads_training: bool
    constants: Constants
    questions: Questions


def run_once(
    module: torch.nn.Module,
    arguments: Arguments,
    dynamic_dims: DynamicDims,
    known: Mapping[str, KnownInput],
    name: str,
    *,
    training: bool,
    questions: Questions,
    dummies: Mapping[str, torch.Tensor],
    calls: Known,
) -> Traced:
    """Trace ``module`` in training or eval mode; the module is left as it was.

    ``known``: inputs whose values it may read. ``dummies``: values that stand for those of some
    dummy arguments, by the names of the inputs, where ``questions`` lets forward look at them.
    ``calls``: what calls gave in other runs on these arguments; it grows.
    """
    with unchanged(module), caches_without_fakes():
        module.train(training)
        run = _Run(module, arguments, dynamic_dims, known, name, questions, calls)
        try:
            return run.trace(dummies)
        finally:
            questions.forget_frames()
            # Fakes refer to the mode and to each other through graphs of autograd, where Python
            # finds no cycles to free: without this the module would live for ever.
            run.mode.lift = None


UPDATES_ARGUMENTS: ContextVar[bool] = ContextVar("updates_arguments", default=False)
"""Whether whoever asks for the trace gives the caller's own objects what forward puts into them."""


class _Run:
    def __init__(
        self,
        module: torch.nn.Module,
        arguments: Arguments,
        dynamic_dims: DynamicDims,
        known: Mapping[str, KnownInput],
        name: str,
        questions: Questions,
        calls: Known,
    ) -> None:
        self.module, self.arguments, self.known, self.name = module, arguments, known, name
        self.questions, self.calls = questions, calls
        self.dynamic = Dynamic(dynamic_dims, arguments.tensor_shapes())
        self.running = RunningModules(module)
        self.recorder = Recorder(self.running, self.dynamic)
        self.mode = TraceMode(allow_non_fake_inputs=True, shape_env=self.dynamic.env)
        # Torch keeps what calls on fakes have returned, and looks it up by shapes. A shape with a
        # symbol is hardly ever found again, and to keep it takes as long as the call.
        self.mode.cache_enabled = self.dynamic.env is None
        self.constants = Constants(self.recorder, self.mode, module)
        self.recorder.make_constant = self.mode.lift = self.constants.fake
        self.sources: list[tuple[ModuleTensor, torch.Tensor, IRValue]] = []
        self.inputs: dict[str, IRValue] = {}
        self._input_variables: dict[str, tuple[IRValue, Variable]] = {}
        self.reads_training = False
        self.autocast = surrounding_dtype()

    def trace(self, dummies: Mapping[str, torch.Tensor]) -> Traced:
        # The arguments with fakes in them, then the parameters and buffers.
        arguments = {
            name: structure.map_leaves(value, self._fake_input, name)
            for name, value in self.arguments.given
        }
        self.constants.replace_dummies(dummies)
        self._place_fakes()
        signature = tuple(
            (name, input_tree(self.recorder, value, name)) for name, value in arguments.items()
        )
        # Arguments may be caches, which forward fills: what has changed in them is told of below.
        before = structure.flatten(arguments)
        result = self._run_forward(arguments)
        after = structure.flatten(arguments)
        # What forward has asked of dynamic sizes must hold for others than the example, too.
        self.dynamic.check()
        graph = IRGraph(
            name=self.name,
            inputs=tuple(self.inputs.values()),
            parameters=tuple(value for tensor, _, value in self.sources if tensor.is_parameter),
            buffers=tuple(value for tensor, _, value in self.sources if not tensor.is_parameter),
            output=output_tree(self.recorder, result),
            buffer_updates=tuple(self._buffer_updates()),
            ops=tuple(self.recorder.ops),
            signature=signature,
            defaults=self.arguments.defaults,
            argument_order=self.arguments.order,
            constants=tuple(self.recorder.constants),
            dynamic_dims=tuple(
                DynamicDim(self.inputs[p].name, dim, name)
                for p, dim, name in self.dynamic.all_dims()
            ),
            constant_inputs=tuple(self.constants.inputs_read()),
            constant_buffers=tuple(self.constants.buffers_read()),
            conditions=self.dynamic.conditions(),
            autocast=self.autocast,
            module_types={
                path: type(module).__name__
                for path, module in self.module.named_modules(remove_duplicate=False)
            },
        )
        self._warn_written_inputs(before, after)
        graph = roll_time_steps(merge_dense_experts(merge_expert_lanes(graph)))
        warn_of_unrolled(graph.ops)
        return Traced(graph, self.reads_training, self.constants, self.questions)

    # sources

    def _fake_input(self, path: str, leaf: Any) -> Any:
        """What ``forward`` gets for a leaf of the arguments: a fake for a tensor, anything else as
        it is.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        # The fake has the symbols of dynamic dims among its sizes.
        with self.mode:
            fake = torch.empty(self.dynamic.shape(path, leaf.shape), dtype=leaf.dtype, device="cpu")
            if differentiable:  # not a leaf of autograd: forward may change it in place
                fake = fake.requires_grad_().clone()
        shape = tuple(self.dynamic.size(size) for size in fake.shape)
        # The value that stands for it in the graph; then all that is known of it.
        value = IRValue(
            self.recorder.names.unique(path), shape, leaf.dtype, differentiable, ValueKind.INPUT
        )
        self.recorder.bind_source(fake, value)
        self.constants.add_dummy(value.name, path, leaf)
        if path in self.known:
            self.constants.add_input(value.name, self.known[path])
        if leaf.requires_grad:
            self.recorder.ask_gradient(value, leaf=leaf.is_leaf)
        self.inputs[path] = value
        self._input_variables[path] = (value, self.recorder.variables[id(fake)])
        return fake

    def _place_fakes(self) -> None:
        for tensor in module_tensors(self.module):
            fake = fake_like(self.mode, tensor.original, parameter=tensor.is_parameter)
            value = source_value(tensor, self.recorder.names)
            self.recorder.bind_source(fake, value)
            if value.requires_grad and not value.takes_gradient:  # a buffer
                self.recorder.ask_gradient(value, leaf=True)
            self.sources.append((tensor, fake, value))
            if not tensor.is_parameter:
                self.constants.add_buffer(value.name, tensor.original, persistent=tensor.persistent)
            for holder, key in tensor.places:
                holder[key] = fake

    # forward

    def _run_forward(self, arguments: dict[str, Any]) -> Any:
        repeated = RepeatedCalls(self.mode, self.calls)
        tracer = Tracer(self.recorder, self.constants, self.questions, repeated)

        def note_training() -> None:
            self.reads_training = True

        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(without_logs_of_fakes())
                stack.enter_context(self.mode)
                # Some kernels take sizes as numbers; their Python forms do not.
                if self.dynamic.env is not None:
                    stack.enter_context(enable_python_dispatcher())
                stack.enter_context(one_autocast(self.autocast))
                stack.enter_context(
                    patched(
                        self.module,
                        self.running,
                        tracer,
                        note_training,
                        self.constants.certain,
                        self.questions,
                    )
                )
                stack.enter_context(self.running.followed())
                stack.enter_context(tracer)
                result = self.module(**arguments)
        except Exception as error:
            # Forward may have caught our error and failed later because of that; the first one is
            # the cause.
            if tracer.refusals.first not in (None, error):
                raise tracer.refusals.first from error
            if isinstance(error, ShardwrightError):
                raise
            raise self._failed(error) from error
        if tracer.refusals.first is not None:
            raise tracer.refusals.first
        return result

    def _failed(self, error: Exception) -> TraceError:
        """The refusal of a model whose ``forward`` raised ``error``."""
        location, why = location_of_error(error), None
        hint = "call the module with the dummy arguments to see whether it runs by itself"
        # torch's numbers that stand for sizes lack some of what an int has, such as a hash.
        if "SymInt" in str(error) or "SymFloat" in str(error):
            why = "a dynamic size is given to what takes only a plain number"
            hint = "compute with + - * // % and math, or leave the dim out of dynamic_dims"
        return TraceError(
            f"forward of {type(self.module).__name__} failed while it was traced: "
            f"{type(error).__name__}: {error}",
            where=str(location) if location else None,
            why=why,
            hint=hint,
        )

    # effects

    def _buffer_updates(self) -> Iterator[tuple[IRValue, IRValue]]:
        """Buffers that hold another value after the call."""
        # A buffer is updated if another value lies in its place, or if it was written to.
        for tensor, fake, value in self.sources:
            holder, key = tensor.places[0]
            now = holder.get(key)
            if tensor.is_parameter:
                if now is not fake:
                    raise TraceError(
                        f"forward replaces the parameter {tensor.names[0]}",
                        hint="parameters are changed by the optimizer only",
                    )
                continue
            if now is None:
                raise TraceError(
                    f"forward removes the buffer {tensor.names[0]}",
                    hint="keep it, and change its contents",
                )
            after = self.recorder.unchecked(self.recorder.value(now))
            if after.name != value.name:
                if value.name in self.constants.read:
                    raise TraceError(
                        f"forward changes the buffer {tensor.names[0]}, whose values decide "
                        "what it computes",
                        why="the traced graph does in every call what it does in the first one",
                        hint="keep what decides in a buffer that forward leaves as it is, or in a "
                        "number",
                    )
                yield value, after

    def _warn_written_inputs(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Warn of tensors that forward writes into, and of containers among the arguments in which
        it has put others, such as a cache. ``before``, ``after``: the leaves of the arguments.
        """
        written = [
            value.name
            for path, (value, variable) in self._input_variables.items()
            if variable.version
        ]
        tensors = {path for path, leaf in after.items() if isinstance(leaf, torch.Tensor)}
        put = [path for path in after if path in tensors and before.get(path) is not after[path]]
        if written:
            warnings.warn(
                f"forward changes its arguments in place: {', '.join(written)}; "
                "the compiled module leaves the caller's tensors as they are",
                stacklevel=4,
            )
        if put and not UPDATES_ARGUMENTS.get():
            named = ", ".join(put[:3]) + (f" and {len(put) - 3} more" if len(put) > 3 else "")
            warnings.warn(
                f"forward puts other tensors into its arguments: {named}; the compiled module "
                "leaves the caller's object as it is. Return what was put there, and pass that on",
                stacklevel=4,
            )
