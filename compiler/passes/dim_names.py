"""Words for dim classes, from what operators do with them and from the names of parameters and
inputs.

Names are for people and for policies that ask for a role; a wrong or missing one costs readability,
never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import torch

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.rule import ATTENTION

_KERNEL_DIMS = (
    ("query", ("heads", "query_seq", "head_dim")),
    ("key", ("kv_heads", "key_seq", "head_dim")),
    ("value", ("kv_heads", "key_seq", "value_dim")),
)
_ATTENTION_DIMS = {
    **dict.fromkeys(ATTENTION, _KERNEL_DIMS),
    "softmax": (("input", ("heads", "query_seq", "key_seq")),),  # attention written out
}
EXPERTS = "experts"
"""The name of the dim of experts that tokens are dispatched to."""
SCORES = "scores"
"""The name of the dim of scores, one for each expert, that a router chooses from."""

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
_CHOOSING = frozenset(("topk", "argmax", "max", "sort"))
_MOVING = frozenset(
    (
        "view",
        "reshape",
        "to",
        "contiguous",
        "getitem",
        "unsqueeze",
        "squeeze",
        "cat",
        "pad",
        "roll",
        "clone",
        "clamp",
    )
    + ("masked_fill", "where", "index_put", "slice_scatter", "select_scatter")
)
"""Operators whose results hold elements of their operands, in other places or among others."""


def name_classes(graph: IRGraph, dims: ModelDims) -> ModelDims:
    """Give every class a name. The first rule that has a name for a class wins."""
    names: dict[int, str] = {}

    def give(indices: tuple[int, ...], name: str) -> None:
        if indices:
            names.setdefault(indices[0], name)

    # The best known names come first: what the user declared, then what inputs are by convention.
    for dynamic in graph.dynamic_dims:
        give(dims.values[dynamic.input][dynamic.dim], dynamic.symbol)
    for value in graph.inputs:
        if value.ndim:
            give(dims.values[value.name][0], "batch")
    # Integers of two dims are token ids, ``[batch, seq]``.
    for value in graph.inputs:
        if value.ndim == 2 and not value.dtype.is_floating_point:
            give(dims.values[value.name][1], "seq")
    _name_stacked_experts(graph, dims, give)
    _name_scores(graph, dims, give)
    _name_by_operators(graph, dims, give)
    _name_logits(graph, dims, give, names)
    _name_fused_heads(graph, dims, names)
    _name_fused_gates(graph, dims, names)
    _name_hidden(dims, names)
    # What no rule names is called by its parameters, or by its number.
    for dim_class in dims.classes:
        names.setdefault(
            dim_class.index, _name_by_parameters(dim_class.parameters) or f"dim{dim_class.index}"
        )
    return replace(dims, classes=tuple(replace(c, name=names[c.index]) for c in dims.classes))


def _name_by_operators(
    graph: IRGraph, dims: ModelDims, give: Callable[[tuple[int, ...], str], None]
) -> None:
    for op in graph.ops:
        if op.target in ATTENTION:
            queries, keys = (dims.values[op.arg(name).name][-2] for name in ("query", "key"))
            if queries == keys:  # a sequence that attends to itself
                give(queries, "seq")
        for argument, words in _ATTENTION_DIMS.get(op.target, ()):
            value = op.arg(argument)
            if value.ndim < 4:
                continue
            for indices, word in zip(dims.values[value.name][-3:], words, strict=True):
                # Several query heads share each head of key and value.
                if word == "heads" and len(indices) == 2:
                    give(indices[:1], "kv_heads")
                    give(indices[1:], "heads_per_kv")
                else:
                    give(indices, word)
        if op.target == "dispatch":
            give(dims.values[op.results[-1].name][0], EXPERTS)
        if op.target.startswith("conv"):
            for indices in dims.values[op.arg("weight").name][2:]:
                give(indices, "kernel")
        if op.target == "embedding":
            weight = op.arg("weight")
            if weight.kind is ValueKind.PARAMETER and not is_data(op.arg("input"), graph):
                give(dims.values[weight.name][0], "positions")
            # A vocabulary has many rows; a table of token types has a handful.
            elif weight.kind is ValueKind.PARAMETER and weight.shape[0] >= weight.shape[1]:
                give(dims.values[weight.name][0], "vocab")


def _name_logits(
    graph: IRGraph,
    dims: ModelDims,
    give: Callable[[tuple[int, ...], str], None],
    names: Mapping[int, str],
) -> None:
    """Name what a loss chooses from: the vocabulary if it has the size of one that is looked up,
    else classes.
    """
    vocabularies = [dims.classes[index].size for index, name in names.items() if name == "vocab"]
    for op in graph.ops:
        if op.target == "cross_entropy" and op.arg("input").ndim > 1:
            logits = op.arg("input")
            give(
                dims.values[logits.name][1],
                "vocab" if logits.shape[1] in vocabularies else "classes",
            )


def _name_fused_heads(graph: IRGraph, dims: ModelDims, names: dict[int, str]) -> None:
    """Name the dims of query, key and value in one product: ``qkv x heads x head_dim``, or
    ``qkv_heads x head_dim`` of unequal parts.
    """
    for value in graph.parameters:
        for indices in dims.values[value.name]:
            for outer, inner in pairwise(indices):
                segments = dims.classes[outer].segments
                # ``3 x heads x head_dim``, as BERT's and GPT's fused projections have it.
                if names.get(inner) == "heads" and segments == (3,):
                    names.setdefault(outer, "qkv")
                elif names.get(outer) == "heads":
                    names.setdefault(inner, "head_dim")
                elif names.get(inner) == "head_dim" and len(segments) == 3:
                    names.setdefault(outer, "qkv_heads")


def _name_fused_gates(graph: IRGraph, dims: ModelDims, names: dict[int, str]) -> None:
    """Name the dim of two of the matrices of a gated layer in one: ``gate_up x ffn``, or ``ffn x
    gate_up`` where their rows take turns.
    """
    for value in graph.parameters:
        for indices in dims.values[value.name]:
            for pair in pairwise(indices):
                for one, other in (pair, pair[::-1]):
                    is_ffn = _name_by_parameters(dims.classes[other].parameters) == "ffn"
                    if is_ffn and other not in names and dims.classes[one].segments == (2,):
                        names.setdefault(one, "gate_up")


def _name_scores(
    graph: IRGraph, dims: ModelDims, give: Callable[[tuple[int, ...], str], None]
) -> None:
    """Name the dim that the experts of tokens are chosen from. It is another one than that of their
    weights: every rank needs all scores of a token.
    """
    chosen = [op.arg("chosen") for op in graph.ops if op.target == "dispatch"]
    producers = graph.producers() if chosen else {}
    for value in chosen:
        # Back through reshapes and casts of the numbers, to what has chosen them.
        while value.name in producers and producers[value.name][0].target in _MOVING:
            value = producers[value.name][0].operands[0]
        if value.name in producers and producers[value.name][0].target in _CHOOSING:
            choosing = producers[value.name][0]
            dim = choosing.arg("dim", -1)
            if isinstance(dim, int):
                give(dims.values[choosing.operands[0].name][dim], SCORES)


def is_data(value: IRValue, graph: IRGraph) -> bool:
    """Whether an integer value holds elements of an input, moved or shifted (not positions counted
    from its shape).
    """
    # Walk back through operators that move elements, until an input is met or nothing is left.
    producers = graph.producers()
    reached, seen = [value], set[str]()
    while reached:
        value = reached.pop()
        if value.kind is ValueKind.INPUT:
            return True
        if value.name not in seen and value.name in producers:
            seen.add(value.name)
            op = producers[value.name][0]
            reached += [
                v for v in op.operands if op.target in _MOVING and v.dtype is not torch.bool
            ]
    return False


def _name_stacked_experts(
    graph: IRGraph, dims: ModelDims, give: Callable[[tuple[int, ...], str], None]
) -> None:
    """Name the first dim of weights that are the matrices of all experts, one behind the other, as
    the model has them or as a stack makes them.
    """
    for value in graph.parameters:
        if value.ndim == 3 and "expert" in (value.fqn or "").lower():
            give(dims.values[value.name][0], EXPERTS)
    for op in graph.ops:
        if op.target == "stack" and all("expert" in (v.fqn or "").lower() for v in op.operands):
            give(dims.values[op.results[0].name][0], EXPERTS)


def _name_hidden(dims: ModelDims, names: dict[int, str]) -> None:
    """Name the class that most parameters have: it is the width of the residual stream."""
    counts = Counter(
        {c.index: len(c.parameters) for c in dims.classes if c.index not in names and c.parameters}
    )
    if counts:
        index, count = counts.most_common(1)[0]
        if count > 2:
            names[index] = "hidden"


def _name_by_parameters(parameters: tuple[str, ...]) -> str | None:
    if not parameters:
        return None
    fqn = parameters[0].rpartition(":")[0]
    if any(part.startswith(_FFN_WORDS) for part in fqn.split(".")):
        return "ffn"
    parts = [part for part in fqn.split(".")[:-1] if not part.isdigit()]
    return f"{parts[-1]}_dim" if parts else f"{fqn}_dim".replace(".", "_")
