"""What the tensors of a model are called in folders of transformers."""

from __future__ import annotations

import pytest
import torch

from shardwright.frontend.huggingface.model_folders import names_for_folder, names_in_folder

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8,
    "intermediate_size": 8,
}  # fmt: skip


def test_names_are_those_that_were_published() -> None:
    """A class may call its tensors otherwise than the folders that it is read from and written
    to.
    """
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))
    there = names_in_folder(model, ("embed_out.weight", "gpt_neox.embed_in.weight"))
    assert there("lm_head.weight") == "embed_out.weight"
    assert there("gpt_neox.embed_in.weight") == "gpt_neox.embed_in.weight"
    # A folder of the base model has no prefix; one that is written has today's names, if they are
    # there.
    assert names_in_folder(model, ("embed_in.weight",))("gpt_neox.embed_in.weight") == (
        "embed_in.weight"
    )
    assert names_in_folder(model, ("lm_head.weight",))("lm_head.weight") == "lm_head.weight"
    assert names_for_folder(model)("lm_head.weight") == "embed_out.weight"
    # The names of experts that the class has merged cannot be told from those of the parts.
    with torch.device("meta"):
        mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert name in dict(mixtral.named_parameters()) and names_for_folder(mixtral)(name) == name
