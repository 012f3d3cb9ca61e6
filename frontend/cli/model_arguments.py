"""What a command line says of the model, the policy and the config: shared by the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from rich.console import Console

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.imbalance import Imbalance, check_reachable, imbalance_problem
from shardwright.frontend.cli.command_arguments import AUTO, HARDWARE
from shardwright.frontend.cli.named_plans import NamedPlan
from shardwright.frontend.cli.targets import load_model, read_settings
from shardwright.frontend.files.module_source import ModuleSource
from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.sized_inputs import inputs_of_plan
from shardwright.policies.known_policies import find_policy
from shardwright.policies.parallel_form import without_form
from shardwright.policies.policy import Policy, read_options
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.json_text import parse_json

PIPE_WIDTH = 160
"""Columns of output that goes to no terminal."""

SEE_EACH = "--all prints each"
"""What is said where many ranks that differ share a line."""

_AS_IMBALANCE = 'give 1.5, or a file with {"model.layers.0.mlp": 1.5, ...}'


def make_console() -> Console:
    """The console on which commands print. Layouts are full of brackets, so it knows no markup; nor
    pictures, as the line in ``gencode0.py:100: loss`` would be one.
    """
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


def read_imbalance(text: str | None, num_ranks: int) -> Imbalance | None:
    """The imbalance that ``--imbalance`` says: a number, or what a JSON file holds.

    ``num_ranks``: those that experts may lie on. Raises :class:`ConfigError` for more than one of
    them can get, and for anything else.
    """
    if text is None:
        return None
    where, found = "--imbalance", None
    try:
        found = float(text)
    except ValueError:
        where = f"the imbalance in {text}"
        try:
            found = parse_json(Path(text).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"cannot read the imbalance from {text}", why=str(error), hint=_AS_IMBALANCE
            ) from error
    problem = imbalance_problem(found, where)
    if problem is not None:
        raise ConfigError(problem, hint=_AS_IMBALANCE)
    check_reachable(cast(Imbalance, found), num_ranks, where)
    return cast(Imbalance, found)


@dataclass(frozen=True)
class ModelRequest:
    """What a command line asks for. ``named``: the plan in a file that it names; the dummy
    arguments have as many samples as the microbatches of that plan.
    """

    source: ModuleSource
    dummy_args: Mapping[str, Any]
    policy: Policy
    config: ComputeConfig
    named: NamedPlan | None = None

    def sources(self, machine: str | None = None, num_microbatches: int | None = None) -> list[str]:
        """What of the request a file says, and what not, a line each: see
        :meth:`NamedPlan.sources`.
        """
        if self.named is None:
            return []
        return self.named.sources(self.config, machine, num_microbatches)

    def unsaid(self, config: ComputeConfig, cost: PlanCost) -> str | None:
        """What a file leaves open that the cost depends on: see :meth:`NamedPlan.unsaid`.
        ``config``: with one stage of ZeRO.
        """
        return None if self.named is None else self.named.unsaid(config, cost)


def read_model_request(options: argparse.Namespace) -> ModelRequest:
    """The model, the policy and the config of a command line, checked."""
    source, dummy_args = load_model(options.target, options.args)
    policy, config, named = read_plan_request(options)
    if named is not None:
        dummy_args = inputs_of_plan(dummy_args, named.plan)
    return ModelRequest(source, dummy_args, policy, config, named)


def on_machine(options: argparse.Namespace, request: ModelRequest) -> tuple[str, ComputeConfig]:
    """The machine that a command line names, else that of the plan it names, and the config with it
    where the policy plans for one.

    Raises :class:`ConfigError` if ``--hardware`` and the policy's option of that name say different
    things, or no preset has the name that the plan says.
    """
    policy, config = request.policy, request.config
    takes = policy.options is not None and any(
        field.name == "hardware" for field in fields(policy.options)
    )
    if takes:
        config = with_options(config, {"--hardware": ("hardware", options.hardware)})
    given = config.pas_config.get("hardware") if takes else options.hardware
    if given is None:
        given = HARDWARE if request.named is None else request.named.machine()
    name = str(given)
    if not takes:
        return name, config
    return name, replace(config, pas_config={**config.pas_config, "hardware": name})


def memory_limit_bytes(policy: Policy, config: ComputeConfig, hardware: Hardware) -> float:
    """What a plan may take of a device: as the policy's option ``memory_limit_gb`` says, else all
    that it has.
    """
    limit_gb = None
    if policy.options is not None and any(
        field.name == "memory_limit_gb" for field in fields(policy.options)
    ):
        limit_gb = read_options(
            policy.options, config.pas_config, policy=policy.name
        ).memory_limit_gb
    return hardware.device.memory_bytes if limit_gb is None else limit_gb * 1e9


def with_options(config: ComputeConfig, given: Mapping[str, tuple[str, object]]) -> ComputeConfig:
    """The config with options of the policy that have arguments of their own, by argument; those
    that are None are left out.

    Raises :class:`ConfigError` for one that ``--set`` gives another value.
    """
    named = {
        argument: (name, value) for argument, (name, value) in given.items() if value is not None
    }
    for argument, (name, value) in named.items():
        if config.pas_config.get(name, value) != value:
            raise ConfigError(
                f"{argument} and --set pas_config.{name} say different things",
                why=f"{value!r} and {config.pas_config[name]!r}",
                hint=f"leave out one of them; {argument} is enough",
            )
    return replace(config, pas_config={**config.pas_config, **dict(named.values())})


def read_plan_request(
    options: argparse.Namespace,
) -> tuple[Policy, ComputeConfig, NamedPlan | None]:
    """The policy and the config of a command line, checked, and the plan in a file that it
    names.
    """
    ranks = {"plan_ngpus": options.plan_ngpus, "runtime_ngpus": options.runtime_ngpus}
    given = {name: number for name, number in ranks.items() if number is not None}
    fields = {**given, **_config_fields(options.settings)}
    parallel = getattr(options, "parallel", None)
    if parallel is not None:
        named, config = without_form(read_parallel(parallel), fields)
        return _checked(named, config), config, None
    plan = NamedPlan.of(options, fields)
    if plan is not None:
        config = ComputeConfig.of(plan.filled(fields))
        return _checked(options.policy, config), config, plan
    if options.plan_ngpus == AUTO:
        fields["plan_ngpus"] = _all_ranks(options.runtime_ngpus)
    if "plan_ngpus" not in fields:
        raise _no_ranks(options)
    # One unit, unless something else is said.
    fields.setdefault("runtime_ngpus", fields["plan_ngpus"])
    config = ComputeConfig.of(fields)
    return _checked(options.policy, config), config, None


def _checked(named: Any, config: ComputeConfig) -> Policy:
    """The policy of a name or a target, with options that it takes."""
    policy = find_policy(load_target(named) if isinstance(named, str) and ":" in named else named)
    policy.check(config)
    return policy


def _no_ranks(options: argparse.Namespace) -> ConfigError:
    searches = hasattr(options, "plan")
    return ConfigError(
        "a search needs --plan-ngpus"
        if searches
        else f"--policy {options.policy} needs --plan-ngpus",
        why="it is the number of ranks that share one copy of the model",
        hint="--plan-ngpus 4, or --plan FILE for a plan that is there"
        if searches
        else "--plan-ngpus 4; with --parallel it follows from the sizes",
    )


def _all_ranks(runtime_ngpus: int | None) -> int:
    if runtime_ngpus is None:
        raise ConfigError(
            "--plan-ngpus auto needs --runtime-ngpus",
            why="it is the number of ranks that are dealt into units",
            hint="--plan-ngpus auto --runtime-ngpus 8",
        )
    return runtime_ngpus


def read_parallel(text: str) -> Mapping[str, Any]:
    """The form ``pipeline, tensor, data`` of a text or a file in JSON or YAML, of which JSON is a
    part.

    Raises :class:`ConfigError` for what is no mapping.
    """
    path = Path(text)
    is_file = "{" not in text and path.suffix in (".json", ".yaml", ".yml")
    if is_file and not path.is_file():
        raise ConfigError(f"there is no file {path}", hint="--parallel takes a file, or its text")
    try:
        form = yaml.safe_load(path.read_text(encoding="utf-8") if is_file else text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--parallel is no YAML", why=str(error)) from error
    if isinstance(form, dict) and set(form) == {"parallel"}:
        form = form["parallel"]  # a file may name it, as configurations of Colossal-AI do
    if not isinstance(form, dict):
        raise ConfigError(
            "--parallel is a mapping",
            why=f"{brief(text)} is {brief(form)}",
            hint="--parallel '{pipeline: 2, tensor: {size: 4, mode: 2d}}'",
        )
    return form


def _config_fields(settings: Sequence[str]) -> dict[str, object]:
    fields = read_settings(settings)
    for name in ("plan_ngpus", "runtime_ngpus"):
        if name in fields:
            raise ConfigError(
                f"{name} is not for --set", hint=f"--{name.replace('_', '-')} {fields[name]}"
            )
    dims = fields.get("dynamic_dims")
    if isinstance(dims, dict):
        fields["dynamic_dims"] = {path: _numbered(named) for path, named in dims.items()}
    return fields


def _numbered(dims: object) -> object:
    """The dims of JSON with numbers as keys: ``{"0": "batch"}`` becomes ``{0: "batch"}``."""
    if not isinstance(dims, dict):
        return dims
    return {int(dim) if dim.isdecimal() else dim: name for dim, name in dims.items()}


def read_dtype(name: str | None) -> torch.dtype | None:
    """The floating dtype of that name, ``None`` for none. Raises :class:`ConfigError` for an
    unknown one, and for one of a byte or less, in which no model is stored while it trains.
    """
    if name is None:
        return None
    if name in _floating_dtypes(small=True):
        raise ConfigError(
            f"--dtype {name} would store the model in {name}",
            why="what trains in float8 or less is stored in bfloat16 or more, and only products "
            "of linear layers are computed in it",
            hint="--dtype bfloat16 --hardware h100+float8_e4m3fn prices such products "
            "(docs/hardware.md, Products in float8)",
        )
    known = _floating_dtypes()
    if name not in known:
        raise ConfigError(
            f"there is no floating dtype {name!r}", hint=did_you_mean(name, tuple(known))
        )
    return known[name]


def floating_dtypes() -> tuple[str, ...]:
    """The names that :func:`read_dtype` knows."""
    return tuple(_floating_dtypes())


def _floating_dtypes(*, small: bool = False) -> dict[str, torch.dtype]:
    """The floating dtypes by name: those of two bytes or more, or the ``small`` ones."""
    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {
        str(dtype).removeprefix("torch."): dtype
        for dtype in dtypes
        if dtype.is_floating_point and (dtype.itemsize < 2) == small
    }
