"""The optimizer of a run, as its settings name it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.training.run_settings import OptimizerSettings
from shardwright.runtime.argument_kinds import kind_of
from shardwright.runtime.arguments import shown
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer


def make_optimizer(module: ParallelModule, settings: OptimizerSettings) -> ParallelOptimizer:
    """The optimizer on this rank's part of a model. Collective.

    Raises :class:`ConfigError` for a name that is no optimizer, or options that it does not take.
    """
    return build_optimizer(
        module,
        find_optimizer(settings.name),
        param_groups=decay_groups(settings),
        **dict(settings.options),
    )


def decay_groups(
    settings: OptimizerSettings,
) -> Callable[[str, nn.Parameter], Mapping[str, Any]] | None:
    """The options of each parameter: biases and the weights of norms are not decayed.

    They are told by their dims. By the type of the module they are in, as other trainers tell them,
    they could not be found: a generated module has no ``nn.LayerNorm``.
    """
    if settings.decay == "all" or not settings.options.get("weight_decay", 0.0):
        return None
    return lambda name, parameter: {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def is_of_torch(name: str) -> bool:
    """Whether an optimizer is named that ``torch.optim`` has, or should have."""
    return not {":", "."} & set(name.removeprefix("torch.optim."))


def find_optimizer(name: str) -> Any:
    """The class, or function, that makes the optimizer of a name. Raises :class:`ConfigError`."""
    if ":" in name:
        return load_target(name)
    short = name.removeprefix("torch.optim.")
    # A dotted name of another package, ``bitsandbytes.optim.Adam8bit``: the last part is the class.
    if not is_of_torch(name):
        return load_target(":".join(short.rsplit(".", 1)))
    found = getattr(torch.optim, short, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    hint = did_you_mean(short, optimizer_names())
    raise ConfigError(f"torch.optim has no optimizer {short!r}", hint=hint)


def check_options(settings: OptimizerSettings) -> None:
    """Raise :class:`ConfigError`, by the path of the setting, for an option that is not of the type
    that an optimizer of torch declares for it.
    """
    make = find_optimizer(settings.name)
    hints = typing.get_type_hints(make.__init__)
    defaults = inspect.signature(make.__init__).parameters
    for name, value in settings.options.items():
        kind = kind_of(hints.get(name, Any))
        # YAML has lists for what Python has as tuples.
        if kind is None or kind.accepts(tuple(value) if isinstance(value, list) else value):
            continue
        words = kind.words.replace("a tuple", "a list", 1).replace(" or a torch.Tensor", "")
        default = defaults[name].default
        default = list(default) if isinstance(default, tuple) else default
        raise ConfigError(
            f"optimizer.options.{name} is {words}",
            why=f"it is {shown(value)}",
            hint=f"the default of {settings.name} is {brief(default)}",
        )


def optimizer_names() -> tuple[str, ...]:
    """The optimizers of torch."""
    return tuple(
        key
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    )
