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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.training.datasets import cast_to
from shardwright.frontend.training.evaluation import evaluate
from shardwright.frontend.training.hooks import Hook
from shardwright.frontend.training.read_settings import settings_json
from shardwright.frontend.training.run_saves import save, written_export
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.run_setup import set_up
from shardwright.frontend.training.run_state import Run, RunResult
from shardwright.frontend.training.step_window import StepWindow
from shardwright.frontend.training.stopping import StopRequest
from shardwright.runtime.errors import DataError
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.structure import flatten, map_leaves
from shardwright.runtime.swap import write_file


def train(settings: RunSettings, *, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Run what ``settings`` describe, on the ranks of this job. Collective.

    ``hooks``: functions by place, besides those that the settings name
    (:mod:`~shardwright.frontend.training.hooks`).

    Raises :class:`ShardwrightError` in words, on all ranks, for settings that do not fit each other
    or the ranks that there are.
    """
    world = current_world()
    with StopRequest(world) as stop:
        made = set_up(settings, world, stop, {**settings.hooks, **(hooks or {})})
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


def _take_steps(run: Run) -> None:
    """All steps that are left, or those until somebody asks to stop."""
    window = StepWindow(run)
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
            cast = cast_to(run.dtype)
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
        job.first_rank_does(lambda: written_export(run.settings, run.original, run.dtype))
    run.loggers.write("export", step=run.step, folder=run.settings.export)
