"""What a command line names: ``module:object`` targets, and settings of the form ``key=value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwright.frontend.files.module_source import ModuleSource, RealTables
from shardwright.frontend.files.named_object import load_target
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.json_text import parse_json


def load_model(target: str, args_target: str | None) -> tuple[ModuleSource, Mapping[str, Any]]:
    """The module and its dummy arguments.

    ``target`` names a function that returns ``(module, dummy_args)`` or just the module, a module
    class, or a module. ``args_target`` names the dict of dummy arguments where the first does not
    give it, or a function that returns it.
    """
    found = load_target(target)
    # A module or a class; else a function that makes one, or makes both it and its arguments.
    if isinstance(found, nn.Module | type):
        source, dummy_args = ModuleSource.of(found, None), None
    else:
        with RealTables():
            made = found() if callable(found) else found
        module, dummy_args = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{target} gives no module",
                why=f"it gave {type(made).__name__}",
                hint="return the module, or (module, dummy_args)",
            )
        source = ModuleSource.of(module, None)
    if args_target is not None:
        dummy_args = _made(args_target)
    if not isinstance(dummy_args, Mapping):
        raise ConfigError(
            f"there are no dummy arguments for {target}",
            why="it gives a module only"
            if dummy_args is None
            else f"they are a {type(dummy_args).__name__}, not a dict",
            hint="return (module, dummy_args), or name them with --args module:name",
        )
    return source, dummy_args


def load_args(target: str) -> Mapping[str, Any]:
    """The dict of arguments that ``target`` names, or that the function it names returns."""
    args = _made(target)
    if not isinstance(args, Mapping):
        raise ConfigError(
            f"{target} gives no arguments",
            why=f"they are a {type(args).__name__}, not a dict",
            hint="a dict of the arguments of forward by name, or a function that returns it",
        )
    return args


def _made(target: str) -> Any:
    """What ``target`` names, or the function of that name returns."""
    named = load_target(target)
    return named() if callable(named) else named


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``["seed=3", "pas_config.num_stages=2"]`` as nested dicts. A value is read as JSON; one
    that is not JSON is a string.

    Raises :class:`ConfigError` for what is no setting, and for what begins like an object or a list
    and is none.
    """
    result: dict[str, Any] = {}
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not all(path.split(".")):
            raise ConfigError(
                f"{setting!r} is not of the form key=value",
                hint="for example seed=3 or pas_config.num_stages=2",
            )
        *parents, last = path.split(".")
        node = result
        for parent in parents:
            # ``pas_config.num_stages=2`` and ``pas_config.tp=4`` meet in one dict.
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{path!r} and {parent!r} are both set", hint="set one of them")
        node[last] = _value(path, text)
    return result


def _value(path: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        if text.lstrip()[:1] in ("{", "["):
            raise ConfigError(
                f"the value of {path} is not JSON",
                why=f"{error} of {text}",
                hint="names in double quotes, those of dims too: "
                """--set 'dynamic_dims={"x": {"0": "batch"}}'""",
            ) from error
        # People who write Python write these, and JSON would make them strings.
        return {"True": True, "False": False, "None": None}.get(text, text)
