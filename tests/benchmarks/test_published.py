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
    for seconds in ([1.1, 1.0], [1.0, 1.0]):  # predicted alike they are not ordered
        for order in (1, -1):
            pair = script.pairs_of_plans([row, others[0]][::order], seconds[::order])
            assert [is_right for _, is_right in pair] == [False]
    # Rows that took as long have no order, and another recipe of float8 is other work.
    assert not script.pairs_of_plans([row, replace(row, tp=2), row], [1.0, 2.0, 3.0])
    recipes = [
        replace(other, recipe=recipe)
        for other, recipe in zip((row, others[0]), RECIPES, strict=True)
    ]
    assert not script.pairs_of_plans(recipes, [1.0, 1.1])


RECIPES = ("FP8-MX", "FP8-CS")


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
    models = importlib.import_module("published_models")
    flash = {row.model for row in rows.values() if row.model.startswith("GPT")}
    flash = {name for name in flash if models.family_of(name).make is models.megatron_flash}
    assert flash == {"GPT3-5B", "GPT3-20B", "GPT3-175B"}  # and neither "GPT 3.6B" nor "GPT 310.1B"
    assert models.family_of("GPT-3 175B").make is models.megatron_flash


SPELLED = """\
Model,GPU,gpus,seq,MBS,gbs,precision,tp,recompute,iter_s,tokens_per_s_per_gpu,fsdp,notes
meta-llama/Llama-3.1-8B,NVIDIA H100 80GB HBM3,8,"8,192",1,128,float8 rowwise,,true,n/a,12000,8,
LLAMA2-7B,A100-SXM4-40GB,8,4096,1,128,,1,full + sequence parallel,10,,,
"""


