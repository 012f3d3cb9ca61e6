"""What a plan file may hold: refuse one that was edited into something else, naming the place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.plan.certified import SETTINGS
from shardwright.compiler.plan.imbalance import check_reachable, imbalance_problem
from shardwright.compiler.plan.plan import PLAN_FORMAT
from shardwright.runtime.errors import ConfigError, PlanError, ShardwrightError, did_you_mean
from shardwright.runtime.layout import Layout

Check = Callable[[Any, str], str | None]
"""Takes a JSON value and the place where it stands; what is wrong there, if anything."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of an object in the file. ``is_needed``: it has no default."""

    check: Check
    is_needed: bool = False


def check_plan_file(data: Any) -> None:
    """Raise :class:`PlanError` if the content of a plan file is no plan: an unknown or a missing
    key, a value of another type, a layout that does not parse, another format, an imbalance that
    its ranks cannot have.
    """
    problem = _object(KEYS)(data, "")
    if problem is not None:
        raise PlanError(problem)
    if "imbalance" in data:
        try:
            check_reachable(data["imbalance"], math.prod(data["mesh"].values()), "imbalance")
        except ConfigError as error:
            raise PlanError(f"{error.what}: {error.why}") from error


def _is(kind: type | tuple[type, ...], words: str) -> Check:
    def check(value: Any, where: str) -> str | None:
        # In Python True is an int, and in JSON it is no number.
        fits = isinstance(value, kind) and not (isinstance(value, bool))
        return None if fits else f"{where} is {value!r}, not {words}"

    return check


def _count(least: int) -> Check:
    def check(value: Any, where: str) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if fits else f"{where} is {value!r}, not a whole number from {least}"

    return check


def _each(item: Check) -> Check:
    """Every value of an object."""

    def check(value: Any, where: str) -> str | None:
        if not isinstance(value, Mapping):
            return f"{where} is {value!r}, not an object"
        # The first problem, if there is one.
        return next(
            (
                p
                for key, inner in value.items()
                if (p := item(inner, f"{where}[{key!r}]")) is not None
            ),
            None,
        )

    return check


def _list(item: Check) -> Check:
    def check(value: Any, where: str) -> str | None:
        if not isinstance(value, list):
            return f"{where} is {value!r}, not a list"
        return next(
            (p for i, inner in enumerate(value) if (p := item(inner, f"{where}[{i}]")) is not None),
            None,
        )

    return check


def _object(keys: Mapping[str, Key]) -> Check:
    """An object with these keys and no other."""

    def check(value: Any, where: str) -> str | None:
        name = where or "the file"
        if not isinstance(value, Mapping):
            return f"{name} holds {type(value).__name__}, not an object"
        # Unknown keys before missing ones: a misspelled key is both.
        for key in value:
            if key not in keys:
                return f"{name} has a key {key!r}: {did_you_mean(key, tuple(keys))}"
        for key, known in keys.items():
            if key in value:
                problem = known.check(value[key], f"{where}.{key}".lstrip("."))
                if problem is not None:
                    return problem
            elif known.is_needed:
                return f"key {key!r} is missing" + (f" in {where}" if where else "")
        return None

    return check


def _layout(value: Any, where: str) -> str | None:
    if not isinstance(value, str):
        return f"{where} is {value!r}, not a layout"
    try:
        Layout.parse(value)
    except ShardwrightError as error:
        return f"{where}: {error.what}"
    return None


def _output(value: Any, where: str) -> str | None:
    """A layout, a wish in a word, or null: not needed."""
    return (
        None
        if value is None or (isinstance(value, str) and not value.startswith("["))
        else _layout(value, where)
    )


def _format(value: Any, where: str) -> str | None:
    return (
        None
        if value == PLAN_FORMAT
        else f"{where} is {value!r}, and this version reads {PLAN_FORMAT}"
    )


def _checked_later(value: Any, where: str) -> None:
    """Anything: a config is made of it, which checks it."""


_TEXT = _is(str, "a text")
_NUMBER = _is((int, float), "a number")
_SIZES = _each(_count(1))
_BY_AXIS = _each(_each(_TEXT))

_STAGE = {
    "first_op": Key(_TEXT, True),
    "mesh": Key(_SIZES, True),
    "turns": Key(_SIZES),
    "ranks": Key(_list(_count(0)), True),
}
_BATCH = {
    "samples": Key(_count(1), True),
    "num_microbatches": Key(_count(1), True),
    "dims": Key(_each(_count(0))),
}
_LOOP = {
    "count": Key(_count(2), True),
    "strategies": Key(_each(_TEXT), True),
    "blocks": Key(_each(_count(1))),
}
_NOTE = {name: Key(_TEXT, True) for name in ("op", "module_path", "source", "axis", "reason")}
_CERTIFICATE = {
    **{name: Key(_NUMBER, True) for name in ("cost_s", "bound_s")},
    **{name: Key(_TEXT, True) for name in ("space", "hardware")},
    **{name: Key(_list(_TEXT), True) for name in ("proof", "found")},
    **{name: Key(_TEXT) for name in ("digest", "covers", "cut_short")},
    "apart_s": Key(_NUMBER),
    "runtime_ngpus": Key(_count(1)),
    "num_microbatches": Key(_count(1)),
    "settings": Key(_object(dict.fromkeys(SETTINGS, Key(_checked_later)))),
}

KEYS: Mapping[str, Key] = {
    "format": Key(_format),
    "mesh": Key(_SIZES, True),
    "turns": Key(_SIZES),
    "policy": Key(_TEXT, True),
    "strategies": Key(_BY_AXIS, True),
    "dims": Key(_BY_AXIS),
    "stored": Key(_each(_layout), True),
    "inputs": Key(_each(_layout), True),
    "outputs": Key(_each(_output), True),
    "notes": Key(_list(_object(_NOTE)), True),
    "recompute": Key(_list(_TEXT)),
    "zero": Key(_count(0)),
    "zero_stage": Key(_count(0)),
    "batch": Key(_object(_BATCH)),
    "imbalance": Key(imbalance_problem),
    "gathers": Key(_each(_TEXT)),
    "loops": Key(_each(_object(_LOOP))),
    "stages": Key(_list(_object(_STAGE))),
    "schedule": Key(_TEXT),
    "num_microbatches": Key(_count(1)),
    "actions": Key(_list(_TEXT)),
    "certificate": Key(_object(_CERTIFICATE)),
}
"""The keys of a plan file: what :meth:`Plan.to_json` writes."""
