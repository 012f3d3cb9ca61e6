"""The global random generators of torch, numpy and Python, which loaders leave alone.

What is drawn from them depends on everything that drew before: on the number of ranks and workers,
and on where a run was resumed. So samples may not depend on them, unless they are seeded for each
sample.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from shardwright.runtime.errors import DataError

LOOKED_AT_STEPS = 4
"""Steps of which it is looked whether they draw from the global generators; later ones are looked
at now and then.
"""

_LOOKED_AT_EVERY = 64


def is_looked_at(step: int) -> bool:
    """Whether step number ``step`` of a process is one of those that are looked at. A look takes as
    long as ten cheap samples.
    """
    return step < LOOKED_AT_STEPS or step % _LOOKED_AT_EVERY == 0


def generator_states() -> tuple[Any, ...]:
    """Where torch's, numpy's and Python's global generators are."""
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def moved(before: tuple[Any, ...]) -> list[str]:
    """The names of those that are somewhere else now."""
    now = generator_states()
    numpy_before, numpy_now = before[1]["state"], now[1]["state"]
    same = (
        torch.equal(before[0], now[0]),
        numpy_before["pos"] == numpy_now["pos"]
        and np.array_equal(numpy_before["key"], numpy_now["key"]),
        before[2] == now[2],
    )
    return [
        name
        for name, is_same in zip(("torch", "numpy", "random"), same, strict=True)
        if not is_same
    ]


def restore(states: tuple[Any, ...]) -> None:
    """Put the global generators back."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def seed_everything(seed: int) -> None:
    """Seed the global generators of the CPU. ``seed``: 64 bits."""
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class GeneratorsKept(AbstractContextManager[None]):
    """A ``with`` block after which the global generators are what they were.

    ``seeded``: the block seeds them itself, sample by sample. Otherwise a block that draws from
    them is refused at its end with :class:`DataError`. ``hint``: what to try then.
    """

    def __init__(self, *, seeded: bool, hint: str) -> None:
        self._seeded = seeded
        self._hint = hint

    def __enter__(self) -> None:
        self._before = generator_states()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        drawn = moved(self._before)
        if not drawn:
            return
        restore(self._before)
        # What the block raised says more than that it drew.
        if self._seeded or kind is not None:
            return
        raise DataError(
            f"the dataset draws from the global generator of {' and '.join(drawn)}",
            why="what it draws then depends on the number of ranks and workers, and a resumed "
            "run gets other samples",
            hint=self._hint,
        )
