"""What a policy is: a function that says where everything lives, with the options it takes from
``pas_config``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.built_in_policies import BUILT_IN
from shardwright.runtime.argument_kinds import is_too_long
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.layout import Layout
from shardwright.runtime.original_names import ORIGINAL_OPTION_NAMES, ORIGINAL_OPTIONS_ELSEWHERE

PolicyFunction = Callable[[PlannableGraph, ComputeConfig], Any]
"""Takes the graph, with rules and dims, and the config; returns the graph with its plan applied, or
the plan.
"""

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a policy that takes none."""


def _nothing(config: ComputeConfig, plan: Plan) -> None:
    pass


def _no_files(config: ComputeConfig) -> Sequence[Path]:
    return ()


def _one_is_enough(config: ComputeConfig) -> bool:
    return False


def _as_before(config: ComputeConfig, first: Plan, stored: Mapping[str, Layout]) -> ComputeConfig:
    return config


@dataclass(frozen=True)
class Policy:
    """A policy under the name it is asked for.

    ``options`` is the dataclass of what it reads from ``pas_config``; ``None``: the function reads
    ``pas_config`` itself.
    ``built_in``: it belongs to shardwright, so that its name and the version say what it does. A
    user's own may change between two calls, and is run again where a built-in one's stored plan
    would do. ``files``: those that its options name and that exist; what is in them is part of what
    a compile is recognised by. ``reused``: called with the stored plan where that did in the place
    of ``apply``, for what ``apply`` does besides. ``takes_traces``: whether it needs the model
    traced for several sizes of a microbatch, which :func:`shardwright.search_plan` does.
    ``searches``: whether it weighs what plans cost, so that the sizes of the dummy arguments count.
    ``following``: the config for another program on the tensors of a first one, given the first
    one's plan and how its tensors are stored: all programs of a module have one mesh.
    """

    name: str
    apply: PolicyFunction
    options: type[Any] | None = None
    built_in: bool = False
    files: Callable[[ComputeConfig], Sequence[Path]] = _no_files
    reused: Callable[[ComputeConfig, Plan], None] = _nothing
    takes_traces: Callable[[ComputeConfig], bool] = _one_is_enough
    searches: bool = False
    following: Callable[[ComputeConfig, Plan, Mapping[str, Layout]], ComputeConfig] = _as_before

    def __call__(self, graph: PlannableGraph, config: ComputeConfig) -> Any:
        """What ``apply`` returns: a policy may stand where a function of one may."""
        return self.apply(graph, config)

    def check(self, config: ComputeConfig) -> None:
        """Raise a :class:`ConfigError` if ``pas_config`` is not what the policy takes."""
        if self.options is not None:
            read_options(self.options, config.pas_config, policy=self.name)


def read_options(options: type[Options], pas_config: Mapping[str, Any], *, policy: str) -> Options:
    """``pas_config`` as the options dataclass of a policy, the original's names included.

    Raises :class:`ConfigError` for unknown names, values of another type, an option given under two
    names, and one left out that has no default.
    """
    hints = typing.get_type_hints(options)
    declared = {f.name: f for f in fields(options)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for written, value in pas_config.items():
        # nnScaler's names are taken for ours, where they mean the same.
        name = written if written in declared else ORIGINAL_OPTION_NAMES.get(written, written)
        if name not in declared:
            known = (
                *declared,
                *(old for old, new in ORIGINAL_OPTION_NAMES.items() if new in declared),
            )
            hint = did_you_mean(written, known) if known else "leave pas_config empty"
            if others := _policies_with(written):
                hint = f"it is an option of {', '.join(map(repr, others))}"
            hint = ORIGINAL_OPTIONS_ELSEWHERE.get(written, hint)
            raise ConfigError(f"policy {policy!r} has no option {written!r}", hint=hint)
        if name in given:
            raise ConfigError(
                f"option {name!r} of policy {policy!r} is given twice",
                why=f"{written!r} is another name of it",
                hint=f"keep {name!r}",
            )
        if not _fits(value, hints[name]):
            raise ConfigError(
                f"option {written!r} of policy {policy!r} cannot be {brief(value)}",
                why=f"it takes {_words(hints[name])}",
            )
        given[name] = _frozen(value)
    # What was not given must have a default.
    for name, declaration in declared.items():
        if (
            name not in given
            and declaration.default is MISSING
            and declaration.default_factory is MISSING
        ):
            raise ConfigError(
                f"policy {policy!r} needs option {name!r}", why=f"it takes {_words(hints[name])}"
            )
    return options(**given)


def _policies_with(option: str) -> list[str]:
    """The names of the built-in policies that have an option. Imports them."""
    found = {name: import_module(path).POLICY.options for name, path in BUILT_IN.items()}
    return [
        name
        for name, options in found.items()
        if option in {field.name for field in fields(options)}
    ]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type: scalars, ``Literal``, unions, ``tuple[T, ...]`` and
    ``Mapping[str, T]``.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    # ``int | None``: any of its members.
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(item, arguments[1]) for item in value.values()
        )
    # ``True`` is an ``int`` in Python, and no number here.
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and not is_too_long(value)
    return hint is Any or isinstance(value, hint)


def _frozen(value: Any) -> Any:
    """Lists as the tuples that a frozen dataclass holds."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _words(hint: Any) -> str:
    """The type as a user would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list, each item {_words(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a dict, each value {_words(arguments[1])}"
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "True or False",
        type(None): "None",
    }
    return names.get(hint, str(hint))
