"""Models of the zoo with adapters of peft, in float64, and the inputs of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as F
import zoo
from precision import float64_casts
from torch import Tensor, nn

QWEN3 = zoo.ZooModel(
    "qwen3",
    zoo.hf("Qwen3ForCausalLM", "Qwen3Config", **zoo.LLAMA, head_dim=4),
    zoo.causal_lm(32),
)


class Int8Linear(nn.Linear):
    """A linear whose weight is kept as int8, with a scale for each row."""

    scale: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The nearest one to ``linear``."""
        made = cls(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        made.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        whole = (weight / made.scale).round().to(torch.int8)
        made.weight = nn.Parameter(whole, requires_grad=False)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Quantised(zoo.ZooModel):
    """A model whose layers are :class:`Int8Linear`, but for the head."""

    def build(self, *, seed: int = 0, **overrides: Any) -> nn.Module:
        model = super().build(seed=seed, **overrides)
        for path, part in list(model.named_modules()):
            if isinstance(part, nn.Linear) and path.endswith("_proj"):
                parent, _, leaf = path.rpartition(".")
                setattr(model.get_submodule(parent), leaf, Int8Linear.of(part))
        return model


CONV1D = {"fan_in_fan_out": True}
"""GPT-2 keeps its weights the other way round."""

MODELS: dict[str, tuple[str | zoo.ZooModel, dict[str, Any]]] = {
    "llama lora": ("llama", {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "llama dora": (
        "llama",
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
    ),
    "llama rslora, biases": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_bias": True},
    ),
    "llama embedding": (
        "llama",
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    ),
    "llama tied, trained embedding": (
        "llama-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "llama some tokens": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 7]},
    ),
    "llama dropout": (
        "llama",
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.1},
    ),
    "llama lora on int8": (
        Quantised("llama-int8", zoo.llama, zoo.causal_lm(32)),
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    "gpt2 lora": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "task_type": "CAUSAL_LM", **CONV1D},
    ),
    "gpt2 dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "use_dora": True, **CONV1D}),
    "gpt2 tied embedding": ("gpt2", {"target_modules": ["c_attn", "wte"], **CONV1D}),
    "qwen3 lora": (QWEN3, {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "bert lora": (
        "bert",
        {"target_modules": ["query", "value", "dense"], "modules_to_save": ["cls"]},
    ),
    "t5 lora": (
        "t5",
        {"target_modules": ["q", "v", "wi", "wo"], "task_type": "SEQ_2_SEQ_LM"},
    ),
}
"""The model of the zoo by name, and what ``peft.LoraConfig`` is given besides its rank."""


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """The model with its adapter, and inputs. No trained parameter is zero or one, as those of a
    new adapter are: mistakes would hide behind them.
    """
    entry, options = MODELS[name]
    found = zoo.get(entry) if isinstance(entry, str) else entry
    return adapted(found.build, **options), found.inputs()


def adapted(make: Callable[[], nn.Module], **options: Any) -> Any:
    """What ``make`` makes, with an adapter of rank 4 that ``options`` describe."""
    with torch.random.fork_rng(devices=[]), float64_casts():
        torch.manual_seed(3)
        model = peft.get_peft_model(make(), peft.LoraConfig(r=4, lora_alpha=8, **options))
        model = model.double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model
