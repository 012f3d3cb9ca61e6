"""Folders of peft: written from pieces, read back by peft, and read into pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import peft_models
import pytest
import torch
import zoo
from precision import float64_casts
from safetensors.torch import load_file

import shardwright
from shardwright.frontend.huggingface.peft_folders import ADAPTER_CONFIG, ADAPTER_FILE
from shardwright.runtime.ranks.threads import run_ranks

PIPELINE = {"use_end2end": True, "pas_config": {"num_microbatches": 1}}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora, head trained": (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj"], "use_dora": True,
            "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM",
        },
    ),
    "tied embedding": (
        "gpt2",
        {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
    ),
}  # fmt: skip


def assert_equal_files(ours: Path, theirs: Path) -> None:
    assert (ours / ADAPTER_CONFIG).read_text() == (theirs / ADAPTER_CONFIG).read_text()
    found, expected = load_file(ours / ADAPTER_FILE), load_file(theirs / ADAPTER_FILE)
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "policy", "fields"),
    [
        ("dora, head trained", "tp", {}),
        pytest.param("tied embedding", "pp", PIPELINE, marks=pytest.mark.slow),
        pytest.param("dora, head trained", "data", {"use_zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_base_in_pieces_training_and_an_adapter_that_peft_reads(
    kind: str, policy: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """A model on the meta device is trained as on one device: nobody had the whole of it."""
    name, options = KINDS[kind]
    entry = zoo.get(name)
    base, inputs = entry.build(), entry.inputs()
    base.save_pretrained(tmp_path / "base")
    with float64_casts():
        alone = type(base).from_pretrained(tmp_path / "base")
        torch.manual_seed(5)
        alone = peft.get_peft_model(alone, peft.LoraConfig(r=4, **options)).double()
    alone.save_pretrained(tmp_path / "expected-start")

    def make() -> Any:
        with torch.device("meta"):
            model = type(base)(base.config).double()
        return peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).train()

    with float64_casts():
        model = make()
        torch.manual_seed(5)
        shardwright.start_peft(model, tmp_path / "base", tmp_path / "start")
    assert_equal_files(tmp_path / "start", tmp_path / "expected-start")

    def loss_of(outputs: Any) -> Any:
        return outputs.loss

    compute = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=2, **fields)

    def job(rank: int) -> float:
        made = shardwright.parallelize(
            type(alone), inputs, policy, compute, module_fn=make, gen_savedir=tmp_path / "gen"
        )
        module = made(init_params=False)
        shardwright.load_peft(module, make(), tmp_path / "start", base=tmp_path / "base")
        optimizer = shardwright.build_optimizer(module, torch.optim.AdamW, lr=1e-2)
        if compute.use_end2end:
            loss = loss_of(module.train_step([inputs])[0])
        else:
            loss = loss_of(module(**inputs))
            loss.backward()
        optimizer.step()
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer)
        return float(loss)

    with float64_casts(make()):
        losses = run_ranks(2, job)
        optimizer = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=1e-2)
        loss = alone.train()(**inputs).loss
        loss.backward()
        optimizer.step()
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-12)
    shardwright.export_peft(tmp_path / "run", tmp_path / "adapter", make())
    back = peft.PeftModel.from_pretrained(
        type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).double()
    found, expected = back.state_dict(), alone.state_dict()
    for key, value in expected.items():
        # The first step of AdamW is a sign: it is as exact as the loss, not as its gradient.
        assert torch.allclose(found[key], value, rtol=1e-6, atol=1e-6), key
    # Read back into pieces of another plan, and written again: no bit changes.
    (tmp_path / "again").mkdir()

    def again(rank: int) -> None:
        made = shardwright.parallelize(
            type(alone), inputs, "dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3},
            module_fn=make, gen_savedir=tmp_path / "again",
        )  # fmt: skip
        module = made(init_params=False)
        shardwright.load_peft(module, make(), tmp_path / "adapter", base=tmp_path / "base")
        shardwright.save_checkpoint(tmp_path / "again/run", module)

    with float64_casts(make()):
        run_ranks(2, again)
    shardwright.export_peft(tmp_path / "again/run", tmp_path / "again/adapter", make())
    assert_equal_files(tmp_path / "again/adapter", tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    entry = zoo.get("llama")
    base = entry.build()
    base.save_pretrained(tmp_path / "base")

    def made(**options: Any) -> Any:
        with torch.device("meta"):
            model = type(base)(base.config)
        return peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, **options}))

    plain = made(target_modules=["q_proj"])
    shardwright.start_peft(plain, tmp_path / "base", tmp_path / "start")
    with pytest.raises(shardwright.CheckpointError, match="start exists"):
        shardwright.start_peft(plain, tmp_path / "base", tmp_path / "start")
    with pytest.raises(shardwright.ConfigError, match="has no adapter of peft"):
        shardwright.start_peft(base, tmp_path / "base", tmp_path / "other")
    with pytest.raises(shardwright.ConfigError, match=r"changes .*q_proj.weight of the base"):
        olora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora")
        changes = peft.get_peft_model(type(base)(base.config).float(), olora)
        shardwright.start_peft(changes, tmp_path / "base", tmp_path / "other")
    with pytest.raises(shardwright.ConfigError, match="do not follow from single layers"):
        tokens = made(target_modules=["q_proj"], trainable_token_indices=[1])
        shardwright.start_peft(tokens, tmp_path / "base", tmp_path / "other")
    scaled = made(target_modules=["q_proj"], lora_alpha=3)
    with pytest.raises(shardwright.CheckpointError, match="lora_alpha is 8 there and 3 here"):
        run_ranks(1, lambda rank: shardwright.load_peft(base, scaled, tmp_path / "start"))
    whole, _ = peft_models.build("llama lora")
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(shardwright.CheckpointError, match="is another adapter"):
        run_ranks(1, lambda rank: shardwright.load_peft(base, scaled, tmp_path / "whole"))
