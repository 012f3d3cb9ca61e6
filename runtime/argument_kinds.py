"""What an annotation stands for: a test of values, and the words in which messages tell of it.

    kind = kind_of(list[int])
    kind.accepts([1, 2])    True
    kind.accepts([1, "2"])  False
    kind.words              "a list, each element a whole number"

An annotation of which nothing is known accepts everything, so its kind is ``None``.
"""

from __future__ import annotations

import collections.abc
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Union, cast, get_args, get_origin

from shardwright.runtime.errors import brief

MOST_PATH, MOST_NAME = 4096, 255
"""Bytes of a path, and of the name of a file or folder in it."""


MOST_BITS = 512
"""The most bits of a whole number; longer ones have no form as floats, nor as text."""


MOST_ELEMENTS = 1000
"""The most elements of a list, tuple or dict that are looked at."""


class Stateful(Protocol):
    """What has a state to save: a scheduler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def _itself(value: Any) -> tuple[str, Any]:
    return "it", value


class Kind(NamedTuple):
    """What values an annotation stands for: a test, and how messages call them. ``culprit``: of a
    value that is not accepted, what is wrong with it: the value itself, or an element of it.
    """

    accepts: Callable[[Any], bool]
    words: str
    culprit: Callable[[Any], tuple[str, Any]] = _itself


def _is_written_as_text(annotation: Any) -> bool:
    return (
        annotation is Path
        or get_origin(annotation) is os.PathLike
        or getattr(annotation, "__name__", "") == "device"
    )


def kind_of(annotation: Any) -> Kind | None:
    """The kind that an annotation stands for; ``None`` where anything goes."""
    # From the plain types to unions, containers, and at last any class.
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin in (Union, types.UnionType):
        # A string in the place of a path or a device must be the text of one.
        special = next(filter(_is_written_as_text, parts), str)
        return _any_of([kind_of(special if part is str else part) for part in parts])
    if origin is os.PathLike:
        return _SIMPLE[Path]
    if origin is Literal:
        return Kind(lambda value: _is_one_of(value, parts), " or ".join(map(repr, parts)))
    if origin is type:
        return _class_of(parts[0])
    if origin is tuple:
        return _tuple_of(parts)
    if origin in _MAPPINGS:
        return _mapping_of(*(kind_of(part) for part in parts))
    if origin in _SEQUENCES:
        return _sequence_of(kind_of(parts[0]), *_SEQUENCES[origin])
    if origin is collections.abc.Callable:
        return _SIMPLE[collections.abc.Callable]
    if getattr(annotation, "__module__", "") == "torch" and annotation.__name__ == "device":
        return Kind(lambda value: _is_device(annotation, value), "a device")
    plain = annotation if origin is None else origin
    if (
        isinstance(plain, type)
        and plain is not object
        and not getattr(plain, "_is_protocol", False)
    ):
        name = _public_name(plain)
        return Kind(lambda value: isinstance(value, plain), f"{_article(name)} {name}")
    return None


def _public_name(cls: type) -> str:
    """The name under which users import a class: ``torch.nn.Module``, though it is defined in
    ``torch.nn.modules.module``.
    """
    parts = cls.__module__.split(".")
    if parts[0] in ("builtins", "shardwright"):
        return cls.__name__
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        if getattr(sys.modules.get(prefix), cls.__name__, None) is cls:
            return f"{prefix}.{cls.__name__}"
    return cls.__name__


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def _any_of(kinds: Sequence[Kind | None]) -> Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    words = list(dict.fromkeys(kind.words for kind in known))
    return Kind(
        lambda value: any(kind.accepts(value) for kind in known),
        " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part),
    )


def _is_number(value: Any) -> bool:
    """Not a truth value, nor one of thousands of digits, which has no other form."""
    return not isinstance(value, bool) and not is_too_long(value)


def is_too_long(value: Any) -> bool:
    """Whether a value is a whole number of so many digits that it has no other form."""
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def is_path(value: Any) -> bool:
    """Whether a value is a path, or the text of one, that a file system could have."""
    if not isinstance(value, str | os.PathLike):
        return False
    try:
        name = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        return False
    return (
        # Python raises ValueError for a zero byte, and OSError for names that are too long: both
        # only when the file is opened, which is far from the call.
        b"\0" not in name
        and len(name) < MOST_PATH
        and all(len(part) <= MOST_NAME for part in name.split(b"/"))
    )


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, n, None)) for n in ("state_dict", "load_state_dict")
    )


def _is_device(kind: Any, value: Any) -> bool:
    try:
        return isinstance(value, kind) or (isinstance(value, str) and kind(value) is not None)
    except RuntimeError:
        return False


def _is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _class_of(base: Any) -> Kind:
    # Any is a class itself, of which nothing is a subclass.
    if base is Any or not isinstance(base, type):
        return Kind(lambda value: isinstance(value, type), "a class")
    return Kind(
        lambda value: isinstance(value, type) and issubclass(value, base),
        f"a subclass of {base.__name__}",
    )


def _sequence_of(element: Kind | None, accepted: type[Any], words: str) -> Kind:
    """A list, a tuple and the like. An iterator is not looked into: that would use it up."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, accepted) or isinstance(value, str | bytes | Mapping):
            return False
        if (
            element is None
            or isinstance(value, Iterator)
            or not isinstance(value, collections.abc.Sized)
        ):
            return True
        try:
            items: Iterable[Any] = itertools.islice(iter(cast(Any, value)), MOST_ELEMENTS)
        except TypeError:  # a tensor without dims has the method and no elements
            return False
        return all(element.accepts(item) for item in items)

    def culprit(value: Any) -> tuple[str, Any]:
        # Other iterables may be used up by looking at them, or have no order.
        if element is not None and isinstance(value, list | tuple):
            for index, item in enumerate(value[:MOST_ELEMENTS]):
                if not element.accepts(item):
                    return f"element {index}", item
        return _itself(value)

    if element is None:
        return Kind(accepts, words)
    return Kind(accepts, f"{words}, each element {element.words}", culprit)


