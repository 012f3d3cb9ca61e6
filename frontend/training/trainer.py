"""The run itself: :func:`train`.

    set up:   model, plan, optimizer, loader, the newest checkpoint
    repeat:   microbatches -> train_step -> norm and clipping -> optimizer -> schedule
              every n steps: a record, an evaluation, a checkpoint
    at last:  a checkpoint, an evaluation, the export

A step is :meth:`ParallelModule.train_step` for every plan, with stages or without, so microbatches
are accumulated in one way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from shardwright.data.make_loader import Loader
from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.huggingface.model_folders import (
    load_whole,
    names_for_folder,
    write_config,
)
from shardwright.frontend.huggingface.peft_folders import export_peft, is_peft_model
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.training.datasets import example_of, make_dataset, make_loader
from shardwright.frontend.training.dealt_samples import Batches, batches_of, policy_of
from shardwright.frontend.training.hooks import Hook, Hooks
from shardwright.frontend.training.learning_rates import make_scheduler
from shardwright.frontend.training.loggers import Loggers
from shardwright.frontend.training.loss_weights import LossWeights
from shardwright.frontend.training.observing import Observer
from shardwright.frontend.training.predictions import Prediction, predict
from shardwright.frontend.training.read_settings import settings_json
from shardwright.frontend.training.records import peak_memory_bytes
from shardwright.frontend.training.resuming import (
    Found,
    checkpoint_folder,
    checkpoint_to_resume,
    saved_extra,
)
from shardwright.frontend.training.run_checks import check_run, config_of
from shardwright.frontend.training.run_model import MadeModel, make_model
from shardwright.frontend.training.run_optimizer import make_optimizer
from shardwright.frontend.training.run_settings import DataSettings, RunSettings
from shardwright.frontend.training.stopping import StopRequest
from shardwright.policies.policy import Policy
from shardwright.runtime.checkpoint.load import load_checkpoint
from shardwright.runtime.checkpoint.merge_files import merge_checkpoint
from shardwright.runtime.checkpoint.pretrained import export_pretrained
from shardwright.runtime.checkpoint.save import CheckpointSave, save_checkpoint
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import CheckpointError, ConfigError, DataError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.structure import flatten, map_leaves
from shardwright.runtime.swap import write_file
from shardwright.runtime.training.loss_scaling import LossScaler
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

_MODULE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_AUTOCAST_DTYPES = {"bfloat16_autocast": torch.bfloat16, "float16_autocast": torch.float16}

TITLE = "preparing a training run"


@dataclass(frozen=True)
class RunResult:
    """What a run came to. ``step``: the last one. ``stopped_by``: why it ended before all steps
    were taken, if it did; started again it goes on.
    """

    step: int
    num_steps: int
    stopped_by: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.step >= self.num_steps


@dataclass
class Run:
    """A run that is under way, as hooks see it. ``step``: how many steps were taken; ``stop``: what
    asks it to stop.
    """

    settings: RunSettings
    world: World
    original: MadeModel
    model: ParallelModule
    optimizer: ParallelOptimizer
    scheduler: LambdaLR
    scaler: LossScaler
    loader: Loader
    batches: Batches
    weights: LossWeights
    dtype: torch.dtype | None
    num_steps: int
    tokens_per_step: int | None
    stop: StopRequest
    loggers: Loggers
    hooks: Hooks
    observer: Observer
    evaluated: tuple[DataSettings, Any, Any] | None
    prediction: Prediction
    step: int = 0
    last_save: CheckpointSave | None = field(default=None, repr=False)
    saved_step: int | None = None


def train(settings: RunSettings, *, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Run what ``settings`` describe, on the ranks of this job. Collective.

    ``hooks``: functions by place, besides those that the settings name
    (:mod:`~shardwright.frontend.training.hooks`).

    Raises :class:`ShardwrightError` in words, on all ranks, for settings that do not fit each other
    or the ranks that there are.
    """
    world = current_world()
    with StopRequest(world) as stop:
        made = _set_up(settings, world, stop, {**settings.hooks, **(hooks or {})})
        # All steps were taken before: nothing is left to run.
        if isinstance(made, RunResult):
            if world.rank == 0:
                print(
                    f"all {made.num_steps} steps of this run were taken before: raise steps, or "
                    f"name another output than {settings.output}",
                    flush=True,
                )
            return made
        run = made
        with run.loggers:
            run.hooks.call("on_start", run, _tell_start(run))
            try:
                _take_steps(run)
            finally:
                run.observer.close()
            return _finish(run)


