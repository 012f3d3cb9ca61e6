"""Runs a graph on real tensors: what the tracer recorded, executed operator by operator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import sympy
import torch
import torch.nn.functional as F

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp, RankDevice, WhenTraining, map_leaves
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.render import call_source, imports_of
from shardwright.runtime import structure


def run_graph(graph: IRGraph, module: torch.nn.Module, args: Mapping[str, Any]) -> Any:
    """The result of ``graph`` for the parameters and buffers of ``module``, whose ``training`` flag
    is honoured.

    Buffer updates are written to ``module``; gradients flow to its parameters.
    """
    if graph.eval_graph is not None and not module.training:
        graph = graph.eval_graph
    return _Run(graph, module).run(args)


class _Run:
    def __init__(self, graph: IRGraph, module: torch.nn.Module) -> None:
        self.graph, self.module = graph, module
        self.values: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.of_rows: set[str] = set()  # the values of which only chosen rows are stored

    def run(self, args: Mapping[str, Any]) -> Any:
        tensors = dict(self.module.named_parameters(remove_duplicate=False)) | dict(
            self.module.named_buffers(remove_duplicate=False)
        )
        for value in (*self.graph.parameters, *self.graph.buffers):
            self.values[value.name] = tensors[value.fqn]
        self.values.update({value.name: tensor for value, tensor in self.graph.constants})
        for name, tree in self.graph.signature:
            given = structure.flatten(args[name], name)
            for path, leaf in tree.leaves():
                if isinstance(leaf, IRValue):
                    self.values[leaf.name] = given[f"{name}.{path}" if path else name]
        for symbol, (value, dim) in self.graph.symbols().items():
            self.sizes[symbol] = self.values[value.name].shape[dim]
        for op in self.graph.ops:
            if op.only_in is None or (op.only_in == "train") == self.module.training:
                self._run_op(op)
        result = self._tree(self.graph.output)
        with torch.no_grad():
            for before, after in self.graph.buffer_updates:
                if after.name in self.values:
                    self.values[before.name].copy_(self.values[after.name])
        return result

    def _run_op(self, op: IROp) -> None:
        cast = torch.autocast("cpu", dtype=op.autocast) if op.autocast else contextlib.nullcontext()
        with cast, torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
            result = self._call(op)
        if op.target == "dispatch":
            tensors = list(result)
        else:
            leaves = structure.flatten(result).values()
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        assert len(tensors) == len(op.results), f"{op.name} gave {len(tensors)} tensors"
        reads_rows = any(value.name in self.of_rows for value in op.operands)
        if op.target == "dispatch" or (reads_rows and op.target != "combine"):
            self.of_rows.update(value.name for value in op.results)
        for value, tensor in zip(op.results, tensors, strict=True):
            if value.name in self.of_rows:
                self.values[value.name] = tensor
                continue
            expected = tuple(self._leaf(size) for size in value.shape)
            assert tuple(tensor.shape) == expected, (
                f"{value.name}: {tuple(tensor.shape)} is not {expected} ({op.target})"
            )
            assert tensor.dtype == value.dtype, (
                f"{value.name}: {tensor.dtype} is not {value.dtype} ({op.target})"
            )
            self.values[value.name] = tensor

    def _call(self, op: IROp) -> Any:
        """The value of the call's source, as the code generator writes it."""
        rank = SimpleNamespace(device=torch.device("cpu"), training=self.module.training)
        scope = {"torch": torch, "F": F, "math": math, "self": rank, **self.values}
        scope.update(self.sizes)
        for statement in imports_of(op):
            exec(statement, scope)
        return eval(call_source(op, lambda value: value.name, to_python), scope)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, IRValue):
            return self.values[leaf.name]
        if isinstance(leaf, WhenTraining):
            return map_leaves(leaf.train if self.module.training else leaf.eval, self._leaf)
        if isinstance(leaf, RankDevice):
            return torch.device("cpu")
        if isinstance(leaf, sympy.Basic):
            return eval(to_python(leaf), {"math": math}, self.sizes)
        return leaf

    def _tree(self, tree: Tree) -> Any:
        if tree.kind == "leaf":
            return (
                self._leaf(tree.value)
                if not isinstance(tree.value, tuple)
                else map_leaves(tree.value, self._leaf)
            )
        items = {key: self._tree(child) for key, child in tree.children}
        if tree.kind == "dict":
            return items
        if tree.kind in ("list", "tuple"):
            return (list if tree.kind == "list" else tuple)(items.values())
        return structure.rebuild(tree.type_path, items)
