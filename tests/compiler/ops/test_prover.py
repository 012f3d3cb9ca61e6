"""The prover accepts what is right and finds what is wrong: in results, in gradients, in shapes, in
buffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import user_ops
from torch import Tensor

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate, parse_rule
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.prover import ProofReport, prove
from shardwright.compiler.ops.rule import OpRule, ParallelFactor, ParallelForm
from shardwright.runtime.errors import AnnotationError


def rand(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def altered(function: Any, change: Callable[[OpRule], OpRule]) -> OpDef:
    """The registry's entry of a function, with a changed rule."""
    found = registry.find(function)
    assert found is not None
    opdef = found[0]
    return replace(opdef, rule=lambda op: change(instantiate(opdef, op)))


def annotated(function: Any, text: str, **fields: Any) -> OpDef:
    """The registry's entry of a function, with another annotation."""
    found = registry.find(function)
    assert found is not None
    return replace(found[0], rule=lambda op: parse_rule(text, op, **fields))


def wrong(report: ProofReport) -> set[str]:
    return {strategy for trial in report.failures for strategy in trial.assignment.values()}


X, W, B = rand(4, 6), rand(5, 6), rand(5)
IMAGE = rand(4, 6, 3)


@pytest.mark.parametrize(
    ("entry", "args", "strategies"),
    [
        (
            annotated(F.linear, "b k, n k+, n -> b n"),
            (X, W, B),
            {"split:k"},
        ),  # the bias is added on every rank
        (
            annotated(
                F.linear, "b k+, n k, n -> b n", additive=(2,), linear_sets=(frozenset({0}),)
            ),
            (X, W, B),
            {"linear:0"},
        ),
        (annotated(F.softmax, "b c -> b c"), (X, -1), {"split:c"}),
        (annotated(F.layer_norm, "b h, h, h -> b h"), (X, (6,), rand(6), rand(6)), {"split:h"}),
        (annotated(torch.mean, "b c+ -> b"), (X, 1), {"split:c"}),
        (annotated(torch.cumsum, "b c -> b c"), (X, 1), {"split:c"}),
        (annotated(torch.relu, "b c -> b c", linear_sets=(frozenset({0}),)), (X,), {"linear:0"}),
        (
            annotated(torch.mul, "b c, b c -> b c", linear_sets=(frozenset({0, 1}),)),
            (X, X),
            {"linear:0"},
        ),
        (annotated(torch.flip, "b c -> b c"), (X, (1,)), {"split:c"}),
        (annotated(torch.amax, "b c+ -> b"), (X, 1), {"split:c"}),
        (
            annotated(F.group_norm, "n (g=3 c^) y^ -> n (g c) y"),
            (IMAGE, 3),
            {"split:g"},
        ),  # num_groups is not localised
        (
            annotated(F.embedding, "b s, v+ h -> b s h"),
            (torch.tensor([[0, 1], [4, 3]]), W),
            {"split:v"},
        ),
    ],
)
def test_wrong_annotations_are_found(
    entry: OpDef, args: tuple[Any, ...], strategies: set[str]
) -> None:
    assert wrong(prove(entry, args)) == strategies


def placed(
    operands: tuple[str, ...] | None, results: tuple[str, ...] | None
) -> Callable[[OpRule], OpRule]:
    def change(rule: OpRule) -> OpRule:
        assert rule.parallel is not None
        factors = {name: ParallelFactor(operands, results) for name in rule.parallel.factors}
        return replace(rule, parallel=replace(rule.parallel, factors=factors))

    return change