# Setting up


def _set_up(
    settings: RunSettings, world: World, stop: StopRequest, hooks: Mapping[str, Hook | str]
) -> Run | RunResult:
    """Everything before the first step, at the place where the newest checkpoint was."""
    with Job(TITLE, exchange_about(TITLE)) as job:
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
    with Job(TITLE, exchange_about(TITLE)) as job:
        is_done = step >= num_steps
        job.every_rank_does(lambda: _check_export(settings, is_done=is_done))
        if is_done:
            # It may have been killed after its last checkpoint, before the export was there.
            if settings.export is not None:
                job.first_rank_does(lambda: _written(settings, original, dtype))
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
    cast: dict[str, Any] = map_leaves(example, _cast_to(dtype))
    weights = LossWeights.of(settings.loss, original, cast)
    return weights.example(cast), weights


def _cast_to(dtype: torch.dtype | None) -> Callable[[str, Any], Any]:
    """What casts the floating tensors of samples to the dtype of the module."""

    def cast(path: str, leaf: Any) -> Any:
        is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if dtype is not None and is_floating else leaf

    return cast


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


def _check_export(settings: RunSettings, *, is_done: bool) -> None:
    """Refuse a folder that is there before the first step, not after the last one."""
    if settings.export is not None and Path(settings.export).exists() and not is_done:
        raise CheckpointError(
            f"export: {settings.export} exists",
            why="the trained model would replace it",
            hint="name a new folder, or delete it first",
        )


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


def _tell_start(run: Run) -> dict[str, Any]:
    """Write what is being run into the output folder, and tell of it."""
    if run.world.rank == 0:
        output = Path(run.settings.output)
        text = json.dumps(settings_json(run.settings), indent=1, default=str) + "\n"
        write_file(output / "settings.json", text.encode())
    model = run.model
    stages = getattr(model, "stages", ())
    return run.loggers.write(
        "start",
        model=type(model).__name__,
        ranks=run.world.size,
        policy=run.settings.parallel.policy,
        # A pipeline has a mesh for each stage.
        mesh=" | ".join(str(stage.mesh) for stage in stages) or str(model.mesh),
        units=run.batches.num_units,
        microbatches=run.batches.num_microbatches,
        loss=run.weights.kind,
        resumed_after=run.step,
        steps=run.num_steps,
        **({} if run.prediction.note is None else {"note": run.prediction.note}),
    )


# Steps


def _take_steps(run: Run) -> None:
    """All steps that are left, or those until somebody asks to stop."""
    window = _Window(run)
    for samples in _samples(run):
        run.observer.before_step(run.step + 1)
        window.data_ready()
        # Decided before the step, as the norm and the loss of a step that nobody reads cost
        # collectives.
        is_logged = (run.step + 1) % run.settings.log.every_steps == 0
        is_logged = is_logged or run.step + 1 == run.num_steps
        rate = float(run.scheduler.get_last_lr()[0])
        losses, norm = _one_step(run, samples, needs_norm=is_logged)
        run.step += 1
        run.observer.after_step(run.step)
        record: dict[str, Any] = {"event": "step", "step": run.step}
        if is_logged:
            record = window.record(losses, norm, rate)
        with window.aside():
            run.hooks.call("on_step_end", run, record)
            _after_step(run)
        if run.stop.is_agreed():
            return
        window.step_done(was_logged=is_logged)


def _samples(run: Run) -> Iterator[Sequence[Any]]:
    """The microbatches of the steps that are left."""
    while run.step < run.num_steps:
        before = run.step
        for samples in run.loader:
            cast = _cast_to(run.dtype)
            yield [None if s is None else map_leaves(s, cast) for s in samples]
            if run.step >= run.num_steps:
                return
        if run.step == before:
            raise DataError(
                "the dataset has no global batch",
                why=f"it has less than {run.settings.global_batch} samples",
                hint="use a smaller global_batch",
            )


