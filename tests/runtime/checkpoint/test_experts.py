"""Checkpoints of mixtures of experts: from any plan into any other, and what transformers reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import expert_models
import pytest
import torch
import zoo
from expert_models import BY_HAND
from precision import float64_casts
from torch import Tensor
from traces import shared_traces

import shardwright

# (not later: under float64_casts its table of dtypes would be wrong)
import shardwright.runtime.checkpoint.save
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Plan:
    """Where a model is trained for some steps. All units get the same batch and average."""

    policy: str
    plan_ngpus: int = 1
    units: int = 1
    zero: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> ComputeConfig:
        return ComputeConfig(
            plan_ngpus=self.plan_ngpus,
            runtime_ngpus=self.plan_ngpus * self.units,
            use_zero=self.zero,
            pas_config=self.options,
            use_end2end=self.policy == "hybrid",
            grad_reduction="mean",
            outputs="loss",
        )


ONE = Plan("dp")
EP4, TP2 = Plan("ep", 4), Plan("tp", 2, options={"ep": 1})
TOURS: dict[str, tuple[Plan, ...]] = {
    "ep to tp and back": (EP4, TP2, ONE, EP4),
    "axes and pieces": (
        Plan("ep", 4, 1, 3),
        Plan("ep", 4, 2, 1, {"ep": 2, "etp": 2}),
        Plan("tp", 4, 2, 3, {"ep": 2, "etp": 2}),
        Plan("ep", 3, 1, 2),
        Plan("ep", 8),
        Plan("data", 3),
        EP4,
    ),
}


def trained(
    name: str, plan: Plan, folder: Path, batches: list[Any], read: Path | None, write: Path
) -> list[Any]:
    """Train on all ranks of a plan from a checkpoint, if there is one, and save another. The losses
    and the state of every rank.
    """
    entry = expert_models.get(name)
    with float64_casts(), shared_traces(f"experts {name} {{}}"):
        files = compile_into(folder, entry.build(), entry.inputs(), plan.policy, plan.config())

    def rank(_: int) -> tuple[list[Tensor], Any, Any]:
        module = load_class(files)(init_params=read is None)
        optimizer = build_optimizer(module, checkpoints.adamw, plan.config())
        if read is not None:
            shardwright.load_checkpoint(read, module, optimizer)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = zoo.loss_of(module(**batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        shardwright.save_checkpoint(write, module, optimizer)
        return losses, *shardwright.deduped_state_dict(module, optimizer)

    with float64_casts():
        return run_ranks(plan.plan_ngpus * plan.units, rank)


@pytest.mark.parametrize(
    ("name", "tour"),
    [
        *(
            pytest.param(name, tour, marks=pytest.mark.slow)
            for name, tour in (
                (BY_HAND, "ep to tp and back"),
                ("switch", "ep to tp and back"),
                ("deepseek_v3", "ep to tp and back"),
                ("qwen3_moe", "axes and pieces"),
            )
        ),
    ],
)
def test_a_run_goes_on_under_any_plan(name: str, tour: str, tmp_path: Path) -> None:
    """Two steps under each plan of a tour are the steps of one device: losses, weights, moments."""
    entry = expert_models.get(name)
    model = entry.build()
    optimizer = checkpoints.adamw(model.parameters())
    read = None
    for number, plan in enumerate(TOURS[tour]):
        batches = [entry.inputs(seed=10 * number + step) for step in range(2)]
        write = tmp_path / f"run{number}"
        found = trained(name, plan, tmp_path / f"plan{number}", batches, read, write)
        with float64_casts():
            wanted = []
            for batch in batches:
                optimizer.zero_grad()
                loss = zoo.loss_of(model(**batch))
                loss.backward()
                optimizer.step()
                wanted.append(loss.detach())
        for losses, _, _ in found:
            torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=0)
        merged = shardwright.merge_state_dicts([m for _, m, _ in found], [o for _, _, o in found])
        whole = shardwright.read_checkpoint(write)
        for module_state, optimizer_state in (merged, (whole.module, whole.optimizer)):
            checkpoints.assert_same(dict(module_state), model.state_dict(), TOLERANCE)
            assert optimizer_state is not None
            for key, state in optimizer.state_dict()["state"].items():
                checkpoints.assert_same(optimizer_state["state"][key], state, TOLERANCE)
        read = write


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mixtral", "gpt_oss", "deepseek_v3", "olmoe", "granitemoe")
        ),
    ],
)
def test_transformers_reads_what_ranks_of_experts_save(name: str, tmp_path: Path) -> None:
    """All names and shapes are those of the original, in its own files and in ``merge``."""
    entry = expert_models.get(name)
    model = entry.build()
    found = trained(
        name, Plan("ep", 4), tmp_path / "plan", [entry.inputs()], None, tmp_path / "run"
    )
    merged, _ = shardwright.merge_state_dicts([m for _, m, _ in found], [o for _, _, o in found])
    shapes = {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}
    assert {key: (value.shape, value.dtype) for key, value in merged.items()} == shapes
    model.load_state_dict(merged)
    out = shardwright.export_pretrained(tmp_path / "run", tmp_path / "out", model.config)
    loaded, info = type(model).from_pretrained(out, output_loading_info=True, dtype=torch.float64)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    checkpoints.assert_same(loaded.state_dict(), dict(merged))
    inputs = entry.inputs()
    with float64_casts(), torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model.eval()(**inputs).logits)