@pytest.mark.parametrize(
    ("function", "args", "change", "strategies"),
    [
        (torch.logsumexp, (X, 1), placed(None, ("P",)), {"split:r1"}),
        (torch.logsumexp, (X, 1), placed(None, ("G",)), {"split:r1"}),  # only gradients tell
        (torch.mean, (X, 1), lambda rule: replace(rule, parallel=wrong_count(rule)), {"split:r1"}),
        (F.embedding, (torch.tensor([[0, 1], [4, 3]]), W), placed(("R", "S"), ("R",)), {"split:v"}),
        (
            F.batch_norm,
            (IMAGE, None, None, rand(6), rand(6), True),
            placed(("S", "R", "R"), ("S",)),
            {"split:n", "split:y0"},
        ),
    ],
)
def test_wrong_placements_are_found(
    function: Any, args: tuple[Any, ...], change: Callable[[OpRule], OpRule], strategies: set[str]
) -> None:
    assert wrong(prove(altered(function, change), args)) == strategies


def wrong_count(rule: OpRule) -> ParallelForm:
    assert rule.parallel is not None
    return replace(rule.parallel, local_args=lambda op, local: {"count": 1})


def test_an_update_that_differs_between_ranks_is_found() -> None:
    args = (
        IMAGE.clone().requires_grad_(),
        torch.zeros(6).double(),
        torch.ones(6).double(),
        None,
        None,
        True,
    )
    assert prove(F.batch_norm, args).ok
    local = altered(F.batch_norm, lambda rule: replace(rule, parallel=None))
    report = prove(local, args)
    assert wrong(report) == {"split:n", "split:y0"}


@pytest.mark.parametrize(
    ("function", "args", "strategies"),
    [
        (user_ops.wrong_free, (X,), {"split:b"}),
        (user_ops.wrong_summed, (X,), {"split:b"}),
        (user_ops.wrong_order, (rand(4, 4),), {"split:a", "split:b"}),
        (user_ops.wrong_linear, (X,), {"linear:0"}),
        (user_ops.wrong_additive, (X, W, B), {"split:k"}),
        (user_ops.wrong_local, (rand(8),), {"split:a"}),
        (user_ops.WrongBackward, (X,), {"G"}),  # results are right: only gradients tell
    ],
)
def test_wrong_rules_of_users_are_found(
    function: Any, args: tuple[Any, ...], strategies: set[str]
) -> None:
    assert wrong(prove(function, args)) == strategies


def test_combinations_of_two_axes() -> None:
    report = prove(F.linear, (X, W, B), num_ranks=[{"u": 2, "v": 3}])
    assert report.ok
    assert len(report.trials) == 7**2


def test_gradients_are_compared_where_they_are_required() -> None:
    weight = torch.rand(6).double()  # has no gradient in nll_loss
    log_probs = X.log_softmax(-1).requires_grad_()
    assert prove(F.nll_loss, (log_probs, torch.tensor([0, 1, 5, 2]), weight)).ok


def test_report_text() -> None:
    text = str(prove(user_ops.wrong_summed, (torch.ones(4, 8).double(),), num_ranks=(2,)))
    assert re.sub(r"difference .*", "difference ...", text) == (
        "wrong.summed: a b+ -> a\n"
        "  factors: a=4 b+=8\n"
        "  3 of 4 strategies proved, largest difference ...\n"
        "  WRONG split:b over 2: result 0 is wrong by 1.0e+00\n"
        "        user_ops.wrong_summed(x0)"
    )
    report = prove(F.max_pool1d, (rand(2, 3, 4), 2), num_ranks=({"u": 4},))
    assert "not allowed, a rank would hold nothing: split:c0 over 4; split:c1 over 4" in str(report)


def test_a_function_without_a_rule() -> None:
    with pytest.raises(AnnotationError) as error:
        prove(torch.linalg.lu, (X,))
    assert (
        str(error.value)
        == "linalg_lu has no rule to prove\n  try:   give it one with shardwright.register_op"
    )


def test_a_rank_that_no_gradient_passes() -> None:
    """What communicates above it in the backward would be left out there, and the other ranks would
    wait.
    """
    opdef = OpDef(
        "user_ops.forgetful", "x", "user_ops.forgetful", lambda op: parse_rule("b c -> b c", op)
    )
    report = prove(opdef, (X,), num_ranks=(2, 4))
    assert wrong(report) == {"split:b"} and [trial.mesh.size for trial in report.failures] == [4]
    assert "no gradient reaches x on rank 0 of 4" in str(report)
