"""Reading ``run.yaml`` and flags as :class:`RunSettings`, with where each value came from.

A file is a tree, and so are the settings; flags name leaves of it. Both are made into one table
from path to value and origin first, in which a later one replaces an earlier one:

    optimizer:                        optimizer.name        AdamW   run.yaml
      name: AdamW              ->     optimizer.options.lr  0.001   run.yaml
      options: {lr: 1e-3}             steps                 10      --steps
    --steps 10

Then the dataclasses are filled from the table, field by field. A path that fills no field is
refused with the nearest one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml

from shardwright.frontend.training.nnscaler_names import ORIGINAL_VALUES, renamed
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.runtime.argument_kinds import kind_of
from shardwright.runtime.arguments import shown
from shardwright.runtime.errors import ConfigError, brief, did_you_mean


@dataclass(frozen=True)
class Given:
    """A value, where it was given, and the key by which, in parts."""

    value: Any
    origin: str
    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        return ".".join(self.parts)

    @property
    def is_renamed(self) -> bool:
        return renamed(self.parts) != self.parts


@dataclass(frozen=True)
class ReadRun:
    """The settings of a run, and by path what was given of them."""

    settings: RunSettings
    given: Mapping[str, Given]

    def __str__(self) -> str:
        """A line for each setting: ``path: value``, and where the value came from."""
        rows = [(f"{path}: {_in_yaml(value)}", path) for path, value in _leaves(self.settings)]
        width = min(60, max(len(text) for text, _ in rows))
        return "\n".join(f"{text:<{width}}  # {self._origin(path)}" for text, path in rows)

    def _origin(self, path: str) -> str:
        found = [
            f"{given.origin}, as {given.key}" if given.is_renamed else given.origin
            for name, given in self.given.items()
            if name == path or name.startswith(f"{path}.")
        ]
        return "; ".join(dict.fromkeys(found)) or "default"


def read_run(file: Path | None, flags: Sequence[str] = ()) -> ReadRun:
    """The settings of a YAML file and of flags (``--steps 10``, ``--parallel.policy=tp``), of which
    the latter count.

    Raises :class:`ConfigError` for a file that cannot be read, a key that there is not, and a value
    that does not fit.
    """
    given: dict[str, Given] = {}
    if file is not None:
        for parts, value in _flat(_read_yaml(file)):
            _put(given, Given(value, str(file), parts))
    known = tuple(path for path, _ in types_of_settings())
    for key, value in _read_flags(flags):
        parts = tuple(key.split("."))
        is_section = any(path.startswith(f"{key}.") for path in known)
        # A mapping for a section is a part of the file; for a setting it is the value.
        whole = not (is_section and isinstance(value, Mapping))
        for below, leaf in [(parts, value)] if whole else _flat(value, parts):
            _put(given, Given(leaf, f"--{key}", below))
    tree: dict[str, Any] = {}
    for path, one in given.items():
        _check_known(path, one, known)
        _insert(tree, renamed(one.parts), one.value)
    return ReadRun(_made(RunSettings, tree, "", given), given)


def settings_json(settings: RunSettings) -> dict[str, Any]:
    """All settings as JSON values."""
    return dataclasses.asdict(settings)


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read", why=str(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML", why=str(error)) from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} is no mapping of settings", why=f"it is {brief(content)}")
    return content


def _flat(
    tree: Mapping[Any, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree by path. A mapping that is empty, or has keys that are no names (dims),
    is a leaf.
    """
    for name, value in tree.items():
        if not isinstance(name, str):
            raise ConfigError(f"the keys of a run are names, not {brief(name)}")
        is_inner = isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value)
        if is_inner:
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value


def _read_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        name, separator, text = flag.partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise ConfigError(
                f"{flag!r} is no setting",
                hint="--steps 10, or --parallel.policy=tp",
            )
        if not separator:
            if not rest:
                raise ConfigError(f"{name} is given no value", hint=f"{name} VALUE")
            text = rest.pop(0)
        try:
            # As in the file: ``3`` is a number, ``true`` a truth value, ``[a, b]`` a list.
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of {name} is no YAML", why=str(error)) from error
        yield name[2:].replace("-", "_"), value


def _put(given: dict[str, Given], one: Given) -> None:
    """Add a value, in the place of what was given for it or for what is below it."""
    path = ".".join(renamed(one.parts))
    before = given.get(path)
    if before is not None and before.origin == one.origin:
        raise ConfigError(
            f"{before.key} and {one.key} stand for the same setting",
            where=one.origin,
            hint="give one of them",
        )
    # From a list, as the dict changes meanwhile.
    for name in [name for name in given if name == path or name.startswith(f"{path}.")]:
        del given[name]
    given[path] = one


