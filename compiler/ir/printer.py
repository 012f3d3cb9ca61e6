"""Graphs as text, one line per operator.

%h: f32[4, 128, 768] = linear(%x, %weight, bias=%bias)  # transformer.h.0.mlp.c_fc
modeling_gpt2.py:123
"""

from __future__ import annotations

import os
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import Arg, IROp, RankDevice, WhenTraining
from shardwright.compiler.ir.quote import comment
from shardwright.compiler.ir.size import Size, to_python
from shardwright.compiler.ir.time_steps import StepIndex, TimeSteps
from shardwright.compiler.ir.value import IRValue

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def print_graph(graph: IRGraph) -> str:
    """The whole graph; parameters and buffers that no operator reads are left out."""
    # A transformer has buffers that nothing reads; they would only fill the page.
    used = (
        set(graph.uses())
        | {v.name for v in graph.outputs}
        | {v.name for pair in graph.buffer_updates for v in pair}
    )
    lines = [
        f"graph {comment(graph.name)}"
        + (f"  autocast({print_dtype(graph.autocast)})" if graph.autocast else "")
    ]
    for word, values in (
        ("input", graph.inputs),
        ("parameter", graph.parameters),
        ("buffer", graph.buffers),
    ):
        shown = (value for value in values if word == "input" or value.name in used)
        lines += [f"  {word} {print_value(value)}{_source_notes(value)}" for value in shown]
    lines += [f"  constant {print_value(value)}" for value, _ in graph.constants]
    lines += [f"  default {name} = {print_arg(default)}" for name, default in graph.defaults]
    lines += ["  training only"] if graph.training_only else []
    lines += [f"  constant input {name}" for name, _ in graph.constant_inputs]
    lines += [f"  constant buffer {name}" for name, _ in graph.constant_buffers]
    lines += [f"  where {print_size(condition)}" for condition in graph.conditions]
    lines += [f"  {print_op(op, graph.dims)}" for op in graph.ops]
    lines += [f"  update %{before.name} = %{after.name}" for before, after in graph.buffer_updates]
    lines.append(f"  return {print_tree(graph.output)}")
    text = "\n".join(lines) + "\n"
    if graph.eval_graph is not None:
        text += "in eval mode:\n" + print_graph(graph.eval_graph)
    return text


def print_op(op: IROp, dims: ModelDims | None = None) -> str:
    """One operator; behind it the dims of its results by name and its rule's annotation, where they
    are known.
    """
    results = ", ".join(print_value(value) for value in op.results)
    args = ", ".join(
        _named_arg(name, value, position) for position, (name, value) in enumerate(op.args)
    )
    notes = [dims.describe(value.name) for value in op.results] if dims is not None else []
    notes += [op.module_path, print_location(op)]
    notes += [f"[{op.region}]"] if op.region else []
    notes += [f"autocast({print_dtype(op.autocast)})"] if op.autocast else []
    notes += [] if op.grad_enabled else ["no_grad"]
    notes += [f"only in {op.only_in}"] if op.only_in else []
    notes += [f"{{{op.rule.annotation}}}"] if op.rule else []
    told = comment("  ".join(note for note in notes if note))
    return f"{results} = {op.target}({args})  # {told}".rstrip(" #")


def print_value(value: IRValue) -> str:
    """The text of a value: ``%x: f32[4, 128]``. A trailing ``'`` marks values that gradients flow
    to.
    """
    grad = "'" if value.requires_grad else ""
    return (
        f"%{value.name}: "
        f"{print_dtype(value.dtype)}[{', '.join(print_size(size) for size in value.shape)}]{grad}"
    )


def print_size(size: Size | sympy.Basic) -> str:
    """A size as Python source over the names of dynamic dims."""
    return to_python(size) if isinstance(size, sympy.Basic) else str(size)


def print_dtype(dtype: torch.dtype) -> str:
    """The short name of a dtype, ``f32`` for ``torch.float32``; torch's own name if there is no
    short one.
    """
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def print_arg(arg: Arg) -> str:
    """An argument as it would stand in Python source, values marked with ``%``."""
    if isinstance(arg, IRValue):
        return f"%{arg.name}"
    if isinstance(arg, tuple | list):
        return f"({', '.join(map(print_arg, arg))}{',' if len(arg) == 1 else ''})"
    # ``1:n`` and ``::2``, as between brackets.
    if isinstance(arg, slice):
        bounds = ["" if bound is None else print_arg(bound) for bound in (arg.start, arg.stop)]
        return ":".join(bounds + ([print_arg(arg.step)] if arg.step is not None else []))
    if isinstance(arg, WhenTraining):
        return f"({print_arg(arg.train)} if training else {print_arg(arg.eval)})"
    if isinstance(arg, RankDevice):
        return "device"
    if isinstance(arg, torch.dtype):
        return print_dtype(arg)
    if isinstance(arg, sympy.Basic):
        return print_size(arg)
    if isinstance(arg, StepIndex):
        return arg.source
    if isinstance(arg, TimeSteps):
        return f"{arg.count} x ({'; '.join(map(_print_step, arg.ops))})"
    if arg is Ellipsis:
        return "..."
    return comment(getattr(arg, "__qualname__", None) or repr(arg))


def _print_step(op: IROp) -> str:
    """An operator of a step, without its shapes."""
    results = ", ".join(f"%{value.name}" for value in op.results)
    args = ", ".join(_named_arg(name, arg, i) for i, (name, arg) in enumerate(op.args))
    return f"{results} = {op.target}({args})"


def print_tree(tree: Tree) -> str:
    """The structure of a result or argument."""
    if tree.kind == "leaf":
        return print_arg(tree.value)
    if tree.kind in ("tuple", "list"):
        items = ", ".join(print_tree(child) for _, child in tree.children)
        return f"({items})" if tree.kind == "tuple" else f"[{items}]"
    if tree.kind == "dict":
        return (
            "{" + ", ".join(f"{key!r}: {print_tree(child)}" for key, child in tree.children) + "}"
        )
    name = comment((tree.type_path or "").partition(":")[2])
    children = (f"{comment(str(key))}={print_tree(child)}" for key, child in tree.children)
    return f"{name}({', '.join(children)})"


def print_location(op: IROp) -> str:
    """The place of a call in the user's code: ``modeling_gpt2.py:123``."""
    return f"{os.path.basename(op.source.file)}:{op.source.line}" if op.source else ""


def _named_arg(name: str, value: Any, position: int) -> str:
    return (
        print_arg(value)
        if name.isdigit() or position == 0 or isinstance(value, IRValue)
        else f"{name}={print_arg(value)}"
    )


def _source_notes(value: IRValue) -> str:
    notes = [value.fqn] if value.fqn and value.fqn != value.name else []
    notes += [f"tied to {', '.join(value.aliases)}"] if value.aliases else []
    return f"  # {comment('  '.join(notes))}" if notes else ""
