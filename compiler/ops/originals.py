"""Functions of torch that a program has replaced before the first compile.

The operator tables name torch's functions as ``torch.Tensor.float`` or ``F.linear``. A program may
have put something else there by then: its own function, or another one of torch's
(``torch.Tensor.float = torch.Tensor.double``). The tables must mean what torch calls so, since that
is what tracing sees however it was called.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch


class _Place(NamedTuple):
    """Where the tables look for functions. ``origins``: where torch keeps those that are written in
    C++. ``file``: the module that defines those in Python.
    """

    title: str
    owner: Any
    origins: tuple[Any, ...] = ()
    file: str | None = None


_PLACES = (
    _Place("torch.Tensor", torch.Tensor, (torch._C.TensorBase,), "torch._tensor"),
    _Place("torch", torch, (torch._C._VariableFunctions,), "torch.functional"),
    _Place(
        "torch.nn.functional",
        torch.nn.functional,
        (torch._C._nn, torch._C._VariableFunctions),
        "torch.nn.functional",
    ),
    _Place("torch.linalg", torch.linalg),
    _Place("torch.fft", torch.fft),
    _Place("torch.special", torch.special),
)


_KNOWN = ("torch", "shardwright.frontend.verification.precision")
"""Modules whose functions may stand in torch's places: its own, and those of casts to float64,
which calls are recorded through.
"""


Name = tuple[Any, str]
"""Where a function stands: in which module or class, and its name there."""


def names_of(operators: Mapping[Any, tuple[str, Any]]) -> dict[str, list[Name]]:
    """The names in torch of every operator, now; ``operators``: those that functions mean."""
    names: dict[str, list[Name]] = {}
    for place in _PLACES:
        for name in (name for name in dir(place.owner) if not name.startswith("_")):
            function = getattr(place.owner, name, None)
            try:
                operator = operators.get(function)
            except TypeError:  # unhashable
                continue
            if operator is not None:
                names.setdefault(operator[0], []).append((place.owner, name))
    return names


def replacement(names: Iterable[Name]) -> tuple[str, Any] | None:
    """The first of these names under which a program has put a function of its own, in words, and
    that function.
    """
    for owner, name in names:
        function = getattr(owner, name, None)
        if not _belongs(owner, name, function):
            return f"{TITLES[owner]}.{name}", function
    return None


def name_of(function: Any) -> Name | None:
    """The name in torch under which a program has put this function."""
    for place in _PLACES:
        for name, value in vars(place.owner).items():
            if value is function and not _belongs(place.owner, name, value):
                return place.owner, name
    return None


TITLES = {place.owner: place.title for place in _PLACES}


@contextmanager
def unpatched() -> Iterator[Mapping[Any, str]]:
    """Inside the ``with`` block torch's functions are in their places again, as far as they can be
    found.

    For those that cannot be, a stand-in that nobody calls is there: the block gets these, with the
    names they stand for.
    """
    # Functions that somebody has replaced, such as a profiler that wraps ``F.linear``.
    replaced = _replaced()
    values = [vars(place.owner)[name] for place, name in replaced]
    stand_ins: dict[Any, str] = {}
    try:
        for place, name in replaced:
            original = _origin(place, name)
            if original is None:
                original = _stand_in(f"{place.title}.{name}")
                stand_ins[original] = f"{place.title}.{name}"
            setattr(place.owner, name, original)
        yield stand_ins
    finally:
        # Whoever replaced them (a profiler, another library) finds everything as it was.
        for (place, name), value in zip(replaced, values, strict=True):
            setattr(place.owner, name, value)


def _replaced() -> list[tuple[_Place, str]]:
    found = []
    for place in _PLACES:
        for name, value in sorted(vars(place.owner).items()):
            is_public_function = not name.startswith("_") and inspect.isroutine(value)
            if is_public_function and not _belongs(place.owner, name, value):
                found.append((place, name))
    return found


def _belongs(place: Any, name: str, value: Any) -> bool:
    """Whether a function is what torch itself has put there."""
    # Methods written in C++ have no module of their own.
    owner = getattr(value, "__objclass__", value)
    # A wrapper made with functools.wraps says that its module is torch's; its globals do not lie.
    scope = getattr(value, "__globals__", {"__name__": getattr(owner, "__module__", "")})
    if not str(scope["__name__"]).startswith(_KNOWN):
        return False
    own_name = str(getattr(value, "__name__", name))
    if own_name.lstrip("_") == name.lstrip("_"):
        return True
    # Under the name of another one, which is still there: torch has few such aliases, and has both
    # in C++.
    return getattr(place, own_name, None) is not value


def _origin(place: _Place, name: str) -> Any:
    """The function written in C++ that stood under a name; ``None`` if it was one in Python."""
    if place.file is not None and name in _written_in_python(place.file):
        return None
    return next((getattr(origin, name) for origin in place.origins if hasattr(origin, name)), None)


def _written_in_python(module: str) -> set[str]:
    """The names of all functions and methods that a file of torch defines."""
    spec = importlib.util.find_spec(module)
    get_code = getattr(spec and spec.loader, "get_code", None)
    names, waiting = set[str](), [get_code(module)] if get_code else []
    while waiting:
        inner = [constant for constant in waiting.pop().co_consts if isinstance(constant, CodeType)]
        names.update(code.co_name for code in inner)
        waiting += inner
    return names


def _stand_in(title: str) -> Any:
    def stand_in(*arguments: Any) -> None:
        raise AssertionError(f"nobody calls what stands for {title}")

    return stand_in
