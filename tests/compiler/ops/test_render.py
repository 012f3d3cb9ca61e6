"""The source of calls: it reads well and evaluates to the call it stands for."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

from shardwright.compiler.ir.op import AxisRef, IROp, RankDevice, WhenTraining
from shardwright.compiler.ir.size import DynamicSize, to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.render import argument_source, call_source, imports_of, index_source
from shardwright.runtime.errors import InternalError

X, Y = (IRValue(name, (2, 3), torch.float32) for name in "xy")


def name_of(value: IRValue) -> str:
    return value.name


def text(arg: object) -> str:
    return argument_source(arg, name_of, to_python)


def call(opdef: OpDef, **args: object) -> tuple[str, set[str]]:
    registry.OPS["test_op"] = opdef
    try:
        op = IROp("o", "test_op", tuple(args.items()), (X,))
        return call_source(op, name_of, to_python), imports_of(op)
    finally:
        del registry.OPS["test_op"]


@pytest.mark.parametrize(
    "arg, source",
    [
        (1, "1"),
        (-2.5, "-2.5"),
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        (True, "True"),
        (None, "None"),
        ("mean", '"mean"'),
        ('say "a"', "'say \"a\"'"),
        ((1, 2), "(1, 2)"),
        ((1,), "(1,)"),
        ((), "()"),
        ((X, (Y, 0)), "(x, (y, 0))"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.channels_last, "torch.channels_last"),
        (Ellipsis, "..."),
        (slice(None, 3), "slice(None, 3, None)"),
        (RankDevice(), "self.device"),
        (AxisRef("tp"), "tp"),
        (WhenTraining(0.1, 0.0), "0.1 if self.training else 0.0"),
        (WhenTraining(True, False), "self.training"),
        (WhenTraining(False, True), "not self.training"),
        (DynamicSize("s", 32) * 2, "2 * s"),
        (sympy.Integer(4), "4"),
    ],
)
def test_argument_source(arg: object, source: str) -> None:
    assert text(arg) == source


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(InternalError, match="an argument of type set has no source form"):
        text({1})


@pytest.mark.parametrize(
    "index, source",
    [
        ((slice(None), None), ":, None"),
        ((Ellipsis, slice(None, 4)), "..., :4"),
        ((slice(1, None, 2), -1), "1::2, -1"),
        ((X, slice(None)), "x, :"),
        (((0, 2), 1), "[0, 2], 1"),
        (((0, 2),), "[0, 2]"),
        (3, "3"),
        ((), "()"),
    ],
)
def test_index_source(index: object, source: str) -> None:
    assert index_source(index, name_of, to_python) == source


def test_forms_of_calls() -> None:
    add = OpDef("add", "input, other, *, alpha=1", "+", lambda op: "")
    assert call(add, input=X, other=Y) == ("x + y", set())
    assert call(add, input=X, other=-1) == ("x + (-1)", set())
    assert call(add, input=X, other=WhenTraining(1, 2)) == (
        "x + (1 if self.training else 2)",
        set(),
    )
    assert call(add, input=X, other=Y, alpha=2) == ("torch.add(x, y, alpha=2)", {"import torch"})
    assert call(OpDef("neg", "input", "-", lambda op: ""), input=X) == ("-x", set())
    assert call(
        OpDef("view", "input, *shape", ".view", lambda op: ""),
        input=X,
        shape=(DynamicSize("b", 32), 6),
    ) == (
        "x.view(b, 6)",
        set(),
    )
    cat = OpDef("cat", "tensors, dim=0", "torch.cat", lambda op: "")
    assert call(cat, tensors=(X, Y), dim=-1) == ("torch.cat((x, y), dim=-1)", {"import torch"})
    linear = OpDef("linear", "input, weight, bias=None", "F.linear", lambda op: "")
    assert call(linear, input=X, weight=Y, bias=Y) == (
        "F.linear(x, y, y)",
        {"import torch.nn.functional as F"},
    )
    index = OpDef("getitem", "input, index", "[]", lambda op: "")
    assert call(index, input=X, index=(slice(None), None)) == ("x[:, None]", set())
    to = OpDef("to", "input, dtype", ".to", lambda op: "")
    assert call(to, input=X, dtype=torch.float64) == ("x.to(torch.float64)", {"import torch"})
    runtime = OpDef(
        "setitem", "input, index", "shardwright.runtime.ops.indexing.setitem", lambda op: ""
    )
    assert call(runtime, input=X, index=(0,)) == (
        "setitem(x, (0,))",
        {"from shardwright.runtime.ops.indexing import setitem"},
    )


def test_unregistered_functions_are_called_by_their_path() -> None:
    op = IROp("o", "collections.abc.Mapping.get", (("0", X), ("1", 2), ("key", Y)), (X,))
    assert call_source(op, name_of, to_python) == "collections.abc.Mapping.get(x, 2, key=y)"
    assert imports_of(op) == {"import collections.abc"}


def test_parallel_forms_are_called_by_their_last_name() -> None:
    op = IROp(
        "o",
        "shardwright.runtime.ops.embedding.embedding",
        (("input", X), ("weight", Y), ("vocab_axes", (AxisRef("tp"),))),
        (X,),
    )
    assert call_source(op, name_of, to_python) == "embedding(x, weight=y, vocab_axes=(tp,))"
    assert imports_of(op) == {"from shardwright.runtime.ops.embedding import embedding"}
