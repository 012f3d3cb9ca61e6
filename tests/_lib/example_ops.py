"""The calls of ``op_examples`` as operators of a graph, with rules and with real tensors to run
them on.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from op_examples import EXAMPLES, Call
from torch import Tensor

from shardwright.compiler.ir.op import IROp, leaves, map_leaves
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.render import call_source, imports_of


def all_calls() -> list[Any]:
    """Every example: ``(name, call)``."""
    return [
        (f"{group}-{index}", call)
        for group, calls in EXAMPLES.items()
        for index, call in enumerate(calls)
    ]


def example_op(call: Call) -> tuple[IROp, list[Tensor]]:
    """The operator of one example, and its operands."""
    function, args, kwargs = call[0], tuple(call[1]), dict(call[2]) if len(call) > 2 else {}
    if isinstance(function, OpDef):
        opdef, bound_args, bound_kwargs = function, args, kwargs
    else:
        found = registry.find(function)
        assert found is not None
        opdef, normalise = found
        bound_args, bound_kwargs = normalise(args, kwargs) if normalise else (args, kwargs)
    bound = dict(opdef.bind(bound_args, bound_kwargs))
    operands = [leaf for arg in bound.values() for leaf in leaves(arg) if isinstance(leaf, Tensor)]
    values = iter([_value(f"x{i}", x) for i, x in enumerate(operands)])
    named = map_leaves(
        tuple(bound.values()), lambda leaf: next(values) if isinstance(leaf, Tensor) else leaf
    )
    op = IROp(opdef.name, opdef.name, tuple(zip(bound, named, strict=True)), ())
    plain = (
        run_op(op, operands)
        if isinstance(function, OpDef)
        else getattr(function, "apply", function)(*args, **kwargs)
    )
    results = tensors_of(plain)
    op = replace(op, results=tuple(_value(f"y{i}", y) for i, y in enumerate(results)))
    return replace(op, rule=instantiate(opdef, op)), operands


def _value(name: str, x: Tensor) -> IRValue:
    return IRValue(name, tuple(x.shape), x.dtype, x.requires_grad, takes_gradient=x.requires_grad)


def run_op(op: IROp, operands: list[Tensor]) -> Any:
    """The plain call on given operands: what its source evaluates to."""
    scope: dict[str, Any] = {"torch": torch, "F": F, **{f"x{i}": x for i, x in enumerate(operands)}}
    scope["self"] = SimpleNamespace(training=True, device=torch.device("cpu"))
    for statement in sorted(imports_of(op)):
        exec(statement, scope)
    return eval(call_source(op, lambda value: value.name, to_python), scope)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return (
        [tensor for item in result for tensor in tensors_of(item)]
        if isinstance(result, tuple | list)
        else []
    )
