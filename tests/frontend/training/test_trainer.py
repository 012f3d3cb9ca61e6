"""A run on many ranks is that of one device, also where it was stopped and went on elsewhere."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covers import spread
from parity import BOUND, assert_close_tree
from precision import float64_casts
from safetensors.torch import load_file
from training_runs import alone, by_step, lora, records, rows, run, settings, tagger

from shardwright.frontend.training.records import line_of
from shardwright.runtime.errors import CheckpointError, ConfigError, ShardwrightError

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"parallel__policy": "tp"}),
    "zero3": (2, {"parallel__use_zero": 3, "microbatch": 2}),
    "pp": (2, {"parallel__policy": "pp", "microbatch": 2}),
}


def reference(output: Path) -> dict[int, tuple[float, float]]:
    chosen = settings(output)
    torch.manual_seed(chosen.seed)
    return alone(chosen, tagger(), rows())


def assert_equal(ours: dict[int, tuple[float, float]], theirs: dict[int, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for step, expected in theirs.items():
        for mine, its in zip(ours[step], expected, strict=True):
            assert abs(mine - its) <= BOUND * abs(its), (step, ours[step], expected)


@pytest.mark.parametrize(
    "name", spread(["tp", pytest.param("zero3", marks=pytest.mark.slow), "pp"], 2, first=1)
)
def test_a_run_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    """Labels differ in number between microbatches, so a mean of means would be seen."""
    num_ranks, changes = PLANS[name]
    chosen = settings(tmp_path, **changes)
    assert run(num_ranks, chosen).is_complete
    assert_equal(by_step(chosen), reference(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_peft_is_trained_and_exported_as_one(tmp_path: Path) -> None:
    chosen = settings(
        tmp_path / "run", model__function="training_runs:lora", parallel__policy="tp",
        export=str(tmp_path / "adapter"),
    )  # fmt: skip
    with float64_casts():
        torch.manual_seed(chosen.seed)
        model: Any = lora()
        assert run(2, chosen).is_complete
        assert_equal(by_step(chosen), alone(chosen, model, rows()))
    model.save_pretrained(tmp_path / "expected")
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "expected")
    )
    assert_close_tree(found, expected, "adapter")


def stopping_at(step: int) -> Any:
    """A hook that asks to stop after a step; ranks agree on it one step later."""

    def on_step_end(run: Any, record: dict[str, Any]) -> None:
        if run.world.rank == 1 and run.step == step:
            run.stop.ask("a test")

    return on_step_end


def test_a_run_that_is_stopped_goes_on_under_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped on one of two ranks of tp, resumed on three copies, then as a pipeline: the losses
    of one device, and one record of each step.
    """
    chosen = settings(tmp_path, parallel__policy="tp", global_batch=12, checkpoints__every_steps=4)
    first = run(2, chosen, on_step_end=stopping_at(1))
    assert (first.step, first.stopped_by, first.is_complete) == (
        2,
        "rank 1, which was asked to",
        False,
    )
    again = settings(tmp_path, global_batch=12, microbatch=2, checkpoints__every_steps=4)
    second = run(3, again, on_step_end=stopping_at(3))
    assert (second.step, second.stopped_by) == (4, "rank 1, which was asked to")
    # Step 4 saves as every fourth one does, and is not saved again because the run stops there.
    assert [record["step"] for record in records(chosen, "save")] == [2, 4]
    last = settings(
        tmp_path, global_batch=12, microbatch=3, parallel__policy="pp", export=str(tmp_path / "out")
    )
    assert run(2, last).is_complete
    capsys.readouterr()
    assert run(2, last).is_complete
    assert "all 6 steps of this run were taken before: raise steps" in capsys.readouterr().out
    whole = settings(tmp_path / "alone", global_batch=12)
    torch.manual_seed(0)
    model = tagger()
    expected = alone(whole, model, rows())
    assert [r["step"] for r in records(chosen)] == list(range(1, 7))
    assert_equal(by_step(chosen), expected)
    # What is exported is the model that one device has trained.
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_close_tree(exported, dict(model.state_dict()), "parameters")
    # Complete already: nothing is done but the export, where a kill has left it out.
    shutil.rmtree(tmp_path / "out")
    assert run(1, last).step == 6 and len(records(chosen)) == 6
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_is_told_of_a_run(tmp_path: Path) -> None:
    """Records of steps beside what was predicted, evaluations, and hooks by name or function."""
    called = []
    chosen = settings(
        tmp_path,
        steps=4,
        loss="mean",
        log__every_steps=2,
        hardware="h100",
        evaluation={"every_steps": 2, "data": {"function": "training_runs:rows"}, "max_steps": 2},
        profile__first_step=2,
        profile__num_steps=1,
    )
    run(1, chosen, on_evaluate=lambda run, record: called.append((run.step, record["loss"])))
    steps, evaluations = records(chosen), records(chosen, "evaluation")
    assert [record["step"] for record in steps] == [2, 4]
    for record in steps:
        assert record["tokens_per_s"] > 0 and 0 < record["mfu"] < 1
        assert record["predicted_step_s"] > 0 and record["predicted_peak_memory_bytes"] > 0
        assert record["lr"] == pytest.approx({2: 1e-2, 4: 5e-3}[record["step"]])
    assert called == [(record["step"], record["loss"]) for record in evaluations]
    assert [step for step, _ in called] == [2, 4]
    assert evaluations[0]["samples_left_out"] == 8
    assert (tmp_path / "profile" / "trace-rank0.json").stat().st_size > 0
    lines = [line_of(record, 4) for record in steps]
    assert all("predicted)" in line and "MFU" in line for line in lines)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deaf": (
        {"model__function": "training_runs:deaf", "loss": "tokens"},
        "its forward takes num_items_in_batch, and does not use it",
    ),
    "microbatches": ({"microbatch": 3}, "do not divide into microbatches of 3"),
    "batch": ({"parallel__policy": "dp", "global_batch": 7}, "does not divide over 2 units"),
    "pipeline": ({"parallel__policy": "pp"}, "policy 'pp' needs microbatch"),
    "optimizer": ({"optimizer__name": "Adamw"}, "did you mean 'AdamW'?"),
    "policy": ({"parallel__options": {"loss_piece": 2}}, "did you mean 'loss_pieces'?"),
    "options": ({"optimizer__options": {"rate": 1}}, "unexpected keyword argument 'rate'"),
    "hook": ({"hooks": {"on_step": "training_runs:rows"}}, "did you mean 'on_step_end'?"),
    "wandb": ({"log__to": ["wandb"]}, "pip install wandb"),
    "memory": ({"profile__memory_step": 1}, "needs a CUDA device"),
    "model": ({"model__arguments": {"wide": 3}}, "does not take model.arguments"),
    "export": ({"export": "."}, "exists"),
    "samples": ({"data__function": "training_runs:SAMPLES.__class__"}, "is no dataset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_words(name: str, tmp_path: Path) -> None:
    changes, text = REFUSED[name]
    with pytest.raises(ShardwrightError) as caught:
        run(2, settings(tmp_path, **changes))
    assert text in str(caught.value), caught.value


def test_which_checkpoint_a_run_may_go_on_from(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=1)
    run(1, chosen)
    with pytest.raises(CheckpointError, match="has checkpoints of an earlier run"):
        run(1, settings(tmp_path, checkpoints__resume="never"))
    with pytest.raises(ConfigError, match="was saved by 1 ranks, and 2 are running"):
        run(2, settings(tmp_path, on_world_change="refuse"))
    # Named by its folder, it is gone on from elsewhere, with smaller units than were planned.
    named = settings(
        tmp_path / "other", checkpoints__resume=str(tmp_path / "checkpoints"),
        parallel__policy="tp", parallel__plan_ngpus=2, steps=2,
    )  # fmt: skip
    assert run(3, replace(named, global_batch=9)).step == 2
    assert [record["step"] for record in records(named)] == [2]
