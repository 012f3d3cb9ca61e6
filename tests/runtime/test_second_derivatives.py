"""Gradients of gradients: refused where ranks exchange values, right where nothing is split."""

import copy

import pytest
import torch
from torch import nn

import shardwright
from shardwright import ComputeConfig, UsageError, parallelize, run_ranks
from shardwright.runtime.second_derivatives import differentiable_once


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_a_gradient_is_no_constant_where_the_one_that_comes_in_is():
    """torch's own ``once_differentiable`` lets this pass, with a gradient of zero."""
    x = torch.tensor(2.0, requires_grad=True)
    assert torch.autograd.grad(_Cubed.apply(x), x) == (torch.tensor(12.0),)
    with pytest.raises(UsageError, match="no gradients of gradients\n  why:   create_graph=True"):
        torch.autograd.grad(_Cubed.apply(x), x, create_graph=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).tanh()).sum()


def penalised(module, x):
    """Backward through a loss and the squares of its gradient."""
    x = x.clone().requires_grad_()
    loss = module(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def test_a_penalty_on_a_gradient(tmp_path):
    """It is refused where operators are split; units of one rank add their gradients up."""
    torch.manual_seed(0)
    model, batches = Net().double(), torch.randn(2, 4, 8, dtype=torch.double)
    alone = copy.deepcopy(model)
    for batch in batches:
        penalised(alone, batch)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    example = {"x": batches[0].clone().requires_grad_()}

    def on_rank(rank, plan_ngpus):
        config = ComputeConfig(plan_ngpus=plan_ngpus, runtime_ngpus=2)
        module = parallelize(
            model, example, "tp", config, instance_name=f"of{plan_ngpus}", gen_savedir=tmp_path
        )
        optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
        if plan_ngpus == 2:
            with pytest.raises(UsageError, match="with plan_ngpus=1"):
                penalised(module, batches[0])
            return None
        penalised(module, batches[rank])
        optimizer.step()
        return dict(module.named_parameters())

    run_ranks(2, on_rank, 2)
    (updated, _) = run_ranks(2, on_rank, 1)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(updated[name], parameter, rtol=1e-10, atol=1e-10)
