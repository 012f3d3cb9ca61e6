"""Training under autocast: no farther from float64 than twice what the module itself is on one
device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from covers import spread
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

from shardwright.frontend.verification.one_device import adamw
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.trained_ranks import train_plan
from shardwright.frontend.verification.verify import compile_into, samples_per_step
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.loss_scaling import LossScaler


class Cast(nn.Module):
    """GPT-2 as a training script in mixed precision writes it: autocast is entered in forward."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype


class CastLanguageModel(Cast):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            loss: Tensor = self.inner(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


class CastClassifier(Cast):
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            loss: Tensor = zoo.loss_of(self.inner(images=images, labels=labels))
        return loss


@dataclass(frozen=True)
class Numbers:
    """Losses of all samples of a step, and gradients."""

    losses: Tensor
    gradients: dict[str, Tensor]
    loss_dtype: torch.dtype

    def errors(self, exact: Numbers) -> dict[str, float]:
        """The 2-norm of what differs, by name; ``"losses"``, ``"gradients"`` (all of them), and
        each gradient.
        """
        each = {
            name: (self.gradients[name] - g).norm().item() for name, g in exact.gradients.items()
        }
        losses = (self.losses - exact.losses).norm().item()
        return {
            "losses": losses,
            "gradients": torch.tensor(list(each.values())).norm().item(),
            **each,
        }


def on_one_device(
    model: nn.Module,
    samples: list[dict[str, Any]],
    to_dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Numbers:
    """The sum of the losses of all samples, differentiated. ``to_dtype``: the model and its inputs
    are cast to it first.
    ``scale``: losses are multiplied by it, and gradients are divided by it.
    """
    model = copy.deepcopy(model)
    if to_dtype is not None:
        model, samples = model.to(to_dtype), [in_dtype(sample, to_dtype) for sample in samples]
    losses = []
    for sample in samples:
        loss = zoo.loss_of(model(**sample))
        (loss * scale).backward()
        losses.append(loss.detach().double())
    gradients = {
        name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None
    }
    return Numbers(torch.stack(losses), gradients, loss.dtype)


def in_dtype(args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in args.items()
    }


def compared(
    name: str, policy: str, config: ComputeConfig, directory: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of a plan of a zoo model under autocast to bfloat16, and those of the same module
    on one device.
    """
    entry = zoo.get(name)
    model = entry.build().float()
    cast = (CastClassifier if "images" in entry.inputs() else CastLanguageModel)(
        model, torch.bfloat16
    )
    inputs = {
        k: v
        for k, v in in_dtype(entry.inputs(), torch.float32).items()
        if k in ("input_ids", "images", "labels")
    }
    with shared_traces(f"{name} under autocast"):
        files = compile_into(directory, cast, inputs, policy, config)
    units = config.runtime_ngpus // config.plan_ngpus
    per_unit = [
        [rolled(inputs, k * units + unit) for k in range(samples_per_step(files, config))]
        for unit in range(units)
    ]
    samples = [sample for unit in per_unit for sample in unit]
    with float64_casts():
        exact = on_one_device(model, samples, torch.float64)
    exact = Numbers(
        exact.losses,
        {f"inner.{name}": gradient for name, gradient in exact.gradients.items()},
        torch.float64,
    )
    found = train_plan(files, config, per_unit, 1, adamw, True)
    losses = torch.stack([loss.double() for loss in found.losses[0]])
    ours = Numbers(
        losses,
        {name: g.double() for name, g in found.gradients.items() if g is not None},
        found.losses[0][0].dtype,
    )
    eager = on_one_device(cast, samples)
    assert ours.loss_dtype == eager.loss_dtype
    return ours.errors(exact), eager.errors(exact)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2}),
    ("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("data", {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 2}),
    ("pp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
]


@pytest.mark.parametrize(
    ("name", "policy", "options"),
    spread(
        [
            *((name, *plan) for name in ("gpt2", "resnet") for plan in PLANS),
            (
                "gpt2",
                "cp",
                {"plan_ngpus": 3, "runtime_ngpus": 3, "pas_config": {"cp_mode": "ring"}},
            ),
        ],
        2,
        first=1,
    ),
)
def test_errors_are_at_most_twice_those_of_one_device(
    tmp_path: Path, name: str, policy: str, options: dict[str, Any]
) -> None:
    ours, eager = compared(name, policy, ComputeConfig(use_end2end=True, **options), tmp_path)
    assert eager["gradients"] > 1e-4, "nothing was computed in bfloat16"
    worse = {key: (error, eager[key]) for key, error in ours.items() if not error <= 2 * eager[key]}
    assert not worse, "\n".join(
        f"{key}: {error:.2e}, on one device {alone:.2e}" for key, (error, alone) in worse.items()
    )


@pytest.mark.slow
def test_float16_with_scaled_losses_in_a_pipeline(tmp_path: Path) -> None:
    """The first scales overflow: steps are skipped until one fits, on one device and on all ranks
    at the same scale.
    """
    entry, first = zoo.get("gpt2"), 2.0**24
    model = entry.build().float()
    cast = CastLanguageModel(model, torch.float16)
    inputs = {
        k: v
        for k, v in in_dtype(entry.inputs(), torch.float32).items()
        if k in ("input_ids", "labels")
    }
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config={"num_microbatches": 2}
    )
    files = compile_into(tmp_path, cast, inputs, "pp", config)
    samples = [inputs, rolled(inputs, 1)]

    def rank(index: int) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        module = load_class(files)()
        optimizer, scaler = (
            build_optimizer(module, torch.optim.SGD, lr=0.0),
            LossScaler(init_scale=first),
        )
        while True:
            losses = module.train_step(samples, scale_fn=scaler.scale)
            scaler.unscale_(optimizer)
            gradients = {
                name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None
            }
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() == scale:  # this step was taken
                return scale, losses, gradients

    (scale, losses, gradients), (other_scale, _, others) = run_ranks(2, rank)
    assert scale == other_scale < first
    gradients = {**gradients, **others}
    with float64_casts():
        exact = on_one_device(model, samples, torch.float64)
    exact = Numbers(
        exact.losses, {f"inner.{name}": g for name, g in exact.gradients.items()}, torch.float64
    )
    eager = on_one_device(cast, samples, scale=scale)
    assert not all(
        g.isfinite().all() for g in on_one_device(cast, samples, scale=2 * scale).gradients.values()
    )
    ours = Numbers(
        torch.stack([loss.double() for loss in losses]), gradients, losses[0].dtype
    ).errors(exact)
    alone = eager.errors(exact)
    assert not [key for key, error in ours.items() if not error <= 2 * alone[key]]
