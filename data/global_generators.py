"""The global random generators of torch, numpy and Python, which loaders leave alone.

What is drawn from them depends on everything that drew before: on the number of ranks and workers,
and on where a run was resumed. So samples may not depend on them, unless they are seeded for each
sample.
"""

from __future__ import annotations

import ctypes
import random
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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


_MERSENNE_TWISTER_BYTES = 625 * 4


class Generators(NamedTuple):
    """Where torch's, numpy's and Python's global generators are. ``numpy``: a mark that changes
    with every number drawn, not a whole state.
    """

    torch: Tensor
    numpy: bytes
    random: tuple[Any, ...]

    @classmethod
    def now(cls) -> Generators:
        """Where they are at this moment."""
        return cls(torch.get_rng_state(), _numpy_mark(), random.getstate())

    def moved(self) -> list[str]:
        """The names of those that are somewhere else now."""
        now = Generators.now()
        same = {
            "torch": torch.equal(self.torch, now.torch),
            "numpy": self.numpy == now.numpy,
            "random": self.random == now.random,
        }
        return [name for name, is_same in same.items() if not is_same]


def _numpy_mark() -> bytes:
    """The memory of numpy's global generator: its 624 words and its place among them. numpy's own
    ``get_state`` makes a number of each word, which takes sixty times as long.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, not in __all__
    if type(generator).__name__ == "MT19937":
        return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES)
    return repr(generator.state).encode()  # the user has set another kind


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
        self._before = Generators.now()
        self._numpy_state = np.random.get_state(legacy=False)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        drawn = self._before.moved()
        if not drawn:
            return
        torch.set_rng_state(self._before.torch)
        np.random.set_state(self._numpy_state)
        random.setstate(self._before.random)
        # What the block raised says more than that it drew.
        if self._seeded or kind is not None:
            return
        raise DataError(
            f"the dataset draws from the global generator of {' and '.join(drawn)}",
            why="what it draws then depends on the number of ranks and workers, and a resumed "
            "run gets other samples",
            hint=self._hint,
        )