def test_tables_may_spell_things_in_many_ways(script: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text(SPELLED, encoding="utf-8-sig")
    first, second, *more = script.read_tables([table, table])
    assert [script.refusal(row) for row in (first, second)] == [None, None]
    assert (first.sizes.layers, first.sizes.kv_heads, first.sizes.seq) == (32, 8, 8192)
    assert (first.gpu, first.precision, first.zero) == ("H100", "float8_e4m3fn", 3)
    assert first.recompute == "full" and second.recompute == "full, sequence parallel"
    assert first.iter_s == pytest.approx(128 * 8192 / (12000 * 8))
    assert (second.gpu, second.precision, second.sizes.ffn) == ("A100 40GB", "bfloat16", 11008)
    # No row hides another of its name.
    assert [row.name for row in more] == ["other 1 (2)", "other 2 (2)"]


PLAIN = {
    "model": "GPT 1B",
    "gpu": "H100",
    "gpus": "8",
    "seq": "2048",
    "mbs": "1",
    "gbs": "16",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "iter_s": "1",
}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        # Without these sizes nothing can be built for a name that says nothing.
        ({"model": "Foo-7B"}, "model 'Foo-7B' is not known here, and the table leaves out ffn, vo"),
        (
            {"model": "LLAMA MoE", "ffn": "9", "vocab": "9", "experts": "8"},
            "model 'LLAMA MoE' is not known here, and the table leaves out top_k; with all sizes "
            "it is built as a Mixtral",
        ),
        (
            {"model": "Org/Llamma3-8B", "layers": "", "hidden": "", "heads": ""},
            "model 'Org/Llamma3-8B' is not known here (did you mean 'LLAMA3-8B'?), and the table",
        ),
        (
            {"model": "Mixtrall-8x7B", "layers": "", "hidden": "", "heads": ""},
            "the table leaves out sizes: layers, hidden, heads, and those of 'Mixtrall-8x7B' are "
            "not known here (did you mean 'Mixtral-8x7B'?)",
        ),
        (
            {"model": "Gtp-3-175B", "layers": "", "hidden": "", "heads": ""},
            "model 'Gtp-3-175B' is not known here (did you mean 'GPT3-175B'?), and the table",
        ),
        # A known model of another size is not meant.
        (
            {"model": "gpt-2.6B", "layers": "", "hidden": "", "heads": "", "vocab": "9"},
            "the table leaves out sizes: layers, hidden, heads, and those of 'gpt-2.6B' are not "
            "known here",
        ),
        # These begin like models that are known.
        ({"model": "Llama-4-Scout"}, "model 'Llama-4-Scout' has layers of other kinds"),
        ({"model": "Nemotron-H-8B"}, "model 'Nemotron-H-8B' has layers of other kinds"),
        (
            {"model": "Mixtral-8x7B", "pp": "8", "vp": "4", "layers": "31"},
            "32 stages for 31 layers",
        ),
        ({"experts": "8"}, "GPT 1B is a model without experts here, and the table has some"),
        ({"gpu": "A10G"}, "no preset describes A10G"),
        ({"gpu": "H800"}, "no preset describes H800"),
        ({"gpu": "H100 PCIe"}, "no preset describes H100 PCIe"),
        ({"gpu": "A100", "precision": "FP8"}, "the preset of A100 has no rate of float8_e4m3fn"),
        ({"precision": "NVFP4"}, "precision 'NVFP4' has no rate here; bf16, fp16 and fp8 have"),
        ({"heads": "", "mbs": ""}, "the table leaves out sizes: heads, mbs"),
        ({"gpus": "eight"}, "gpus says 'eight', which is no whole number from 1"),
        ({"tp": "0"}, "tp says '0', which is no whole number from 1"),
        ({"iter_s": "-1"}, "iter_s says '-1', which is no positive number"),
        ({"mem_gib": "lots"}, "mem_gib says 'lots', which is no positive number"),
        ({"iter_s": ""}, "the table has no time of a step and no tokens a second"),
        (
            {"tokens_per_s_per_gpu": "9"},
            "iter_s says 1 s, and tokens_per_s_per_gpu 455.1 s",
        ),
        ({"hidden": "2050"}, "a hidden size of 2050 with 16 heads and 16 of keys is no whole"),
        ({"recompute": "every other layer"}, "recompute says 'every other layer'; none, full and"),
        ({"schedule": "GPipe", "pp": "2"}, "the schedule 'GPipe' is not known"),
        ({"schedule": "interleaved", "pp": "2"}, "the schedule is interleaved, and vp does not"),
        ({"pp": "1", "vp": "4"}, "vp says 4, and with pp=1 there is no pipeline to interleave"),
        ({"dp": "4", "tp": "1"}, "dp says 4, and 8 GPUs with tp=1 pp=1 cp=1 (the table has no co"),
        (
            {"fsdp": "2", "tp": "1", "pp": "1", "cp": "1"},
            "fsdp says 2, and 8 GPUs with tp=1 pp=1 cp=1 leave 8",
        ),
        ({"zero": "4"}, "zero says 4; there are stages 0 to 3"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(
    script: ModuleType, tmp_path: Path, cells: dict[str, str], reason: str
) -> None:
    line, table = PLAIN | cells, tmp_path / "other.csv"
    table.write_text(f"{','.join(line)}\n{','.join(line.values())}\n")
    ((why, names),) = script.sorted_out(script.read_tables([table]), script.Programs())[1].items()
    assert why.startswith(reason) and names == ["other 1"]
    assert ("did you mean" in why) == ("did you mean" in reason)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a table without a line"),
        ("gpu,seq\n", "the table lacks columns: gpus, mbs, gbs, iter_s or tokens"),
        ("gpu;gpus;seq\n", "the table has semicolons between its cells"),
        ("gpu,gpus,seq,mbs,gbs,iter_s,gpu\n", "the table has columns twice: gpu"),
        ("gpu,gpus,seq,mbs,gbs,iter_s\n", "there are no rows"),
        (None, "cannot read the table"),
    ],
)
def test_files_that_are_no_tables_are_errors_in_words(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    words: str,
) -> None:
    table = tmp_path / "other.csv"
    if text is not None:
        table.write_text(text)
    monkeypatch.setattr("sys.argv", ["published.py", str(table)])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    said = str(stopped.value)
    assert said.startswith(f"error: {words}") and str(table) in said and "try:" in said


