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

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar, cast

from shardwright.runtime.argument_kinds import Kind, kind_of
from shardwright.runtime.errors import (
    ArgumentError,
    CheckpointError,
    ShardwrightError,
    brief,
    brief_text,
)

Checked = TypeVar("Checked", bound=Callable[..., Any])
CheckedClass = TypeVar("CheckedClass", bound=type[Any])


MOST_LEVELS = 200
"""The most levels that may be nested in an argument."""


def checked(function: Checked) -> Checked:
    """Check the arguments of each call of ``function``. Raises :class:`ArgumentError` for one that
    does not fit.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check(function, args, kwargs)
        try:
            return function(*args, **kwargs)
        # Python's own complaint of a call that does not fit the signature, in our words; a
        # TypeError from inside goes on as it is.
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
        # Too late is early enough: the call has failed, and the check says why in words.
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
    function: Callable[..., Any], name: str, expected: str, value: Any, found: str = "it"
) -> ArgumentError:
    """The error for an argument of the wrong type. ``expected``: what it should be, in words.
    ``found``: what ``value`` is of it.
    """
    return ArgumentError(
        f"{_title(function)}: argument {name!r} is {expected}",
        why=f"{found} is {shown(value)}",
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
    def refuse(name: str, kind: Kind, value: Any) -> NoReturn:
        found, culprit = kind.culprit(value)
        raise wrong_argument(function, name, kind.words, culprit, found)

    positional, by_name, rest, others = _kinds(function)
    for (name, kind), value in zip(positional, args, strict=False):
        if kind is not None and not kind.accepts(value):
            refuse(name, kind, value)
    if rest is not None:
        name, kind = rest
        for value in args[len(positional) :]:
            if not kind.accepts(value):
                refuse(name, kind, value)
    for name, value in kwargs.items():
        found = by_name.get(name, others)
        if found is not None and not found.accepts(value):
            refuse(name, found, value)


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
