"""The policies by name: the built-in ones, and those a user registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardwright.policies.built_in_policies import BUILT_IN
from shardwright.policies.policy import Policy, PolicyFunction
from shardwright.runtime.arguments import checked, checked_late
from shardwright.runtime.errors import PlanError, brief, did_you_mean

_registered: dict[str, Policy] = {}


@checked
def register_policy(
    name: str, *, options: type[Any] | None = None
) -> Callable[[PolicyFunction], PolicyFunction]:
    """Give a policy function a name that ``parallelize`` and the command line accept::

        @register_policy("mine", options=MyOptions)
        def mine(graph: IRGraph, config: ComputeConfig) -> IRGraph: ...

    ``options`` is a dataclass of what it takes from ``pas_config``, checked before the policy runs.
    Registering a name again replaces it; a built-in name is a :class:`PlanError`.
    """
    if name in BUILT_IN:
        raise PlanError(f"{name!r} is the name of a built-in policy", hint="choose another name")

    def register(function: PolicyFunction) -> PolicyFunction:
        _check_callable(function)
        _registered[name] = Policy(name, function, options)
        return function

    return register


def policy_names() -> tuple[str, ...]:
    """Every name that :func:`find_policy` accepts."""
    return (*BUILT_IN, *_registered)


@checked_late
def find_policy(policy: str | PolicyFunction) -> Policy:
    """The policy of a name, or one made of a function. Raises :class:`PlanError`."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        _check_callable(policy)
        return Policy(_import_path(policy), policy)
    if policy in _registered:
        return _registered[policy]
    if policy in BUILT_IN:
        # Imported when it is asked for: ``dp`` needs no solver.
        built_in: Policy = import_module(BUILT_IN[policy]).POLICY
        return built_in
    raise PlanError(f"there is no policy {policy!r}", hint=did_you_mean(policy, policy_names()))


def _import_path(function: PolicyFunction) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _check_callable(policy: Any) -> None:
    if not callable(policy):
        raise PlanError(
            "pas_policy is the name of a policy, or a function of the graph and the config",
            why=f"it is {brief(policy)}",
            hint=f"one of {', '.join(map(repr, sorted(policy_names())))}",
        )
    try:
        inspect.signature(policy).bind(None, None)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"policy {_import_path(policy)} does not take a graph and a config",
            why=f"its parameters are {inspect.signature(policy)}"
            if isinstance(error, TypeError)
            else str(error),
            hint="def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph",
        ) from error
