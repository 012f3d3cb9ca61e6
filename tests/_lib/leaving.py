"""A rank that goes away in a step, at a moment that does not depend on how fast the others are:
when they wait for gradients.

Until then they send, and what fails first would be a message to the rank that is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwright.runtime.pipeline.transfers import Arrival, Exchange
from shardwright.runtime.ranks.world import current_world


def tell_of_waiting(folder: Path) -> None:
    """Tell in ``folder``, from now on, of the first wait of this rank for a gradient."""
    receive = Exchange.receive

    def telling(exchange: Exchange, arrival: Arrival, transfer: Any) -> torch.Tensor:
        if arrival.payload == "gradients":
            tell(folder)
        return receive(exchange, arrival, transfer)

    Exchange.receive = telling  # type: ignore[method-assign]


def tell(folder: Path) -> None:
    """This rank waits for a gradient, or never will."""
    (folder / f"waits{current_world().rank}").touch()


def leave_when_awaited(folder: Path, others: Sequence[int]) -> NoReturn:
    """End this process, without an error that would end the others, as soon as they have told."""
    while not all((folder / f"waits{rank}").exists() for rank in others):
        time.sleep(0.01)
    os._exit(0)
