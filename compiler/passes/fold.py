"""Compute what depends on no input and no weight while compiling: position indices, causal masks,
constant tables.

An operator is computed here if all tensors it reads are constants or were computed here. Results
that something else reads become constants of the graph, kept in the file of constants, if they are
small; large ones stay computed by every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, WhenTraining, leaves
from shardwright.compiler.ir.size import Size, to_python
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.render import call_source, imports_of

MAX_CONSTANT_BYTES = 2**20
"""The most bytes of a result that is folded. It is cheaper to compute a larger one than to ship it
to every rank and keep it.
"""

MAX_COMPUTED_BYTES = 2**26
"""The most bytes of a tensor that is made while compiling."""


def fold_constants(graph: IRGraph) -> IRGraph:
    """``graph``, and its body for evaluation, with the results of folded operators as constants."""
    taken: set[str] = set()  # names that no constant may get
    for body in graph.bodies:
        taken |= {value.name for value in body.sources}
        taken |= {result.name for op in body.ops for result in op.results}
    taken |= {(value.fqn or "").partition(".")[0] for value in graph.sources}
    folded = _folded(graph, taken)
    return (
        replace(folded, eval_graph=_folded(graph.eval_graph, taken)) if graph.eval_graph else folded
    )


class FoldedValues:
    """The values of a graph that depend on no input and no weight, computed when they are asked
    for.
    """

    def __init__(self, graph: IRGraph) -> None:
        self._computed: dict[str, torch.Tensor] = {v.name: tensor for v, tensor in graph.constants}
        self._producers: dict[str, IROp] = {}
        for op in graph.ops:
            known = all(self.known(value) for value in op.operands)
            if known and _is_foldable(op):
                self._producers |= {result.name: op for result in op.results}

    def known(self, value: IRValue) -> bool:
        """Whether a value depends on no input and no weight."""
        return value.name in self._computed or value.name in self._producers

    def of(self, value: IRValue) -> torch.Tensor | None:
        """The numbers of a value; ``None`` of one that is not known."""
        if value.name not in self._computed and value.name in self._producers:
            op = self._producers[value.name]
            for operand in op.operands:
                self.of(operand)
            self._computed |= _results(op, self._computed)
        return self._computed.get(value.name)


def _folded(graph: IRGraph, taken: set[str]) -> IRGraph:
    # First compute all that follows from constants. Then, from the end, keep what is still needed.
    known: dict[str, torch.Tensor] = {value.name: tensor for value, tensor in graph.constants}
    computed: set[str] = set()
    for op in graph.ops:
        if all(value.name in known for value in op.operands) and _is_foldable(op):
            known |= _results(op, known)
            computed.add(op.name)
    kept: list[IROp] = []
    constants: dict[str, IRValue] = {}
    needed = {value.name for value in graph.outputs} | {
        after.name for _, after in graph.buffer_updates
    }
    # Backwards: an operator is needed if one behind it reads a result.
    for op in reversed(graph.ops):
        read = [value for value in op.results if value.name in needed]
        # A result is kept as a constant. A large one, such as a mask of 4096 x 4096, is made at run
        # time.
        if op.name in computed and all(_num_bytes(value) <= MAX_CONSTANT_BYTES for value in read):
            constants |= {value.name: _constant(value, taken) for value in read}
        else:
            kept.append(op)
            needed |= {value.name for value in op.operands}

    # Whoever read a result of a dropped operator reads the constant.
    def new(arg: Arg) -> Arg:
        return constants.get(arg.name, arg) if isinstance(arg, IRValue) else arg

    return replace(
        graph,
        ops=tuple(op.map_args(new) for op in reversed(kept)),
        constants=(
            *graph.constants,
            *((value, known[name]) for name, value in reversed(constants.items())),
        ),
        output=graph.output.map(new),
        buffer_updates=tuple(
            (before, constants.get(after.name, after)) for before, after in graph.buffer_updates
        ),
    ).live()


def _is_foldable(op: IROp) -> bool:
    """Whether a call gives the same values whenever and wherever it is made, and of reasonable
    size.
    """
    opdef = registry.get(op.target)
    # A user's function may do anything.
    if type(opdef) is not OpDef or op.target.startswith(("empty", "new_empty")):
        return False
    # ``only_in``: it runs in training alone. ``autocast``: tensors of floating point are cast to
    # the dtype of the region.
    is_cast = op.autocast is not None and any(v.dtype.is_floating_point for v in op.operands)
    if op.only_in is not None or is_cast or any(value.requires_grad for value in op.results):
        return False
    # Dynamic sizes have no numbers now.
    sizes = [size for value in op.results for size in value.shape]
    settled = [*sizes, *(leaf for _, arg in op.args for leaf in leaves(arg))]
    if any(hasattr(leaf, "free_symbols") for leaf in settled) or any(
        isinstance(arg, WhenTraining) for _, arg in op.args
    ):
        return False
    rule = instantiate(opdef, op)
    return not (rule.random or rule.updates) and all(
        _num_bytes(value) <= MAX_COMPUTED_BYTES for value in op.results
    )


def _results(op: IROp, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The call made for real, as generated code would make it."""
    # Operands get names of their own, as names of values need not be identifiers.
    operands = {f"operand_{index}": known[value.name] for index, value in enumerate(op.operands)}
    names = iter(operands)
    call = op.map_args(
        lambda leaf: replace(leaf, name=next(names)) if isinstance(leaf, IRValue) else leaf
    )
    # What the statements of a generated file see.
    scope: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "math": math,
        "self": SimpleNamespace(device=torch.device("cpu")),
    }
    for statement in imports_of(op):
        exec(statement, scope)
    with torch.no_grad():
        result = eval(call_source(call, lambda value: value.name, to_python), {**scope, **operands})
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return {value.name: tensor.clone() for value, tensor in zip(op.results, tensors, strict=True)}


def _constant(value: IRValue, taken: set[str]) -> IRValue:
    name = f"const_{value.name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return replace(value, name=name, kind=ValueKind.CONSTANT)


def _num_bytes(value: IRValue) -> Size:
    return math.prod(value.shape) * value.dtype.itemsize
