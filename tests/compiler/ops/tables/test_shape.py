"""Views, permutations, expansion, joining, splitting, padding: every split against the whole
call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import split_check
import torch
import torch.nn.functional as F
from covers import spread

from shardwright.compiler.ops.strategy import strategies

T = torch.Tensor


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(len(shape)),
        requires_grad=True,
    )


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (T.view, (rand(4, 3, 6), 4, 3, -1, 2), {}, "a b (c d) -> a b c d"),
    (T.view, (rand(4, 3, 6), (12, 6)), {}, "a b c -> (a b) c"),
    (T.view, (rand(1, 1), ()), {}, "1 1 -> "),
    (T.view, (rand(3, 4), 4, 3), {}, "a^ b^ -> c^ d^"),
    (T.view, (rand(3, 4), torch.int64), {}, "a b^ -> a c^"),
    (T.view_as, (rand(4, 6), rand(4, 2, 3)), {}, "a (b c) -> a b c"),
    (T.reshape, (rand(4, 3, 6), -1, 6), {}, "a b c -> (a b) c"),
    (torch.reshape, (rand(4, 6), (2, 2, 6)), {}, "(a b) c -> a b c"),
    (T.reshape_as, (rand(4, 6), rand(4, 2, 3)), {}, "a (b c) -> a b c"),
    (T.flatten, (rand(2, 3, 4), 1), {}, "a b c -> a (b c)"),
    (torch.flatten, (rand(2, 3, 4),), {"end_dim": 1}, "a b c -> (a b) c"),
    (torch.ravel, (rand(2, 3),), {}, "a b -> (a b)"),
    (T.unflatten, (rand(2, 12), -1, (3, -1)), {}, "a (b c) -> a b c"),
    (T.squeeze, (rand(2, 1, 3, 1),), {}, "a 1 b 1 -> a b"),
    (T.squeeze, (rand(2, 1, 3, 1), 1), {}, "a 1 b 1 -> a b 1"),
    (T.squeeze, (rand(2, 1, 3, 1), 0), {}, "a 1 b 1 -> a 1 b 1"),
    (T.squeeze, (rand(2, 1, 3, 1), (0, -1)), {}, "a 1 b 1 -> a 1 b"),
    (T.unsqueeze, (rand(2, 3), -1), {}, "a b -> a b 1"),
    (T.transpose, (rand(2, 3, 4), 1, -1), {}, "a b c -> a c b"),
    (torch.swapaxes, (rand(2, 3, 4),), {"axis0": 0, "axis1": 1}, "a b c -> b a c"),
    (T.mT.__get__, (rand(2, 3, 4),), {}, "a b c -> a c b"),
    (T.t, (rand(2, 3),), {}, "a b -> b a"),
    (T.T.__get__, (rand(2, 3),), {}, "a b -> b a"),
    (T.permute, (rand(2, 3, 4), 2, 0, 1), {}, "a b c -> c a b"),
    (torch.permute, (rand(2, 3, 4), (2, 0, -2)), {}, "a b c -> c a b"),
    (torch.movedim, (rand(2, 3, 4), 0, 2), {}, "a b c -> b c a"),
    (torch.moveaxis, (rand(2, 3, 4, 5), (0, 1), (-1, 0)), {}, "a b c d -> b c d a"),
    (T.expand, (rand(3, 1), 2, 3, 4), {}, "b 1 -> a b c"),
    (T.expand, (rand(3, 1), -1, 4), {}, "a 1 -> a b"),
    (torch.broadcast_to, (rand(3, 1), (2, 3, 4)), {}, "b 1 -> a b c"),
    (T.expand_as, (rand(3, 1), rand(3, 4)), {}, "a 1 -> a b"),
    (torch.broadcast_tensors, (rand(3, 1), rand(4)), {}, "a 1, b -> a b, a b"),
    (T.repeat, (rand(3, 2), 2, 1, 3), {}, "a b -> c a (d b)"),
    (T.repeat, (rand(3, 2), (2, 2)), {}, "a b -> (c a) (d b)"),
    (T.tile, (rand(3, 2), 2), {}, "a b -> a (c b)"),
    (torch.tile, (rand(3), (2, 2)), {}, "a -> b (c a)"),
    (T.repeat_interleave, (rand(3, 2), 2), {"dim": 1}, "a b -> a (b c)"),
    (torch.repeat_interleave, (rand(3, 2), 2), {}, "a b -> (a b c)"),
    (torch.repeat_interleave, (rand(3, 2), torch.tensor([1, 0, 2]), 0), {}, "a^ b^, c^ -> d^ e^"),
    (
        torch.meshgrid,
        (rand(3), rand(4), rand(2)),
        {"indexing": "ij"},
        "a, b, c -> a b c, a b c, a b c",
    ),
    (torch.meshgrid, ([rand(3), rand(4)],), {"indexing": "xy"}, "a, b -> b a, b a"),
    (
        torch.cat,
        ([rand(2, 3), rand(2, 4), rand(2, 3)],),
        {"dim": -1},
        "a b[3|4|3]#0, a b#1, a b#2 -> a b",
    ),
    (torch.concat, ((rand(2, 3), rand(1, 3)),), {}, "b[2|1]#0 a, b#1 a -> b a"),
    (torch.cat, ([rand(0), rand(2, 4)],), {"dim": 1}, "c^, a b -> a b"),
    (torch.stack, ([rand(2, 3), rand(2, 3)],), {"dim": 1}, "a b, a b -> a c^ b"),
    (T.split, (rand(2, 6), 2), {"dim": 1}, "a (c^ b) -> a b, a b, a b"),
    (T.split, (rand(2, 7), 3, 1), {}, "a b[3|3|1] -> a b#0, a b#1, a b#2"),
    (torch.split, (rand(2, 7), [4, 3]), {"dim": 1}, "a b[4|3] -> a b#0, a b#1"),
    (T.split_with_sizes, (rand(2, 7), (4, 3), -1), {}, "a b[4|3] -> a b#0, a b#1"),
    (T.split, (rand(3, 2), 1), {}, "b^ a -> 1 a, 1 a, 1 a"),
    (T.chunk, (rand(2, 6), 2, -1), {}, "a (c^ b) -> a b, a b"),
    (T.chunk, (rand(2, 7), 2, -1), {}, "a b^ -> a c^, a d^"),
    (torch.tensor_split, (rand(2, 6), 3), {"dim": 1}, "a (c^ b) -> a b, a b, a b"),
    (torch.tensor_split, (rand(2, 7), 3), {"dim": 1}, "a b^ -> a c^, a d^, a e^"),
    (torch.tensor_split, (rand(2, 7), (1, 4)), {"dim": 1}, "a b[1|3|3] -> a b#0, a b#1, a b#2"),
    (T.unbind, (rand(3, 4),), {}, "a^ b -> b, b, b"),
    (torch.unbind, (rand(3, 4), -1), {}, "a b^ -> a, a, a, a"),
    (torch.roll, (rand(3, 4), 1, 1), {}, "a b^ -> a b"),
    (torch.roll, (rand(3, 4), 1), {}, "a^ b^ -> a b"),
    (T.flip, (rand(3, 4), 1), {}, "a b^ -> a b"),
    (torch.flip, (rand(3, 4), (0,)), {}, "a^ b -> a b"),
    (torch.tril, (rand(2, 3, 4),), {"diagonal": 1}, "a b^ c^ -> a b c"),
    (torch.triu, (rand(3, 4),), {}, "a^ b^ -> a b"),
    (F.pad, (rand(2, 3, 4), (1, 1)), {}, "a b c^ -> a b d^"),
    (F.pad, (rand(2, 3, 4), (0, 0, 1, 0)), {}, "a b^ c -> a d^ c"),
    (F.pad, (rand(2, 3, 4), (1, -1)), {"value": 2.0}, "a b c^ -> a b d^"),
    (F.pad, (rand(2, 3, 4), (1, 2)), {"mode": "reflect"}, "a b^ c^ -> a b d^"),
    (torch.diff, (rand(2, 4),), {}, "a c^ -> a b^"),
    (torch.diff, (rand(2, 4),), {"dim": 0, "prepend": rand(1, 4)}, "c^ b, 1 b -> a^ b"),
    (T.diagonal, (rand(3, 4, 5),), {"dim1": 0, "dim2": 2}, "a^ b c^ -> b d^"),
    (torch.diag_embed, (rand(3, 4),), {}, "a d^ -> a b^ c^"),
    (T.unfold, (rand(3, 6), 1, 2, 2), {}, "a d^ -> a c^ e^"),
    (T.unfold, (rand(3, 6), 1, 3, 1), {}, "a e^ -> a d^ c^"),
    (F.glu, (rand(3, 6),), {}, "a (c^ b) -> a b"),
    (F.glu, (rand(6, 3), 0), {}, "(c^ a) b -> a b"),
    (torch.view_as_complex, (rand(3, 4, 2),), {}, "a b c^ -> a b"),
    (torch.view_as_real, (torch.randn(3, 4, dtype=torch.complex128),), {}, "a b -> a b c^"),
]


@pytest.mark.parametrize(
    "function, args, kwargs, annotation",
    spread(CALLS, 3),
    ids=[f"{c[0].__name__}-{c[3]}" for c in CALLS],
)
def test_calls(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], annotation: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op = split_check.check(function, *args, **kwargs)
    assert op.rule is not None
    assert split_check.canonical(op.rule.annotation) == split_check.canonical(annotation)


def test_padding_with_a_number_is_not_linear() -> None:
    op = split_check.check(F.pad, rand(2, 3), (1, 1), value=1.0)
    assert op.rule is not None
    assert not any(strategy.startswith("linear") for strategy in strategies(op.rule))
