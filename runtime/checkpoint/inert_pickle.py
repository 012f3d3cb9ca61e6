"""Reading a pickle without running any of it.

A pickle is a program: it names functions and classes, and its reader calls them. Here no name is
looked up. Whatever is named becomes a :class:`Made`, which keeps the name and the arguments, so a
reader sees what the pickle would have made and decides what it means::

    read_pickle(pickle.dumps(torch.Size([2, 3])))      # a Made of "torch.Size" from ((2, 3),)
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any, ClassVar


class Made:
    """What a pickle would have made: ``name`` of the class or function, the arguments ``given`` to
    it, the ``state`` it was set to, and the ``entries`` it was filled with, as a dict is.
    """

    name: ClassVar[str] = ""
    given: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]

    def __new__(cls, *given: Any, **named: Any) -> Made:
        made = super().__new__(cls)
        made.given, made.state, made.entries = (*given, *named.values()), None, {}
        return made

    def __init__(self, *given: Any, **named: Any) -> None:
        """Nothing: ``__new__`` has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def field(self, name: str) -> Any:
        """One field of an object whose state is a dict, as that of a dataclass.

        Raises ``TypeError`` or ``KeyError`` if it has none.
        """
        if not isinstance(self.state, dict):
            raise TypeError(f"{self.name} has no fields")
        return self.state[name]


def read_pickle(data: bytes) -> Any:
    """What a pickle would have made, with a :class:`Made` for every object that is none of Python's
    own plain values. A tensor's memory is what ``torch.save`` notes of it, a tuple.

    Raises anything that comes of it where ``data`` is no pickle.
    """
    return _Reader(io.BytesIO(data)).load()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Made]:
        return _named(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> Any:
        return reference


@functools.lru_cache(maxsize=1024)
def _named(name: str) -> type[Made]:
    return type("Made", (Made,), {"name": name})


def is_named(value: Any, name: str) -> bool:
    """Whether a class or function of this name is meant, or something made by it."""
    return bool(getattr(value, "name", None) == name) and _is_made(value)


def _is_made(value: Any) -> bool:
    return isinstance(value, Made) or (isinstance(value, type) and issubclass(value, Made))
