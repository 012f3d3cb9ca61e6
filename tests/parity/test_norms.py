"""The norm of all gradients, and what clipping leaves of them, under every kind of plan: those of
``clip_grad_norm_`` on one device, also where a gradient is infinite or not a number on one rank.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models
import pytest
import tiny_gpt
import torch
import zoo
from covers import spread
from overflows import overflow
from precision import float64_casts
from torch import Tensor
from traces import shared_traces

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero.gathering import gathered_gradients

MAX_NORM = 0.05
NUM_SAMPLES = 2


def on_the_residual_stream(op: IROp) -> bool:
    return op.target in ("add", "dropout", "layer_norm")


def sequence_parallel(graph: PlannableGraph, config: ComputeConfig) -> Any:
    """Megatron's: layer norms see a part of the sequence, and their gradients are summands."""
    b = graph.builder(mesh={"tp": config.plan_ngpus})
    for dim in ("heads", "up_dim", "vocab"):
        b.split(dim, "tp")
    return b.split("seq", "tp", where=on_the_residual_stream).build()


PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp": ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2}),
    "tp": ("tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
    "sequence": (sequence_parallel, {"plan_ngpus": 2, "runtime_ngpus": 4}),
    "sequence-zero2": (sequence_parallel, {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 2}),
    "data-zero1": (
        "data",
        {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 1, "zero_use_reduce_scatter": True},
    ),
    "pp": ("pp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
    "hybrid-zero1": ("hybrid", {"plan_ngpus": 4, "runtime_ngpus": 8, "use_zero": 1}),
    "tp-zero3": ("tp", {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 3}),
    "pp-table": ("pp", {"plan_ngpus": 2, "runtime_ngpus": 4, "distributed_optimizer": {}}),
}
EXPERT_PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ep-edp-tp-units-zero1": (
        "hybrid",
        {
            "plan_ngpus": 4,
            "runtime_ngpus": 8,
            "use_zero": 1,
            "pas_config": {"num_stages": 1, "dp": 2, "tp": 2, "ep": 2, "etp": 1},
        },
    ),
    "ep-zero3": ("ep", {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 3}),
    "ep-etp-pp": (
        "hybrid",
        {
            "plan_ngpus": 8,
            "runtime_ngpus": 8,
            "pas_config": {"num_stages": 2, "dp": 2, "tp": 2, "ep": 2, "etp": 2},
        },
    ),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = tiny_gpt.GPT(num_layers=2).double()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made


def mixture() -> torch.nn.Module:
    return expert_models.get(expert_models.BY_HAND).build()


Args = dict[str, Any]
SUBJECTS: dict[Callable[[], torch.nn.Module], Callable[[], Args]] = {
    model: tiny_gpt.dummy_args,
    mixture: expert_models.get(expert_models.BY_HAND).inputs,
}
"""The models, and what makes inputs for them."""


def samples(args: Args, unit: int) -> list[Args]:
    return [rolled(args, 1 + 2 * unit + k) for k in range(NUM_SAMPLES)]


def on_one_device(
    build: Callable[[], torch.nn.Module], num_units: int, value: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    alone, args = build(), SUBJECTS[build]()
    losses = [
        zoo.loss_of(alone(**sample)) for unit in range(num_units) for sample in samples(args, unit)
    ]
    torch.stack(losses).sum().backward()
    if value is not None:
        alone.get_parameter("blocks.0.norm1.weight").grad[1] = value
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
    return norm, {name: p.grad for name, p in alone.named_parameters()}


def check(
    name: str,
    folder: Path,
    value: float | None = None,
    build: Callable[[], torch.nn.Module] = model,
) -> None:
    policy, options = (PLANS | EXPERT_PLANS)[name]
    pas_config = {"num_microbatches": 2} if policy in ("pp", "hybrid") else {}
    pas_config |= options.get("pas_config", {})
    config = ComputeConfig(use_end2end=True, **{**options, "pas_config": pas_config})
    args = SUBJECTS[build]()
    with shared_traces(f"{build.__name__} of norms"):
        files = compile_into(folder, build(), args, policy, config)

    def clipped(rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        module = load_class(files)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        poisoned = dict(module.named_parameters()).get("blocks.0.norm1.weight")
        # Under tp the ranks of a unit compute the whole gradient, each for itself.
        is_spoilt = rank == 0 or (policy == "tp" and module.ranks.unit == 0)
        if value is not None and is_spoilt and poisoned is not None:
            with overflow(poisoned, 1, value):
                module.train_step(samples(args, module.ranks.unit))
        else:
            module.train_step(samples(args, module.ranks.unit))
        before = optimizer.clip_gnorm()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        assert torch.equal(norm, before) or before.isnan()
        return norm, gathered_gradients(optimizer._reducer.buckets)

    norm, gradients = on_one_device(build, config.runtime_ngpus // config.plan_ngpus, value)
    for found, pieces in run_ranks(config.runtime_ngpus, clipped):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0, equal_nan=True)
        for key, piece in pieces.items():
            if piece is not None and piece.shape == gradients[key].shape:
                torch.testing.assert_close(
                    piece, gradients[key], rtol=1e-10, atol=1e-14, equal_nan=True, msg=key
                )


@pytest.mark.parametrize("name", spread(PLANS, 2))
def test_norms_and_clipped_gradients(tmp_path: Path, name: str) -> None:
    with float64_casts():
        check(name, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "ep-edp-tp-units-zero1",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("ep-zero3", "ep-etp-pp")),
    ],
)
def test_each_expert_counts_once(tmp_path: Path, name: str) -> None:
    with float64_casts():
        check(name, tmp_path, build=mixture)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", spread(["tp", "sequence-zero2", "pp", "tp-zero3"], 2))
def test_one_that_is_not_finite_in_one_unit(tmp_path: Path, name: str, value: float) -> None:
    """All ranks see the norm of one device: infinite, or not a number."""
    with float64_casts():
        check(name, tmp_path, value)
