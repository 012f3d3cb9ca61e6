"""Recurrent networks with dropout between their layers.

Their kernels draw from the default generator and take no other, so for one call it is set to the
seed of the draw and then put back: what runs outside sees no difference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.runtime.ops.random import Draw

# Ranks that are threads share the default generator.
_default_generator = threading.Lock()


@contextmanager
def _seeded(draw: Draw, device: torch.device) -> Iterator[None]:
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index]
    )
    # torch's recurrent layers draw their dropout from the default generator alone. Ranks that are
    # threads share it, so one at a time.
    with _default_generator:
        state = generator.get_state()
        generator.manual_seed(draw.rng.generator_seed(draw.name))
        try:
            yield
        finally:
            generator.set_state(state)


def lstm(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    draw: Draw,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm``."""
    with _seeded(draw, input.device):
        return torch.lstm(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )


def gru(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    """``torch.gru``."""
    with _seeded(draw, input.device):
        return torch.gru(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )


def rnn_tanh(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    """``torch.rnn_tanh``."""
    with _seeded(draw, input.device):
        return torch.rnn_tanh(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )


def rnn_relu(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    """``torch.rnn_relu``."""
    with _seeded(draw, input.device):
        return torch.rnn_relu(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
