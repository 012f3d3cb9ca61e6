"""What can be said of the settings of a run before a rank is started, without the user's code.

Single values are checked where they are read (``read_settings.py``). Here are those that others
must know: optimizers and their options, policies and theirs, sizes that must divide. The program
that starts the ranks asks first, so that a mistake is told once and at once. Each rank asks again
before it compiles, as torchrun and srun start ranks without us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.frontend.training.dealt_samples import (
    Batches,
    batches_of,
    check_microbatch,
    options_of,
    policy_of,
)
from shardwright.frontend.training.hooks import check_places
from shardwright.frontend.training.loggers import check_loggers
from shardwright.frontend.training.run_optimizer import check_options, find_optimizer, is_of_torch
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.training.user_optimizer import made_of


def check_run(settings: RunSettings, num_ranks: int, *, replan: bool = False) -> None:
    """Raise what a run of these settings on ``num_ranks`` ranks would end with, as far as that
    shows without its model and its data.

    ``replan``: as for :func:`batches_of`.
    """
    check_settings(settings)
    batches = batches_of(settings, num_ranks, replan=replan)
    config = config_of(settings, num_ranks, batches, grad_reduction="sum")
    # Functions that are named as ``package.module:name`` are the user's code.
    if ":" not in settings.parallel.policy:
        policy_of(settings).check(config)


def check_settings(settings: RunSettings) -> None:
    """Raise what a run of these settings would end with on any number of ranks, as far as that
    shows without its model and its data.
    """
    if ":" not in settings.parallel.policy:
        policy_of(settings)
    check_microbatch(settings)
    if is_of_torch(settings.optimizer.name):
        check_options(settings.optimizer)
        make = find_optimizer(settings.optimizer.name)
        # Of two dims, which Muon asks for.
        parameters: Mapping[str, nn.Parameter] = {"weight": nn.Parameter(torch.zeros(1, 1))}
        made_of(make, parameters, parameters, None, settings.optimizer.options)
    check_places(settings.hooks)
    check_loggers(settings)
    if settings.hardware is not None:
        load_hardware(settings.hardware)


def config_of(
    settings: RunSettings, num_ranks: int, batches: Batches, *, grad_reduction: str
) -> ComputeConfig:
    """The config that the model is compiled with. Raises :class:`ConfigError`."""
    fields: dict[str, Any] = {
        "outputs": "loss",
        "seed": settings.seed,
        **settings.parallel.compute,
        "plan_ngpus": batches.plan_ngpus,
        "runtime_ngpus": num_ranks,
        "use_zero": settings.parallel.use_zero,
        "pas_config": options_of(settings, batches),
        "use_end2end": True,
        "grad_reduction": grad_reduction,
    }
    if settings.precision in ("bfloat16", "float16"):
        # Updates are added to float32 masters: most are too small for 16 bits.
        fields.setdefault("distributed_optimizer", {"dtype": "float32"})
    return ComputeConfig.of(fields)
