"""Models under several plans, trained on ranks that are threads, for tests of checkpoints."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

import shardwright

# (not later: under float64_casts its table of dtypes would be wrong)
import shardwright.runtime.checkpoint.save
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

Plan = tuple[str, int, int]
"""Policy, ranks of the plan, ranks in all. ``"tp+zero1"``: policy ``tp``, optimizer state split;
``"tp+zero3"``: parameters in pieces over the units.
"""

ADAMW = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}

_folders: list[tempfile.TemporaryDirectory[str]] = []


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW)


@functools.cache
def model_of(name: str) -> nn.Module:
    """A model of the zoo. Copy it before it is changed."""
    return zoo.get(name).build()


@functools.cache
def compiled(name: str, policy: str, plan_ngpus: int, units: int = 1) -> Path:
    """The generated files of a model of the zoo under a policy."""
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    config = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": plan_ngpus * units,
        "outputs": "loss",
        "grad_reduction": "mean",
    }
    policy, _, stage = policy.partition("+zero")
    config["use_zero"] = int(stage or 0)
    with warnings.catch_warnings(), float64_casts(), shared_traces(name):
        warnings.simplefilter("ignore")
        model, inputs = copy.deepcopy(model_of(name)), zoo.get(name).inputs()
        shardwright.parallelize(
            model, inputs, policy, config, gen_savedir=folder.name, load_module=False
        )
    (manifest,) = Path(folder.name).rglob("manifest.json")
    return manifest.parent


def directory_of(name: str, plan: Plan) -> Path:
    policy, plan_ngpus, runtime_ngpus = plan
    return compiled(name, policy, plan_ngpus, runtime_ngpus // plan_ngpus)


@dataclass
class Trainer:
    """One rank's module and optimizer. All units get the same batch and average gradients, as if
    there were one.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = zoo.loss_of(self.module(**zoo.get(self.name).inputs(seed=100 + number)))
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()

    def steps(self, numbers: Iterable[int]) -> list[Tensor]:
        return [self.step(number) for number in numbers]


OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def trainer(name: str, plan: Plan, optimizer: OptimizerFactory = adamw, **options: Any) -> Trainer:
    """This rank's part under a plan."""
    module = load_class(directory_of(name, plan))()
    return Trainer(name, module, build_optimizer(module, optimizer, **options))


def original(name: str, optimizer: OptimizerFactory = adamw) -> Trainer:
    """The model on one device, to be trained under ``float64_casts``."""
    model = copy.deepcopy(model_of(name))
    return Trainer(name, model, optimizer(list(model.parameters())))


def on(name: str, plan: Plan, fn: Callable[[], Any]) -> list[Any]:
    """``fn()`` on all ranks of a plan, after the model was compiled for it."""
    directory_of(name, plan)
    with float64_casts():  # not in the threads: the patches are of the process
        return run_ranks(plan[2], lambda rank: fn())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer by position of the parameter and key."""
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        found.update({f"{number}.{key}": value for key, value in state.items()})
    return found


def assert_same(
    ours: Mapping[str, Any], reference: Mapping[str, Any], tolerance: float = 0.0
) -> None:
    """All tensors equal: bit for bit, or up to ``tolerance`` of the largest element."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    for name, expected in reference.items():
        value = ours[name]
        if not isinstance(expected, Tensor):
            assert value == expected, name
            continue
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        if tolerance and expected.numel() and expected.dtype.is_floating_point:
            bound = tolerance * max(1.0, expected.abs().max().item())
            assert (value - expected).abs().max().item() <= bound, (
                f"{name}: {(value - expected).abs().max().item():.3g}"
            )
        else:
            assert torch.equal(value, expected), name
