"""The grammar of graphs: a good one passes, every kind of broken one is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.trace import trace
from shardwright.runtime.errors import InternalError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return F.relu(self.linear(x)) + torch.tensor([1.0, 2, 3, 4, 5, 6])


@pytest.fixture(scope="module")
def graph() -> IRGraph:
    return trace(Small(), {"x": torch.zeros(3, 4)}, dynamic_dims={"x": {0: "batch"}})


def op_index(graph: IRGraph, target: str) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.target == target)


def with_op(graph: IRGraph, target: str, **changes: Any) -> IRGraph:
    ops = list(graph.ops)
    index = op_index(graph, target)
    ops[index] = replace(ops[index], **changes)
    return graph.with_ops(tuple(ops))


def with_rule(graph: IRGraph, annotation: str) -> IRGraph:
    op = graph.ops[op_index(graph, "linear")]
    return with_op(graph, "linear", rule=parse_rule(annotation, op))


def unknown_value(graph: IRGraph) -> IRGraph:
    stranger = IRValue("stranger", (DynamicSize("batch", 32), 6), torch.float32)
    op = graph.ops[op_index(graph, "relu")]
    return with_op(graph, "relu", args=op.with_args(input=stranger).args)


def swapped(graph: IRGraph) -> IRGraph:
    first, second = op_index(graph, "linear"), op_index(graph, "relu")
    ops = list(graph.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return graph.with_ops(tuple(ops))


def other_shape(graph: IRGraph) -> IRGraph:
    op = graph.ops[op_index(graph, "relu")]
    return with_op(
        graph, "relu", args=op.with_args(input=replace(op.operands[0], dtype=torch.float64)).args
    )


def defined_twice(graph: IRGraph) -> IRGraph:
    return with_op(graph, "relu", results=graph.ops[op_index(graph, "linear")].results)


def strange_argument(graph: IRGraph) -> IRGraph:
    op = graph.ops[op_index(graph, "relu")]
    return with_op(graph, "relu", args=(*op.args, ("inplace", object())))


def wrong_update(graph: IRGraph) -> IRGraph:
    ((before, _),) = graph.buffer_updates
    return replace(graph, buffer_updates=((before, graph.ops[op_index(graph, "relu")].results[0]),))


def wrong_constant(graph: IRGraph) -> IRGraph:
    ((value, _),) = graph.constants
    return replace(graph, constants=((value, torch.zeros(5)),))


def wrong_rule(graph: IRGraph) -> IRGraph:
    good = with_rule(graph, "b k+, n k+, n -> b n")
    op = good.ops[op_index(good, "linear")]
    assert op.rule is not None
    refs = op.rule.operands
    return with_op(good, "linear", rule=replace(op.rule, operands=(refs[0], refs[0], refs[2])))


BROKEN: list[tuple[Callable[[IRGraph], IRGraph], str]] = [
    (unknown_value, "%stranger is read before it is made"),
    (swapped, "%linear is read before it is made"),
    (
        other_shape,
        "%linear was made as %linear: f32[batch, 6]' and is read as %linear: f64[batch, 6]'",
    ),
    (defined_twice, "%linear is defined twice"),
    (strange_argument, "an argument is a object"),
    (wrong_update, "the update of %steps has another shape"),
    (wrong_constant, "the tensor of constant %const_0 does not fit %const_0: f32[6]"),
    (wrong_rule, "gives dim 0 of %linear_weight: f32[6, 4]' the size batch"),
    (lambda g: with_op(g, "relu", name="linear"), "two operators are named linear"),
    (
        lambda g: replace(g, inputs=(replace(g.inputs[0], name="not a name"),)),
        "'not a name' is not an identifier",
    ),
    (
        lambda g: replace(g, inputs=(replace(g.inputs[0], kind=ValueKind.ACTIVATION),)),
        "%x stands among values of kind input",
    ),
    (
        lambda g: replace(g, dynamic_dims=(replace(g.dynamic_dims[0], dim=1),)),
        "dim 1 of x is not batch",
    ),
]


def test_a_traced_graph_is_good(graph: IRGraph) -> None:
    verify(graph)
    verify(with_rule(graph, "b k+, n k+, n -> b n"))
    verify(replace(graph, eval_graph=graph))


@pytest.mark.parametrize(
    ("breaks", "message"), BROKEN, ids=lambda item: item if isinstance(item, str) else ""
)
def test_a_broken_graph_is_refused(
    graph: IRGraph, breaks: Callable[[IRGraph], IRGraph], message: str
) -> None:
    with pytest.raises(InternalError, match=re.escape(message)) as caught:
        verify(breaks(graph))
    assert str(caught.value).startswith("the graph Small is broken: ")
    with pytest.raises(InternalError):
        verify(replace(graph, eval_graph=breaks(graph)))
