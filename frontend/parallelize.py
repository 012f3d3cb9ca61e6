""":func:`parallelize`: compile a module, and load this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn

from shardwright.frontend.files.cache import generated_directory
from shardwright.frontend.files.further_programs import (
    constants_of,
    load_made,
    make_files,
    make_program,
    order_like,
)
from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.files.module_files import Order
from shardwright.frontend.files.module_source import ModuleSource
from shardwright.policies.known_policies import find_policy
from shardwright.policies.parallel_form import without_form
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from shardwright.runtime.errors import (
    ConfigError,
    DistributedError,
    did_you_mean,
)
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.threads import ThreadWorld
from shardwright.runtime.ranks.world import World, current_world

Choice = TypeVar("Choice", bound=Enum)


# What comes back depends on what is given: a module, a class, or nothing to be loaded.
@overload
def parallelize(
    module_or_module_class: nn.Module,
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    gen_savedir: str | Path = ...,
    reuse: ReuseType | str = ...,
    instance_name: str | None = ...,
    load_module: Literal[True] = ...,
    module_dtype: torch.dtype | None = ...,
    module_fn: Callable[[], nn.Module] | None = ...,
    init_module_params: bool = ...,
    broadcast_strategy: BroadcastGenFilesStrategy | str = ...,
    dump: str | Path | None = ...,
    more_dummy_args: Sequence[Mapping[str, Any]] = ...,
    max_programs: int = ...,
) -> ParallelModule: ...


@overload
def parallelize(
    module_or_module_class: type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    gen_savedir: str | Path = ...,
    reuse: ReuseType | str = ...,
    instance_name: str | None = ...,
    load_module: Literal[True] = ...,
    module_dtype: torch.dtype | None = ...,
    module_fn: Callable[[], nn.Module] | None = ...,
    init_module_params: bool = ...,
    broadcast_strategy: BroadcastGenFilesStrategy | str = ...,
    dump: str | Path | None = ...,
    more_dummy_args: Sequence[Mapping[str, Any]] = ...,
    max_programs: int = ...,
) -> type[ParallelModule]: ...


@overload
def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    gen_savedir: str | Path = ...,
    reuse: ReuseType | str = ...,
    instance_name: str | None = ...,
    load_module: Literal[False],
    module_dtype: torch.dtype | None = ...,
    module_fn: Callable[[], nn.Module] | None = ...,
    init_module_params: bool = ...,
    broadcast_strategy: BroadcastGenFilesStrategy | str = ...,
    dump: str | Path | None = ...,
    more_dummy_args: Sequence[Mapping[str, Any]] = ...,
    max_programs: int = ...,
) -> None: ...


@overload
def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    gen_savedir: str | Path = ...,
    reuse: ReuseType | str = ...,
    instance_name: str | None = ...,
    load_module: bool = ...,
    module_dtype: torch.dtype | None = ...,
    module_fn: Callable[[], nn.Module] | None = ...,
    init_module_params: bool = ...,
    broadcast_strategy: BroadcastGenFilesStrategy | str = ...,
    dump: str | Path | None = ...,
    more_dummy_args: Sequence[Mapping[str, Any]] = ...,
    max_programs: int = ...,
) -> ParallelModule | type[ParallelModule] | None: ...


@checked
def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    gen_savedir: str | Path = "./.shardwright",
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: BroadcastGenFilesStrategy | str = BroadcastGenFilesStrategy.NONE,
    dump: str | Path | None = None,
    more_dummy_args: Sequence[Mapping[str, Any]] = (),
    max_programs: int = 1,
) -> ParallelModule | type[ParallelModule] | None:
    """Compile a module for ``compute_config.plan_ngpus`` ranks, and load the part of the calling
    rank.

    A module gives a :class:`ParallelModule` object, a module class gives a ``ParallelModule``
    class. With ``load_module=False`` the result is ``None``, and no ``torchrun``, process group or
    GPU is needed.

    ``dummy_forward_args``: an example of every argument of ``forward``, by name. What is absent
    keeps its default for good.
    ``pas_policy``: the name of a policy, built in (``"dp"``, ``"tp"``, ``"data"``, ``"cp"``,
    ``"ep"``, ``"pp"``, ``"hybrid"``, ``"tensor"``, ``"autodist"``, ``"saved"``) or registered; or a
    function of the graph and the config; or ``dict(pipeline=2, tensor=dict(size=4, mode="2d"))``,
    with which a dict ``compute_config`` may leave ``plan_ngpus`` and ``runtime_ngpus`` out
    (docs/tensor-modes.md).
    ``gen_savedir``: the files lie in
    ``<gen_savedir>/_parallel_modules/<module>/<class>/<instance_name>``.
    ``reuse``: what to do with files of an earlier call, see :class:`ReuseType`. Files are
    recognised by the content of the model, the config, the policy and the versions; initial weights
    that differ are written anew in all cases.
    ``module_dtype``: compile as if the module had been cast to this dtype; the module given stays
    as it is.
    ``module_fn``: makes the module where a class is given (default: the class called without
    arguments). It may build on the meta device; then initial values come from a checkpoint.
    ``init_module_params``: give the loaded module its initial values; otherwise they are left
    uninitialised.
    ``broadcast_strategy``: which files go to nodes that do not have them, see
    :class:`BroadcastGenFilesStrategy`.
    ``dump``: a folder for what every pass of the compile returned, as numbered text files
    (``00-trace.txt``, ``01-rules.txt``, ...). Rank 0 writes them. Where the files of an earlier
    call serve, the passes that make files do not run, and dump nothing.

    ``more_dummy_args``: other arguments of ``forward``, for each of which a program of its own is
    compiled: other values of inputs that decide sizes, or other static sizes. All of them run on
    the parameters of one module; each call takes the one that its arguments fit.
    ``max_programs``: where a call fits none, compile one for its arguments, up to this many of all.
    Then all ranks must call with arguments of one program.

    In a job all ranks call it alike. Rank 0 compiles, the others wait for it; an error on one rank
    is raised on all. A compile that fails leaves the files of an earlier one untouched.

    Raises subclasses of :class:`shardwright.ShardwrightError`, in words: :class:`ConfigError` for
    arguments and for files that do not match, :class:`TraceError` for a model that cannot be
    traced, :class:`PlanError` for the policy, :class:`LoadError` for files that cannot be loaded.
    """
    title = f"compiling {_title(module_or_module_class)}"

    def read_arguments(world: World) -> tuple[Order, BroadcastGenFilesStrategy]:
        if isinstance(module_or_module_class, ParallelModule):
            raise ConfigError(
                f"{_title(module_or_module_class)} is a parallel module already",
                hint="pass the module that it was compiled from",
            )
        source = ModuleSource.of(module_or_module_class, module_fn)
        in_job = _in_job(world)
        named, config = without_form(pas_policy, compute_config, world.size if in_job else None)
        policy = find_policy(named)
        policy.check(config)
        strategy = _choice("broadcast_strategy", broadcast_strategy, BroadcastGenFilesStrategy)
        _check_world(world, config, load_module, strategy)
        _check_max_programs(max_programs, source, load_module)
        _check_dtype(module_dtype)
        order = Order(
            source=source,
            dummy_args=dummy_forward_args,
            policy=policy,
            config=config,
            directory=generated_directory(gen_savedir, source.cls, instance_name),
            reuse=_choice("reuse", reuse, ReuseType),
            module_dtype=module_dtype,
            dump=None if dump is None else Path(dump),
        )
        return order, strategy

    with Job(title, exchange_about(title)) as job:
        order, strategy = job.every_rank_does(lambda: read_arguments(current_world()))
        # Before rank 0 begins to work: ranks that ask for different things would load files of
        # another's request, or wait for a call that never comes.
        job.agree(
            model=f"{order.source.cls.__module__}.{order.source.cls.__qualname__}",
            instance_name=order.directory.name,
            policy=order.policy.name,
            load_module=load_module,
            **{f"ComputeConfig.{name}": value for name, value in order.config.to_json().items()},
        )
        made = make_files(job, order, strategy)
        # Further programs, for calls with other sizes, on the parameters of the first.
        others, made_of_others = _further(job, order, more_dummy_args, strategy)
        if not load_module:
            return None
        loaded = _loaded_class(job, [order, *others], [made, *made_of_others])
        if order.source.module is None:
            return loaded
        parallel = job.every_rank_does(lambda: loaded(init_params=init_module_params))
        if max_programs > 1:
            programs = parallel.programs()
            programs.most = max_programs
            programs.compile_another = lambda given: make_program(
                order_like(order, given, programs.constants()), strategy
            )
        return parallel.train(order.source.module.training)


def _further(
    job: Job,
    order: Order,
    more_dummy_args: Sequence[Mapping[str, Any]],
    strategy: BroadcastGenFilesStrategy,
) -> tuple[list[Order], list[str]]:
    """The orders of the programs for further dummy arguments, and the fingerprints of their files.
    Collective.
    """
    job.agree(more_dummy_args=len(more_dummy_args))
    orders: list[Order] = []
    made: list[str] = []
    for given in more_dummy_args:
        # Sets that differ in values alone are told apart by what was read so far.
        directories = [one.directory for one in (order, *orders)]
        read = job.first_rank_does(partial(_constants_of, directories))
        orders.append(job.every_rank_does(partial(order_like, order, given, read)))
        job.agree(more_dummy_args=[one.directory.name for one in orders])
        made.append(make_files(job, orders[-1], strategy))
    return orders, made


def _constants_of(directories: Sequence[Path]) -> list[str]:
    found = [path for directory in directories for path in constants_of(directory)]
    return list(dict.fromkeys(found))


def _loaded_class(
    job: Job, orders: Sequence[Order], digests: Sequence[str]
) -> type[ParallelModule]:
    """The class of the first order's files, which knows the programs of the others. Collective."""
    # By the digest of what was made: a node without a shared disk may hold files of an earlier
    # compile, which would load.
    loaded, *others = (
        job.every_rank_does(partial(load_made, order.directory, digest))
        for order, digest in zip(orders, digests, strict=True)
    )
    loaded.other_programs = tuple(others)
    return loaded


