"""Checking the arguments of public functions against their annotations, so that a wrong one is told
in words at the call.

    @checked
    def save(directory: Path | str, keep: int | None = 2) -> None: ...

    save(3)

    ArgumentError: save: argument 'directory' is a path or a string
      why:   it is 3, an int
      try:   save(directory: Path | str, keep: int | None = 2)

What annotations say is checked as far as it is cheap and certain: simple types, classes, unions,
literals, and the elements of lists, tuples and dicts. Callables are only seen to be callable. Whole
numbers pass for floats; numbers of numpy pass, truth values do not pass for numbers. What is
annotated as ``Any``, a protocol or a type variable is left to the function.

The annotations are read at the first call. A call with right arguments costs a few microseconds
more.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Union, cast, get_args, get_origin

from shardwright.runtime.errors import (
    ArgumentError,
    CheckpointError,
    ShardwrightError,
    brief,
    brief_text,
)

Checked = TypeVar("Checked", bound=Callable[..., Any])
CheckedClass = TypeVar("CheckedClass", bound=type[Any])

MOST_PATH, MOST_NAME = 4096, 255
"""Bytes of a path, and of the name of a file or folder in it."""

MOST_LEVELS = 200
"""The most levels that may be nested in an argument."""

MOST_BITS = 512
"""The most bits of a whole number; longer ones have no form as floats, nor as text."""

MOST_ELEMENTS = 1000
"""The most elements of a list, tuple or dict that are looked at."""


class Stateful(Protocol):
    """What has a state to save: a scheduler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Kind(NamedTuple):
    """What values an annotation stands for: a test, and how messages call them."""

    accepts: Callable[[Any], bool]
    words: str


def checked(function: Checked) -> Checked:
    """Check the arguments of each call of ``function``. Raises :class:`ArgumentError` for one that
    does not fit.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check(function, args, kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _check_bound(function, args, kwargs, error)
            raise
        except RecursionError:
            _check_nesting(function, args, kwargs)
            raise

    return cast(Checked, call)


def checked_late(function: Checked) -> Checked:
    """Like :func:`checked`, for functions that are called so often that arguments are looked at
    only once a call has failed.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShardwrightError:
            raise
        except Exception as error:
            _check(function, args, kwargs)
            _check_bound(function, args, kwargs, error)
            raise

    return cast(Checked, call)


def checked_fields(cls: CheckedClass) -> CheckedClass:
    """Check what objects of ``cls`` are made of, like :func:`checked`."""
    cls.__init__ = checked(cls.__init__)
    return cls


def checked_fields_late(cls: CheckedClass) -> CheckedClass:
    """Check what objects of ``cls`` are made of, like :func:`checked_late`."""
    cls.__init__ = checked_late(cls.__init__)
    return cls


def check_call(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> None:
    """Raise :class:`ArgumentError` if ``error`` came of calling ``function`` with too few, too many
    or unknown arguments.
    """
    _check_bound(function, args, kwargs, error)


def wrong_argument(
    function: Callable[..., Any], name: str, expected: str, value: Any
) -> ArgumentError:
    """The error for an argument of the wrong type. ``expected``: what it should be, in words."""
    return ArgumentError(
        f"{_title(function)}: argument {name!r} is {expected}",
        why=f"it is {shown(value)}",
        hint=_usage(function),
    )


def param_groups_of(state_dict: Mapping[str, Any]) -> Any:
    """The groups in the state dict of an optimizer. Raises :class:`CheckpointError` if it is
    none.
    """
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and "params" in group for group in groups
    ):
        raise CheckpointError(
            "this is no state dict of an optimizer",
            why="it has no list 'param_groups' of dicts with 'params'",
            hint="pass what state_dict() of an optimizer, or merge_state_dicts, gave",
        )
    return groups


def shown(value: Any) -> str:
    """A value and its type for a message, however large, deep or broken the value is: ``3, an
    int``.
    """
    if value is None:
        return "None"
    kind = type(value).__name__
    kind = f"an {kind}" if kind[:1].lower() in "aeiou" else f"a {kind}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not isinstance(value, bool | int | float | complex | str | bytes | PurePath):
        return kind
    return f"{brief(value)}, {kind}"


