"""Models trained in low precision with masters: on the ranks of a plan, on one device, and in
float64 for comparison.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zoo
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

import shardwright
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

STEPS = 4
SAMPLES = 2
"""Per unit and step, where a step is one of ``train_step``."""

Tensors = Mapping[str, Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A model of the zoo under a plan. ``policy``: its name. ``options``: further fields of the
    config.
    """

    name: str
    policy: str
    plan_ngpus: int
    num_units: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> ComputeConfig:
        end2end = self.policy in ("pp", "hybrid")
        return ComputeConfig(
            **{
                "plan_ngpus": self.plan_ngpus,
                "runtime_ngpus": self.plan_ngpus * self.num_units,
                "grad_reduction": "mean",
                "outputs": "loss",
                "use_end2end": end2end,
                "use_zero": 0,
                "distributed_optimizer": {},
                **(
                    {"pas_config": {"num_stages": 2, "num_microbatches": SAMPLES}}
                    if end2end
                    else {}
                ),
                **self.options,
            }
        )

    @property
    def num_samples(self) -> int:
        return SAMPLES if self.config.use_end2end else 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name} {dtype} {self.policy} {self.plan_ngpus}x{self.num_units} "
            f"{dict(self.options)}"
        )

    def inputs(self, step: int, unit: int, sample: int) -> dict[str, Any]:
        """Token ids and the like: no floating tensors."""
        number = (step * self.num_units + unit) * self.num_samples + sample
        return rolled(zoo.get(self.name).inputs(seed=number // 4), number % 4)


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """A model of the zoo whose parameters are exact in ``dtype``. Copy it before it is changed."""
    return zoo.get(name).build().to(dtype)


# ------------------------------------------------------------------------------------------------
# one device


def exact(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters after training in float64, from the same values."""
    with float64_casts():
        model = copy.deepcopy(model_of(case.name, case.dtype)).double()
        optimizer = adamw(model.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            for unit in range(case.num_units):
                for sample in range(case.num_samples):
                    (
                        zoo.loss_of(model(**case.inputs(step, unit, sample))) / case.num_units
                    ).backward()
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def eager(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    """The float32 masters after training in ``case.dtype``, their gradients added up in float32."""
    model = copy.deepcopy(model_of(case.name, case.dtype))
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    optimizer = adamw(list(masters.values()))
    for step in range(steps):
        optimizer.zero_grad()
        for unit in range(case.num_units):
            for sample in range(case.num_samples):
                zoo.loss_of(model(**case.inputs(step, unit, sample))).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        gradient = p.grad.float() / case.num_units
                        masters[name].grad = (
                            gradient
                            if masters[name].grad is None
                            else masters[name].grad + gradient
                        )
                        p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def error(found: Tensors, reference: Tensors) -> float:
    """The 2-norm over all parameters of the difference."""
    assert found.keys() == reference.keys()
    squares = [
        (found[name].double() - reference[name].double()).square().sum() for name in reference
    ]
    return torch.stack(squares).sum().sqrt().item()


# ------------------------------------------------------------------------------------------------
# ranks

_folders: list[tempfile.TemporaryDirectory[str]] = []


def compiled(case: Case) -> Path:
    """The generated files of a case."""
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    with warnings.catch_warnings(), shared_traces(case.name):
        warnings.simplefilter("ignore")
        model = copy.deepcopy(model_of(case.name, case.dtype))
        shardwright.parallelize(
            model,
            case.inputs(0, 0, 0),
            case.policy,
            case.config,
            gen_savedir=folder.name,
            load_module=False,
        )
    (manifest,) = Path(folder.name).rglob("manifest.json")
    return manifest.parent


def train_steps(case: Case, module: Any, optimizer: ParallelOptimizer, steps: range) -> None:
    """Train one rank's part. The loss is averaged over units, and summed over the samples of a
    step.
    """
    unit = module.ranks.unit
    for step in steps:
        optimizer.zero_grad()
        samples = [case.inputs(step, unit, sample) for sample in range(case.num_samples)]
        if case.config.use_end2end:
            module.train_step(
                [s[module.arguments[0]] if len(module.arguments) == 1 else s for s in samples]
            )
        else:
            zoo.loss_of(module(**samples[0])).backward()
        optimizer.step()


@dataclass
class Rank:
    """What one rank has after training: its state dicts, and what ``look`` said of its module and
    optimizer.
    """

    module: dict[str, Any]
    optimizer: dict[str, Any]
    seen: Any


def train(
    case: Case,
    directory: Path,
    look: Callable[[Any, ParallelOptimizer], Any] = lambda module, optimizer: None,
    steps: int = STEPS,
) -> list[Rank]:
    """Train on all ranks, as threads."""

    def on_rank(rank: int) -> Rank:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        train_steps(case, module, optimizer, range(steps))
        state, optimizer_state = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        return Rank(state, optimizer_state, look(module, optimizer))

    return run_ranks(case.config.runtime_ngpus, on_rank)


def merged_masters(
    name: str, module: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The masters in merged state dicts."""
    names = [parameter for parameter, _ in model_of(name, torch.bfloat16).named_parameters()]
    return {names[number]: master for number, master in optimizer["masters"].items()}
