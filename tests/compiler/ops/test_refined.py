"""Rules stay right when the dims of the model refine their factors into products: local arguments
follow the references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import split_check
import torch
from covers import spread

from shardwright.compiler.ops.rule import Factor, FactorKind, FactorRef, OpRule, TensorRefs
from shardwright.compiler.ops.shapes import segmented_slice_rule
from shardwright.compiler.ops.strategy import strategies
from shardwright.runtime.layout import Mesh

T = torch.Tensor


def halved(rule: OpRule) -> OpRule:
    """Every factor of even size as (half, 2), the segments of a concatenation each by itself."""
    even = {f.name for f in rule.factors if all(size % 2 == 0 and size > 2 for size in f.segments)}
    factors = []
    for factor in rule.factors:
        if factor.name in even:
            factors.append(
                replace(
                    factor,
                    name=f"{factor.name}.0",
                    segments=tuple(size // 2 for size in factor.segments),
                )
            )
            factors.append(Factor(f"{factor.name}.1", (2,), factor.kind))
        else:
            factors.append(factor)

    def refine(tensor: TensorRefs) -> TensorRefs:
        return tuple(
            tuple(
                new
                for ref in dim
                for new in (
                    (FactorRef(f"{ref.factor}.0", ref.segment), FactorRef(f"{ref.factor}.1"))
                    if ref.factor in even
                    else (ref,)
                )
            )
            for dim in tensor
        )

    assert even, "nothing to refine"
    operands, results = tuple(map(refine, rule.operands)), tuple(map(refine, rule.results))
    return replace(rule, factors=tuple(factors), operands=operands, results=results)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (T.view, (rand(3, 24), 3, 6, -1)),
    (T.reshape, (rand(3, 6, 4), 18, 4)),
    (T.unflatten, (rand(3, 24), 1, (6, 4))),
    (T.expand, (rand(3, 1), 3, 6)),
    (T.repeat, (rand(6, 3), 4, 6)),
    (T.repeat_interleave, (rand(6, 3), 4, 0)),
    (T.repeat_interleave, (rand(6, 3), 4)),
    (T.split, (rand(3, 12), 6, 1)),
    (T.split, (rand(3, 20), (12, 4, 4), 1)),
    (T.chunk, (rand(3, 12), 2, 1)),
    (T.tensor_split, (rand(3, 20), (12, 16), 1)),
    (T.narrow, (rand(3, 6), 1, 0, 6)),
    (T.__getitem__, (rand(3, 6), (slice(1, 2), slice(0, 6)))),
    (torch.slice_scatter, (rand(3, 6), rand(3, 6), 1, 0, 6)),
    (torch.zeros, (4, 6)),
    (torch.cat, ([rand(3, 6), rand(3, 4)], 1)),
    (T.squeeze, (rand(1, 6, 1, 4),)),
]


@pytest.mark.parametrize("function, args", spread(CALLS, 3), ids=[c[0].__name__ for c in CALLS])
def test_refined(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    op, tensors, _ = split_check.trace(function, *args)
    assert op.rule is not None
    check_all(replace(op, rule=halved(op.rule)), tensors)


@pytest.mark.parametrize(
    "index, bounds", [(0, slice(None, 12)), (1, slice(12, 16)), (2, slice(16, None))]
)
def test_refined_slices(index: int, bounds: slice) -> None:
    op, tensors, _ = split_check.trace(T.__getitem__, rand(3, 20), (slice(None), bounds))
    check_all(replace(op, rule=halved(segmented_slice_rule(op, (12, 4, 4), index))), tensors)


def check_all(op: Any, tensors: dict[str, torch.Tensor]) -> None:
    assert any(f.kind is not FactorKind.FROZEN and "." in f.name for f in op.rule.factors)
    for strategy in strategies(op.rule):
        for size in (2, 3, 4):
            split_check.check_strategy(op, tensors, Mesh((("u", size),)), {"u": strategy})
        for other in strategies(op.rule):
            split_check.check_strategy(
                op, tensors, Mesh((("u", 2), ("v", 2))), {"u": strategy, "v": other}
            )
