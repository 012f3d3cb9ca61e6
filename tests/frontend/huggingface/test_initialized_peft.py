"""Models of peft whose inside was initialized: trained, saved, loaded and asked for tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import initialized
import peft
import peft_models
import pytest
import torch
from precision import float64_casts

import shardwright
from shardwright.runtime.ranks.threads import run_ranks

PARALLEL = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}


def made(seed: int = 0) -> Any:
    targets = ["q_proj", "down_proj"]
    return peft_models.adapted(
        lambda: initialized.make("llama", seed), target_modules=targets, task_type="CAUSAL_LM"
    )


def steps_of(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(**initialized.batch("llama", step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tokens_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval().generate(
        **initialized.prompt("llama"), do_sample=False, max_new_tokens=4
    )
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_trains_saves_and_generates_as_the_model_of_one_device(tmp_path: Path) -> None:
    # Ranks are threads, which share the generator that draws adapters: they get copies.
    alone, other_start = made(), made(seed=7)

    def job(rank: int) -> Any:
        def parallel(model: Any) -> Any:
            own = copy.deepcopy(model)
            return shardwright.initialize(own, PARALLEL, gen_savedir=tmp_path / "gen")

        model = parallel(alone)
        optimizer = shardwright.build_optimizer(model, torch.optim.SGD, lr=0.05)
        losses = steps_of(model, optimizer)
        model.save_pretrained(tmp_path / "adapter")
        model.save_parallelized(tmp_path / "pieces", optimizer=optimizer, step=2)
        with pytest.raises(shardwright.UsageError, match=r"disable_adapter\(\) is not for"):
            model.disable_adapter()
        with pytest.raises(shardwright.ConfigError, match="wrapped by peft"):
            model.get_base_model().save_parallelized(tmp_path / "no", merge_checkpoints=True)
        tokens = tokens_of(model)
        other = parallel(other_start)
        other.from_parallelized(tmp_path / "pieces")
        third = parallel(alone)
        third.load_adapter(tmp_path / "adapter")
        for one in (other, third):
            pairs = zip(model.parameters(), one.parameters(), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        return losses, tokens

    with float64_casts(alone):
        results = run_ranks(2, job)
        optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.05)
        expected = steps_of(alone, optimizer)
        tokens = tokens_of(alone)
    for losses, found in results:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert torch.equal(found, tokens)
    back = peft.PeftModel.from_pretrained(initialized.make("llama"), tmp_path / "adapter")
    state = back.double().state_dict()
    for name, value in alone.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(initialized.make("llama"), config)
    with pytest.raises(shardwright.ConfigError, match="'default' of PeftModelForCausalLM is a pro"):
        shardwright.initialize(model, PARALLEL)