def _tuple_of(parts: tuple[Any, ...]) -> Kind:
    if len(parts) == 2 and parts[1] is Ellipsis:
        return _sequence_of(kind_of(parts[0]), tuple, "a tuple")
    # ``tuple[int, str]``: so many items, each of its own kind.
    kinds = [kind_of(part) for part in parts]

    def accepts(value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) != len(kinds):
            return False
        return all(
            kind is None or kind.accepts(item) for kind, item in zip(kinds, value, strict=True)
        )

    inside = ", ".join("anything" if kind is None else kind.words for kind in kinds)
    return Kind(accepts, f"a tuple of {len(kinds)} ({inside})")


def _mapping_of(key: Kind | None, value: Kind | None) -> Kind:
    def accepts(found: Any) -> bool:
        if not isinstance(found, Mapping):
            return False
        # A mapping of anything.
        if key is None and value is None:
            return True
        items = _first_items(found)
        return all(
            (key is None or key.accepts(k)) and (value is None or value.accepts(v))
            for k, v in items
        )

    def culprit(found: Any) -> tuple[str, Any]:
        for k, v in _first_items(found) if isinstance(found, Mapping) else ():
            if key is not None and not key.accepts(k):
                return f"the key {brief(k)}", k
            if value is not None and not value.accepts(v):
                return f"the value of {brief(k)}", v
        return _itself(found)

    parts = [
        f"each {name} {kind.words}"
        for name, kind in (("key", key), ("value", value))
        if kind is not None
    ]
    return Kind(accepts, ", ".join(["a dict", *parts]), culprit)


def _first_items(found: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The first items of a dict."""
    return ((key, found[key]) for key, _ in zip(found, range(MOST_ELEMENTS), strict=False))


_SIMPLE: Mapping[Any, Kind | None] = {
    Any: None,
    None: Kind(lambda value: value is None, "None"),
    types.NoneType: Kind(lambda value: value is None, "None"),
    bool: Kind(lambda value: isinstance(value, bool), "True or False"),
    int: Kind(lambda value: isinstance(value, Integral) and _is_number(value), "a whole number"),
    Stateful: Kind(
        lambda value: _has_state(value), "an object with state_dict and load_state_dict"
    ),
    float: Kind(lambda value: isinstance(value, Real) and _is_number(value), "a number"),
    str: Kind(lambda value: isinstance(value, str), "a string"),
    dict: Kind(lambda value: isinstance(value, Mapping), "a dict"),
    Path: Kind(lambda value: is_path(value), "a path"),
    collections.abc.Callable: Kind(callable, "a function"),
}


_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


_SEQUENCES: Mapping[Any, tuple[type[Any], str]] = {
    list: (list, "a list"),
    collections.abc.Sequence: (collections.abc.Sequence, "a list or tuple"),
    collections.abc.Collection: (collections.abc.Collection, "a list or another collection"),
    collections.abc.Iterable: (collections.abc.Iterable, "a list or another iterable"),
    set: (collections.abc.Set, "a set"),
    frozenset: (collections.abc.Set, "a set"),
}
