"""Checkpoints of what policies made: saved, deduped and merged under one plan, resumed under
others, equal to one device.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from safetensors.torch import load_file
from tied import SAMPLES, Tied
from torch import Tensor, nn
from traces import shared_traces

import shardwright
from shardwright.__main__ import main
from shardwright.frontend.verification.one_device import adamw
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

TOLERANCE = 1e-11
PLANS: dict[str, dict[str, Any]] = {
    "pp": {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 4},
    "hybrid": {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 4, "schedule": "zb_h1"},
    "interleaved": {
        "policy": "pp",
        "plan_ngpus": 2,
        "runtime_ngpus": 2,
        "schedule": "1f1b_interleaved",
    },
    "dp": {
        "policy": "hybrid",
        "plan_ngpus": 4,
        "runtime_ngpus": 4,
        "dp": 2,
        "tp": 1,
        "schedule": "zb_v",
    },
    "tp": {"policy": "tp", "plan_ngpus": 2, "runtime_ngpus": 2},
    "zigzag": {"policy": "cp", "plan_ngpus": 2, "runtime_ngpus": 4, "cp_mode": "ring"},
    "wider zigzag": {"policy": "cp", "plan_ngpus": 4, "runtime_ngpus": 4, "cp_turns": 2},
}
TOURS = [
    ("pp", "hybrid", "tp"),
    ("interleaved", "dp", "pp"),
    ("zigzag", "wider zigzag", "tp"),
    ("tp", "interleaved", "hybrid"),
    ("hybrid", "pp", "dp"),
]


class Causal(Tied):
    """Attention in front, so that positions are dealt in zigzag, and ``places`` with them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = (self.words(tokens) + self.places).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


def trained(model: nn.Module, num_steps: int) -> tuple[dict[str, Tensor], dict[int, Any]]:
    """The model and its optimizer on one device after so many steps, which all plans here repeat on
    every unit.
    """
    optimizer = adamw(model.parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        for sample in SAMPLES:
            model(**sample)[0].backward()
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def train(module: Any, optimizer: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        module.train_step(SAMPLES)
        optimizer.step()


def held(module: Any, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy((module.state_dict(), optimizer.state_dict()))


def check_merged(model: nn.Module, ranks: list[tuple[Any, Any]], num_steps: int) -> tuple[Any, Any]:
    """What the ranks hold, merged, is what one device has."""
    module, optimizer = shardwright.merge_state_dicts([r[0] for r in ranks], [r[1] for r in ranks])
    parameters, state = trained(model, num_steps)
    assert_same(dict(module), parameters, TOLERANCE)
    for number, entries in state.items():
        assert_same(optimizer["state"][number], entries, TOLERANCE)
    return module, optimizer


def compiled(into: Path, make: type[nn.Module], name: str) -> Path:
    """The generated files of a model under one of the plans, on which all units have one batch."""
    options = dict(PLANS[name])
    policy, plan_ngpus, runtime_ngpus = (
        options.pop(key) for key in ("policy", "plan_ngpus", "runtime_ngpus")
    )
    if policy in ("pp", "hybrid"):
        options["num_microbatches"] = len(SAMPLES)
    config = ComputeConfig(
        plan_ngpus=plan_ngpus,
        runtime_ngpus=runtime_ngpus,
        use_end2end=True,
        pas_config=options,
        grad_reduction="mean",
    )
    with shared_traces(make.__name__):
        return compile_into(into, make(), SAMPLES[0], policy, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tour",
    [
        pytest.param(tour, marks=pytest.mark.slow if index else ())
        for index, tour in enumerate(TOURS)
    ],
    ids="-".join,
)
def test_training_goes_on_under_another_plan(tmp_path: Path, tour: tuple[str, ...]) -> None:
    merged: Any = None
    make = Causal if "zigzag" in tour else Tied
    for number, name in enumerate(tour):
        directory = compiled(tmp_path / name, make, name)

        def on_rank(
            _: int, directory: Path = directory, number: int = number, merged: Any = merged
        ) -> Any:
            module = load_class(directory)()
            optimizer = build_optimizer(module, adamw)
            if number == 1:
                assert shardwright.load_checkpoint(tmp_path / "run", module, optimizer).step == 2
            elif number == 2:
                shardwright.load_merged_state_dicts(module, merged[0], optimizer, merged[1])
            train(module, optimizer, 2)
            shardwright.save_checkpoint(tmp_path / "run", module, optimizer, step=2 * number + 2)
            whole, deduped = (
                held(module, optimizer),
                copy.deepcopy(shardwright.deduped_state_dict(module, optimizer)),
            )
            train(module, optimizer, 1)
            ahead = held(module, optimizer)
            shardwright.load_deduped_state_dict(module, deduped[0], optimizer, deduped[1])
            train(module, optimizer, 1)
            again = held(module, optimizer)
            assert_same(
                {n: x for n, x in again[0].items() if torch.is_tensor(x)},
                {n: x for n, x in ahead[0].items() if torch.is_tensor(x)},
            )
            return whole, deduped

        ranks = run_ranks(PLANS[name]["runtime_ngpus"], on_rank)
        merged = check_merged(make(), [whole for whole, _ in ranks], 2 * number + 2)
        check_merged(make(), [deduped for _, deduped in ranks], 2 * number + 2)
        saved = shardwright.read_checkpoint(tmp_path / "run")
        assert_same(dict(saved.module), dict(merged[0]))


def test_a_checkpoint_of_positions_in_zigzag_is_converted(tmp_path: Path) -> None:
    """Every form of it has whole tensors in their order, and the optimizer's state with them."""
    zigzag = compiled(tmp_path / "zigzag", Causal, "zigzag")
    assert '"places", "[6/cp, 6]' in (zigzag / "gencode0.py").read_text()

    def save(_: int) -> None:
        module = load_class(zigzag)()
        optimizer = build_optimizer(module, adamw)
        train(module, optimizer, 2)
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer, step=2)

    run_ranks(PLANS["zigzag"]["runtime_ngpus"], save)
    (tmp_path / "config.json").write_text("{}")
    for source, out, *more in (
        ("run", "full", "full"),
        ("run", "dcp", "dcp"),
        ("dcp", "back", "shardwright"),
        ("run", "transformers", "huggingface", "--config", str(tmp_path)),
        ("transformers", "start", "shardwright"),
    ):
        assert main(["convert", str(tmp_path / source), str(tmp_path / out), "--to", *more]) == 0
    parameters, state = trained(Causal(), 2)
    once = {name: value for name, value in parameters.items() if name != "head.weight"}  # is tied
    assert_same(load_file(tmp_path / "transformers" / "model.safetensors"), once, TOLERANCE)
    assert_same(dict(shardwright.read_checkpoint(tmp_path / "start").module), once, TOLERANCE)
    for out in ("full", "back"):
        read = shardwright.read_checkpoint(tmp_path / out)
        assert_same(dict(read.module), parameters, TOLERANCE)
        for number, entries in state.items():
            assert_same(read.optimizer["state"][number], entries, TOLERANCE)
