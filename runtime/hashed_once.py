"""Frozen values that work out their hash once: layouts and meshes are the keys of most caches of
the compiler, which asks for their hashes hundreds of thousands of times in a large compile. A
schedule has thousands of actions, and a search asks for the times of thousands of cuts of it.
"""

from __future__ import annotations

from typing import TypeVar

Frozen = TypeVar("Frozen", bound="HashedOnce")


class HashedOnce:
    """The base of a frozen dataclass under :func:`hashed_once`. It has the place for the hash. That
    is no field, so it is not compared, copied or pickled: hashes of texts differ between processes.
    """

    __slots__ = ("_hash",)
    _hash: int


def hashed_once(cls: type[Frozen]) -> type[Frozen]:
    """Let each object of a frozen dataclass remember the hash that its fields give it."""
    of_fields = cls.__hash__

    def remembered(self: Frozen) -> int:
        try:
            return self._hash
        except AttributeError:
            found = of_fields(self)
            object.__setattr__(self, "_hash", found)  # past the dataclass, which is frozen
            return found

    cls.__hash__ = remembered  # type: ignore[method-assign,assignment]
    return cls
