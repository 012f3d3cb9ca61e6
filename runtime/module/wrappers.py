"""Modules of other libraries that train a module on many ranks in their own way. Around a parallel
module they are refused.

``DistributedDataParallel`` sends rank 0's parameters to all ranks: its pieces lie over everybody's,
and losses are wrong from the first step. Trainers (``accelerate.prepare``, Hugging Face's
``Trainer``, Lightning) put their models into one of these.
"""

from __future__ import annotations

import threading

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwright.runtime.errors import UsageError
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


def _refuse_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    wrapper = next((cls.__name__ for cls in type(parent).__mro__ if cls.__name__ in WRAPPERS), None)
    if wrapper is None or child is None:
        return
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
        "that wrap models by themselves (accelerate, transformers.Trainer, Lightning) need a "
        "loop of your own instead",
    )


_is_watching = False
_lock = threading.Lock()