def types_of_settings(cls: type[Any] = RunSettings, path: str = "") -> Iterator[tuple[str, Any]]:
    """All settings by path, with their annotations; sections are gone into."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{path}.{field.name}" if path else field.name
        section = _section_of(hints[field.name])
        if section is None:
            yield name, hints[field.name]
        else:
            yield from types_of_settings(section, name)


def _section_of(annotation: Any) -> type[Any] | None:
    """The dataclass that an annotation stands for, if it does."""
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((one for one in options if dataclasses.is_dataclass(one)), None)  # type: ignore[return-value]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is not None and issubclass(
        get_origin(annotation) if isinstance(get_origin(annotation), type) else object,
        typing.cast(Any, Mapping),
    )


def _check_known(path: str, one: Given, known: tuple[str, ...]) -> None:
    if path in known:
        return
    # Below a setting that is a mapping there may be anything.
    kinds = dict(types_of_settings())
    parts = path.split(".")
    parents = (".".join(parts[:length]) for length in range(1, len(parts)))
    if any(parent in kinds and _is_mapping(kinds[parent]) for parent in parents):
        return
    # A section that is given as a value: "parallel: tp".
    below = [name for name in known if name.startswith(f"{path}.")]
    if below:
        if one.value is None:
            return
        raise ConfigError(
            f"{one.key} has settings of its own",
            where=one.origin,
            why=f"it was given {brief(one.value)}",
            hint=f"{below[0]}, {below[1]}, ..." if len(below) > 1 else below[0],
        )
    raise ConfigError(
        f"there is no setting {one.key!r}", where=one.origin, hint=_nearest(one.key, known)
    )


def _nearest(key: str, known: tuple[str, ...]) -> str | None:
    """The setting that was meant: by its last name in the same section first."""
    section = key.rpartition(".")[0]
    beside = tuple(name for name in known if name.rpartition(".")[0] == section)
    return did_you_mean(key, beside or tuple(dict.fromkeys(n.partition(".")[0] for n in known)))


def _insert(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = tree.get(part)
        below: dict[str, Any] = dict(inner) if isinstance(inner, Mapping) else {}
        tree[part] = below
        tree = below
    tree[parts[-1]] = value


def _made(cls: type[Any], tree: Mapping[str, Any], path: str, given: Mapping[str, Given]) -> Any:
    hints, values = typing.get_type_hints(cls), {}
    missing = []
    for field in dataclasses.fields(cls):
        name = f"{path}.{field.name}" if path else field.name
        section = _section_of(hints[field.name])
        if section is not None:
            inner = tree.get(field.name)
            # A section that may be left out is there once something of it is given.
            if inner is not None or field.default is not None:
                values[field.name] = _made(section, inner or {}, name, given)
        elif field.name in tree:
            values[field.name] = _value(name, hints[field.name], tree[field.name], given)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given",
            hint=f"write it into run.yaml, or --{missing[0]} VALUE",
        )
    return cls(**values)


def _value(path: str, annotation: Any, value: Any, given: Mapping[str, Given]) -> Any:
    """A value of the type that a field has."""
    if isinstance(value, str):
        value = ORIGINAL_VALUES.get(path, {}).get(value, value)
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    # YAML has no tuples, and reads "1e-3" as text: only 1.0e-3 is a number to it.
    if any(get_origin(one) is tuple for one in options) and isinstance(value, list):
        value = tuple(value)
    if float in options and isinstance(value, str):
        value = _as_number(value)
    if any(_is_mapping(one) for one in options):
        value = _numbers_in(value)
    kind = kind_of(annotation)
    if kind is None or kind.accepts(value):
        return value
    origin = next(
        (one.origin for name, one in given.items() if name == path or name.startswith(f"{path}.")),
        None,
    )
    # YAML has lists for what Python has as tuples.
    words = kind.words.replace("a tuple", "a list", 1)
    found = brief(list(value)) if isinstance(value, tuple) else shown(value)
    # One element alone, where a list of it would do.
    hint = f"as a list: {_in_yaml([value])}" if kind.accepts((value,)) else None
    raise ConfigError(f"{path} is {words}", where=origin, why=f"it is {found}", hint=hint)


def _as_number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _numbers_in(value: Any) -> Any:
    """A value of a free mapping, with ``1e-3`` read as the number that is meant."""
    if isinstance(value, Mapping):
        return {name: _numbers_in(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers_in(item) for item in value]
    if isinstance(value, str) and value[:1] in "+-.0123456789" and "e" in value.lower():
        return _as_number(value)
    return value


def _leaves(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(settings):
        name, value = f"{path}.{field.name}" if path else field.name, getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, name)
        else:
            yield name, value


def _in_yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).strip()
    return text.removesuffix("...").strip()
