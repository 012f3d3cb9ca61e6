"""A policy written as ``dict(pipeline=..., tensor=...)``: the stages, and how each is split.

    dict(pipeline=2, tensor=dict(size=4, mode="2d"))      # on 16 ranks: 2 units of 2 x 4

It is Colossal-AI's form, for the policies ``tensor``, ``cp`` and ``hybrid``. Both parts may be left
out, and what remains of the ranks is data parallel: units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.policies.policy import PolicyFunction
from shardwright.policies.tensor_modes import AXES, fitting_sizes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ArgumentError, ConfigError, brief, did_you_mean

SEQUENCE = "sequence"
"""The mode in which the ranks share sequences, not layers: policy ``cp``, ``hybrid`` in stages."""

FORMS = (
    "tensor=dict(size=4, mode='1d'), dict(size=4, mode='2d'), "
    "dict(size=8, mode='2.5d', depth=2) or dict(size=8, mode='3d')"
)

_OWN_OPTIONS = ("mode", "shape", "depth", "num_stages", "cp", "tp", "dp")


@dataclass(frozen=True)
class ParallelForm:
    """The form as it was read. ``data``: the number of units, where it was given."""

    pipeline: int = 1
    size: int = 1
    mode: str = "1d"
    depth: int | None = None
    data: int | None = None

    @property
    def num_ranks(self) -> int:
        """The ranks that share one copy of the model."""
        return self.pipeline * self.size

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> ParallelForm:
        """Read the form.

        Raises :class:`ArgumentError` (a TypeError) for values of another type, and
        :class:`ConfigError` (a ValueError) for unknown keys, a tensor size without a mode, an
        unknown mode, and sizes that are not the mode's.
        """
        known = ("pipeline", "tensor", "data")
        for key in form:
            if key not in known:
                raise ConfigError(
                    f"parallel has no part {brief(key)}", hint=did_you_mean(key, known)
                )
        size, mode, depth = _tensor(form.get("tensor"))
        data = None if form.get("data") is None else _size("data", form["data"])
        return cls(_size("pipeline", form.get("pipeline")), size, mode, depth, data)

    @property
    def policy(self) -> str:
        """The policy that it stands for."""
        if self.mode != SEQUENCE:
            return "tensor"
        return "hybrid" if self.pipeline > 1 else "cp"

    def options(self) -> dict[str, Any]:
        """The options of that policy."""
        stages = {"num_stages": self.pipeline} if self.pipeline > 1 else {}
        if self.mode == SEQUENCE:
            return {"cp": self.size, **stages, **({"tp": 1} if stages else {})}
        depth = {} if self.depth is None else {"depth": self.depth}
        return {"mode": self.mode, **depth, **stages}


def without_form(
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    num_ranks: int | None = None,
) -> tuple[str | PolicyFunction, ComputeConfig]:
    """The policy and the config that a call asks for, where the policy may be the form.

    With the form ``plan_ngpus`` may be left out of a dict ``compute_config``, and ``runtime_ngpus``
    too: then it is ``num_ranks``, the ranks of the job, or one unit. What ``pas_config`` has
    besides (``num_microbatches``, ``recompute``, ...) goes along.

    Raises as :meth:`ParallelForm.of` does, and :class:`ConfigError` for ranks that do not divide
    into units, another number of units than ``data``, and a config that says something else.
    """
    if not isinstance(pas_policy, Mapping):
        return pas_policy, ComputeConfig.of(compute_config)
    form = ParallelForm.of(pas_policy)
    given = (
        compute_config.to_json() if isinstance(compute_config, ComputeConfig) else compute_config
    )
    if not isinstance(given, Mapping):
        return form.policy, ComputeConfig.of(given)  # refuses it, in words
    plan = given.get("plan_ngpus", form.num_ranks)
    if plan != form.num_ranks:
        raise ConfigError(
            f"plan_ngpus={brief(plan)} contradicts parallel",
            why=f"pipeline {form.pipeline} x tensor {form.size} is {form.num_ranks} ranks",
            hint="leave plan_ngpus out of the dict of ComputeConfig's fields",
        )
    runtime = given.get("runtime_ngpus", num_ranks or form.num_ranks)
    if type(runtime) is int and runtime % form.num_ranks:
        raise ConfigError(
            f"{runtime} ranks are not data x pipeline x tensor",
            why=f"pipeline {form.pipeline} x tensor {form.size} is {form.num_ranks}, and data is "
            "what remains",
            hint=f"a multiple of {form.num_ranks} ranks, or other sizes",
        )
    if form.data is not None and type(runtime) is int and runtime != form.data * form.num_ranks:
        raise ConfigError(
            f"data={form.data} is not what remains",
            why=f"{runtime} ranks in units of pipeline {form.pipeline} x tensor {form.size} are "
            f"{runtime // form.num_ranks} units",
            hint="leave data out: it is inferred",
        )
    options = dict(given.get("pas_config") or {})
    for name in _OWN_OPTIONS:
        if name in options:
            raise ConfigError(
                f"pas_config says {name!r}, and so does parallel",
                hint=f"leave {name!r} out of pas_config, or take policy {form.policy!r} with it",
            )
    own = {"plan_ngpus": plan, "runtime_ngpus": runtime, "pas_config": options | form.options()}
    fields = {**given, **own}
    is_config = isinstance(compute_config, ComputeConfig)
    return form.policy, ComputeConfig.from_json(fields) if is_config else ComputeConfig.of(fields)


def _size(name: str, value: Any) -> int:
    """The size of ``pipeline`` or ``data``: a number, or ``dict(size=...)``."""
    if isinstance(value, Mapping):
        for key in value:
            if key != "size":
                raise ConfigError(
                    f"{name} has no {brief(key)}", hint=f"{name}=2 or {name}=dict(size=2)"
                )
        value = value.get("size", 1)
    if value is None:
        return 1
    return _count(name, value, f"{name}=2 or {name}=dict(size=2)")


def _tensor(value: Any) -> tuple[int, str, int | None]:
    """Size, mode and depth."""
    if value is None:
        return 1, "1d", None
    if type(value) is int:
        raise ConfigError(f"tensor={value} does not say its mode", hint=f"one of the forms {FORMS}")
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"tensor is a dict, not {brief(value)}", hint=f"one of the forms {FORMS}"
        )
    known = ("size", "mode", "depth")
    for key in value:
        if key not in known:
            raise ConfigError(f"tensor has no {brief(key)}", hint=did_you_mean(key, known))
    size = _count("the size of tensor", value.get("size", 1), FORMS)
    mode, depth = value.get("mode"), value.get("depth")
    if mode is None:
        if size == 1 and depth is None:
            return 1, "1d", None
        raise ConfigError(
            f"tensor=dict(size={size}) does not say its mode", hint=f"one of the forms {FORMS}"
        )
    if mode not in (*AXES, SEQUENCE):
        raise ConfigError(
            f"there is no tensor mode {brief(mode)}",
            hint=f"one of {', '.join(map(repr, (*AXES, SEQUENCE)))}",
        )
    if depth is not None:
        if mode != "2.5d":
            raise ConfigError(
                f"tensor mode {mode!r} has no depth", hint=f"one of the forms {FORMS}"
            )
        depth = _count("the depth of tensor", depth, FORMS)
    elif mode == "2.5d":
        raise ConfigError("tensor mode '2.5d' needs its depth", hint=f"one of the forms {FORMS}")
    _check_size(size, mode, depth)
    return size, mode, depth


def _check_size(size: int, mode: str, depth: int | None) -> None:
    """Squares and cubes alone, as in the original; policy ``tensor`` takes rectangles too."""
    # The nearest size that the mode can have: this one, if it is such a size.
    edges = {
        "1d": size,
        SEQUENCE: size,
        "2d": math.isqrt(size) ** 2,
        "2.5d": math.isqrt(size // (depth or 1)) ** 2 * (depth or 1),
        "3d": round(size ** (1 / 3)) ** 3,
    }
    if edges[mode] != size:
        rule = {"2d": "q x q", "2.5d": f"q x q x {depth}", "3d": "l x l x l"}[mode]
        raise ConfigError(
            f"tensor size {size} is not {rule}, as mode {mode!r} wants it",
            hint=f"{fitting_sizes(mode, depth)}; or policy 'tensor' with the shape of a rectangle",
        )


def _count(what: str, value: Any, forms: str) -> int:
    if type(value) is not int:
        raise ArgumentError(f"{what} is a whole number, not {brief(value)}", hint=forms)
    if value < 1:
        raise ConfigError(f"{what} is at least 1", why=f"it is {value}", hint=forms)
    return value
