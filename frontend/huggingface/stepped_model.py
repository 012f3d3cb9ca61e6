"""Models of transformers whose ranks run whole steps together, because a pipeline does.

    model = make_stepped(model, example, {"pas_policy": "pp", "plan_ngpus": 2}, num_microbatches=4)
    losses = model.train_step([batch, batch, batch, batch])   # and the gradients of all four

:func:`shardwright.initialize` leaves a model where it is, with a ``forward`` that runs a program.
One call of ``forward`` is one batch, and the stages of a pipeline need several. So the model is
compiled as :func:`shardwright.parallelize` does it, and :class:`SteppedModel` has what is known of
the original besides: its config, its names in folders, and the arguments of its ``forward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.huggingface.calls import EXAMPLE_SIZES, Call
from shardwright.frontend.huggingface.initialize import check_model
from shardwright.frontend.huggingface.initialize_settings import PIPELINES, Settings
from shardwright.frontend.huggingface.initialized_model import refusal
from shardwright.frontend.huggingface.model_folders import (
    folder_of_values,
    load_whole,
    save_merged,
)
from shardwright.frontend.huggingface.parallel_folders import ParallelFolders
from shardwright.frontend.huggingface.peft_folders import is_peft_model, save_adapter
from shardwright.frontend.huggingface.twin import twin_of
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.module.end2end import ScaleFunction
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.structure import flatten

_NUM_MICROBATCHES = ("num_microbatches", "pipeline_nmicros")
_PIECES = "every rank has pieces of its own"


class SteppedModel(ParallelFolders, nn.Module):
    """A model of transformers, or of peft around one, that is trained by :meth:`train_step`.

    ``parallel_module``: this rank's part of it. ``original``: its twin without values. ``call``:
    the kind of arguments that it was compiled for.
    """

    def __init__(self, module: ParallelModule, original: nn.Module, call: Call) -> None:
        super().__init__()
        self.parallel_module = module
        # Not a submodule: its parameters have no values.
        self.__dict__["original"] = original
        self._call = call
        self._num_samples: int | None = getattr(module, "num_microbatches", None)
        # Libraries read the names of the arguments, and leave others out of batches.
        self.__dict__["forward"] = _Inference(self._infer, _inside(original))

    original: Any

    @property
    def config(self) -> Any:
        """The config of the model."""
        return _inside(self.original).config

    @property
    def main_input_name(self) -> str:
        """The argument by which transformers counts tokens."""
        return str(_inside(self.original).main_input_name)

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """The parameters of the whole model."""
        return int(_inside(self.original).num_parameters(*args, **kwargs))

    def train_step(
        self, batches: Sequence[Mapping[str, Any]], scale_fn: ScaleFunction | None = None
    ) -> list[Tensor]:
        """Forward and backward of several batches. Returns their losses, and leaves the gradients
        of all of them. Fewer batches than the schedule has microbatches are filled up.
        ``scale_fn``: makes of a loss what is differentiated.
        """
        samples, dummies = self._filled(batches)
        results = self.parallel_module.train_step(samples, dummies, scale_fn)
        return [next(iter(flatten(result).values())) for result in results[: len(batches)]]

    def _infer(self, inputs: Mapping[str, Any]) -> Any:
        """The result for one batch, on all ranks that share the model."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"a call of {type(_inside(self.original)).__name__} that may be differentiated",
                why="its ranks run whole steps of several batches",
                hint="train_step(batches); or call it under torch.no_grad()",
            )
        samples, _ = self._filled([inputs])
        return self.parallel_module.infer_step(samples)[0]

    def _filled(
        self, batches: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[bool]]:
        """A sample for each microbatch of the schedule, and which of them only fill it up.
        Those are a single row: their results are thrown away.
        """
        missing = max(0, (self._num_samples or 0) - len(batches))
        samples = [*batches, *[self._row(batches[0])] * missing]
        return samples, [index >= len(batches) for index in range(len(samples))]

    def _row(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The first row of a batch, where batches may have any size."""
        varies = {name for name, dims in self._call.dims.items() if 0 in dims}
        return {name: x[:1] if name in varies else x for name, x in batch.items()}

    # Folders

    def _saved(self) -> tuple[nn.Module, Any]:
        return self.parallel_module, _inside(self.original)

    def _save_merged(
        self, directory: Path, *, save_config: bool, max_file_bytes: int | None
    ) -> None:
        if is_peft_model(self.original):
            save_adapter(self.parallel_module, directory, self.original)
            return
        save_merged(
            self.parallel_module, directory, save_config=save_config,
            max_file_bytes=max_file_bytes, config_of=_inside(self.original),
        )  # fmt: skip

    generate = refusal(
        "generate",
        "its ranks run whole steps, and a token is a call",
        "save it, and generate with shardwright.initialize under a policy without pipeline",
    )
    save_pretrained = refusal(
        "save_pretrained", _PIECES, "save_parallelized(directory, merge_checkpoints=True)"
    )
    push_to_hub = refusal(
        "push_to_hub", _PIECES, "save_parallelized(directory, merge_checkpoints=True), then upload"
    )


class _Inference:
    """``forward`` of a :class:`SteppedModel`, with the arguments of the original."""

    def __init__(self, infer: Callable[[Mapping[str, Any]], Any], original: Any) -> None:
        self._infer = infer
        self.__signature__ = inspect.signature(original.forward)

    def __call__(self, **inputs: Any) -> Any:
        return self._infer(inputs)


def make_stepped(
    model: nn.Module,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    num_microbatches: int,
    checkpoint: str | Path | None = None,
    gen_savedir: str | Path = "./.shardwright",
    reuse: str = "moo",
) -> SteppedModel:
    """Compile a model of transformers, or of peft around one, for whole steps. Collective.

    ``arguments``: an example of a batch, whose rows and length may vary. ``config``: as for
    :func:`shardwright.initialize`, and with stages: ``pas_policy`` ``"pp"`` or ``"hybrid"``, or
    ``pipeline_parallel_size``. ``num_microbatches``: the batches of a step. The other arguments are
    those of ``initialize``.

    Raises :class:`ConfigError` for a config that says another number of microbatches, and what
    :func:`shardwright.parallelize` raises.
    """
    inside = _inside(model)
    check_model(inside)
    world = current_world()

    def read() -> tuple[Settings, Call]:
        settings = Settings.of(config, world.size, takes_steps=True)
        settings = _with_microbatches(settings, num_microbatches)
        call = Call.of(
            model, arguments, world.device, settings.config, names_dims=settings.names_dims
        )
        dims = settings.config.dynamic_dims if settings.names_dims else call.dims
        return replace(settings, config=replace(settings.config, dynamic_dims=dims)), call

    title = f"compiling {type(inside).__name__} for whole steps"
    with Job(title, exchange_about(title)) as job:
        settings, call = job.every_rank_does(read)
        folder = job.every_rank_does(lambda: folder_of_values(inside, checkpoint))
        original = job.every_rank_does(lambda: twin_of(model))
    # What is searched or balanced depends on the sizes.
    example = call.examples({**EXAMPLE_SIZES, **call.sizes()})
    module = _compiled(model, example, settings, folder, gen_savedir, reuse).to(world.device)
    made = getattr(module, "num_microbatches", num_microbatches)
    if made != num_microbatches:
        raise _other_number(made, num_microbatches)
    return SteppedModel(module.train(model.training), original, call)


def _compiled(
    model: nn.Module,
    example: Mapping[str, Any],
    settings: Settings,
    folder: Path | None,
    gen_savedir: str | Path,
    reuse: str,
) -> ParallelModule:
    """The part of this rank, with its values."""
    policy: Any = settings.policy.name if settings.policy.built_in else settings.policy.apply
    files: dict[str, Any] = {"gen_savedir": gen_savedir, "reuse": reuse}
    if folder is None:
        part: ParallelModule = parallelize(model, example, policy, settings.config, **files)
        return part
    if is_peft_model(model):
        raise ConfigError(
            "the adapter of a pipeline is on the meta device",
            why="its base and its own values lie in different folders",
            hint="give the model its values before it is made parallel",
        )
    made: type[ParallelModule] = parallelize(
        type(model), example, policy, settings.config, module_fn=lambda: model, **files
    )
    part = made(init_params=False)
    load_whole(model, part, folder)
    return part


def _with_microbatches(settings: Settings, number: int) -> Settings:
    """The settings for ``number`` microbatches, where the policy makes a schedule for them."""
    given = dict(settings.config.pas_config)
    said = next((given[name] for name in _NUM_MICROBATCHES if name in given), None)
    if said not in (None, number):
        raise _other_number(said, number)
    if settings.policy.name not in PIPELINES or said is not None or "actions" in given:
        return settings
    options = {**given, "num_microbatches": number}
    return replace(settings, config=replace(settings.config, pas_config=options))


def _other_number(said: Any, number: int) -> ConfigError:
    return ConfigError(
        f"the plan has {said} microbatches, and a step has {number} batches",
        why="the batches of a step are the microbatches of the pipeline",
        hint="leave num_microbatches out of pas_config",
    )


def _inside(model: Any) -> Any:
    """The model of transformers: ``model`` itself, or what peft has put its adapter into."""
    return model.get_base_model() if is_peft_model(model) else model
