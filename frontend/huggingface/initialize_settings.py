"""The config of :func:`shardwright.initialize`, read: a policy, and a :class:`ComputeConfig`.

{"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}      # OSLO's
{"plan_ngpus": 2, "seed": 7, "pas_policy": "tp"}                        # ours
{"model_parallelism": {...}, "seed": 7}                                 # both
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import Policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, brief, did_you_mean

MODEL_PARALLELISM, POLICY = "model_parallelism", "pas_policy"

SIZES = ("tensor_parallel_size", "pipeline_parallel_size")

PIPELINES = ("pp", "hybrid")
"""Policies that make stages, unless they are asked for one."""

EXAMPLE = '{"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}'


@dataclass(frozen=True)
class Settings:
    """What a model is compiled with. ``names_dims``: whether the user says himself which dims of
    the inputs may vary.
    """

    policy: Policy
    config: ComputeConfig
    names_dims: bool

    @property
    def may_cut_batch(self) -> bool:
        """Whether ranks that share a model may be dealt its samples."""
        return self.config.plan_ngpus > 1 and self.policy.name not in ("tp", "cp")

    @classmethod
    def of(
        cls,
        given: ComputeConfig | Mapping[str, Any],
        world_size: int | None,
        *,
        takes_steps: bool = False,
    ) -> Settings:
        """Read a config. ``world_size``: of the job; ``None`` where none runs, as the files are
        made beforehand. ``takes_steps``: the program is to be compiled end to end, with stages if
        the config asks for them.

        Raises :class:`ConfigError` for unknown keys, sizes that do not fit the ranks, and a config
        that would do nothing.
        """
        if isinstance(given, ComputeConfig):
            given = {f.name: getattr(given, f.name) for f in fields(ComputeConfig)}
        if not isinstance(given, Mapping):
            raise ConfigError(
                "config is a dict or a ComputeConfig",
                why=f"it is {brief(given)}",
                hint=EXAMPLE,
            )
        _check_names(given)
        options = {name: given[name] for name in given if name in _FIELDS}
        asked = given.get(MODEL_PARALLELISM)
        default = None
        if asked is not None:
            tensor, stages = _sizes(asked, may_have_stages=takes_steps)
            _take_size(options, tensor * stages)
            if stages > 1:
                default = "hybrid" if tensor > 1 else "pp"
                cut = {"num_stages": stages, **({"tp": tensor} if tensor > 1 else {})}
                options["pas_config"] = {**cut, **options.get("pas_config", {})}
        if takes_steps:
            options["use_end2end"] = True
        if "plan_ngpus" not in options:
            raise ConfigError(
                "the config would do nothing",
                why="it does not say how many ranks share a model",
                hint=EXAMPLE,
            )
        if "runtime_ngpus" not in options:
            if world_size is None:
                raise ConfigError(
                    "the number of ranks is not known",
                    why="no job runs, and the config has no runtime_ngpus",
                    hint="add 'runtime_ngpus': the number of ranks that will run",
                )
            options["runtime_ngpus"] = world_size
        _check_fit(options, world_size)
        config = ComputeConfig.of(options)
        if config.use_end2end and not takes_steps:
            raise ConfigError(
                "use_end2end is not for initialize",
                why="forward of the model runs the program, and one compiled end to end is run by "
                "train_step",
                hint="leave it out, or call shardwright.parallelize",
            )
        if config.leaves_zero_to_plan and not takes_steps:
            raise ConfigError(
                f"use_zero={config.use_zero!r} is not for initialize",
                why="each program has a plan, which would choose a stage of its own, and all "
                "programs of a model share one optimizer",
                hint="use_zero=1, 2 or 3 with shardwright.build_optimizer",
            )
        default = default or ("tp" if config.plan_ngpus > 1 else "dp")
        policy = find_policy(given.get(POLICY, default))
        if takes_steps:
            return cls(policy, config, "dynamic_dims" in given)
        if policy.searches:
            # Further programs are searched on the first one's mesh, and none of them in zigzag.
            config = replace(config, pas_config={"zigzag": False, **config.pas_config})
        _check_policy(policy, config)
        return cls(policy, config, "dynamic_dims" in given)


_FIELDS = tuple(f.name for f in fields(ComputeConfig))


def _check_names(given: Mapping[str, Any]) -> None:
    known = (MODEL_PARALLELISM, POLICY, *_FIELDS)
    for name in given:
        if name in SIZES or name == "enable":
            raise ConfigError(
                f"{name!r} stands beside 'model_parallelism', and belongs into it", hint=EXAMPLE
            )
        if name not in known:
            raise ConfigError(
                f"the config of initialize has no key {brief(name)}", hint=did_you_mean(name, known)
            )


def asks_for_steps(given: Any) -> bool:
    """Whether a config asks for a program that runs whole steps: for stages, or end to end."""
    if not isinstance(given, Mapping):
        return False
    asked = given.get(MODEL_PARALLELISM)
    stages = asked.get("pipeline_parallel_size") if isinstance(asked, Mapping) else None
    several = isinstance(stages, int) and stages > 1
    return several or given.get(POLICY) in PIPELINES or given.get("use_end2end") is True


def _sizes(asked: Any, *, may_have_stages: bool) -> tuple[int, int]:
    """The ranks that share a stage, and the number of stages, by ``model_parallelism``."""
    if not isinstance(asked, Mapping):
        raise ConfigError(
            "'model_parallelism' is a dict", why=f"it is {brief(asked)}", hint=EXAMPLE
        )
    for name in asked:
        if name not in ("enable", *SIZES):
            hint = did_you_mean(name, ("enable", *SIZES))
            # A common mistake: the right key in the wrong place.
            if name in (*_FIELDS, POLICY):
                hint = f"{name!r} stands beside 'model_parallelism', not in it"
            raise ConfigError(f"'model_parallelism' has no key {brief(name)}", hint=hint)
    if asked.get("enable") is not True:
        raise ConfigError(
            "the config would do nothing",
            why="'model_parallelism' has no 'enable': True"
            if "enable" not in asked
            else f"'enable' is {brief(asked['enable'])}",
            hint=EXAMPLE,
        )
    for name in SIZES:
        size = asked.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} is a whole number of at least 1", why=f"it is {brief(size)}")
    stages: int = asked.get("pipeline_parallel_size", 1)
    if stages > 1 and not may_have_stages:
        raise _no_pipelines("pipeline_parallel_size", stages)
    if "tensor_parallel_size" not in asked and stages == 1:
        raise ConfigError(
            "the config would do nothing",
            why="'model_parallelism' has no 'tensor_parallel_size'",
            hint=EXAMPLE,
        )
    return asked.get("tensor_parallel_size", 1), stages


def _take_size(options: dict[str, Any], ranks: int) -> None:
    if options.setdefault("plan_ngpus", ranks) != ranks:
        raise ConfigError(
            "plan_ngpus and tensor_parallel_size contradict each other",
            why=f"they are {brief(options['plan_ngpus'])} and {ranks}",
            hint="leave out plan_ngpus",
        )


def _check_fit(options: Mapping[str, Any], world_size: int | None) -> None:
    """Refuse a size of the model that does not divide the ranks there are."""
    plan, runtime = options["plan_ngpus"], options["runtime_ngpus"]
    if world_size is not None and runtime != world_size:
        raise ConfigError(
            f"runtime_ngpus is {brief(runtime)}, and {world_size} ranks are running",
            hint="leave it out: it is the number of ranks of the job",
        )
    if not isinstance(plan, int) or not isinstance(runtime, int) or plan < 1 or not runtime % plan:
        return  # what is no number is refused by ComputeConfig
    divisors = [size for size in range(1, runtime + 1) if not runtime % size]
    raise ConfigError(
        f"{runtime} ranks cannot be dealt into models of {plan}",
        why=f"a model is shared by {plan} ranks, and data-parallel ranks are what remains",
        hint=f"with {runtime} ranks, one of {', '.join(map(str, divisors))}; or start a multiple "
        f"of {plan} ranks",
    )


def _check_policy(policy: Policy, config: ComputeConfig) -> None:
    if policy.name in PIPELINES:
        raise _no_pipelines(POLICY, policy.name)
    policy.check(config)
    if policy.takes_traces(config):
        raise ConfigError(
            "option 'global_batch' is not for initialize",
            why="a call of forward is one batch: there are no microbatches whose size could be "
            "searched",
            hint="leave it out: plans are searched for the sizes of dummy_forward_args",
        )
    if policy.name == "dp" and config.plan_ngpus > 1:
        raise ConfigError(
            "policy 'dp' has one rank to a model",
            why=f"{config.plan_ngpus} ranks are to share it",
            hint="leave out pas_policy: 'tp' cuts a model over several ranks",
        )


def _no_pipelines(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{name}={value!r} is not for initialize",
        why="a pipeline runs whole steps of several microbatches, and a call of forward is not one",
        hint="shardwright.parallelize(..., 'hybrid') with use_end2end=True has train_step; "
        "ShardwrightTrainer takes pipelines, too",
    )