def _one_step(
    run: Run, samples: Sequence[Any], *, needs_norm: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Forward, backward, clipping, update. The losses of the microbatches, and the norm of all
    gradients before they were clipped.
    """
    model, optimizer, scaler = run.model, run.optimizer, run.scaler
    number = len(samples)
    results = model.train_step(
        run.weights.told(samples, model),
        scale_fn=lambda loss: scaler.scale(run.weights.scaled(loss, number)),
    )
    # Before clipping: the norm of scaled gradients is another one.
    scaler.unscale_(optimizer)
    norm = None
    if needs_norm or run.settings.clip_norm is not None:
        norm = optimizer.clip_gnorm(run.settings.clip_norm)
    scaler.step(optimizer)
    scaler.update()
    run.scheduler.step()
    return [next(iter(flatten(result).values())) for result in results], norm


def _after_step(run: Run) -> None:
    """What is due after a step; the last one is followed by :func:`_finish`."""
    if run.step == run.num_steps:
        return
    every = run.settings.evaluation.every_steps
    if every is not None and run.step % every == 0:
        evaluate(run)
    every = run.settings.checkpoints.every_steps
    if every is not None and run.step % every == 0:
        save(run)


class _Window:
    """The steps since the last record: how long they took, and what they sent."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begin()
        self._waiting_since = time.perf_counter()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._waited_before = self._run.world.counters.waited_s
        self._num_steps, self._data_s, self._aside_s = 0, 0.0, 0.0

    def data_ready(self) -> None:
        """The samples of a step have come."""
        self._num_steps += 1
        self._data_s += time.perf_counter() - self._waiting_since

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around evaluations and saves, which count for no step."""
        started, waited_s = time.perf_counter(), self._run.world.counters.waited_s
        yield
        self._aside_s += time.perf_counter() - started
        self._waited_before += self._run.world.counters.waited_s - waited_s

    def step_done(self, *, was_logged: bool) -> None:
        """A step is over, and what followed it."""
        if was_logged:
            self._begin()
        self._waiting_since = time.perf_counter()

    def record(self, losses: Sequence[Tensor], norm: Tensor | None, rate: float) -> dict[str, Any]:
        """The record of the step that is over, which took that learning rate. Collective."""
        run, world = self._run, self._run.world
        loss = run.weights.total(losses, world, run.batches.num_units).item()
        norm_value = None if norm is None else float(norm)
        # On a GPU the numbers above were waited for, so the steps are over.
        now = time.perf_counter()
        waited_s = world.counters.waited_s - self._waited_before
        seconds = now - self._started - self._aside_s
        step_s = seconds / self._num_steps
        memory = torch.tensor(float(peak_memory_bytes(world.device)), device=world.device)
        memory = world.everyone.all_reduce(memory.double(), "max", phase="setup")
        predicted = run.prediction
        # Collectives of a GPU are waited for on the device, where the host's clock does not see
        # them.
        waits_on_host = world.device.type == "cpu" and world.size > 1
        return run.loggers.write(
            "step",
            step=run.step,
            epoch=run.loader.epoch,
            loss=loss,
            grad_norm=norm_value,
            lr=rate,
            step_s=step_s,
            predicted_step_s=predicted.step_s,
            samples_per_s=run.settings.global_batch / step_s,
            tokens_per_s=None if run.tokens_per_step is None else run.tokens_per_step / step_s,
            mfu=predicted.mfu(step_s),
            peak_memory_bytes=int(memory.item()),
            predicted_peak_memory_bytes=predicted.peak_bytes,
            communication_share=waited_s / seconds if waits_on_host else None,
            predicted_communication_share=predicted.communication_share,
            data_s=self._data_s,
        )


def evaluate(run: Run) -> dict[str, Any]:
    """The mean loss over the global batches of the evaluation data, in evaluation mode. Collective.

    Samples that fill no global batch are left out, and counted in the record.
    """
    assert run.evaluated is not None
    settings, dataset, transform = run.evaluated
    device = run.world.device if run.world.device.type == "cuda" else None
    loader = make_loader(
        settings, dataset, transform, run.model,
        global_batch=run.settings.global_batch, microbatch=run.batches.microbatch, device=device,
    )  # fmt: skip
    started, losses = time.perf_counter(), []
    with _evaluation_mode(run.model):
        for samples in loader:
            cast = _cast_to(run.dtype)
            given = [None if s is None else map_leaves(s, cast) for s in samples]
            results = run.model.infer_step(run.weights.told(given, run.model))
            found = [next(iter(flatten(result).values())) for result in results]
            losses.append(run.weights.total(found, run.world, run.batches.num_units))
            if len(losses) == run.settings.evaluation.max_steps:
                break
    loader.close()
    if not losses:
        raise DataError(
            "the evaluation data has no global batch",
            why=f"it has less than {run.settings.global_batch} samples",
            hint="evaluate on more, or use a smaller global_batch",
        )
    num_samples = len(losses) * run.settings.global_batch
    left_out = len(dataset) - num_samples if hasattr(dataset, "__len__") else None
    loss = torch.stack(losses).mean().item()
    record = run.loggers.write(
        "evaluation",
        step=run.step,
        loss=loss,
        # exp(709.8) is the largest float64.
        perplexity=math.exp(min(loss, 700.0)),
        samples=num_samples,
        samples_left_out=left_out,
        seconds=time.perf_counter() - started,
    )
    run.hooks.call("on_evaluate", run, record)
    return record


@contextmanager
def _evaluation_mode(model: ParallelModule) -> Iterator[None]:
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def save(run: Run, *, wait: bool = False) -> None:
    """Save a checkpoint, in the background if the settings say so. Collective."""
    settings = run.settings.checkpoints
    run.last_save = save_checkpoint(
        checkpoint_folder(run.settings),
        run.model,
        run.optimizer,
        scheduler=run.scheduler,
        loader=run.loader,
        step=run.step,
        extra=saved_extra(run.world.size, run.batches.plan_ngpus, run.scaler.state_dict()),
        keep=settings.keep or None,
        async_save=settings.in_background and not wait,
    )
    run.saved_step = run.step
    if wait:
        run.last_save.wait()
    record = run.loggers.write("save", step=run.step, folder=str(run.last_save.folder))
    run.hooks.call("on_save", run, record)


# The end


def _finish(run: Run) -> RunResult:
    run.stop.settle()
    # A step that saves may be the one that a run is stopped after.
    if run.saved_step != run.step or run.last_save is None:
        save(run, wait=True)
    else:
        run.last_save.wait()
    result = RunResult(run.step, run.num_steps, run.stop.reason)
    if result.is_complete:
        # Asked to stop during the last step: all steps were taken, so nothing is left to go on
        # with.
        result = RunResult(run.step, run.num_steps)
        if run.evaluated is not None:
            evaluate(run)
        _export(run)
    run.loader.close()
    record = run.loggers.write("end", step=run.step, stopped_by=result.stopped_by)
    run.hooks.call("on_end", run, record)
    return result


def _export(run: Run) -> None:
    """Write the trained model: for ``from_pretrained``, as an adapter of peft, or as whole tensors
    under the original names.
    """
    if run.settings.export is None:
        return
    with Job("exporting the model", exchange_about("exporting the model")) as job:
        job.first_rank_does(lambda: _written(run.settings, run.original, run.dtype))
    run.loggers.write("export", step=run.step, folder=run.settings.export)


def _written(settings: RunSettings, original: MadeModel, dtype: torch.dtype | None) -> str:
    """The folder of the export, written if it is not there."""
    assert settings.export is not None
    folder, out = checkpoint_folder(settings), Path(settings.export)
    # An earlier start of the same run has written it.
    if out.exists():
        return str(out)
    if is_peft_model(original.module):
        return str(export_peft(folder, out, original.module))
    if not original.is_transformers:
        return str(merge_checkpoint(folder, out))
    module: Any = original.module
    export_pretrained(folder, out, module.config, rename=names_for_folder(module))
    write_config(module, out, dtype)
    return str(out)