@functools.lru_cache(maxsize=1024)
def _kinds(
    function: Callable[..., Any],
) -> tuple[
    list[tuple[str, Kind | None]], dict[str, Kind | None], tuple[str, Kind] | None, Kind | None
]:
    """The kinds of the positional arguments in order, those by name, that of ``*args`` and that of
    ``**kwargs``.
    """
    positional: list[tuple[str, Kind | None]] = []
    by_name: dict[str, Kind | None] = {}
    rest: tuple[str, Kind] | None = None
    others: Kind | None = None
    # What cannot be told from an annotation is not checked.
    for parameter in inspect.signature(function).parameters.values():
        kind = kind_of(_resolved(function, parameter.annotation))
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = None if kind is None else (parameter.name, kind)
        elif parameter.kind is parameter.VAR_KEYWORD:
            others = kind
        else:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append((parameter.name, kind))
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                by_name[parameter.name] = kind
    return positional, by_name, rest, others


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """What an annotation stands for; ``Any`` for a name that is imported for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, function.__globals__)
    except NameError:
        return Any


def kind_of(annotation: Any) -> Kind | None:
    """The kind that an annotation stands for; ``None`` where anything goes."""
    # From the plain types to unions, containers, and at last any class.
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin in (Union, types.UnionType):
        # A string in the place of a path or a device must be the text of one.
        special = next(
            (part for part in parts if part is Path or getattr(part, "__name__", "") == "device"),
            str,
        )
        return _any_of([kind_of(special if part is str else part) for part in parts])
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
        module = plain.__module__.split(".")[0]
        name = (
            plain.__name__
            if module in ("builtins", "shardwright")
            else f"{module}.{plain.__name__}"
        )
        return Kind(lambda value: isinstance(value, plain), f"{_article(plain.__name__)} {name}")
    return None


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


def _is_path(value: Any) -> bool:
    if not isinstance(value, str | os.PathLike):
        return False
    try:
        name = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        return False
    return (
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
        items: Iterable[Any] = itertools.islice(iter(cast(Any, value)), MOST_ELEMENTS)
        return all(element.accepts(item) for item in items)

    return Kind(accepts, words if element is None else f"{words}, each element {element.words}")


def _tuple_of(parts: tuple[Any, ...]) -> Kind:
    if len(parts) == 2 and parts[1] is Ellipsis:
        return _sequence_of(kind_of(parts[0]), tuple, "a tuple")
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

    parts = [
        f"each {name} {kind.words}"
        for name, kind in (("key", key), ("value", value))
        if kind is not None
    ]
    return Kind(accepts, ", ".join(["a dict", *parts]))


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
    Path: Kind(lambda value: _is_path(value), "a path"),
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


def _title(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__").split("<locals>.")[-1]


def _usage(function: Callable[..., Any]) -> str:
    """How a function is called, as its definition says it."""
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        annotation = (
            ""
            if parameter.annotation is parameter.empty
            else f": {_annotation(parameter.annotation)}"
        )
        default = (
            "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        )
        known: Mapping[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        stars = known.get(parameter.kind, "")
        arguments.append(f"{stars}{name}{annotation}{default}")
    return f"{_title(function)}({', '.join(arguments)})"


def _annotation(annotation: Any) -> str:
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", str(annotation))
    )


def _default(default: Any) -> str:
    return repr(default) if isinstance(default, bool | int | float | str | None) else "..."


def _check(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    positional, by_name, rest, others = _kinds(function)
    for (name, kind), value in zip(positional, args, strict=False):
        if kind is not None and not kind.accepts(value):
            raise wrong_argument(function, name, kind.words, value)
    if rest is not None:
        name, kind = rest
        for value in args[len(positional) :]:
            if not kind.accepts(value):
                raise wrong_argument(function, name, kind.words, value)
    for name, value in kwargs.items():
        found = by_name.get(name, others)
        if found is not None and not found.accepts(value):
            raise wrong_argument(function, name, found.words, value)


def _check_bound(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> None:
    """Raise the error for a call with too many, too few or unknown arguments, if that is why it
    failed.
    """
    if isinstance(error, ArgumentError):
        return
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as reason:
        raise ArgumentError(f"{_title(function)}: {reason}", hint=_usage(function)) from None
    for name, value in given.items():
        # Python says of a call with other arguments than a function has which function it was.
        if callable(value) and brief_text(error).startswith(_names_in_errors(value)):
            raise ArgumentError(
                f"{_title(function)}: argument {name!r} is a function that cannot be called "
                "as it is called here",
                why=brief_text(error),
                hint=_usage(function),
            ) from error


def _names_in_errors(function: Any) -> tuple[str, ...]:
    """What Python may call a function, class or callable object when its arguments do not fit."""
    name = getattr(function, "__qualname__", None)
    if name:
        return f"{name}()", f"{name}.__init__()"
    kind = type(function).__qualname__
    return f"{kind}.__call__()", f"{kind}.forward()"


def _check_nesting(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise the error for an argument that is nested too deeply, after something could not follow
    it.
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return
    for name, value in given.items():
        if name != "self" and is_too_deep(value):
            raise ArgumentError(
                f"{_title(function)}: argument {name!r} is nested in itself, or too deeply",
                why=f"there are more than {MOST_LEVELS} levels",
                hint="pass what is needed of it, in fewer levels",
            ) from None


def is_too_deep(value: Any) -> bool:
    """Whether lists, tuples and dicts are nested in more than :data:`MOST_LEVELS` levels, or one in
    itself.
    """
    level, layer = 0, [value]
    while layer and level <= MOST_LEVELS:
        containers = [item for item in layer if isinstance(item, Mapping | list | tuple)]
        # An object that occurs twice in a layer leads to the same things below.
        once = {id(item): item for item in containers}.values()
        layer = [
            child
            for item in once
            for child in (item.values() if isinstance(item, Mapping) else item)
        ]
        level += 1
    return level > MOST_LEVELS