def test_what_a_table_has_besides_is_said(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Columns that are not known, lines of another length, and models that cannot be built."""
    table = tmp_path / "other.csv"
    line = PLAIN | {"recomputation": "full", "TP size": "2", "id": "[/b]", "vocab": "-"}
    others = [",".join((line | {"id": "one", "ep": "3"}).values()), "GPT 1B,H100"]
    table.write_text("\n".join([",".join(line), ",".join(line.values()), *others]))

    def unbuilt(*args: object) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr("published_runs.on_meta", unbuilt)
    monkeypatch.setattr("sys.argv", ["published.py", str(table)])
    script.main()
    said = " ".join(capsys.readouterr().out.split())
    # Before all else, as what is priced is another plan.
    assert said.startswith(
        f"{table}: columns that are not read, as if they were not there: recomputation (did you "
        "mean 'recompute'?), tp size (did you mean 'tp'?)"
    )
    assert "the model cannot be built or run: no such model ([/b])" in said
    assert "the line has 15 cells for 14 columns (one)" in said
    assert "left out, 1 row: the line has 2 cells for 14 columns (other 3)" in said


NAMED = {
    # Billions of parameters as the models' own pages and papers have them.
    "bigscience/bloom-7b1": 7.07,
    "BLOOM-176B": 176.2,
    "DeepSeek-V3": 671,
    "falcon-7b": 6.92,
    "tiiuae/falcon-40b": 41.3,
    "Falcon 180B": 179.5,
    "EleutherAI/gpt-neox-20b": 20.55,
    "openai/gpt-oss-20b": 20.9,
    "GPT OSS 120B": 116.8,
    "GPT-3-175B": 174.6,
    "LLaMA-65B": 65.3,
    "Llama-3.1-405B": 405.9,
    "Mixtral-8x7B-v0.1": 46.7,
    "mistralai/Mixtral-8x22B": 140.6,
    "OPT-175B": 174.6,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
}


def test_models_of_known_names_need_no_sizes(script: ModuleType, tmp_path: Path) -> None:
    """Each has the parameters that were published."""
    table = tmp_path / "named.csv"
    kept = {key: value for key, value in PLAIN.items() if key not in ("layers", "hidden", "heads")}
    lines = [",".join((kept | {"model": model}).values()) for model in NAMED]
    table.write_text("\n".join([",".join(kept), *lines]))
    models = importlib.import_module("published_models")
    for row in script.read_tables([table]):
        assert script.refusal(row) is None, row
        model = models.on_meta(row.family, replace(row.sizes, seq=1))
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(1e9 * NAMED[row.model], rel=6e-3), row.model


@pytest.mark.parametrize("model", ["BLOOM", "Falcon", "GPT-NeoX", "GPT OSS", "Mixtral", "Foo-8x1B"])
def test_rows_with_all_sizes_are_priced(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
) -> None:
    """Whatever their name, on two ranks of tensor parallelism, or of experts, in two stages; what
    was built by sizes alone is said.
    """
    experts = {"experts": "8", "top_k": "2", "moe_ffn": "96", "ep": "2"}
    line = PLAIN | {"model": model, "hidden": "128", "heads": "4", "kv_heads": "2", "ffn": "256"}
    line |= {"layers": "4", "vocab": "512", "seq": "64", "pp": "2"}
    line |= experts if model in ("GPT OSS", "Mixtral", "Foo-8x1B") else {"tp": "2"}
    table = tmp_path / "sizes.csv"
    table.write_text(f"{','.join(line)}\n{','.join(line.values())}\n")
    (row,) = script.read_tables([table])
    assert script.refusal(row) is None and script.predict(row, script.Programs(), script.HOST) > 0
    if model.startswith("Foo"):
        table.write_text(f"{','.join(line)},precision\n{','.join(line.values())},FP8-CS\n")
        monkeypatch.setattr("sys.argv", ["published.py", str(table), "--rows"])
        script.main()
        said = " ".join(capsys.readouterr().out.split())
        assert "FP8-CS" in said
        assert "1 row: built as a Mixtral by sizes, as the name is not known here (sizes 1)" in said
        # Nothing was measured or audited of memory, and nothing fitted.
        assert "GB" not in said and "over memory" not in said and "nothing (launch_us 50" in said
        assert said.count(script.NO_MEMORY) == 1


def test_layers_are_dealt_out_as_megatron_does(script: ModuleType) -> None:
    """Embedding and head count as a layer each where layers alone do not fill the stages."""
    runs = importlib.import_module("published_runs")
    llama = replace(rows_of(script)["258"], pp=16)  # 405B, 126 layers on 8 stages a rank
    assert (llama.stages, llama.ends, script.refusal(llama)) == (128, 2, None)
    starts = runs.stage_starts_of(llama)
    assert starts == (*(f"model.layers.{layer}" for layer in range(126)), "model.norm")
    starts = runs.stage_starts_of(replace(llama, chunks=2))
    assert starts[:2] == ("model.layers.3", "model.layers.7") and starts[-1] == "model.layers.123"
    # Where layers fill the stages they are dealt out alone.
    assert runs.stage_starts_of(replace(llama, chunks=1, pp=2)) == ("model.layers.63",)
    assert not runs.stage_starts_of(replace(llama, chunks=1, pp=5))


def test_the_first_and_the_last_stage_may_have_no_layer(script: ModuleType) -> None:
    row = small(replace(rows_of(script)["258"], pp=2, tp=2, cp=1, chunks=4, gpus=4, batch=8), 6)
    program = importlib.import_module("published_runs").program_of(row)
    operators = [
        [op.module_path for op in stage.graph.ops if "layers" in op.module_path]
        for stage in program.stages
    ]
    assert [len({path.split(".")[2] for path in paths}) for paths in operators] == [0, *[1] * 6, 0]
    assert script.predict(row, script.Programs(), script.HOST) > 0


def test_releases_of_nemo_are_studies_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    """What was fitted on one release prices no row of another."""
    table = tmp_path / "other.csv"
    line = PLAIN | {"source": "NVIDIA/NeMo 24.12"}
    table.write_text(f"{','.join(line)}\n{','.join(line.values())}\n")
    (row,) = script.read_tables([table])
    assert row.study == "NeMo 24.12, H100" and row.is_later_megatron
    assert script.machine_of(row.study, script.load_machines()) == script.HOST


def test_blind_rows_say_runs(script: ModuleType) -> None:
    """The table that was predicted blind: all but ten rows can be priced."""
    rows = script.read_tables([script.TABLES / "blind" / "runs.csv"])
    assert len(rows) == 195 and sum(script.refusal(row) is not None for row in rows) == 10
    fitted = script.load_machines()
    assert not {row.study for row in rows} & set(fitted)
    # torchtitan's tensor parallelism splits the sequence, too.
    said = {row.name: row.recompute for row in rows}
    assert said["b73"] == "full, sequence parallel" and said["b69"] == "full"


def test_rows_of_a_later_release_fit_nothing(script: ModuleType) -> None:
    """NVFP4 has no rate here, and B300 no preset."""
    rows = script.read_tables([script.TABLES / "later" / "runs.csv"])
    left_out = [row for row in rows if script.refusal(row)]
    assert len(rows) == 33 and {row.gpu for row in left_out} == {"B300", "GB200", "GB300"}
    names = {name for machine in script.load_machines().values() for name in machine.fitted_on}
    assert not {row.name for row in rows} & names


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
        gathers_ahead=script.GATHERS_AHEAD,
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
        assert more_s == pytest.approx(30e-6)  # once, though there are two hops
    # One row cannot tell how late ranks are.
    assert set(script.BELIEF.constants) - set(script.believed(1).constants) == {"late_us"}
    assert script.believed(6) == script.BELIEF


def test_buckets_of_later_megatron_grow_with_the_ranks(script: ModuleType) -> None:
    rows = rows_of(script)

    def bucket_bytes(row: Any) -> float:
        return 2**20 * row.measured_config.optimizer_table.bucket_cap_mb

    assert bucket_bytes(rows["279"]) == pytest.approx(2 * 64e6)  # 64 copies, in bfloat16
    assert bucket_bytes(rows["281"]) == pytest.approx(2 * 40e6)  # 4 copies
    assert bucket_bytes(rows["626"]) == pytest.approx(954 * 2**20)  # of another system


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


def test_a_study_has_the_attention_and_the_memory_that_its_system_had(script: ModuleType) -> None:
    """Operations per second of attention, forward and backward, and the peak of memory: what a
    source says, or the preset's, whatever products reach.
    """
    blind = script.read_tables([script.TABLES / "blind" / "runs.csv"])
    rows = rows_of(script) | {row.name: row for row in blind}
    triton = (0.40 * 312e12, 0.30 * 312e12)
    wanted = {
        "495": ("llm-foundry, A100 80GB", triton, 2039e9),
        "b1": ("llm-foundry, H100", (1.62 * triton[0], 1.64 * triton[1]), 3350e9),
        "b64": ("torchtitan, H100", (335e12, 322e12), 2400e9),
        "b63": ("torchtitan, not compiled, H100", (335e12, 322e12), 2400e9),
        "b93": ("torchtitan, H200", (335e12, 322e12), 4800e9),
        "b96": ("torchtitan, not compiled, A100 80GB", (0.73 * 312e12, 0.63 * 312e12), 2039e9),
        "280": ("NeMo 24.07, H100", (562e12, 456e12), 3350e9),
    }
    for name, (study, rates, memory) in wanted.items():
        assert rows[name].study == study
        for products in (None, 0.5):
            constants = {} if products is None else {"products": products, "memory": 0.6}
            device = script.Machine(constants).hardware(rows[name]).device
            reached = [
                device.flops_per_s["bfloat16"] * device.matmul_efficiency * part
                for part in device.attention_efficiency
            ]
            assert reached == pytest.approx(rates, rel=0.015), name
            part = 0.9 if products is None else 0.6
            assert device.bytes_per_s == pytest.approx(part * memory, rel=1e-3), name


def test_scores(script: ModuleType) -> None:
    score = script.Score.of([1.1, 1.8, 3.0], [1.0, 2.0, 3.0])
    assert score.error == pytest.approx(0.2 / 3) and score.rank == 1.0 and score.ordered == 1.0
    assert script.Score.of([2.0, 1.0, 3.0], [1.0, 2.0, 3.0]).ordered == pytest.approx(2 / 3)
    # A plan that was measured twice has one prediction: neither order of the two is better.
    again = [script.Score.of([1.0, 1.0, 2.0], times).rank for times in ([1, 2, 3], [2, 1, 3])]
    assert again[0] == again[1] == pytest.approx(0.75**0.5)
    # Rows that took as long have no order, which is neither right nor wrong.
    assert script.Score.of([1.0, 2.0, 3.0], [1.0, 1.0, 3.0]).ordered == 1.0
    assert script.Score.of([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]).cells[2:] == ("", "")


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


def test_experts_with_biases_compute_what_those_of_transformers_do(script: ModuleType) -> None:
    """Experts of GPT-OSS as Megatron has them, whose gates come first."""
    fused = importlib.import_module("fused_kernels")
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=6, intermediate_size=5, num_local_experts=4)
    experts = GptOssExperts(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=4)  # some are clamped
    x, weights = torch.randn(7, 6, dtype=torch.double), torch.rand(7, 2, dtype=torch.double)
    chosen = torch.rand(7, 4).topk(2).indices
    expected = experts(x, chosen, weights)
    ours = fused.BiasedExperts(experts)
    halves = [*range(0, 10, 2), *range(1, 10, 2)]
    with torch.no_grad():
        for weight in (ours.gate_up_proj, ours.gate_up_proj_bias):
            weight.copy_(weight[..., halves])
    torch.testing.assert_close(ours(x, chosen, weights), expected)


def test_no_study_is_fitted_on_more_than_a_tenth(script: ModuleType) -> None:
    rows = rows_of(script).values()
    for study, machine in script.load_machines().items():
        count = sum(row.study == study for row in rows)
        assert len(machine.fitted_on) <= count / 10
        assert np.all([value > 0 for value in machine.constants.values()])
