"""What people do with modules: right on a parallel module, or refused in words."""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import shardwright
from shardwright import ComputeConfig, run_ranks
from shardwright.runtime.module import global_hooks

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def same(module: Any) -> Tensor:
    return module(x=X)


def averaged(module: Any) -> Tensor:
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    return average(x=X)


def doubled(module: Any) -> Tensor:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(2 * vector, module.parameters())
    return module(x=X)


def other_data(module: Any) -> Tensor:
    for parameter in module.parameters():
        parameter.data = parameter.data * 2
    return module(x=X)


def constant(module: Any) -> Tensor:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    return module(x=X)


RIGHT: tuple[Callable[[Any], Tensor], ...] = (averaged, doubled, other_data, constant)
"""What gives the loss of the original module after the same."""


def whole_data(module: Any) -> None:
    module.up.weight.data = torch.zeros(16, 8, dtype=torch.float64)
    module(x=X)


def halved(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.half()
    module(x=X)


def functional(module: Any) -> None:
    values = {name: 2 * value.detach() for name, value in module.named_parameters()}
    torch.func.functional_call(module, values, (), {"x": X})


def frozen(module: Any) -> None:
    module.up.requires_grad_(False)
    module(x=X)


def scaled(module: Any) -> None:
    optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(x=X)).backward()
    scaler.step(optimizer)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "jit.script": (torch.jit.script, "cannot be compiled by torch.jit.script"),
    "jit.trace": (lambda m: torch.jit.trace(m, (X,)), "cannot be traced by torch.jit"),
    "apply": (lambda m: m.apply(lambda part: None), "has no layers that apply"),
    "quantize_dynamic": (torch.ao.quantization.quantize_dynamic, "cannot be quantized"),
    "init": (lambda m: nn.init.xavier_uniform_(m.up.weight),
        "'up.weight' of Net cannot be initialised in place"),
    "normal": (lambda m: nn.init.normal_(m.down.bias),
        "'down.bias' of Net cannot be initialised in place"),
    "orthogonal": (lambda m: nn.init.orthogonal_(m.up.weight),
        "'up.weight' of Net cannot be initialised in place"),
    "a whole tensor as data": (whole_data,
        r"has the shape \[16, 8\]\n  why:   this rank's piece of it is \[8, 8\]"),
    "data of another dtype": (halved,
        "'up.weight' of Net has the dtype torch.float16\n  why:   it was compiled as"),
    "no argument": (lambda m: m(), "Net.forward: missing a required argument: 'x'"),
    "an unknown argument": (lambda m: m(x=X, y=X),
        "Net.forward: got an unexpected keyword argument 'y'"),
    "functional_call": (functional, "is not the one that the module was made with"),
    "freezing": (frozen, "'up.weight' of Net is frozen, but was trained"),
    "load_state_dict of the original": (
        lambda m: m.load_state_dict(net().state_dict(), strict=False),
        "the state dict has no layouts for Net"
    ),
    "half": (lambda m: m.half(), "cannot be converted from float64 to float16"),
    "GradScaler": (scaled, "torch.amp.GradScaler cannot scale"),
    "pickle": (pickle.dumps, "Net cannot be pickled"),
    "copy": (copy.copy, "Net cannot be pickled"),
    "weight_norm": (lambda m: nn.utils.parametrizations.weight_norm(m.up),
        "submodule 'up' of a parallel module cannot lose its parameter 'weight'"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m.up),
        "submodule 'up' of a parallel module cannot lose its parameter 'weight'"),
    "a hook on a submodule": (lambda m: m.up.register_full_backward_hook(print), "would never run"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
        shardwright.parallelize(
            net(), {"x": X}, "tp", config, gen_savedir=folder, load_module=False
        )
        yield next(Path(folder).rglob("manifest.json")).parent


@pytest.mark.parametrize("habit", RIGHT)
def test_what_is_right(files: Path, habit: Callable[[Any], Tensor]) -> None:
    expected = habit(net()).detach()
    for loss in run_ranks(2, lambda rank: habit(shardwright.load_class(files)()).detach()):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_is_refused(files: Path) -> None:
    def on_rank(rank: int) -> None:
        for name, (habit, words) in REFUSED.items():
            module = shardwright.load_class(files)()
            with pytest.raises(shardwright.ShardwrightError, match=words):
                habit(module)
                pytest.fail(f"{name} passes")

    run_ranks(2, on_rank)


class Drops(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_that_is_run_again_in_backward(tmp_path: Path, use_reentrant: bool) -> None:
    """Its gradients are those of a call without ``checkpoint``, unless it draws: which call's
    numbers to draw again, it cannot know.
    """
    x = X.clone().requires_grad_()
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    def gradients(module: Any, again: bool) -> list[Tensor]:
        def loss(x: Tensor) -> Any:
            return module(x=x)

        found = checkpoint(loss, x, use_reentrant=use_reentrant) if again else loss(x)
        found.backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    def on_rank(rank: int) -> None:
        module = shardwright.parallelize(net(), {"x": x}, "tp", config, gen_savedir=tmp_path)
        expected = gradients(module, again=False)
        module.zero_grad()
        assert all(map(torch.equal, gradients(module, again=True), expected))
        drops = shardwright.parallelize(
            Drops().double(), {"x": x}, "tp", config, gen_savedir=tmp_path
        )
        gradients(drops, again=False)
        with pytest.raises(
            shardwright.UsageError,
            match="'dropout' draws random numbers in a call that is made inside backward",
        ):
            gradients(drops, again=True)
        gradients(drops, again=False)
        gradients(drops.eval(), again=True)

    run_ranks(2, on_rank)


def test_others_are_initialised_as_ever() -> None:
    nn.init.xavier_uniform_(net().up.weight)


def test_gradients_that_are_asked_for_are_summands(files: Path, tmp_path: Path) -> None:
    """A warning says so where two units have copies; pieces of one unit are whole pieces."""

    def ask(module: Any) -> None:
        torch.autograd.grad(module(x=X), module.up.weight)
        torch.autograd.grad(module(x=X), iter(module.parameters()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, lambda rank: ask(shardwright.load_class(files)()))
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2)

    def on_rank(rank: int) -> None:
        ask(shardwright.parallelize(net(), {"x": X}, "dp", config, gen_savedir=tmp_path))

    with pytest.warns(
        UserWarning, match="this rank's summand of the gradient of 'up.weight' of Net"
    ):
        run_ranks(2, on_rank)


def test_hooks_on_all_modules_that_never_run_are_said(files: Path) -> None:
    """Once for each kind, in a process that runs a parallel module."""
    global_hooks._said.clear()
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.warns(UserWarning, match="for the parallel module Net alone") as told:
            run_ranks(2, lambda rank: shardwright.load_class(files)()(x=X).detach())
    finally:
        hook.remove()
    assert len([w for w in told if "register_module_forward_hook" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        global_hooks.warn_of_global_hooks("Net")  # the hook is gone
