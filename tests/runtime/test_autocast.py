"""Compiled modules inside and outside of blocks of autocast: what the module itself computes there,
or a refusal.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

X = torch.linspace(-1.3, 2.1, 24).view(4, 6)


class Net(nn.Module):
    """A tied product in float32 inside of whatever surrounds it, and a recomputed part."""

    def __init__(self, inner_autocast=False):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.inner_autocast = inner_autocast
        with torch.no_grad():
            for index, p in enumerate(self.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel()) + 1.7 * index).view_as(p) / 3)

    def forward(self, x):
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=self.inner_autocast or torch.is_autocast_enabled("cpu")
        ):
            hidden = F.gelu(self.up(x)).float()
        with torch.autocast("cpu", enabled=False):
            # Rounded in half precision.
            table = torch.arange(6.0)[:, None] @ torch.full((1, 6), 0.1)
            exact = hidden @ self.up.weight + x @ table.cos()
        return F.cross_entropy(
            checkpoint(self.down, hidden, use_reentrant=False) + exact, torch.tensor([1, 2, 3, 0])
        )


def block(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def compiled(folder, policy="tp", plan_ngpus=2, model=None, **config):
    config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": 2, "constant_folding": True, **config}
    return parallelize(model or Net(), {"x": X}, policy, config, gen_savedir=folder)


def gradients(module, inside):
    """The gradients of a loss that is computed in the block. The block ends before the backward, as
    PyTorch wants it.
    """
    with block() if inside else nullcontext():
        loss = module(x=X)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in module.named_parameters()},
    }


def assert_equal(found, expected):
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("inner", [False, True])
def test_compiled_inside_it_computes_what_the_module_does_inside(tmp_path, inner):
    """Wherever it is called; a plan that splits nothing gives the same bits."""
    expected = gradients(Net(inner), True)
    assert not torch.equal(expected["loss"], Net(inner)(X))

    def train(rank):
        with block():
            module = compiled(tmp_path, "dp", 1, Net(inner))
        assert module.autocast is torch.bfloat16
        inside = gradients(module, True)
        module.zero_grad()
        return inside, gradients(module, False)

    for found in run_ranks(2, train):
        for result in found:
            assert_equal(result, expected)


@pytest.mark.parametrize("policy", ["tp", "pp"])
def test_steps_inside(tmp_path, policy):
    def train(rank):
        with block():
            module = compiled(
                tmp_path,
                policy,
                use_end2end=True,
                pas_config={"num_microbatches": 2} if policy == "pp" else {},
            )
            optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
            inside = (
                module.train_step([X, X / 2]),
                optimizer.clip_gnorm(),
                module.infer_step([X, X / 2]),
            )
        return inside, (
            module.train_step([X, X / 2]),
            optimizer.clip_gnorm(),
            module.infer_step([X, X / 2]),
        )

    for inside, outside in run_ranks(2, train):
        assert inside[0] == outside[0] and inside[1] == outside[1] and inside[2] == outside[2]
        with block():
            expected = [Net()(x).item() for x in (X, X / 2)]
        assert [loss.item() for loss in inside[0]] == pytest.approx(expected, rel=1e-2)


def text_of(fn, error=UsageError):
    with pytest.raises(error) as caught:
        run_ranks(2, fn)
    return str(caught.value)


def test_blocks_that_it_was_not_compiled_in_are_refused(tmp_path):
    def called_inside(rank):
        module = compiled(tmp_path / "a")
        with block():
            module(x=X)

    assert text_of(called_inside) == (
        "Net was called inside autocast to bfloat16, which it was not compiled for\n"
        "  why:   it was compiled outside of autocast, and the dtypes of its values were "
        "settled then\n"
        "  try:   call parallelize inside the same `with torch.autocast(...)`, or let "
        "forward of the model enter it"
    )

    def another_dtype(rank):
        with block(torch.float16):
            module = compiled(tmp_path / "b", use_end2end=True)
        with block():
            module.train_step([X])

    assert text_of(another_dtype).splitlines()[:2] == [
        "Net was called inside autocast to bfloat16, which it was not compiled for",
        (
            "  why:   it was compiled inside autocast to float16, and the dtypes of its values "
            "were settled then"
        ),
    ]


def test_files_of_another_block_are_not_taken(tmp_path):
    run_ranks(2, lambda rank: compiled(tmp_path))

    def inside(rank):
        with block():
            compiled(tmp_path)

    assert "holds files of another compile" in text_of(inside, ConfigError)


def test_a_block_around_run_ranks_is_around_its_ranks():
    with block(torch.float16):
        found = run_ranks(
            2, lambda rank: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        )
    assert found == [(True, torch.float16)] * 2
    assert run_ranks(2, lambda rank: torch.is_autocast_enabled("cpu")) == [False, False]
