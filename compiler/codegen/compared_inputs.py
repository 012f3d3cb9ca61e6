"""What a generated file says of inputs and of buffers with known values, by which calls are
checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from shardwright.compiler.codegen.file_names import FileNames
from shardwright.compiler.codegen.literals import source
from shardwright.compiler.codegen.text import WIDTH, wrap
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import RankDevice
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.render import imports_of_literal
from shardwright.runtime.layout import Layout
from shardwright.runtime.structure import values_digest
from shardwright.runtime.told import Told, told

_COMPARED = (
    IRValue, bool, int, float, complex, str, bytes, range, Enum, torch.dtype, torch.layout,
    torch.memory_format,
)  # fmt: skip

_SHOWN_VALUES = 16
"""The most values of a constant input that are written out."""


def input_lines(
    names: FileNames, graph: IRGraph, given: Mapping[str, Layout] = MappingProxyType({})
) -> list[str]:
    """The lines of the dict against which calls are checked: for the path of every leaf of the
    arguments its shape and dtype, or its value. ``given``: the layouts of inputs by name, where
    ranks are given pieces.
    """
    lines, known = [], dict(graph.constant_inputs)
    for path, leaf in _input_leaves(graph):
        names.imports |= imports_of_literal(leaf)
        if isinstance(leaf, IRValue):
            words = [quoted(_shape_text(leaf, given.get(leaf.name))), str(leaf.dtype)]
            words += [_values_text(known[leaf.name])] if leaf.name in known else []
            text = f"({', '.join(words)})"
        elif isinstance(leaf, Told):
            names.need("Told")
            text = f"Told({quoted(leaf.text)})"
        else:
            text = source(leaf)
        lines += wrap(f"{quoted(path)}: {text},", WIDTH - 8)
    return lines


def known_buffer_lines(names: FileNames, graph: IRGraph) -> list[str]:
    """The lines of the dict of buffers whose values are compiled in, by original name."""
    paths = {buffer.name: buffer.fqn or "" for buffer in graph.buffers}
    lines = []
    for name, tensor in graph.constant_buffers:
        values = tensor.tolist()
        names.imports |= imports_of_literal(values)
        lines += wrap(f"{quoted(paths[name])}: {source(values)},", WIDTH - 8)
    return lines


def _input_leaves(graph: IRGraph) -> list[tuple[str, Any]]:
    """Path and value of every leaf of the arguments against which calls are checked: tensors, and
    what two calls can be compared by. Devices are each rank's own.
    """
    found = (leaf for name, tree in graph.signature for leaf in tree.leaves(name))
    return [(path, _compared(leaf)) for path, leaf in found if not isinstance(leaf, RankDevice)]


def _compared(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, _COMPARED):
        return leaf
    # The trace takes a shape apart, whose sizes may vary in a result.
    return Told(told(torch.Size(leaf) if type(leaf) is tuple else leaf))


def _values_text(tensor: torch.Tensor) -> str:
    """The values of a constant input as a nested list, or their digest if they are many."""
    return (
        repr(tensor.tolist()) if tensor.numel() <= _SHOWN_VALUES else quoted(values_digest(tensor))
    )


def _shape_text(value: IRValue, layout: Layout | None) -> str:
    if layout is not None and layout.cut_axes:
        return str(layout)
    return "[" + ", ".join(to_python(size) for size in value.shape) + "]"
