"""Arrays by content, and what is made of them: equal blocks of a model come to the same objects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.problem import Array


class Pool:
    """Arrays by content: equal arrays become one object, so that ``is`` and ``id`` compare them."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[tuple[int, ...], bytes], Array] = {}
        self._by_id: dict[int, tuple[Array, Array]] = {}
        self._results: dict[tuple[object, ...], object] = {}

    def intern(self, array: Array) -> Array:
        """The one array with this content."""
        found = self._by_id.get(id(array))
        if found is None:
            # -0.0 becomes 0.0, and nobody else writes to it.
            plain = np.ascontiguousarray(array, dtype=np.float64) + 0.0
            plain.setflags(write=False)
            kept = self._by_content.setdefault((plain.shape, plain.tobytes()), plain)
            # The first keeps the id from being used again.
            found = self._by_id[id(array)] = (
                array,
                kept,
            )
            self._by_id.setdefault(id(kept), (kept, kept))
        return found[1]

    def add(self, a: Array, b: Array) -> Array:
        """``a + b``, computed once per pair."""
        key = ("add", id(a), id(b))
        if key not in self._results:
            self._results[key] = self.intern(a + b)
        result = self._results[key]
        assert isinstance(result, np.ndarray)
        return result

    def take(self, array: Array, index: tuple[NDArray[np.intp] | int | slice, ...]) -> Array:
        """``array[index]``, one index array, number or slice per dim."""
        parts = tuple(i.tobytes() if isinstance(i, np.ndarray) else str(i) for i in index)
        key = ("take", id(array), *parts)
        if key not in self._results:
            taken = array
            # Dim by dim, as several index arrays at once would be paired, not crossed.
            for dim in reversed(range(array.ndim)):
                taken = taken[(slice(None),) * dim + (index[dim],)]
            self._results[key] = self.intern(taken)
        result = self._results[key]
        assert isinstance(result, np.ndarray)
        return result

    def transpose(self, array: Array) -> Array:
        """``array.T``."""
        key = ("transpose", id(array))
        if key not in self._results:
            self._results[key] = self.intern(array.T)
        result = self._results[key]
        assert isinstance(result, np.ndarray)
        return result
