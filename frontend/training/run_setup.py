"""Everything before the first step of a run: :func:`set_up`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.data.make_loader import Loader
from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.huggingface.model_folders import load_whole
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.training.datasets import cast_to, example_of, make_dataset, make_loader
from shardwright.frontend.training.dealt_samples import Batches, batches_of, policy_of
from shardwright.frontend.training.hooks import Hook, Hooks
from shardwright.frontend.training.learning_rates import make_scheduler
from shardwright.frontend.training.loggers import Loggers
from shardwright.frontend.training.loss_weights import LossWeights
from shardwright.frontend.training.observing import Observer
from shardwright.frontend.training.predictions import Prediction, predict
from shardwright.frontend.training.read_settings import settings_json
from shardwright.frontend.training.resuming import Found, checkpoint_to_resume
from shardwright.frontend.training.run_checks import check_run, config_of
from shardwright.frontend.training.run_model import MadeModel, make_model
from shardwright.frontend.training.run_optimizer import make_optimizer
from shardwright.frontend.training.run_saves import check_export, written_export
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.run_state import Run, RunResult
from shardwright.frontend.training.stopping import StopRequest
from shardwright.policies.policy import Policy
from shardwright.runtime.checkpoint.load import load_checkpoint
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import World
from shardwright.runtime.structure import map_leaves
from shardwright.runtime.training.loss_scaling import LossScaler

_MODULE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_AUTOCAST_DTYPES = {"bfloat16_autocast": torch.bfloat16, "float16_autocast": torch.float16}

_TITLE = "preparing a training run"


def set_up(
    settings: RunSettings, world: World, stop: StopRequest, hooks: Mapping[str, Hook | str]
) -> Run | RunResult:
    """Everything before the first step, at the place where the newest checkpoint was."""
    with Job(_TITLE, exchange_about(_TITLE)) as job:
        found = _found_checkpoint(job, settings, world)
        replan = found is not None and found.is_moved_to(world.size)
        job.every_rank_does(lambda: check_run(settings, world.size, replan=replan))
        batches, policy, original = job.every_rank_does(
            lambda: (
                batches_of(settings, world.size, replan=replan),
                policy_of(settings),
                make_model(settings.model, settings.seed),
            )
        )
        made_hooks, observer = job.every_rank_does(
            lambda: (
                Hooks(hooks),
                Observer(settings.profile, Path(settings.output) / "profile", world),
            )
        )
        dtype = _MODULE_DTYPES.get(settings.precision)
        data = settings.data
        dataset, transform = job.every_rank_does(lambda: make_dataset(data, original))
        example, weights = job.every_rank_does(
            lambda: _example(settings, original, dataset, transform, batches, dtype)
        )
    config = config_of(settings, world.size, batches, grad_reduction=weights.reduction)
    with _autocast(settings, world):
        model = _compiled(settings, policy, config, original, example, dtype)
    # A checkpoint has all values already; the folder's would be read for nothing.
    if found is None and original.folder is not None:
        load_whole(original.module, model, original.folder)
    model.to(world.device).train()
    optimizer = make_optimizer(model, settings.optimizer)
    device = world.device if world.device.type == "cuda" else None
    loader = make_loader(
        data, dataset, transform, model,
        global_batch=settings.global_batch, microbatch=batches.microbatch, device=device,
    )  # fmt: skip
    num_steps = _num_steps(settings, loader)
    scheduler = make_scheduler(optimizer, settings.schedule, num_steps)
    # float16 alone has too few exponents for gradients; bfloat16 has those of float32.
    scaler = LossScaler(enabled=settings.precision in ("float16", "float16_autocast"))
    step = 0
    if found is not None:
        loaded = load_checkpoint(found.folder, model, optimizer, scheduler=scheduler, loader=loader)
        step = found.step
        if scaler_state := (loaded.extra or {}).get("scaler"):
            scaler.load_state_dict(scaler_state)
    with Job(_TITLE, exchange_about(_TITLE)) as job:
        is_done = step >= num_steps
        job.every_rank_does(lambda: check_export(settings, is_done=is_done))
        if is_done:
            # It may have been killed after its last checkpoint, before the export was there.
            if settings.export is not None:
                job.first_rank_does(lambda: written_export(settings, original, dtype))
            return RunResult(step, num_steps)
        evaluated = None
        if settings.evaluation.data is not None:
            other = settings.evaluation.data
            evaluated = job.every_rank_does(lambda: (other, *make_dataset(other, original)))
        loggers = job.every_rank_does(
            lambda: Loggers.of(
                settings, settings_json(settings), num_steps, is_first=world.rank == 0
            )
        )
        prediction = Prediction()
        if settings.hardware is not None:
            prediction = Prediction(
                **job.first_rank_does(
                    lambda: _predicted(
                        settings, policy, config, original, model, example, dtype, batches
                    ).to_json()
                )
            )
    return Run(
        settings=settings, world=world, original=original, model=model, optimizer=optimizer,
        scheduler=scheduler, scaler=scaler, loader=loader, batches=batches, weights=weights,
        dtype=dtype, num_steps=num_steps, tokens_per_step=_tokens(settings, example, batches),
        stop=stop, loggers=loggers, hooks=made_hooks, observer=observer, evaluated=evaluated,
        prediction=prediction, step=step,
    )  # fmt: skip


def _found_checkpoint(job: Job, settings: RunSettings, world: World) -> Found | None:
    """What rank 0 finds: others may look at the disk later, when a save has changed it."""

    def look() -> list[Any] | None:
        found = checkpoint_to_resume(settings, world.size)
        return None if found is None else [str(found.folder), found.step, found.num_ranks]

    told = job.first_rank_does(look)
    return None if told is None else Found(Path(told[0]), told[1], told[2])


def _example(
    settings: RunSettings,
    original: MadeModel,
    dataset: Any,
    transform: Any,
    batches: Batches,
    dtype: torch.dtype | None,
) -> tuple[dict[str, Any], LossWeights]:
    """The arguments to compile for."""
    example = example_of(settings.data, dataset, transform, original, batches.microbatch)
    example = {**example, **settings.model.call}
    cast: dict[str, Any] = map_leaves(example, cast_to(dtype))
    weights = LossWeights.of(settings.loss, original, cast)
    return weights.example(cast), weights


def _autocast(settings: RunSettings, world: World) -> AbstractContextManager[object]:
    dtype = _AUTOCAST_DTYPES.get(settings.precision)
    return nullcontext() if dtype is None else torch.autocast(world.device.type, dtype)


def _compiled(
    settings: RunSettings,
    policy: Policy,
    config: ComputeConfig,
    original: MadeModel,
    example: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> ParallelModule:
    """The part of the model that is this rank's."""
    shared: dict[str, Any] = {
        "gen_savedir": Path(settings.output) / "generated",
        "reuse": "moo",
        "module_dtype": dtype,
        "broadcast_strategy": settings.parallel.broadcast,
    }
    named = policy.name if policy.built_in else policy.apply
    module = original.module
    if original.folder is None:
        part: ParallelModule = parallelize(module, example, named, config, **shared)
        return part
    # The model has no values, so its class is compiled, and each rank reads its own pieces.
    made: type[ParallelModule] = parallelize(
        type(module), example, named, config, module_fn=lambda: module, **shared
    )
    return made(init_params=False)


def _num_steps(settings: RunSettings, loader: Loader) -> int:
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    try:
        by_epoch = len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            "epochs needs a dataset with a length",
            why="nobody knows how many samples a stream has",
            hint="say how many steps to take: steps",
        ) from error
    return settings.epochs * by_epoch


def _tokens(settings: RunSettings, example: Mapping[str, Any], batches: Batches) -> int | None:
    """The tokens of a step, where samples are rows of tokens."""
    ids = example.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    return ids.shape[1] * settings.global_batch


def _predicted(
    settings: RunSettings,
    policy: Policy,
    config: ComputeConfig,
    original: MadeModel,
    model: ParallelModule,
    example: Mapping[str, Any],
    dtype: torch.dtype | None,
    batches: Batches,
) -> Prediction:
    assert settings.hardware is not None
    return predict(
        original.module, model, example, policy, config,
        hardware=settings.hardware, optimizer=settings.optimizer.name, dtype=dtype,
        num_microbatches=batches.num_microbatches,
    )  # fmt: skip
