"""Names of values: Python identifiers made from the user's own names, the same in every run."""

from __future__ import annotations

import builtins
import keyword

from shardwright.compiler.ir.identifier import identifier

_RESERVED = frozenset(
    (*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "torch", "F", "math", "operator")
)


class Namer:
    """Hands out names that are unique within one graph."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, text: str) -> str:
        """``text`` as an identifier, with ``_1``, ``_2``, ... appended where it is taken already or
        reserved.
        """
        base = identifier(text)
        name = base
        while name in self._taken or name in _RESERVED:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._taken.add(name)
        return name
