"""Arguments and results of ``forward`` as trees of the graph."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.op import RankDevice
from shardwright.compiler.trace.recorder import Recorder
from shardwright.runtime import structure
from shardwright.runtime.errors import TraceError


def input_tree(recorder: Recorder, argument: Any) -> Tree:
    """The tree of an argument: values for its tensors, literals for the rest."""
    return _tree(recorder, argument, "an argument", set())


def output_tree(recorder: Recorder, result: Any) -> Tree:
    """The tree of the result of ``forward``."""
    return _tree(recorder, result, "the result", set())


def _tree(recorder: Recorder, obj: Any, what: str, seen: set[int]) -> Tree:
    kind = structure.kind(obj)
    if kind == "leaf":
        return Tree("leaf", _leaf(recorder, obj))
    if id(obj) in seen:
        raise TraceError(f"{what} of forward contains itself: an object of type {type(obj).__name__}")
    children = tuple((key, _tree(recorder, child, what, seen | {id(obj)})) for key, child in structure.children(obj))
    if kind != "object":
        return Tree(kind, children=children)
    if "<" in type(obj).__qualname__:
        raise TraceError(
            f"{what} of forward contains an object of the local class {type(obj).__qualname__}",
            why="generated code must import the class to build such an object",
            hint="define the class at the top level of a module",
        )
    return Tree("object", children=children, type_path=structure.type_path(obj))


def _leaf(recorder: Recorder, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return recorder.value(leaf)
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return recorder.dynamic.size(leaf)
    if isinstance(leaf, torch.Size):
        return recorder.arg(tuple(leaf))
    return RankDevice() if isinstance(leaf, torch.device) else leaf
