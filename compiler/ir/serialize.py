"""Graphs as plain data, and the digest of a graph."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp, RankDevice, WhenTraining
from shardwright.compiler.ir.printer import print_size
from shardwright.compiler.ir.size import dynamic_sizes
from shardwright.compiler.ir.time_steps import TimeSteps
from shardwright.compiler.ir.value import IRValue


def digest(graph: IRGraph) -> str:
    """The sha256 of :func:`to_json`, in hex: equal for graphs that compute the same in the same
    way.

    The values of parameters and buffers do not enter, those of constants do. Neither do source
    lines and file names.
    """
    text = json.dumps(to_json(graph), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(graph: IRGraph) -> dict[str, Any]:
    """The graph as dicts, lists, strings and numbers, without rules and source locations."""
    return {
        "name": graph.name,
        "inputs": [_value(value) for value in graph.inputs],
        "parameters": [_value(value) for value in graph.parameters],
        "buffers": [_value(value) for value in graph.buffers],
        "constants": [
            {**_value(value), "sha256": tensor_digest(tensor)} for value, tensor in graph.constants
        ],
        "ops": [_op(op) for op in graph.ops],
        "output": _tree(graph.output),
        "signature": [[name, _tree(tree)] for name, tree in graph.signature],
        "defaults": [[name, literal(value)] for name, value in graph.defaults],
        "buffer_updates": [[before.name, after.name] for before, after in graph.buffer_updates],
        "argument_order": list(graph.argument_order),
        "dynamic_dims": [[dim.input, dim.dim, dim.symbol] for dim in graph.dynamic_dims],
        # Costs, and with them plans, are those of the example's sizes.
        "examples": dict(sorted(_examples(graph).items())),
        "training_only": graph.training_only,
        "constant_inputs": [
            [name, tensor_digest(tensor)] for name, tensor in graph.constant_inputs
        ],
        "constant_buffers": [
            [name, tensor_digest(tensor)] for name, tensor in graph.constant_buffers
        ],
        "conditions": [print_size(condition) for condition in graph.conditions],
        "autocast": str(graph.autocast) if graph.autocast else None,
        "module_types": dict(sorted(graph.module_types.items())),
        "eval_graph": to_json(graph.eval_graph) if graph.eval_graph else None,
    }


def tensor_digest(tensor: torch.Tensor) -> str:
    """The sha256 of shape, dtype and bytes of a tensor."""
    # The bytes of equal tensors are equal only in one order in memory.
    tensor = tensor.detach().cpu().contiguous()
    content = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def literal(value: Any) -> Any:
    """An argument as plain data, each kind in a form of its own so that ``1``, ``1.0``, ``True``
    and ``"1"`` differ.
    """
    for types, convert in _FORMS:
        if isinstance(value, types):
            return convert(value)
    return {_word(value): _import_name(value)}


def _value(value: IRValue) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": [print_size(size) for size in value.shape],
        "dtype": str(value.dtype),
        "requires_grad": value.requires_grad,
        "kind": value.kind.value,
        "fqn": value.fqn,
        "aliases": list(value.aliases),
        "persistent": value.persistent,
        "takes_gradient": value.takes_gradient,
    }


def _examples(graph: IRGraph) -> dict[str, int]:
    """The numbers of dynamic sizes in the dummy arguments. Planners price a model at these."""
    expressions = (expression for value in graph.inputs for expression in value.shape)
    return {
        size.name: size.example for expression in expressions for size in dynamic_sizes(expression)
    }


def _op(op: IROp) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "args": [[name, literal(value)] for name, value in op.args],
        "results": [_value(value) for value in op.results],
        "module_path": op.module_path,
        "module_type": op.module_type,
        "region": op.region,
        "autocast": str(op.autocast) if op.autocast else None,
        "grad_enabled": op.grad_enabled,
        "only_in": op.only_in,
        "updates_buffers": op.updates_buffers,
    }


def _tree(tree: Tree) -> dict[str, Any]:
    if tree.kind == "leaf":
        return {"leaf": literal(tree.value)}
    children = [[literal(key), _tree(child)] for key, child in tree.children]
    return {"kind": tree.kind, "type": tree.type_path, "children": children}


_MAX_DECIMAL = 10**4000
"""Python writes no decimal numbers of many more digits than this has."""

_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    # The first form whose types fit is taken. So bools, which are ints, come before ints.
    (type(None) | bool | str, lambda value: value),
    (enum.Enum, lambda value: {"enum": f"{_import_name(type(value))}.{value.name}"}),
    (int, lambda value: value if abs(value) < _MAX_DECIMAL else {"int": hex(value)}),
    # Exact to the last bit, and infinities and NaN have a form too, which JSON lacks.
    (float, lambda value: {"float": value.hex()}),
    (complex, lambda value: {"complex": [value.real.hex(), value.imag.hex()]}),
    (bytes, lambda value: {"bytes": value.hex()}),
    (IRValue, lambda value: {"value": value.name}),
    (sympy.Basic, lambda value: {"size": print_size(value)}),
    (WhenTraining, lambda value: {"train": literal(value.train), "eval": literal(value.eval)}),
    (RankDevice, lambda value: {"device": "rank"}),
    (TimeSteps, lambda value: {"steps": value.text}),
    (tuple | list, lambda value: [literal(item) for item in value]),
    (
        slice,
        lambda value: {"slice": [literal(value.start), literal(value.stop), literal(value.step)]},
    ),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}),
    (
        set | frozenset,
        lambda value: {"set": sorted((literal(item) for item in value), key=json.dumps)},
    ),
    (dict, lambda value: {"dict": [[literal(key), literal(item)] for key, item in value.items()]}),
    (torch.dtype | torch.layout | torch.memory_format, lambda value: {"torch": str(value)}),
    (torch.Tensor, lambda value: {"tensor": tensor_digest(value)}),
    (
        functools.partial,
        lambda value: {
            "partial": [literal(value.func), literal(value.args), literal(value.keywords)]
        },
    ),
    (type(Ellipsis), lambda value: {"ellipsis": True}),
)


def _word(value: Any) -> str:
    """The key under which a value that has only a name is written."""
    if isinstance(value, type):
        return "type"
    return "function" if callable(value) else "object"


def _import_name(value: Any) -> str:
    """A name that holds no address: the import path of a class or function, the class of anything
    else.
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
