"""The models that must work: small, seeded, float64, each with inputs and a loss.

    model = zoo.get("llama").build()
    inputs = zoo.get("llama").inputs(batch=4, seq=8)
    zoo.loss_of(model(**inputs)).backward()

Sizes are as small as the structure allows. Plain names divide by 2 and 4 (4 heads, sequence 8,
batch 4, even vocabulary); names ending in ``-uneven`` do not (3, 5 or 7 heads, sequence 7, batch 5,
odd vocabulary). The middle part of other names says what is special (``gpt2-cache``,
``gpt2-frozen``, ``llama-tied``).

Everything is built under :func:`precision.float64_casts`; models must also *run* under it (the
tables of rotary embeddings, norms and losses cast to float32 inside).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import zoo_modules
from precision import float64_casts
from torch import Tensor, nn

Inputs = dict[str, Any]
IGNORED = -100
"""The label that losses leave out."""


@dataclass(frozen=True)
class ZooModel:
    """One entry: how to build the model and what to feed it.

    ``make`` takes overrides of sizes or config fields (``build(resid_pdrop=0.1)``).
    ``make_inputs(batch, seq, generator)`` gives keyword arguments of ``forward``. ``batch`` and
    ``seq`` are the defaults of :meth:`inputs`; ``seq`` is ``None`` where the model has no sequence
    to choose. ``families`` are words that tests select by.
    """

    name: str
    make: Callable[..., nn.Module]
    make_inputs: Callable[[int, int, torch.Generator], Inputs]
    batch: int = 4
    seq: int | None = 8
    families: frozenset[str] = frozenset()
    notes: str = ""

    def build(self, *, seed: int = 0, **overrides: Any) -> nn.Module:
        """The model in float64 and training mode, all weights drawn from ``seed``; the global RNG
        is left as it was.
        """
        with torch.random.fork_rng(devices=[]), float64_casts():
            torch.manual_seed(seed)
            model = self.make(**overrides).double().train()
            disturb(model)
            return model

    def inputs(self, *, batch: int | None = None, seq: int | None = None, seed: int = 1) -> Inputs:
        """Keyword arguments of ``forward``; another ``seed`` gives another batch of the same
        shapes.
        """
        if seq is not None and self.seq is None:
            raise ValueError(f"{self.name} has no sequence length to choose")
        generator = torch.Generator().manual_seed(seed)
        return self.make_inputs(batch or self.batch, seq or self.seq or 0, generator)


MODELS: dict[str, ZooModel] = {}


def get(name: str) -> ZooModel:
    """The entry called ``name``."""
    return MODELS[name]


def names(*families: str, exclude: Iterable[str] = ()) -> list[str]:
    """Names of the entries that belong to all of ``families`` and to none of ``exclude``, in order
    of definition.
    """
    excluded = frozenset(exclude)
    return [
        name
        for name, entry in MODELS.items()
        if entry.families.issuperset(families) and not entry.families & excluded
    ]


def loss_of(outputs: Any) -> Tensor:
    """The scalar loss of what a zoo model returned: itself, ``.loss``, ``["loss"]`` or the first
    element.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs["loss"]
    return outputs[0] if isinstance(outputs, tuple) else outputs.loss


def disturb(model: nn.Module) -> None:
    """Move every parameter away from its initial value.

    Biases that start at zero and scales that start at one hide mistakes: a bias added once per rank
    is still zero.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def define(
    name: str,
    make: Callable[..., nn.Module],
    make_inputs: Callable[..., Inputs],
    families: str,
    notes: str = "",
    **sizes: Any,
) -> None:
    """Add an entry. ``-uneven`` names get sizes that do not divide; ``families`` is a string of
    words.
    """
    uneven = name.endswith("-uneven")
    words = frozenset(families.split()) | ({"uneven"} if uneven else {"even"})
    defaults: dict[str, Any] = {"batch": 5, "seq": 7} if uneven else {}
    MODELS[name] = ZooModel(
        name, make, make_inputs, families=words, notes=notes, **{**defaults, **sizes}
    )


# --- inputs
# --------------------------------------------------------------------------------------------------


def tokens(
    vocab_size: int, batch: int, seq: int, generator: torch.Generator, low: int = 0
) -> Tensor:
    """Random token ids [batch, seq] in ``low .. vocab_size - 1``."""
    return torch.randint(low, vocab_size, (batch, seq), generator=generator)


def ignore_some(labels: Tensor) -> Tensor:
    """Labels of which the first row ignores its first tokens and the second row everything.

    A rank that holds only the second row has no token that counts: its local mean would be 0 / 0.
    """
    labels = labels.clone()
    labels[0, : labels.shape[1] // 3] = IGNORED
    if labels.shape[0] > 1:
        labels[1] = IGNORED
    return labels


def images(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Random images [batch, 3, size, size] in float64."""
    return torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)


