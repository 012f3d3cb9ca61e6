"""What a run writes: checkpoints, and the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwright.frontend.huggingface.model_folders import names_for_folder, write_config
from shardwright.frontend.huggingface.peft_folders import export_peft, is_peft_model
from shardwright.frontend.training.resuming import checkpoint_folder, saved_extra
from shardwright.frontend.training.run_model import MadeModel
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.run_state import Run
from shardwright.runtime.checkpoint.merge_files import merge_checkpoint
from shardwright.runtime.checkpoint.pretrained import export_pretrained
from shardwright.runtime.checkpoint.save import save_checkpoint
from shardwright.runtime.errors import CheckpointError


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


def check_export(settings: RunSettings, *, is_done: bool) -> None:
    """Refuse a folder that is there before the first step, not after the last one."""
    if settings.export is not None and Path(settings.export).exists() and not is_done:
        raise CheckpointError(
            f"export: {settings.export} exists",
            why="the trained model would replace it",
            hint="name a new folder, or delete it first",
        )


def written_export(settings: RunSettings, original: MadeModel, dtype: torch.dtype | None) -> str:
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
