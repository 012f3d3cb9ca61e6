"""The state of any optimizer: its own, by shape and dtype; in memory, in time, and in what a search
adds up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import planning
import pytest
import torch
import zoo
from covers import spread
from memory_ranks import measured_peaks
from plans import traced, zoo_graph, zoo_traced
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory, state_bytes
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.distributed_config import DistributedOptimizerConfig
from shardwright.runtime.errors import ConfigError

FLOAT, BFLOAT = torch.float32, torch.bfloat16
STEP = 4


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "expected"),
    [
        ("SGD", (64, 32), FLOAT, 0),
        ("SGD(momentum=0.9)", (64, 32), FLOAT, 4 * 64 * 32),
        ("SGD(momentum=0.9)", (64, 32), BFLOAT, 2 * 64 * 32),
        ("AdamW", (64, 32), FLOAT, 8 * 64 * 32 + STEP),
        ("Adam(amsgrad=True)", (7,), FLOAT, 12 * 7 + STEP),
        ("Adafactor", (64, 32), FLOAT, 4 * (64 + 32) + STEP),
        ("Adafactor", (64,), FLOAT, 4 * 64 + STEP),
        ("Muon", (64, 32), FLOAT, 4 * 64 * 32),
        ("own_optimizers:Averaging(lr=0.1)", (64, 32), BFLOAT, 4 * 64 * 32),
        ("own_optimizers:muon_for_matrices", (64, 32), FLOAT, 4 * 64 * 32),
        ("own_optimizers:muon_for_matrices", (64,), FLOAT, 8 * 64 + STEP),
        ("own_optimizers:Preconditioned", (64, 32), FLOAT, 4 * (64 * 64 + 32 * 32 + 64 * 32)),
        ("AdamW", (0, 32), FLOAT, 0),
    ],
)
def test_state_by_hand(
    text: str, shape: tuple[int, ...], dtype: torch.dtype, expected: int
) -> None:
    assert NamedOptimizer(text).state_bytes(shape, dtype) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "AdmW",
            "there is no optimizer 'AdmW'\n"
            "  try:   did you mean 'AdamW'? (a class of torch.optim; one of your own is "
            "'my_module:name')",
        ),
        (
            "LBFGS",
            "the state of optimizer 'LBFGS' cannot be told\n"
            "  why:   a step of it on a parameter of shape [4, 4] failed: "
            "LBFGS.step() missing 1 required positional argument: 'closure'\n"
            "  try:   a function that takes a list of parameters and returns an optimizer "
            "whose step takes no arguments",
        ),
        (
            "SGD(0.1)",
            "'SGD(0.1)' does not name an optimizer\n  try:   for example AdamW, or "
            "SGD(momentum=0.9)",
        ),
        (
            "SGD(lr=",
            "'SGD(lr=' does not name an optimizer\n  try:   for example AdamW, or "
            "SGD(momentum=0.9)",
        ),
        (
            "SGD(speed=1)",
            "optimizer 'SGD(speed=1)' cannot be made for a parameter of shape [4, 4]\n"
            "  why:   TypeError: SGD.__init__() got an unexpected keyword argument 'speed'\n"
            "  try:   name a function of your own, 'my_module:make', that makes for each "
            "parameter what it takes",
        ),
        (
            "own_optimizers:nothing",
            "'own_optimizers:nothing' makes no optimizer\n  why:   it returns a int",
        ),
        (
            "own_optimizers:RATE",
            "'own_optimizers:RATE' names no optimizer\n"
            "  why:   it is a float\n"
            "  try:   name a class, or a function that takes a list of parameters and "
            "returns an optimizer",
        ),
        (
            "no_such_thing:make",
            "optimizer 'no_such_thing:make' cannot be imported\n  why:   No module named "
            "'no_such_thing'",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NamedOptimizer(text)
    assert str(caught.value) == expected


def test_masters_count_beside_it() -> None:
    config = ComputeConfig(
        plan_ngpus=1,
        runtime_ngpus=2,
        use_zero=1,
        distributed_optimizer=DistributedOptimizerConfig(dtype="fp32"),
    )
    named = OptimizerMemory(named=NamedOptimizer("SGD(momentum=0.9)"))
    # Momentum in float32, and the master.
    assert state_bytes(named, (64, 32), BFLOAT, config) == 8 * 64 * 32


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD(momentum=0.9)": lambda params: torch.optim.SGD(params, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize(
    ("text", "zero"),
    spread(
        [
            ("SGD", 0),
            ("SGD(momentum=0.9)", 1),
            *[
                pytest.param(*case, marks=pytest.mark.slow)
                for case in [("RMSprop", 0), ("Adafactor", 0), ("SGD(momentum=0.9)", 0)]
            ],
        ],
        2,
        first=1,
    ),
)
def test_peaks_are_those_measured(text: str, zero: int, tmp_path: Path) -> None:
    entry = zoo.get("gpt2")
    model, inputs = entry.build(), entry.inputs(batch=8)
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_end2end=True, use_zero=zero)
    compiled = compile_graph(
        zoo_traced("gpt2", batch=8), find_policy("dp").apply, config, policy_name="dp"
    )
    found = program_memory(compiled.program, config, OptimizerMemory(named=NamedOptimizer(text)))  # type: ignore[arg-type]
    for measured in measured_peaks(
        tmp_path, compiled, model, inputs, config, make=OPTIMIZERS[text]
    ):
        assert found.peak_bytes == pytest.approx(measured, rel=0.05)


class Uneven(nn.Module):
    """Matrices of which one has most of the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((16, 128), (128, 128), (128, 2))
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.mid(self.up(x).relu()).relu()).square().mean()
        return loss


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whole_tensors_count_on_the_rank_that_owns_most(zero: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Uneven(), {"x": torch.randn(128, 16)}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_end2end=True, use_zero=zero)
    compiled = compile_graph(
        traced(model, inputs), find_policy("dp").apply, config, policy_name="dp"
    )
    muon = OptimizerMemory(named=NamedOptimizer("Muon"))
    found = program_memory(compiled.program, config, muon)  # type: ignore[arg-type]
    # All of the largest; an even share is 4 * 9344.
    assert found.by_category["optimizer"] == 4 * 128 * 128
    measured = measured_peaks(tmp_path, compiled, model, inputs, config, make=torch.optim.Muon)
    assert found.peak_bytes == pytest.approx(max(measured), rel=1e-3)
    assert min(measured) < 0.95 * found.peak_bytes


@pytest.mark.parametrize("text", spread(["SGD", "SGD(momentum=0.9)"], 2, first=1))
def test_a_search_adds_up_what_the_audit_does(text: str) -> None:
    named = OptimizerMemory(named=NamedOptimizer(text))
    wanted: dict[str, Any] = {"optimizer": named}
    graph, mesh = zoo_graph("mlp"), planning.mesh_of("2x2")
    asked = planning.request(graph, mesh, **wanted)
    found = place(asked)
    assert isinstance(found, Placement)
    assert math.isclose(found.cost_s, planning.audited_s(graph, found.plan, asked), rel_tol=1e-12)
    adam = place(planning.request(graph, mesh))
    assert isinstance(adam, Placement) and found.cost_s < adam.cost_s
