"""Training under autocast: no farther from float64 than twice what the module itself is on one
device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from half_precision import CastLanguageModel, Numbers, compared, in_dtype, on_one_device
from precision import float64_casts
from torch import Tensor

from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.loss_scaling import LossScaler
from shardwright.runtime.training.optimizer import build_optimizer

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2}),
    ("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("data", {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 2}),
    ("pp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
]


@pytest.mark.parametrize(("policy", "options"), PLANS, ids=[policy for policy, _ in PLANS])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_errors_are_at_most_twice_those_of_one_device(
    tmp_path: Path, name: str, policy: str, options: dict[str, Any]
) -> None:
    ours, eager = compared(name, policy, ComputeConfig(use_end2end=True, **options), tmp_path)
    assert eager["gradients"] > 1e-4, "nothing was computed in bfloat16"
    worse = {key: (error, eager[key]) for key, error in ours.items() if not error <= 2 * eager[key]}
    assert not worse, "\n".join(
        f"{key}: {error:.2e}, on one device {alone:.2e}" for key, (error, alone) in worse.items()
    )


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
