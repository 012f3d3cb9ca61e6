"""Means over split dims: the ranks' results add up to the plain mean, and so do the gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from op_ranks import assert_parallel
from placements import Sharded

from shardwright.runtime import ops
from shardwright.runtime.layout import Cut

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


@RANKS
@pytest.mark.parametrize(("dim", "keepdim"), [(None, False), (1, False), ((0, -1), True)])
def test_mean(dim, keepdim, num_ranks):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 2, dtype=torch.float64).requires_grad_()
    split_dim = 0 if dim != 1 else 1
    count = {None: 30, 1: 5, (0, -1): 6}[dim]
    assert_parallel(
        num_ranks,
        lambda x: x.mean() if dim is None else x.mean(dim, keepdim),
        lambda axis, x: ops.mean(x, dim, keepdim, count=count),
        [(x, Sharded(split_dim, Cut((x.shape[split_dim],))))],
        "P",
    )


def test_mean_of_half_precision_does_not_overflow():
    x = torch.full((100,), 1000.0, dtype=torch.float16)
    assert ops.mean(x, count=100).item() == 1000
    assert ops.mean(x, None, False, torch.float32, count=50).item() == 2000


def signs(*shape):
    return torch.randint(2, shape).double() * 2 - 1


def probabilities(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# name: operands, further arguments by position and by name, the divisor of each reduction beside
# the number of elements
LOSSES = {
    "mse_loss": ([randn, randn], (), {}),
    "l1_loss": ([randn, randn], (), {}),
    "smooth_l1_loss": ([randn, randn], (), {"beta": 0.7}),
    "huber_loss": ([randn, randn], (), {"delta": 0.7}),
    "binary_cross_entropy": ([probabilities, probabilities], (), {}),
    "binary_cross_entropy_with_logits": ([randn, probabilities, probabilities], (), {}),
    "kl_div": ([randn, probabilities], (), {"log_target": False}),
    "poisson_nll_loss": ([randn, probabilities], (False, True), {}),
    "gaussian_nll_loss": ([randn, randn, probabilities], (), {}),
    "soft_margin_loss": ([randn, signs], (), {}),
    "hinge_embedding_loss": ([randn, signs], (0.5,), {}),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@RANKS
@pytest.mark.parametrize("name", LOSSES)
def test_elementwise_losses(name, num_ranks):
    torch.manual_seed(0)
    makers, positional, named = LOSSES[name]
    for dim, shape in ((0, (5, 3)), (1, (2, 1))):
        operands = [make(*shape) for make in makers]
        operands[0].requires_grad_()
        assert_parallel(
            num_ranks,
            lambda *xs: getattr(F, name)(*xs, *positional, **named),
            lambda axis, *xs: getattr(ops, name)(
                *xs,
                *positional,
                **named,
                reduction="mean",
                count=math.prod(shape),  # noqa: B023
            ),
            [(x, Sharded(dim, Cut((shape[dim],)))) for x in operands],
            "P",
        )


ROW_LOSSES = {
    "margin_ranking_loss": lambda: [randn(5), randn(5), signs(5)],
    "cosine_embedding_loss": lambda: [randn(5, 4), randn(5, 4), signs(5)],
    "triplet_margin_loss": lambda: [randn(5, 4), randn(5, 4), randn(5, 4)],
    "multi_margin_loss": lambda: [randn(5, 4), torch.randint(4, (5,))],
    "multilabel_margin_loss": lambda: [randn(5, 4), torch.tensor([[0, 2, -1, 1]] * 5)],
    "multilabel_soft_margin_loss": lambda: [randn(5, 4), probabilities(5, 4)],
}


@RANKS
@pytest.mark.parametrize("name", ROW_LOSSES)
def test_losses_by_row(name, num_ranks):
    torch.manual_seed(0)
    operands = ROW_LOSSES[name]()
    operands[0].requires_grad_()
    assert_parallel(
        num_ranks,
        getattr(F, name),
        lambda axis, *xs: getattr(ops, name)(*xs, count=5),
        [(x, Sharded(0, Cut((5,)))) for x in operands],
        "P",
    )


def test_batchmean_divides_by_what_it_is_given():
    x, target = randn(5, 3), probabilities(5, 3)
    expected = F.kl_div(x, target, reduction="batchmean")
    torch.testing.assert_close(ops.kl_div(x, target, reduction="batchmean", count=5), expected)
