"""How far training in half precision is from float64: of a compiled plan, and of the module itself
on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

from shardwright.frontend.verification.one_device import adamw
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.trained_ranks import train_plan
from shardwright.frontend.verification.verify import _num_samples, compile_into
from shardwright.runtime.config import ComputeConfig


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
        """By name the 2-norm of what differs; ``"losses"``, ``"gradients"`` (all of them), and each
        gradient.
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
        [rolled(inputs, k * units + unit) for k in range(_num_samples(files, config))]
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
