"""Reading JSON objects that people write by hand: each value is checked as it is taken, and errors
name file and key.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from shardwright.runtime.errors import ConfigError, brief, did_you_mean


class Fields:
    """One JSON object. ``where`` names the file, and ``path`` the object in it. :meth:`finish`
    knows every key that was read.

    All readers raise :class:`ConfigError` for a key that is missing or a value that is not of the
    kind asked for.
    """

    def __init__(self, data: object, where: str, path: str = "") -> None:
        self.where, self.path = where, path
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            name = path or "the file"
            raise ConfigError(
                f"{name} is a JSON object with names and values",
                where=where,
                why=f"it is {_describe(data)}",
            )
        self._data: dict[str, Any] = data
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._data

    def names(self) -> tuple[str, ...]:
        return tuple(self._data)

    def is_mapping(self, key: str) -> bool:
        return isinstance(self.value(key), dict)

    def value(self, key: str) -> Any:
        """The value of ``key``, whatever it is."""
        self._read.add(key)
        if key not in self._data:
            unread = [name for name in self._data if name not in self._read]
            why = f"it has {', '.join(self._data)}" if self._data else "it is empty"
            raise ConfigError(
                f"{self._name(key)} is missing", where=self.where, why=why, hint=_meant(key, unread)
            )
        return self._data[key]

    def error(self, key: str, rule: str) -> ConfigError:
        """The error for a value that breaks ``rule``: ``"is a positive number"``."""
        return ConfigError(
            f"{self._name(key)} {rule}",
            where=self.where,
            why=f"it is {_describe(self._data.get(key))}",
        )

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "is a text")
        return value

    def count(self, key: str) -> int:
        """A whole number of at least 1, also when it is written ``80e9``."""
        number = self.number(key)
        if number != int(number):
            raise self.error(key, "is a whole number")
        return int(number)

    def number(self, key: str, *, zero: bool = False) -> float:
        """A positive number; ``zero`` allows 0."""
        value = self.value(key)
        if not _is_number(value, zero):
            raise self.error(key, "is a number of at least 0" if zero else "is a positive number")
        return value if isinstance(value, int) else float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 1."""
        value = self.value(key)
        if (
            not isinstance(value, list)
            or not all(_is_number(n, zero=False) and n == int(n) for n in value)
            or not value
        ):
            raise self.error(key, "is a list of whole numbers of at least 1")
        return tuple(int(number) for number in value)

    def number_list(self, key: str, *, zero: bool = False) -> tuple[float, ...]:
        """A list of positive numbers; ``zero`` allows 0."""
        value = self.value(key)
        if not isinstance(value, list) or not all(_is_number(number, zero) for number in value):
            raise self.error(
                key,
                "is a list of numbers of at least 0" if zero else "is a list of positive numbers",
            )
        return tuple(float(number) for number in value)

    def mapping(self, key: str, *, optional: bool = False) -> Mapping[str, Any]:
        """An object with any values; the empty one if it may be left out."""
        if optional and not self.has(key):
            return {}
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, "is an object with names and values")
        return value

    def numbers(self, key: str, *, optional: bool = False) -> Mapping[str, float]:
        """An object of positive numbers; the optional one may have zeros."""
        entries = Fields(self.mapping(key, optional=optional), self.where, self._name(key))
        return {name: entries.number(name, zero=optional) for name in entries.names()}

    def texts(self, key: str, *, optional: bool = False) -> Mapping[str, str]:
        """An object of texts."""
        entries = Fields(self.mapping(key, optional=optional), self.where, self._name(key))
        return {name: entries.text(name) for name in entries.names()}

    def child(self, key: str) -> Fields:
        """The object under ``key``."""
        return Fields(self.value(key), self.where, self._name(key))

    def children(self, key: str) -> tuple[Fields, ...]:
        """The objects of the list under ``key``."""
        value = self.value(key)
        if not isinstance(value, list):
            raise self.error(key, "is a list of objects")
        return tuple(
            Fields(entry, self.where, f"{self._name(key)}[{i}]") for i, entry in enumerate(value)
        )

    def finish(self, *known: str) -> None:
        """Refuse keys that nobody read and that are not ``known``."""
        for key in self._data:
            if key not in self._read and key not in known:
                hint = did_you_mean(key, tuple(sorted(self._read | set(known))))
                raise ConfigError(
                    f"{self._name(key)} is not a key of a hardware file",
                    where=self.where,
                    hint=hint,
                )

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _is_number(value: object, zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if abs(value) > sys.float_info.max or not math.isfinite(value):
        return False
    return value > 0 or (zero and value == 0)


def _meant(key: str, unread: list[str]) -> str | None:
    """A hint if an unread key looks like a misspelling of ``key``."""
    hint = did_you_mean(key, tuple(unread)) if unread else None
    return (
        f"rename {hint.removeprefix('did you mean ').removesuffix('?')}"
        if hint and hint.startswith("did")
        else None
    )


def _describe(value: object) -> str:
    text = "missing" if value is None else brief(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