def causal_lm(vocab_size: int, use_cache: bool = False) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        ids = tokens(vocab_size, batch, seq, generator)
        return {"input_ids": ids, "labels": ignore_some(ids), "use_cache": use_cache}

    return make


def padded(batch: int, seq: int) -> Tensor:
    """An attention mask [batch, seq] of 0 and 1: every row is one token shorter than the last, down
    to three.
    """
    lengths = (seq - torch.arange(batch)).clamp(min=3)
    return (torch.arange(seq)[None, :] < lengths[:, None]).long()


def padded_causal_lm(vocab_size: int) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        inputs = causal_lm(vocab_size)(batch, seq, generator)
        mask = padded(batch, seq)
        return {
            **inputs,
            "attention_mask": mask,
            "labels": inputs["labels"].masked_fill(mask == 0, IGNORED),
        }

    return make


def masked_lm(vocab_size: int) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        ids, mask = tokens(vocab_size, batch, seq, generator), padded(batch, seq)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": (torch.arange(seq) >= seq // 2)
            .long()
            .expand(batch, seq)
            .contiguous(),
            "labels": ignore_some(ids).masked_fill(mask == 0, IGNORED),
        }

    return make


def seq2seq_lm(vocab_size: int) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        return {
            "input_ids": tokens(vocab_size, batch, seq, generator, low=2),
            "attention_mask": padded(batch, seq),
            "labels": ignore_some(tokens(vocab_size, batch, seq - 2, generator, low=2)),
            "use_cache": False,
        }

    return make


def classified_images(size: int, num_classes: int, key: str = "images") -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        labels = torch.randint(num_classes, (batch,), generator=generator)
        return {key: images(batch, size, generator), "labels": labels}

    return make


def diffusion(size: int, num_classes: int | None = None) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        inputs: Inputs = {
            "images": images(batch, size, generator),
            "steps": torch.randint(1000, (batch,), generator=generator),
            "noise": images(batch, size, generator),
        }
        if num_classes is not None:
            inputs["labels"] = torch.randint(num_classes, (batch,), generator=generator)
        return inputs

    return make


def vectors(in_size: int, out_size: int) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        x = torch.randn(batch, in_size, generator=generator, dtype=torch.float64)
        return {
            "x": x,
            "target": torch.randn(batch, out_size, generator=generator, dtype=torch.float64),
        }

    return make


def translation(vocab_size: int, pad: bool, ignore: bool) -> Callable[..., Inputs]:
    def make(batch: int, seq: int, generator: torch.Generator) -> Inputs:
        source = tokens(vocab_size, batch, seq + 1, generator, low=1)
        labels = tokens(vocab_size, batch, seq, generator, low=1)
        return {
            "source": source * padded(batch, seq + 1) if pad else source,
            "target": tokens(vocab_size, batch, seq, generator, low=1),
            "labels": ignore_some(labels) if ignore else labels,
        }

    return make


# --- transformers
# --------------------------------------------------------------------------------------------------


def hf(architecture: str, config: str, **fields: Any) -> Callable[..., nn.Module]:
    """A transformers model of random weights from its config class and fields."""

    def make(**overrides: Any) -> nn.Module:
        made = getattr(transformers, config)(**{**fields, **overrides})
        return getattr(transformers, architecture)(made)

    return make


def freeze(make: Callable[..., nn.Module], *prefixes: str) -> Callable[..., nn.Module]:
    """The model with parameters whose names start with one of ``prefixes`` not requiring
    gradients.
    """

    def make_frozen(**overrides: Any) -> nn.Module:
        model = make(**overrides)
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(False)
        return model

    return make_frozen


