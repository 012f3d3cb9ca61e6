"""Modules of other libraries that train a module on many ranks in their own way. Around a parallel
module they are refused.

``DistributedDataParallel`` sends rank 0's parameters to all ranks: its pieces lie over everybody's,
and losses are wrong from the first step. (Around a model of :func:`shardwright.initialize` it may
stand, over the ranks that hold the same pieces: that is how its users average gradients.) Trainers
(``accelerate.prepare``, Hugging Face's ``Trainer``, Lightning) put their models into one of these;
``shardwright.integrations`` has what does not.
"""

from __future__ import annotations

import functools
import threading
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.module.compiled import PROGRAM, CompiledModule
from shardwright.runtime.module.scope import Scope

WRAPPERS = frozenset(
    {
        "DataParallel",
        "DeepSpeedEngine",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "ShardedDataParallel",
    }
)
"""The names of the classes, whoever defines them: importing a library to learn its classes would
cost those without it.
"""


def watch_wrappers() -> None:
    """Let torch tell of every module that becomes a part of another one. A second call does
    nothing.
    """
    global _is_watching
    with _lock:
        if not _is_watching:
            _is_watching = True
            register_module_module_registration_hook(_refuse_wrapper)
            _watch_weight_norm()


def _watch_weight_norm() -> None:
    """Refuse the old ``torch.nn.utils.weight_norm`` before it does anything: it takes the weight
    out of the module, and what is refused then leaves a module without it.
    """
    # The module's name in its package is that of the function.
    weight_norm = import_module("torch.nn.utils.weight_norm").WeightNorm
    original = weight_norm.apply

    @functools.wraps(original)
    def apply(module: nn.Module, name: str, dim: int) -> Any:
        if isinstance(module, Scope):
            module.register_parameter(f"{name}_g", None)  # which says why not
        return original(module, name, dim)

    weight_norm.apply = staticmethod(apply)


def _refuse_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(parent).__name__ == "OptimizedModule":
        _refuse_compiling_steps(child)
        if isinstance(child, CompiledModule):
            parent.register_forward_pre_hook(_check_arguments, with_kwargs=True)
    wrapper = next((cls.__name__ for cls in type(parent).__mro__ if cls.__name__ in WRAPPERS), None)
    if wrapper is None or child is None:
        return
    for part in child.modules():
        if PROGRAM in part.__dict__:
            _take_wrapper(parent, wrapper, type(part).__name__, part.__dict__[PROGRAM])
    parallel = next((part for part in child.modules() if isinstance(part, Scope)), None)
    if parallel is None:
        return
    owner = type(parallel).__name__ if parallel.is_root else type(child).__name__
    raise UsageError(
        f"{wrapper} cannot wrap {owner}: it is or contains a parallel module",
        why="every rank has pieces of its own there, and the wrapper would treat them as copies "
        "of one tensor",
        hint="leave the wrapper out: optimizer = shardwright.build_optimizer(model, "
        "torch.optim.AdamW, ...) sums gradients "
        "over all ranks, those of ordinary parts too, and ComputeConfig(use_zero=1 to 3) "
        "splits what FSDP would. Trainers "
        "that wrap models by themselves have one in shardwright.integrations (transformers, "
        "fabric); other loops go without accelerate.prepare",
    )


def _refuse_compiling_steps(module: nn.Module | None) -> None:
    """Refuse ``torch.compile(module)`` of a module that is called by its steps: what it returns
    compiles calls of the module, and has the steps of the original.
    """
    if isinstance(module, CompiledModule) and getattr(module, "end2end", False):
        raise UsageError(
            f"torch.compile({type(module).__name__}) would compile nothing",
            why="it compiles calls of a module, and a module that was compiled end to end is "
            "called by train_step and infer_step",
            hint="model.compile(...) takes the same arguments, and the steps run what it compiles",
        )


def _check_arguments(compiled: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse arguments in words that the compiler would refuse in its own, before it reads the
    call. ``compiled``: what ``torch.compile`` has made of a module.
    """
    module: Any = compiled._orig_mod
    if not torch.compiler.is_compiling():
        with module.ranks.world.telling_errors():
            module.check_arguments(args, kwargs)


def _take_wrapper(parent: nn.Module, wrapper: str, owner: str, program: CompiledModule) -> None:
    """Leave the sums over replicas to ``DistributedDataParallel`` around a model of
    :func:`shardwright.initialize`, if it sums over the ranks that hold the same pieces. It has not
    sent anything yet.
    """
    if wrapper != "DistributedDataParallel":
        raise UsageError(
            f"{wrapper} cannot wrap {owner}, whose parameters are this rank's pieces",
            why="it would treat the pieces of all ranks as copies of one tensor, or cut them again",
            hint="DistributedDataParallel(model, "
            "process_group=model.mpu.get_data_parallel_group()), or "
            "shardwright.build_optimizer(model, torch.optim.AdamW, ...)",
        )
    ours = list(program.ranks.units.communicator.ranks)
    found = dist.get_process_group_ranks(parent.process_group)  # type: ignore[arg-type]
    if found != ours:
        raise UsageError(
            f"DistributedDataParallel would sum gradients of {owner} over ranks {found}",
            why=f"these ranks hold other pieces of the parameters; those with the same pieces as "
            f"this one are {ours}",
            hint="DistributedDataParallel(model, "
            "process_group=model.mpu.get_data_parallel_group(), ...)",
        )
    reducer = program.reducer
    if reducer is not None and reducer.is_attached and not program.is_summed_elsewhere:
        raise UsageError(
            f"DistributedDataParallel cannot wrap {owner}: its gradients are summed already",
            why="build_optimizer was given the model, and its optimizer sums gradients over all "
            "ranks",
            hint="leave out DistributedDataParallel, or use an optimizer of torch.optim",
        )
    check_settings(program, "DistributedDataParallel")
    program.leave_sums()


def check_settings(program: CompiledModule, who: str) -> None:
    """Refuse settings of ``program`` that only an optimizer of ``build_optimizer`` honours.
    ``who``: what would ignore them.

    Raises :class:`UsageError`.
    """
    config = program.compute_config
    if config is None:
        return
    default = ComputeConfig(plan_ngpus=config.plan_ngpus, runtime_ngpus=config.runtime_ngpus)
    named = [
        f"{name}={getattr(config, name)!r}"
        for name in OPTIMIZER_SETTINGS
        if getattr(config, name) != getattr(default, name)
    ]
    if named:
        raise UsageError(
            f"{who} would ignore {', '.join(named)}",
            why="these settings say how our own optimizer sums gradients and splits its state",
            hint="leave them out, or use shardwright.build_optimizer(model, torch.optim.AdamW, "
            "...) and no DistributedDataParallel",
        )


OPTIMIZER_SETTINGS = (
    "use_zero",
    "zero_ngroups",
    "zero_use_reduce_scatter",
    "use_async_reducer",
    "reducer_bucket_cap_mb",
    "distributed_optimizer",
)
"""Fields of a config that mean something to ``build_optimizer`` only."""

_is_watching = False
_lock = threading.Lock()
