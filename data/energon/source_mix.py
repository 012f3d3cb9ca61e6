"""Several datasets as one, each a number of times: what Energon calls an epochized blend.

The samples of each are spread evenly, so that any neighbours have all datasets in proportion: a
dataset of 4 and one of 2 are ``a a b a a b``. Where a sample lies is computed: of two parts, with
``n`` of ``total`` samples in the first, the first ``k`` places have ``k * n // total`` of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any


class SourceMix:
    """The samples of ``sources``, each ``repetitions`` times, by index."""

    def __init__(self, sources: Sequence[Any], repetitions: Sequence[int]) -> None:
        self._sources = tuple(sources)
        self._counts = [len(s) * n for s, n in zip(sources, repetitions, strict=True)]
        # The samples of each source and of all behind it, among which its own are spread.
        self._totals = list(accumulate(reversed(self._counts)))[::-1]
        parts = [getattr(source, "fingerprint", None) for source in sources]
        content = repr((parts, self._counts)).encode()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def __len__(self) -> int:
        return self._totals[0]

    def __getitem__(self, index: int) -> Any:
        source, place = self.place(index)
        return self._sources[source][place]

    def key(self, index: int) -> str:
        """The name of a sample, for messages."""
        source, place = self.place(index)
        dataset = self._sources[source]
        name = dataset.key(place) if hasattr(dataset, "key") else place
        return f"{name} of dataset {source}"

    def place(self, index: int) -> tuple[int, int]:
        """The source of a sample, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} among {len(self)}")
        for source, (count, total) in enumerate(zip(self._counts, self._totals, strict=True)):
            before = index * count // total
            if (index + 1) * count // total > before:
                return source, before % len(self._sources[source])
            index -= before
        raise AssertionError(f"the last source has every index that others have not: {index}")
