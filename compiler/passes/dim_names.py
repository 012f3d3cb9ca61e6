"""Words for dim classes, from what operators do with them and from the names of parameters and inputs.

Names are for people and for policies that ask for a role; a wrong or missing one costs readability, never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue, ValueKind

_ATTENTION_DIMS = (
    ("query", ("heads", "query_seq", "head_dim")),
    ("key", ("kv_heads", "key_seq", "head_dim")),
    ("value", ("kv_heads", "key_seq", "value_dim")),
)
_FFN_WORDS = (
    "mlp",
    "ffn",
    "feed_forward",
    "feedforward",
    "intermediate",
    "fc1",
    "c_fc",
    "gate_proj",
    "up_proj",
    "wi",
    "linear1",
)


def name_classes(graph: IRGraph, dims: ModelDims) -> ModelDims:
    """The same dims with a name for every class."""
    names: dict[int, str] = {}

    def give(indices: tuple[int, ...], name: str) -> None:
        if indices:
            names.setdefault(indices[0], name)

    for dynamic in graph.dynamic_dims:
        give(dims.values[dynamic.input][dynamic.dim], dynamic.symbol)
    for value in graph.inputs:
        if value.ndim:
            give(dims.values[value.name][0], "batch")
    for value in graph.inputs:
        if value.ndim == 2 and not value.dtype.is_floating_point:
            give(dims.values[value.name][1], "seq")
    _name_by_operators(graph, dims, give)
    _name_hidden(dims, names)
    for dim_class in dims.classes:
        names.setdefault(dim_class.index, _name_by_parameters(dim_class.parameters) or f"dim{dim_class.index}")
    return replace(dims, classes=tuple(replace(c, name=names[c.index]) for c in dims.classes))


def _name_by_operators(graph: IRGraph, dims: ModelDims, give: Callable[[tuple[int, ...], str], None]) -> None:
    for op in graph.ops:
        if op.target == "scaled_dot_product_attention":
            for argument, words in _ATTENTION_DIMS:
                value = op.arg(argument)
                for indices, word in zip(dims.values[value.name][-3:], words, strict=False):
                    give(indices, word)
        elif op.target == "embedding":
            weight = op.arg("weight")
            if weight.kind is ValueKind.PARAMETER:
                give(dims.values[weight.name][0], "vocab" if _is_data(op.arg("input"), graph) else "positions")
        elif op.target == "cross_entropy":
            logits = op.arg("input")
            if logits.ndim > 1:
                give(dims.values[logits.name][1], "classes")


def _is_data(value: IRValue, graph: IRGraph) -> bool:
    """Whether an integer value is an input in another shape, not counted from shapes."""
    producers = graph.producers()
    passing = ("view", "reshape", "to", "contiguous", "getitem", "clone")
    while value.name in producers and producers[value.name][0].target in passing:
        value = producers[value.name][0].operands[0]
    return value.kind is ValueKind.INPUT


def _name_hidden(dims: ModelDims, names: dict[int, str]) -> None:
    """The class that most parameters have is the width of the residual stream."""
    counts = Counter({c.index: len(c.parameters) for c in dims.classes if c.index not in names and c.parameters})
    if counts:
        index, count = counts.most_common(1)[0]
        if count > 2:
            names[index] = "hidden"


def _name_by_parameters(parameters: tuple[str, ...]) -> str | None:
    if not parameters:
        return None
    fqn = parameters[0].rpartition(":")[0]
    if any(word in fqn.split(".") or any(part.startswith(word) for part in fqn.split(".")) for word in _FFN_WORDS):
        return "ffn"
    parts = [part for part in fqn.split(".")[:-1] if not part.isdigit()]
    return f"{parts[-1]}_dim" if parts else f"{fqn}_dim".replace(".", "_")
