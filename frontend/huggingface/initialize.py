""":func:`initialize`: make a model of transformers parallel, in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.files.make_process_group import join_process_group
from shardwright.frontend.huggingface.calls import Call, default_arguments
from shardwright.frontend.huggingface.initialize_settings import Settings
from shardwright.frontend.huggingface.initialized_model import (
    CALLS,
    Calls,
    guard_submodules,
    initialized_class,
)
from shardwright.frontend.huggingface.initialized_peft import become_initialized, check_can_wrap
from shardwright.frontend.huggingface.model_folders import folder_of_values, load_whole
from shardwright.frontend.huggingface.model_pieces import check_can_be_cut, cut
from shardwright.frontend.huggingface.model_programs import Programs
from shardwright.frontend.huggingface.peft_folders import is_peft_model
from shardwright.frontend.huggingface.twin import twin_of
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, DistributedError, UsageError
from shardwright.runtime.module.compiled import PROGRAM
from shardwright.runtime.module.scope import Scope
from shardwright.runtime.ranks.world import current_world, world_of_thread


@checked
def initialize(
    model: nn.Module,
    config: ComputeConfig | Mapping[str, Any],
    *,
    dummy_forward_args: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    gen_savedir: str | Path = "./.shardwright",
    reuse: str = "moo",
    load_module: bool = True,
) -> Any:
    """Make a model of transformers parallel, in place, and return it. Collective.

    Its parameters become this rank's pieces of them, and stay the same objects, so that an
    optimizer made before goes on. ``forward`` runs a compiled program, for batches and sequences of
    any size; ``generate`` gives the same tokens as before. The model has ``mpu``,
    ``save_parallelized`` and ``from_parallelized`` besides.

    ``config``: ``{"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}``, fields of
    :class:`ComputeConfig` by name, or both; ``pas_policy`` names the policy (default: ``"tp"``).
    Ranks that remain are data-parallel: wrap the model in ``DistributedDataParallel`` over
    ``model.mpu.get_data_parallel_group()``, or let :func:`build_optimizer` make the optimizer.

    ``dummy_forward_args``: an example of the call that the model is compiled for now (default: a
    training step on tokens). A call of another kind is compiled when it comes, by all ranks
    together. Policy ``"autodist"`` needs one: it searches plans for batches and sequences of its
    sizes. ``gen_savedir``, ``reuse``: where files lie, and what becomes of those of an earlier
    run, as in :func:`parallelize`. ``load_module=False`` makes these files and nothing else,
    without a job; the config then has ``runtime_ngpus``.

    A model on the meta device gets its values from ``checkpoint``, a folder of safetensors
    (default: where its config comes from). Each rank reads its own pieces, and never holds the
    whole model.

    A model of peft (``get_peft_model``) is initialized inside, and returned: ``save_pretrained``
    and ``save_parallelized(..., merge_checkpoints=True)`` write its adapter.

    Under ``torchrun`` the process group is made if there is none.

    Raises :class:`ConfigError` for a config with unknown keys or one that would do nothing,
    :class:`UsageError` for a second call, :class:`DistributedError` without a job, and what
    :func:`parallelize` raises.
    """
    if is_peft_model(model):
        check_can_wrap(model)
        wrapper: Any = model
        initialize(
            wrapper.get_base_model(), config, dummy_forward_args=dummy_forward_args,
            checkpoint=checkpoint, gen_savedir=gen_savedir, reuse=reuse, load_module=load_module,
        )  # fmt: skip
        if not load_module:
            return None
        become_initialized(model)
        return model
    check_model(model)
    if load_module:
        _join_job(model)
    title = f"initializing {type(model).__name__}"
    with Job(title, exchange_about(title)) as job:
        settings, call = job.every_rank_does(
            lambda: _read(model, config, dummy_forward_args, load_module=load_module)
        )
        folder = job.every_rank_does(lambda: folder_of_values(model, checkpoint))
        # Further programs are traced from it: by then the parameters of the model are pieces.
        twin = job.every_rank_does(lambda: twin_of(model))
    sizes = call.sizes() if settings.policy.searches else None
    programs = Programs(twin, settings, gen_savedir, reuse, sizes)
    if not load_module:
        programs.compile(call)
        return None
    program = programs.make_first(call)
    if folder is not None:  # before the model is changed: a folder that does not fit leaves it be
        load_whole(model, program, folder)
    cut(model, program)
    programs.join_buffers(model)
    model.__dict__[PROGRAM] = program
    model.__dict__[CALLS] = calls = Calls(model, programs)
    encoder = _encoder_path(model)
    if encoder:
        calls.add(encoder, model.get_submodule(encoder))
    if any(program.ranks_of(one).mesh.size > 1 for one in program.declarations):
        guard_submodules(model, (encoder,))
    model.__class__ = initialized_class(type(model))  # type: ignore[arg-type]
    return model


def check_model(model: nn.Module) -> None:
    cls = type(model)
    if PROGRAM in model.__dict__:
        raise UsageError(
            f"this {cls.__name__} was initialized already",
            why="its parameters are this rank's pieces, and cannot be cut again",
            hint="use the model as it is, or make a new one for another config",
        )
    if not any(base.__name__ == "PreTrainedModel" for base in cls.__mro__):
        inner = getattr(model, "module", None)
        raise ConfigError(
            f"initialize takes a model of transformers, not a {cls.__name__}",
            why=f"{type(inner).__name__} is inside it" if isinstance(inner, nn.Module) else None,
            hint="initialize the model, then wrap it"
            if isinstance(inner, nn.Module)
            else "shardwright.parallelize compiles any module",
        )
    if any(isinstance(part, Scope) for part in model.modules()):
        raise ConfigError(
            f"a part of this {cls.__name__} is a parallel module already",
            hint="initialize the model as transformers made it",
        )


def _join_job(model: nn.Module) -> None:
    """Make the process group under torchrun, if nobody has."""
    if world_of_thread() is not None or (dist.is_available() and dist.is_initialized()):
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise DistributedError(
            f"{type(model).__name__} is made parallel in a job, and none runs",
            why="torch.distributed is not initialised, and torchrun has not started this process",
            hint="torchrun --nproc_per_node=4 your_script.py; or pass load_module=False to "
            "compile only",
        )
    join_process_group()


def _read(
    model: nn.Module,
    config: ComputeConfig | Mapping[str, Any],
    dummy_args: Mapping[str, Any] | None,
    *,
    load_module: bool,
) -> tuple[Settings, Call]:
    world = current_world() if load_module else None
    settings = Settings.of(config, None if world is None else world.size)
    check_can_be_cut(model)
    if settings.policy.searches and not dummy_args:
        raise ConfigError(
            f"policy {settings.policy.name!r} needs dummy_forward_args",
            why="it searches the plan that is fastest for batches and sequences of some sizes, and "
            "they are not known",
            hint="initialize(..., dummy_forward_args={'input_ids': ..., 'labels': ...}), or in the "
            "initialize_options of a ShardwrightTrainer: an example of your call; other sizes run, "
            "too",
        )
    arguments = dummy_args or default_arguments(
        model, with_labels=not settings.config.inference_only
    )
    device = torch.device("cpu") if world is None else world.device
    call = Call.of(model, arguments, device, settings.config, names_dims=settings.names_dims)
    return settings, call


def _encoder_path(model: Any) -> str:
    """The path of the encoder of an encoder-decoder, which ``generate`` calls by itself."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return ""
    encoder = model.get_encoder()
    return next((path for path, part in model.named_modules() if part is encoder), "")
