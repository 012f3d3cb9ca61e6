"""Names of nnScaler's trainer, where they mean the same as names here.

A configuration for nnScaler's command line may be kept: keys of the left column are read as those
of the right one. What it has beyond them is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL_KEYS: Mapping[str, str] = {
    "pas_policy": "parallel.policy",
    "compute_config.plan_ngpus": "parallel.plan_ngpus",
    "compute_config.use_zero": "parallel.use_zero",
    "compute_config.pas_config": "parallel.options",
    "compute_config": "parallel.compute",
    "broadcast_strategy": "parallel.broadcast",
    "global_batch_size": "global_batch",
    "micro_batch_size": "microbatch",
    "max_epochs": "epochs",
    "max_train_steps": "steps",
    "max_val_steps": "evaluation.max_steps",
    "val_every_n_train_steps": "evaluation.every_steps",
    "enable_progress_bar": "log.bar",
    "model.type": "model.function",
    "model.args": "model.arguments",
    "optimizer.type": "optimizer.name",
    "optimizer.args": "optimizer.options",
    "optimizer.clip_gnorm": "clip_norm",
    "dataset.type": "data.function",
    "dataset.train_args": "data.arguments",
    "checkpoint.save_dir": "checkpoints.folder",
    "checkpoint.every_n_train_steps": "checkpoints.every_steps",
    "checkpoint.keep_last_n_checkpoints": "checkpoints.keep",
    "checkpoint.resume_from": "checkpoints.resume",
}
"""The keys here, by key of nnScaler. The longest one that fits counts; what is below it keeps its
name."""

ORIGINAL_VALUES: Mapping[str, Mapping[str, str]] = {
    "precision": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "none": "model"},
    "checkpoints.resume": {"last": "auto"},
}
"""The values of nnScaler and what they are called here, by key here."""


def renamed(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The key here, in parts, of a key that may be nnScaler's."""
    for length in range(len(parts), 0, -1):
        known = ORIGINAL_KEYS.get(".".join(parts[:length]))
        if known is not None:
            return (*known.split("."), *parts[length:])
    return parts
