"""Factorising views, and slices that tile a dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import split_check
import torch
from hypothesis import given, settings

from shardwright.compiler.ir.size import DynamicSize, Size
from shardwright.compiler.ops.rule import FactorKind
from shardwright.compiler.ops.rule_builder import RuleBuilder
from shardwright.compiler.ops.shapes import factorise, segmented_slice_rule, slice_of
from shardwright.runtime.layout import Mesh

B, S = DynamicSize("b", 32), DynamicSize("s", 32)


def text(old: Sequence[Size], new: Sequence[Size]) -> str:
    build = RuleBuilder()
    operand, result = factorise(build, old, new)
    return split_check.canonical(build.rule([operand], [result]).annotation)


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ((4, 128, 768), (4, 128, 12, 64), "a b (c d) -> a b c d"),
        ((4, 128, 12, 64), (512, 768), "a b c d -> (a b) (c d)"),
        ((4, 1, 6), (1, 24), "a 1 b -> 1 (a b)"),
        ((1,), (), "1 -> "),
        ((6,), (6,), "a -> a"),
        ((8, 6), (4, 12), "(a b) c -> a (b c)"),
        ((3, 4), (4, 3), "a^ b^ -> c^ d^"),
        ((6, 4), (8, 3), "(a b^) c^ -> (a d^) e^"),
        ((3, 4, 5), (4, 3, 5), "a^ b^ c -> d^ e^ c"),
        ((0, 4), (4, 0), "a^ b^ -> c^ d^"),
        ((B, S, 768), (B, S, 12, 64), "a b (c d) -> a b c d"),
        ((B, S, 768), (B * S, 768), "a b c -> (a b) c"),
        ((B * S, 768), (B, S, 768), "(a b) c -> a b c"),
        ((B, S + 1), (B * S + B,), "a b -> (a b)"),
        ((2 * B, S), (B, 2 * S), "(a b) c -> a (b c)"),
        ((B, 3), (3, B), "a^ b^ -> c^ d^"),
    ],
)
def test_factorise(old: Sequence[Size], new: Sequence[Size], expected: str) -> None:
    assert text(old, new) == split_check.canonical(expected)


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_factors_number_the_elements_alike(shape: list[int], random: Any) -> None:
    """Every element has the same coordinates in terms of the factors that both shapes share, and
    frozen ones stay whole.
    """
    count = int(torch.tensor(shape).prod()) if shape else 1
    new, rest = [], count
    while rest > 1:
        divisor = random.choice([d for d in range(2, rest + 1) if rest % d == 0])
        new.append(divisor)
        rest //= divisor
    build = RuleBuilder()
    old_refs, new_refs = factorise(build, shape, new)
    sizes = {factor.name: factor.size for factor in build.factors}
    free = {factor.name for factor in build.factors if factor.kind is FactorKind.FREE}

    def coordinates(refs: Any) -> list[dict[str, int]]:
        names = [ref.factor for dim in refs for ref in dim]
        grid = (
            torch.cartesian_prod(*(torch.arange(sizes[name]) for name in names))
            if names
            else torch.zeros(1, 0)
        )
        return [
            dict(zip(names, row, strict=True)) for row in grid.reshape(count, len(names)).tolist()
        ]

    for left, right in zip(coordinates(old_refs), coordinates(new_refs), strict=True):
        assert all(left[name] == right[name] for name in free)


# ------------------------------------------------------------------------------------------------
# slices

X = torch.randn(3, 8, 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "index, expected",
    [
        ((slice(None), slice(0, 4)), (1, 0, 4)),
        ((slice(None), slice(4, None)), (1, 4, 8)),
        ((Ellipsis, slice(-2, None)), (2, 3, 5)),
        ((None, slice(0, 1), Ellipsis, None), (0, 0, 1)),
        ((Ellipsis, slice(1, 100)), (2, 1, 5)),
        ((slice(None),), None),
        ((slice(0, 3), slice(0, 8)), None),
        ((slice(0, 2), slice(0, 4)), None),
        ((slice(None), slice(0, 8, 2)), None),
        ((slice(0, 2), 1), None),
        ((slice(0, 2), torch.tensor([0, 1])), None),
    ],
)
def test_slice_of(index: Any, expected: Any) -> None:
    assert slice_of(split_check.trace(torch.Tensor.__getitem__, X, index)[0]) == expected


def test_slice_of_narrow() -> None:
    assert slice_of(split_check.trace(torch.narrow, X, -2, 1, 3)[0]) == (1, 1, 4)
    assert slice_of(split_check.trace(torch.narrow, X, 1, -3, 3)[0]) == (1, 5, 8)
    assert slice_of(split_check.trace(torch.narrow, X, 1, 0, 8)[0]) is None
    assert slice_of(split_check.trace(torch.neg, X)[0]) is None


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("form", ["getitem", "narrow"])
def test_segmented_slices(form: str, index: int) -> None:
    segments = (4, 3, 1)
    start = sum(segments[:index])
    if form == "narrow":
        op, tensors, _ = split_check.trace(torch.narrow, X, 1, start, segments[index])
    else:
        stop = start + segments[index]
        bounds = slice(start or None, None if stop == 8 else stop)
        op, tensors, _ = split_check.trace(torch.Tensor.__getitem__, X, (None, slice(0, 3), bounds))
    rule = segmented_slice_rule(op, segments, index)
    op = replace(op, rule=rule)
    factor = next(f for f in rule.factors if len(f.segments) == 3)
    for size in (2, 3, 5):
        for strategy in (f"split:{factor.name}", f"split:{rule.factors[0].name}", "linear:0", "G"):
            split_check.check_strategy(op, tensors, Mesh((("u", size),)), {"u": strategy})
