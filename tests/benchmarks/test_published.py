"""Published runs: rows as they are read, layers that stand for more, and constants that are found
again.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.compiler.cost.time.collectives import collective_s

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published")


def rows_of(script: ModuleType) -> dict[str, Any]:
    tables = sorted(script.TABLES.glob("*.csv"))
    return {row.name: row for row in script.read_tables(tables)}


def test_pairs_are_plans_for_the_same_work(script: ModuleType) -> None:
    row = rows_of(script)["single_node 1"]
    others = (replace(row, tp=2, iter_s=2 * row.iter_s), replace(row, batch=2 * row.batch))
    ((apart, is_right),) = script.pairs_of_plans([row, *others], [1.0, 1.1, 5.0])
    assert apart == pytest.approx(0.1) and is_right
    ((_, is_right),) = script.pairs_of_plans([row, others[0]], [1.1, 1.0])
    assert not is_right


def small(row: Any, layers: int = 4) -> Any:
    sizes = replace(
        row.sizes, layers=layers, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, seq=32
    )
    return replace(row, sizes=sizes)


def test_rows_are_read(script: ModuleType) -> None:
    rows = rows_of(script)
    assert len(rows) == 293 + 480
    row = rows["757"]  # Megatron's trillion, 64 stages of 8 ranks
    assert (row.copies, row.num_microbatches, row.plan_ngpus) == (1, 512, 512)
    assert row.study == "Megatron-LM 2022, A100 80GB" and row.plan_text == "tp=8 pp=64"
    # The paper says of its trillion: 163 Tflop/s on each of 3,072 GPUs, and 84 days for 450 billion
    # tokens. These leave out the products of attention and of the head: 85 days with them.
    assert rows["750"].iter_s * 450e9 / (3072 * 2048) / 86400 == pytest.approx(85, abs=0.1)
    assert (rows["283"].precision, rows["259"].precision) == ("float8_e4m3fn", "bfloat16")
    assert "adapters" in script.refusal(rows["294"])
    assert "no preset describes V100" in script.refusal(replace(rows["234"], gpu="V100"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            "single_node 1",
            {"pp": 1, "tp": 2, "gpus": 4, "batch": 8},
            marks=pytest.mark.slow,
        ),
        pytest.param("757", {"pp": 2, "tp": 2, "gpus": 8, "batch": 8}, marks=pytest.mark.slow),
        ("495", {}),
    ],
)
def test_two_programs_tell_what_more_layers_cost(
    script: ModuleType, name: str, changes: dict[str, int]
) -> None:
    depth = 10
    row = replace(rows_of(script)[name], **changes)
    row = small(row, depth * row.pp)
    programs, machine = script.Programs(), script.Machine({})
    told = script.predict(row, programs, machine), programs.peak_bytes(row)
    assert script.depths_of(row) == (4, 8)
    program = script.program_of(row, depth)
    hardware = machine.hardware(row)
    cost = script.audit(
        program,
        row.config,
        hardware,
        optimizer=script.FUSED_ADAM,
        num_microbatches=row.num_microbatches,
    )
    assert told[0] == pytest.approx(cost.step_s, rel=1e-2)
    assert told[1] == pytest.approx(cost.peak_bytes, rel=2e-2)


def test_constants_are_found_again(script: ModuleType) -> None:
    """Rows whose times are predictions themselves give back the constants of these."""
    base = small(rows_of(script)["single_node 1"])
    base = replace(base, pp=1, tp=2, gpus=4)
    rows = [replace(base, batch=batch, microbatch=size) for batch, size in ((4, 2), (16, 1))]
    programs = script.Programs()
    true = script.Machine({"launch_us": 70.0, "step_ms": 4.0})
    rows = [replace(row, iter_s=script.predict(row, programs, true)) for row in rows]
    belief = script.Machine({"launch_us": 50.0, "step_ms": 2.0})
    found = script.fit(rows, programs, belief, row_error=1e-4)
    assert found.constants == pytest.approx(true.constants, rel=1e-2)
    # Rows that tell little leave what is believed.
    found = script.fit(rows, programs, belief, row_error=10.0)
    assert found.constants == pytest.approx(belief.constants, rel=5e-2)


def test_ranks_that_come_late_cost_as_much_for_any_message(script: ModuleType) -> None:
    row = replace(rows_of(script)["single_node 1"], pp=1, tp=2, gpus=2)

    def seconds(num_bytes: float, **constants: float) -> float:
        hardware = script.Machine(constants).hardware(row)
        return collective_s(hardware, "all_reduce", num_bytes, (0, 1))

    for num_bytes in (1e6, 1e9):
        more_s = seconds(num_bytes, waits=0.5, late_us=30.0) - seconds(num_bytes, waits=0.5)
        assert more_s == pytest.approx(2 * 30e-6)  # there are two hops
    # One row cannot tell how late ranks are.
    assert set(script.BELIEF.constants) - set(script.believed(1).constants) == {"late_us"}
    assert script.believed(6) == script.BELIEF


def test_systems_of_megatron_stop_behind_a_forward_and_sum_in_large_buckets(
    script: ModuleType,
) -> None:
    machine, rows = script.Machine({"launch_us": 50.0}), rows_of(script)
    found = {}
    for name in ("single_node 1", "626", "746", "495"):
        row = rows[name]
        hardware = machine.hardware(row)
        assert machine.hardware(replace(row, batch=2 * row.batch)) is hardware
        table = row.config.optimizer_table
        found[row.study] = hardware.device.queue_stops, table.bucket_cap_mb * 2**20 / 2
    assert found.pop("Megatron-LM 2021, A100 80GB") == (True, 2**39)
    assert found.pop("llm-foundry, A100 80GB") == (False, 25 * 2**19)
    assert len(found) == 2
    for stops, numbers in found.values():
        assert stops and numbers == pytest.approx(500e6, rel=1e-3)


def test_scores(script: ModuleType) -> None:
    score = script.Score.of([1.1, 1.8, 3.0], [1.0, 2.0, 3.0])
    assert score.error == pytest.approx(0.2 / 3) and score.rank == 1.0 and score.ordered == 1.0
    assert script.Score.of([2.0, 1.0, 3.0], [1.0, 2.0, 3.0]).ordered == pytest.approx(2 / 3)
    # A plan that was measured twice has one prediction: neither order of the two is better.
    again = [script.Score.of([1.0, 1.0, 2.0], times).rank for times in ([1, 2, 3], [2, 1, 3])]
    assert again[0] == again[1] == pytest.approx(0.75**0.5)


def test_later_megatron_is_priced_with_what_it_switches_on(script: ModuleType) -> None:
    """A row of NeMo beside the same one of a study that says nothing: two ranks of tensor
    parallelism with sequences split, messages beside products, gradients added inside of these, and
    weights cast to float8 once.
    """
    row = rows_of(script)["280"]
    assert row.recompute == "none, sequence parallel" and row.measured_config.overlap_communication
    plain = replace(row, study="another", recompute="none")
    assert plain.measured_config == row.config
    row, plain = (replace(r, sizes=replace(r.sizes, layers=2)) for r in (row, plain))
    programs, machine = script.Programs(), script.Machine({})
    assert script.predict(row, programs, machine) < 0.9 * script.predict(plain, programs, machine)
    zero3 = replace(rows_of(script)["256"])
    assert not zero3.measured_config.optimizer_table.overlap_param_sync


def test_fused_kernels_compute_what_models_do(script: ModuleType) -> None:
    """Gates and rotary positions, of whole heads and of halves."""
    models, fused = (
        importlib.import_module(name) for name in ("published_models", "fused_kernels")
    )
    torch.manual_seed(0)
    config = models.LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2)
    mlp = fused.modeling_llama.LlamaMLP(config).double()
    x = torch.randn(2, 3, 8, dtype=torch.double)
    torch.testing.assert_close(fused.GatedMLP(mlp)(x), mlp(x))
    query, key = (torch.randn(2, heads, 3, 8, dtype=torch.double) for heads in (4, 2))
    for module in fused.MODULES:
        turned = 4 if module is fused.modeling_nemotron else 8
        cos, sin = torch.randn(2, 1, 3, turned, dtype=torch.double)
        expected = module.apply_rotary_pos_emb(query, key, cos, sin)
        with fused.one_rotary_kernel():
            assert module.apply_rotary_pos_emb is fused._rotated
            found = module.apply_rotary_pos_emb(query, key, cos, sin)
        torch.testing.assert_close(found, expected)
        assert module.apply_rotary_pos_emb is not fused._rotated


def test_no_study_is_fitted_on_more_than_a_tenth(script: ModuleType) -> None:
    rows = rows_of(script).values()
    for study, machine in script.load_machines().items():
        count = sum(row.study == study for row in rows)
        assert len(machine.fitted_on) <= count / 10
        assert np.all([value > 0 for value in machine.constants.values()])
