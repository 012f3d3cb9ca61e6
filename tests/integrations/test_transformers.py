"""Hugging Face's Trainer over models that ranks share: equal to the stock one on one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_close_tree
from safetensors.torch import load_file
from spawn import run_script
from trainer_runs import SCRIPT, tiny

import shardwright
from shardwright.runtime.checkpoint.convert import convert_checkpoint


def trained(
    folder: Path, ranks: int, *arguments: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What was logged, and the weights, of a run in processes of their own."""
    out = folder / f"run{len(list(folder.glob('run*')))}"
    out.mkdir()
    name, batch, parallel, *resume = arguments
    lines = f"import sys; sys.path[:0] = {sys.path!r}\n"
    call = SCRIPT.format(arguments=(name, str(out), batch, parallel, *resume))
    (folder / "job.py").write_text(lines + call)
    run_script(ranks, folder, "job.py")
    history = json.loads((out / "history.json").read_text())
    (weights,) = (out / "final").glob("*model.safetensors")
    return history, load_file(weights)


@pytest.mark.slow
def test_runs_equal_the_stock_trainer_and_go_on_under_another_plan(tmp_path: Path) -> None:
    expected, weights = trained(tmp_path, 1, "gpt2", 4, None)
    split = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}
    history, found = trained(tmp_path, 2, "gpt2", 4, split)
    assert [set(entry) for entry in history] == [set(entry) for entry in expected]
    assert len(history) > 8
    assert_close_tree(found, weights, "weights of tp")
    assert_close_tree(history, expected, "what tp logs")
    # A checkpoint, or the folder of all of them, is one for other tools.
    for source in ("run1/checkpoint-8", "run1"):
        whole = convert_checkpoint(tmp_path / source, tmp_path / f"{source}.full", "full")
        converted = load_file(whole / "model.safetensors")
        assert_close_tree({name: converted[name] for name in weights}, weights, "converted")
    # The last two steps again, on two units with half of each batch.
    checkpoint = str(tmp_path / "run1" / "checkpoint-6")
    history, found = trained(tmp_path, 2, "gpt2", 2, {"plan_ngpus": 1, "use_zero": 3}, checkpoint)
    assert_close_tree(found, weights, "weights of ZeRO-3")
    assert_close_tree(history[-3:], expected[-3:], "what ZeRO-3 logs")
    # And in two stages, of which the batches of a step are the microbatches.
    staged = {"model_parallelism": {"enable": True, "pipeline_parallel_size": 2}}
    history, found = trained(tmp_path, 2, "gpt2", 4, staged, checkpoint)
    assert_close_tree(found, weights, "weights of pp")
    assert_close_tree(history[-3:], expected[-3:], "what pp logs")


@pytest.mark.slow
def test_a_model_that_is_evaluated_by_what_it_generates(tmp_path: Path) -> None:
    """T5 takes the number of labels, and its loss is the mean over its own batch all the same."""
    expected, weights = trained(tmp_path, 1, "t5", 4, None)
    split = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}
    history, found = trained(tmp_path, 2, "t5", 4, split)
    assert_close_tree(found, weights, "weights of tp")
    assert_close_tree(history, expected, "what tp logs")
    # Means over halves of a batch are not the mean over it: the same labels for all make them so.
    expected, weights = trained(tmp_path, 1, "t5 whole", 4, None)
    history, found = trained(tmp_path, 2, "t5 whole", 2, {"plan_ngpus": 1})
    assert_close_tree(found, weights, "weights of two units")
    assert_close_tree(history, expected, "what two units log")


@pytest.mark.slow
def test_an_adapter_of_peft_is_trained_as_by_the_stock_trainer(tmp_path: Path) -> None:
    expected, weights = trained(tmp_path, 1, "llama lora", 4, None)
    assert len(weights) == 28
    split = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}
    history, found = trained(tmp_path, 2, "llama lora", 4, split)
    assert_close_tree(found, weights, "adapter of tp")
    assert_close_tree(history, expected, "what tp logs")


def test_what_cannot_be_honoured_is_refused() -> None:
    transformers = pytest.importorskip("shardwright.integrations.transformers")
    arguments = pytest.importorskip("transformers").TrainingArguments
    ours = transformers.ShardwrightTrainer
    parallel = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}
    plain = arguments("unused", use_cpu=True, report_to=[])
    with pytest.raises(shardwright.ConfigError, match="parallel= is missing"):
        ours(model=tiny("llama"), args=plain)
    with pytest.raises(shardwright.ConfigError, match="parallel='tp' is no config"):
        ours(model=tiny("llama"), args=plain, parallel="tp")
    uneven = arguments(
        "unused", use_cpu=True, report_to=[], accelerator_config={"even_batches": False}
    )
    with pytest.raises(shardwright.ConfigError, match="use_zero=3 needs even batches"):
        ours(model=tiny("llama"), args=uneven, parallel={**parallel, "use_zero": 3})
    with pytest.raises(shardwright.ConfigError, match="model_init is not for models"):
        ours(args=plain, model_init=lambda: tiny("llama"), parallel=parallel)
    with pytest.raises(shardwright.ConfigError, match="grad_reduction='sum'"):
        ours(model=tiny("llama"), args=plain, parallel={**parallel, "grad_reduction": "sum"})
    hooked = arguments("unused", use_cpu=True, report_to=[], neftune_noise_alpha=5.0)
    with pytest.raises(shardwright.ConfigError, match="neftune_noise_alpha=5.0"):
        ours(model=tiny("llama"), args=hooked, parallel=parallel)
    # Of a pipeline, the last stage has the loss.
    staged = {"model_parallelism": {"enable": True, "pipeline_parallel_size": 2}}
    smooth = arguments("unused", use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    with pytest.raises(shardwright.ConfigError, match="label_smoothing_factor is not for pipel"):
        ours(model=tiny("llama"), args=smooth, parallel=staged)

    class Own(ours):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(shardwright.ConfigError, match="Own.compute_loss is not for pipelines"):
        Own(model=tiny("llama"), args=plain, parallel=staged)
