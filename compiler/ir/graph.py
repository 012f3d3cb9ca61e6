"""The graph: what the model computes, in static single assignment form, immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.runtime.arguments import checked_late
from shardwright.runtime.errors import PlanError, brief, did_you_mean
from shardwright.runtime.structure import join


@dataclass(frozen=True, slots=True)
class Tree:
    """A nested Python structure with leaves replaced: the arguments of ``forward``, or its result.

    ``kind`` is ``leaf`` (``value`` is an :class:`IRValue`, or a literal), ``tuple``, ``list``,
    ``dict`` or ``object``. ``children`` are ``(key, Tree)``: indices, dict keys, or attribute
    names. ``type_path`` is the import path of the class of an object (named tuples, dataclasses,
    transformers' ModelOutput and caches), which is rebuilt at run time.
    """

    kind: str
    value: Arg = None
    children: tuple[tuple[Any, Tree], ...] = ()
    type_path: str | None = None

    def leaves(self, path: str = "") -> list[tuple[str, Arg]]:
        """``(path, value)`` of every leaf, as ``flatten`` gives them at run time; the path is like
        ``past_key_values.0.key``.
        """
        if self.kind == "leaf":
            return [(path, self.value)]
        return [leaf for key, child in self.children for leaf in child.leaves(join(path, key))]

    def classes(self) -> list[str]:
        """The import paths of the classes of all objects in it."""
        own = [self.type_path] if self.type_path else []
        return own + [path for _, child in self.children for path in child.classes()]

    def map(self, function: Callable[[Arg], Arg]) -> Tree:
        """The structure with ``function`` applied to the value of every leaf."""
        if self.kind == "leaf":
            return replace(self, value=function(self.value))
        return replace(
            self, children=tuple((key, child.map(function)) for key, child in self.children)
        )


@dataclass(frozen=True, slots=True)
class DynamicDim:
    """An input dim whose size may vary: ``symbol`` is the size's name in expressions."""

    input: str
    dim: int
    symbol: str


@dataclass(frozen=True)
class IRGraph:
    """The operators of one module's ``forward``, topologically ordered. ``print`` shows them with
    shapes, dims and rules; ``builder`` begins a plan, where a policy gets the graph.

    ``ops``: the operators. ``parameters``, ``buffers``: the tensors of the module that they read.
    ``inputs``: the tensor leaves of the arguments, in order. ``signature``: argument name to its
    :class:`Tree` (leaves: input values, or literals that were fixed by tracing). ``defaults``:
    arguments that were absent and took their default; ``argument_order``: the names of all, as in
    ``forward``. ``dynamic_dims``: the input dims whose size may vary.
    ``dims``: the dims of the model (batch, heads, ...), once they are known. ``module_types``:
    module path to class name.
    ``output``: the structure of the result. ``buffer_updates``: buffer value to the value it has
    after the call.
    ``constants``: the tensors that constant values stand for. ``constant_inputs``: by name, the
    values of inputs that the trace has read; a call with others must be refused.
    ``constant_buffers``: the same of buffers that a checkpoint may change. ``conditions``:
    relations between dynamic sizes that the traced control flow took for granted; a call that
    breaks one must be refused. ``eval_graph``: the body for ``training=False`` where it differs in
    structure; parameters and buffers are shared by name. ``autocast``: the dtype of the autocast
    block that the module was traced in, if any; operators stand in it by their own ``autocast``.
    ``training_only``: there is no body for evaluation, in which ``forward`` changes parameters.
    """

    name: str
    inputs: tuple[IRValue, ...]
    parameters: tuple[IRValue, ...]
    buffers: tuple[IRValue, ...]
    ops: tuple[IROp, ...]
    output: Tree
    signature: tuple[tuple[str, Tree], ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    argument_order: tuple[str, ...] = ()  # of forward, given and absent alike
    constants: tuple[tuple[IRValue, torch.Tensor], ...] = ()
    buffer_updates: tuple[tuple[IRValue, IRValue], ...] = ()
    dynamic_dims: tuple[DynamicDim, ...] = ()
    constant_inputs: tuple[tuple[str, torch.Tensor], ...] = ()
    constant_buffers: tuple[tuple[str, torch.Tensor], ...] = ()
    conditions: tuple[sympy.Basic, ...] = ()
    eval_graph: IRGraph | None = None
    autocast: torch.dtype | None = None
    # Module path -> class name, for naming.
    module_types: Mapping[str, str] = field(default_factory=dict)
    dims: ModelDims | None = None  # filled by the dims pass
    # In eval mode forward changes parameters, which only optimizers may.
    training_only: bool = False

    @property
    def bodies(self) -> tuple[IRGraph, ...]:
        """The graph of training, and that of evaluation where it is another one."""
        return (self,) if self.eval_graph is None else (self, self.eval_graph)

    @property
    def outputs(self) -> tuple[IRValue, ...]:
        """The tensor leaves of the result, in order; a value returned twice appears twice."""
        return tuple(value for _, value in self.output.leaves() if isinstance(value, IRValue))

    @property
    def sources(self) -> tuple[IRValue, ...]:
        """Every value that no operator makes."""
        return (
            *self.inputs,
            *self.parameters,
            *self.buffers,
            *(value for value, _ in self.constants),
        )

    @property
    def used_parameters(self) -> tuple[IRValue, ...]:
        """The parameters in the order in which forward first uses them, which decides the buckets
        of their gradients.
        """
        # A dict keeps a name at the place of its first use.
        read = (
            value for op in self.ops for value in op.operands if value.kind is ValueKind.PARAMETER
        )
        return tuple({value.name: value for value in read}.values())

    @checked_late
    def op(self, name: str) -> IROp:
        """The operator of that name."""
        for op in self.ops:
            if op.name == name:
                return op
        raise PlanError(
            f"the graph has no operator {brief(name)}",
            hint=did_you_mean(name, [op.name for op in self.ops][:50]),
        )

    def producers(self) -> dict[str, tuple[IROp, int]]:
        """Value name to the operator that makes it, and which of its results it is."""
        return {
            value.name: (op, index) for op in self.ops for index, value in enumerate(op.results)
        }

    def uses(self) -> dict[str, list[tuple[IROp, int]]]:
        """Value name to the operators that read it, with the operand position."""
        uses: dict[str, list[tuple[IROp, int]]] = {}
        for op in self.ops:
            for position, value in enumerate(op.operands):
                uses.setdefault(value.name, []).append((op, position))
        return uses

    def with_ops(self, ops: tuple[IROp, ...]) -> IRGraph:
        """The graph with other operators."""
        return replace(self, ops=ops)

    def live(self, *, updates: bool = True) -> IRGraph:
        """The graph without operators whose results nobody reads, and without constants that nobody
        reads. Without ``updates`` what serves updates of buffers alone is left out, too.
        """
        needed = {value.name for value in self.outputs}
        if updates:
            needed |= {after.name for _, after in self.buffer_updates}
        kept: list[IROp] = []
        # Backwards, so that readers come before what they read and one pass is enough.
        for op in reversed(self.ops):
            read = any(result.name in needed for result in op.results)
            if read or (updates and op.updates_buffers):
                needed.update([value.name for value in op.operands])
                kept.append(op)
        return replace(
            self,
            ops=tuple(reversed(kept)),
            constants=tuple(
                (value, tensor) for value, tensor in self.constants if value.name in needed
            ),
        )

    def symbols(self) -> dict[str, tuple[IRValue, int]]:
        """Symbol name to the input and dim that give its size."""
        by_name = {value.name: value for value in self.inputs}
        # Several inputs may share a symbol. Reversed, so that the first of them is the one that
        # stays.
        return {d.symbol: (by_name[d.input], d.dim) for d in reversed(self.dynamic_dims)}