NO_SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
GPT2 = {
    **NO_SPECIAL_TOKENS, "vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
GPT2_UNEVEN = {**GPT2, "vocab_size": 37, "n_embd": 12, "n_head": 3, "n_inner": 30}
LLAMA = {
    **NO_SPECIAL_TOKENS, "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
LLAMA_UNEVEN = {
    **LLAMA, "vocab_size": 37, "hidden_size": 12, "intermediate_size": 21,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
}  # fmt: skip
BERT = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}  # fmt: skip
BERT_UNEVEN = {
    **BERT,
    "vocab_size": 37,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 21,
}
T5 = {
    "vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
T5_UNEVEN = {
    **T5,
    "vocab_size": 37,
    "d_model": 12,
    "num_heads": 3,
    "d_ff": 21,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
VIT = {
    "image_size": 8, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "num_labels": 6,
}  # fmt: skip
VIT_UNEVEN = {
    **VIT,
    "image_size": 9,
    "patch_size": 3,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 21,
    "num_labels": 7,
}

gpt2 = hf("GPT2LMHeadModel", "GPT2Config", **GPT2)
llama = hf("LlamaForCausalLM", "LlamaConfig", **LLAMA)

define(
    "gpt2",
    gpt2,
    causal_lm(32),
    "hf decoder causal-lm tied",
    "fused query-key-value Conv1D; head tied to the embedding",
)
define(
    "gpt2-uneven",
    hf("GPT2LMHeadModel", "GPT2Config", **GPT2_UNEVEN),
    causal_lm(37),
    "hf decoder causal-lm tied",
    "3 heads of 4, ffn 30",
)
define(
    "gpt2-untied",
    hf("GPT2LMHeadModel", "GPT2Config", **GPT2, tie_word_embeddings=False),
    causal_lm(32),
    "hf decoder causal-lm",
)
define(
    "gpt2-cache",
    gpt2,
    causal_lm(32, use_cache=True),
    "hf decoder causal-lm tied cache",
    "returns a DynamicCache beside the logits",
)
define(
    "gpt2-eager",
    hf("GPT2LMHeadModel", "GPT2Config", **GPT2, attn_implementation="eager"),
    causal_lm(32),
    "hf decoder causal-lm tied",
    "attention written out",
)
define(
    "gpt2-padded",
    gpt2,
    padded_causal_lm(32),
    "hf decoder causal-lm tied padded",
    "attention mask over padded rows",
)
define(
    "gpt2-frozen",
    freeze(gpt2, "transformer.wpe", "transformer.h.0."),
    causal_lm(32),
    "hf decoder causal-lm tied frozen",
    "positions and first block frozen",
)
define(
    "llama",
    llama,
    causal_lm(32),
    "hf decoder causal-lm gqa rotary",
    "4 query heads share 2 key-value heads",
)
define(
    "llama-uneven",
    hf("LlamaForCausalLM", "LlamaConfig", **LLAMA_UNEVEN),
    causal_lm(37),
    "hf decoder causal-lm gqa rotary",
    "6 query heads of 4 on 3 key-value heads; hidden 12, not 24",
)
define(
    "llama-tied",
    hf("LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True),
    causal_lm(32),
    "hf decoder causal-lm gqa rotary tied",
)
define(
    "llama-mqa",
    hf("LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "num_key_value_heads": 1}),
    causal_lm(32),
    "hf decoder causal-lm gqa rotary",
    "one key-value head: fewer than ranks",
)
define(
    "llama-cache",
    llama,
    causal_lm(32, use_cache=True),
    "hf decoder causal-lm gqa rotary cache",
    "returns a DynamicCache beside the logits",
)
define(
    "llama-padded",
    llama,
    padded_causal_lm(32),
    "hf decoder causal-lm gqa rotary padded",
    "attention mask over padded rows",
)
define(
    "llama-frozen",
    freeze(llama, "model.embed_tokens", "model.layers.0."),
    causal_lm(32),
    "hf decoder causal-lm gqa rotary frozen",
    "embedding and first block frozen",
)
define(
    "qwen2",
    hf("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    causal_lm(32),
    "hf decoder causal-lm gqa rotary",
    "biases on query, key, value only",
)
define(
    "qwen2-uneven",
    hf("Qwen2ForCausalLM", "Qwen2Config", **LLAMA_UNEVEN, tie_word_embeddings=True),
    causal_lm(37),
    "hf decoder causal-lm gqa rotary tied",
)
define(
    "mistral",
    hf("MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=4),
    causal_lm(32),
    "hf decoder causal-lm gqa rotary",
    "sliding window shorter than the sequence",
)
define(
    "mistral-uneven",
    hf("MistralForCausalLM", "MistralConfig", **LLAMA_UNEVEN, sliding_window=3),
    causal_lm(37),
    "hf decoder causal-lm gqa rotary",
)
define(
    "bert",
    hf("BertForMaskedLM", "BertConfig", **BERT),
    masked_lm(32),
    "hf encoder tied padded",
    "padded attention mask, token types",
)
define(
    "bert-uneven",
    hf("BertForMaskedLM", "BertConfig", **BERT_UNEVEN),
    masked_lm(37),
    "hf encoder tied padded",
)
define(
    "t5",
    hf("T5ForConditionalGeneration", "T5Config", **T5),
    seq2seq_lm(32),
    "hf encoder-decoder tied padded",
    "relative position buckets, shifted labels, no biases",
)
define(
    "t5-uneven",
    hf("T5ForConditionalGeneration", "T5Config", **T5_UNEVEN),
    seq2seq_lm(37),
    "hf encoder-decoder padded",
    "gated feed-forward, head not tied",
)
define(
    "vit",
    hf("ViTForImageClassification", "ViTConfig", **VIT),
    classified_images(8, 6, "pixel_values"),
    "hf vision",
    "17 tokens: the class token makes them odd",
    seq=None,
)
define(
    "vit-uneven",
    hf("ViTForImageClassification", "ViTConfig", **VIT_UNEVEN),
    classified_images(9, 7, "pixel_values"),
    "hf vision",
    seq=None,
)

# --- hand-written
# --------------------------------------------------------------------------------------------------


def own(module: type[nn.Module], **sizes: Any) -> Callable[..., nn.Module]:
    """A module of zoo_modules with the given sizes."""
    return lambda **overrides: module(**{**sizes, **overrides})


define("mlp", own(zoo_modules.MLP), vectors(12, 8), "own", "a square residual linear", seq=None)
define(
    "mlp-uneven",
    own(zoo_modules.MLP, in_size=11, hidden_size=13, out_size=7),
    vectors(11, 7),
    "own",
    seq=None,
)
define(
    "resnet",
    own(zoo_modules.ResNet),
    classified_images(8, 10),
    "own vision batch-norm",
    "batch norm in training mode, in-place ReLU",
    seq=None,
)
define(
    "resnet-uneven",
    own(zoo_modules.ResNet, channels=7, num_classes=11),
    classified_images(9, 11),
    "own vision batch-norm",
    seq=None,
)
define(
    "unet",
    own(zoo_modules.UNet),
    diffusion(8),
    "own vision",
    "skip joined by cat, group norm, transposed convolution",
    seq=None,
)
define(
    "unet-uneven",
    own(zoo_modules.UNet, channels=6, groups=3),
    diffusion(6),
    "own vision",
    "3 groups of 2 channels",
    seq=None,
)
define(
    "dit",
    own(zoo_modules.DiT),
    diffusion(8, 6),
    "own vision",
    "adaLN-zero, fused query-key-value, pixel shuffle",
    seq=None,
)
define(
    "dit-uneven",
    own(zoo_modules.DiT, image_size=6, hidden_size=12, num_heads=3, num_classes=7),
    diffusion(6, 7),
    "own vision",
    seq=None,
)
define(
    "encoder-decoder",
    own(zoo_modules.EncoderDecoder),
    translation(24, pad=True, ignore=True),
    "own encoder-decoder tied padded",
    "cross attention written out",
)
define(
    "encoder-decoder-uneven",
    own(zoo_modules.EncoderDecoder, vocab_size=29, hidden_size=12, num_heads=3),
    translation(29, pad=True, ignore=True),
    "own encoder-decoder tied padded",
)
define(
    "transformer",
    own(zoo_modules.TorchTransformer),
    translation(24, pad=False, ignore=False),
    "own encoder-decoder",
    "torch.nn.Transformer",
)
define(
    "transformer-uneven",
    own(zoo_modules.TorchTransformer, vocab_size=29, hidden_size=12, num_heads=3, norm_first=True),
    translation(29, pad=False, ignore=True),
    "own encoder-decoder",
)
