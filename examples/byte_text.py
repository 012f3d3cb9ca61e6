"""Batches of text for the examples: one token per byte, cut at random places of data/text.txt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256


def read_tokens() -> Tensor:
    """The whole text as int64 tokens [length]."""
    return torch.frombuffer(
        bytearray((Path(__file__).parent / "data" / "text.txt").read_bytes()), dtype=torch.uint8
    ).long()


def batches(
    num_steps: int, batch_size: int, seq_length: int, *, part: int = 0, num_parts: int = 1
) -> Iterator[Tensor]:
    """Tokens [batch_size / num_parts, seq_length] per step: the share of ``part`` of the same batch
    on every rank.
    """
    tokens = read_tokens()
    generator = torch.Generator().manual_seed(0)
    share = batch_size // num_parts
    for _ in range(num_steps):
        starts = torch.randint(
            len(tokens) - seq_length, (batch_size,), generator=generator
        ).tolist()
        yield torch.stack(
            [
                tokens[start : start + seq_length]
                for start in starts[part * share : (part + 1) * share]
            ]
        )