def _title(module_or_class: Any) -> str:
    return getattr(module_or_class, "__name__", type(module_or_class).__name__)


def _in_job(world: World) -> bool:
    return isinstance(world, ThreadWorld) or (dist.is_available() and dist.is_initialized())


def _check_world(
    world: World, config: ComputeConfig, load_module: bool, strategy: BroadcastGenFilesStrategy
) -> None:
    in_job = _in_job(world)
    if not in_job and strategy is not BroadcastGenFilesStrategy.NONE:
        raise ConfigError(
            f"broadcast_strategy={strategy.value!r} needs a job",
            why="torch.distributed is not initialised, so there are no other nodes to send files "
            "to",
            hint="run under torchrun and call torch.distributed.init_process_group, or leave it "
            "at 'none'",
        )
    if not load_module:
        return
    if not in_job:
        raise DistributedError(
            "a parallel module is loaded in a job",
            why="torch.distributed is not initialised",
            hint=f"run with torchrun --nproc_per_node={config.runtime_ngpus} and call "
            "torch.distributed.init_process_group, "
            "or pass load_module=False to compile only",
        )
    if world.size != config.runtime_ngpus:
        raise DistributedError(
            f"the module is compiled for runtime_ngpus={config.runtime_ngpus}, but "
            f"{world.size} ranks are running",
            hint=f"torchrun --nproc_per_node={config.runtime_ngpus}, or set "
            f"runtime_ngpus={world.size}",
        )


def _check_max_programs(max_programs: int, source: ModuleSource, load_module: bool) -> None:
    if max_programs < 1:
        why = "there is one program at least"
    elif max_programs > 1 and not (load_module and source.module):
        why = (
            "a call compiles another program of the module that was given and loaded, and here "
            "none is"
        )
    else:
        return
    raise ConfigError(
        f"max_programs={max_programs} cannot be",
        why=why,
        hint="pass a module and load it, or compile ahead with more_dummy_args",
    )


def _check_dtype(module_dtype: object) -> None:
    if module_dtype is None:
        return
    if not isinstance(module_dtype, torch.dtype) or not module_dtype.is_floating_point:
        raise ConfigError(
            "module_dtype is a floating dtype, or None", why=f"it is {module_dtype!r}"
        )


def _choice(name: str, value: Choice | str, kind: type[Choice]) -> Choice:
    """An enum member, or the one whose value it is."""
    if isinstance(value, kind):
        return value
    values = tuple(member.value for member in kind)
    if not isinstance(value, str) or value.lower() not in values:
        raise ConfigError(f"{name} cannot be {value!r}", hint=did_you_mean(str(value), values))
    return kind(value.lower())
