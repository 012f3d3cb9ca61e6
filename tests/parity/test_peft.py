"""Adapters of peft on models of transformers, held to one device; frozen weights cost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft_models
import pytest
import torch
from covers import spread
from memory_ranks import measured_peaks
from precision import float64_casts

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.verification.verify import verify
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

STEPS = {"use_end2end": True}

CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("llama lora", "tp", 2, 4, {"use_zero": 1}),
    ("gpt2 tied embedding", "pp", 2, 2, STEPS),
]
MORE_CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("llama dora", "dp", 1, 2, {"use_zero": 3}),
    ("llama rslora, biases", "data", 2, 4, {"use_zero": 2}),
    ("llama tied, trained embedding", "hybrid", 4, 4, STEPS),
    ("llama some tokens", "tp", 2, 2, {}),
    ("llama dropout", "tp", 2, 2, {}),
    ("llama lora on int8", "tp", 2, 4, {"use_zero": 3}),
    ("t5 lora", "pp", 2, 4, {**STEPS, "use_zero": 1}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "policy", "plan", "runtime", "fields"),
    spread([*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES]], 2),
)
def test_training_equals_one_device(
    name: str, policy: str, plan: int, runtime: int, fields: dict[str, Any]
) -> None:
    model, inputs = peft_models.build(name)
    config = {"plan_ngpus": plan, "runtime_ngpus": runtime, **fields}
    report = verify(model, inputs, policy, config)
    assert report.ok, str(report)


@pytest.mark.parametrize(("zero", "held"), spread([(0, 1), (2, 1), (3, 2)], 2, first=1))
def test_what_is_frozen_has_no_gradient_no_bucket_and_no_state(
    zero: int, held: int, tmp_path: Path
) -> None:
    model, inputs = peft_models.build("llama lora")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_zero=zero)

    def job(rank: int) -> None:
        module = parallelize(model, inputs, "dp", config, gen_savedir=tmp_path)
        optimizer = build_optimizer(module, torch.optim.AdamW, lr=1e-3)
        reduced = list(optimizer._reducer.parameters)
        assert sum(p.numel() for p in reduced) == trained // held
        assert sum(p.numel() for p in module.parameters()) < everything / held * 1.02
        with count_communication() as volume:
            module(**inputs).loss.backward()
            assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
            optimizer.step()
        collectives = ("all_reduce", "reduce_scatter")
        moved = sum(
            volume.elements(one, phase=phase)
            for one in collectives
            for phase in ("gradients", "backward")
        )
        # Besides gradients, one number for each says whether it has come.
        assert trained <= moved <= trained + 2 * len(reduced), str(volume)
        state = [x for one in optimizer.state.values() for x in one.values() if x.ndim]
        assert sum(x.numel() for x in state) == 2 * trained // (1 if zero == 0 else 2)

    with float64_casts(model):
        run_ranks(2, job)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "plan", "zero"), [("dp", 1, 0), ("tp", 2, 3)])
def test_the_predicted_peak_is_that_measured(
    policy: str, plan: int, zero: int, tmp_path: Path
) -> None:
    model, inputs = peft_models.build("llama lora")
    with float64_casts(model):
        graph = trace(model, inputs)
        config = ComputeConfig(
            plan_ngpus=plan, runtime_ngpus=2 * plan, use_end2end=True, use_zero=zero
        )
        compiled = compile_graph(graph, find_policy(policy).apply, config, policy_name=policy)
        found = program_memory(compiled.program, config)  # type: ignore[arg-type]
        for measured in measured_peaks(tmp_path, compiled, model, inputs, config):
            assert found.peak_bytes == pytest.approx(measured, rel=0.05)
