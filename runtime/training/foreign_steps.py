"""Steps of optimizers that ``build_optimizer`` has not made.

``torch.optim.AdamW(model.parameters())`` updates each rank's parameters along what this rank has of
their gradients. Where other ranks have summands of them that is wrong, and the copies of a
parameter drift apart. torch calls a hook before every step of every optimizer, and there such a
step is refused. Gradients that are sums already, such as those that ``train_step`` leaves behind,
may be stepped along by anybody, except by optimizers that send parameters from rank to rank: they
take each rank's pieces for copies of one tensor, as wrappers of modules do
(``runtime/module/wrappers.py``). So does what averages parameters over the ranks between steps.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.runtime.bucket import is_reduced
from shardwright.runtime.errors import UsageError
from shardwright.runtime.training.clipping import PART, PartOfModel
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

SENDERS = frozenset({"ZeroRedundancyOptimizer"})
"""The names of classes of optimizers that send each parameter from one rank to all others."""


def watch_steps() -> None:
    """Look at every step of every optimizer from now on. A second call does nothing."""
    global _is_watching
    with _lock:
        if not _is_watching:
            _is_watching = True
            register_optimizer_step_pre_hook(_check_step)
            _watch_averaging()


def _watch_averaging() -> None:
    """Refuse ``torch.distributed.algorithms.model_averaging`` before it sends anything."""
    averaging: Any = import_module("torch.distributed.algorithms.model_averaging.utils")
    original = averaging.average_parameters

    @functools.wraps(original)
    def average_parameters(params: Iterable[Tensor], process_group: Any) -> None:
        given = list(params)
        mark = next((mark for p in given if (mark := getattr(p, PART, None)) is not None), None)
        if mark is not None:
            raise UsageError(
                f"parameters of {mark.owner}, a parallel module, cannot be averaged over ranks",
                why=f"every rank has pieces of its own, and {mark.name!r} would be the mean of "
                "different ones",
                hint="leave the averager out: shardwright.build_optimizer(model, "
                "torch.optim.AdamW, lr=...) sums gradients over the ranks in every step",
            )
        original(iter(given), process_group)

    averaging.average_parameters = average_parameters


def _check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if isinstance(optimizer, ParallelOptimizer):
        return
    sender = next(
        (cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in SENDERS), None
    )
    # An optimizer of torch's own may step what needs no sum: models that lie whole on a rank.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Gradients that ranks have to sum, and that nobody has summed.
            mark = getattr(parameter, PART, None)
            if mark is not None and sender is not None:
                _refuse_sender(sender, mark)
            if mark is not None and parameter.grad is not None:
                _check_state(optimizer, parameter, mark)
            if (
                mark is None
                or not mark.needs_sum
                or parameter.grad is None
                or is_reduced(parameter.grad)
            ):
                continue
            raise UsageError(
                f"{type(optimizer).__name__}.step() would follow gradients of {mark.owner} "
                "that nobody has summed over "
                "the ranks",
                why=f"that of {mark.name!r} is the sum of what several ranks compute, and "
                "build_optimizer has not made this "
                "optimizer",
                hint="optimizer = shardwright.build_optimizer(model, "
                f"torch.optim.{type(optimizer).__name__}, lr=...)",
            )


def _refuse_sender(sender: str, mark: PartOfModel) -> None:
    raise UsageError(
        f"{sender} cannot update parameters of {mark.owner}, a parallel module",
        why=f"every rank has pieces of its own, and one rank's {mark.name!r} would be sent over "
        "those of all",
        hint="optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...); "
        "ComputeConfig(use_zero=1) splits its state over the ranks",
    )


def _check_state(optimizer: Optimizer, parameter: Tensor, mark: PartOfModel) -> None:
    """Refuse state that was made for the whole parameter, before this rank kept a piece of it."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.ndim != parameter.ndim:
            continue
        sizes = list(zip(value.shape, parameter.shape, strict=True))
        if value.shape != parameter.shape and all(size >= piece for size, piece in sizes):
            raise UsageError(
                f"{type(optimizer).__name__} has stepped before {mark.owner} was made parallel",
                why=f"its {key!r} of {mark.name!r} is {list(value.shape)}, and this rank's "
                f"piece of the parameter is {list(parameter.shape)}",
                hint="make the optimizer anew: only one that has not stepped yet goes on",
            )


_is_watching = False
_lock = threading.Lock()
