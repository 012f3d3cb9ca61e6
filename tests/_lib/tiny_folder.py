"""A folder that `from_pretrained` reads, as the scripts of the pages expect one."""

from __future__ import annotations

from pathlib import Path

import transformers
import transformers.modeling_utils  # (tables of dtypes are made before any test rebinds them)
from tokenizers import Tokenizer, models, pre_tokenizers


def tiny_gpt2(folder: Path) -> None:
    """A folder with a tokenizer of few words and a model of random weights."""
    words = {
        word: i for i, word in enumerate(["<|endoftext|>", "the", "cat", "sat", "on", "mat", "a"])
    }
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|endoftext|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=101,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
