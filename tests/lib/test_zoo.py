"""Every model of the zoo runs alone, in float64, with little work, and reproducibly."""

from __future__ import annotations

import pytest
import torch
import zoo
from covers import spread
from precision import float64_casts
from torch.utils.flop_counter import FlopCounterMode


def run(name: str, **sizes: int) -> tuple[torch.nn.Module, torch.Tensor]:
    entry = zoo.get(name)
    model = entry.build()
    with float64_casts():
        loss = zoo.loss_of(model(**entry.inputs(**sizes)))
        loss.backward()
    return model, loss


@pytest.mark.parametrize("name", spread(zoo.names(), 3))
def test_forward_and_backward(name: str) -> None:
    with FlopCounterMode(display=False) as counter:
        model, loss = run(name)
    assert counter.get_total_flops() < 5e6 and sum(p.numel() for p in model.parameters()) < 20_000
    assert loss.dtype == torch.float64 and loss.shape == () and loss.isfinite()
    for fqn, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64, fqn
        assert (parameter.grad is not None) == parameter.requires_grad, fqn
    assert any((p.grad != 0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet"])
def test_building_and_inputs_are_reproducible_and_leave_the_global_rng_alone(name: str) -> None:
    entry = zoo.get(name)
    before = torch.get_rng_state()
    first, second, other = entry.build(), entry.build(), entry.build(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(first.parameters(), second.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)
    same, again, another = entry.inputs(), entry.inputs(), entry.inputs(seed=2)
    tensors = [
        key
        for key, value in same.items()
        if isinstance(value, torch.Tensor) and key != "attention_mask"
    ]
    assert all(
        torch.equal(same[key], again[key]) and not torch.equal(same[key], another[key])
        for key in tensors
    )


@pytest.mark.parametrize("name", zoo.names("causal-lm"))
def test_batch_and_sequence_can_be_chosen(name: str) -> None:
    model, _ = run(name, batch=2, seq=5)
    assert model.training
    assert zoo.get(name).inputs(batch=2, seq=5)["input_ids"].shape == (2, 5)


def test_a_model_without_sequence_says_so() -> None:
    with pytest.raises(ValueError, match="resnet has no sequence length to choose"):
        zoo.get("resnet").inputs(seq=3)


def test_every_special_case_is_there() -> None:
    assert {
        "even",
        "uneven",
        "tied",
        "gqa",
        "cache",
        "frozen",
        "padded",
        "batch-norm",
    } <= set().union(*(entry.families for entry in zoo.MODELS.values()))
    for model in ["gpt2", "llama", "qwen2", "mistral", "bert", "t5", "vit"]:
        assert {model, f"{model}-uneven"} <= set(zoo.names("hf"))
    for model in ["mlp", "resnet", "unet", "dit", "encoder-decoder", "transformer"]:
        assert {model, f"{model}-uneven"} <= set(zoo.names("own"))
    assert zoo.names("tied", exclude=["hf"]) == ["encoder-decoder", "encoder-decoder-uneven"]


def test_overrides_reach_the_config() -> None:
    assert zoo.get("gpt2").build(n_layer=1).config.n_layer == 1
    assert zoo.get("mlp").build(dropout=0.5).dropout.p == 0.5


def test_a_cache_is_an_output_and_labels_ignore_a_whole_row() -> None:
    entry = zoo.get("llama-cache")
    inputs = entry.inputs()
    with float64_casts():
        outputs = entry.build()(**inputs)
    assert outputs.past_key_values.layers[0].keys.shape == (4, 2, 8, 4)
    assert (inputs["labels"][1] == zoo.IGNORED).all() and (inputs["labels"][0] != zoo.IGNORED).any()
