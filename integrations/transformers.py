"""Hugging Face's ``Trainer``, for models that several ranks share.

    trainer = ShardwrightTrainer(
        model=model,
        args=TrainingArguments("out", per_device_train_batch_size=4),
        train_dataset=dataset,
        parallel={"model_parallelism": {"enable": True, "tensor_parallel_size": 2}},
    )
    trainer.train()

The stock ``Trainer`` asks accelerate to wrap the model, to deal batches to single ranks, to clip
gradients and to gather predictions: all of it wrong where a rank has pieces of a model. Here
nothing wraps the model. The ranks that share one get the same batches, gradients are summed and
clipped by :func:`shardwright.build_optimizer`, and checkpoints are ours, so that a run goes on
under another plan. What is logged, evaluated, kept and saved, and when, is the Trainer's affair as
before.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.frontend.huggingface.calls import default_arguments
from shardwright.frontend.huggingface.initialize import initialize
from shardwright.frontend.huggingface.initialize_settings import asks_for_steps
from shardwright.frontend.huggingface.initialized_model import CALLS, InitializedModel
from shardwright.frontend.huggingface.initialized_peft import InitializedPeft
from shardwright.frontend.huggingface.stepped_model import SteppedModel, make_stepped
from shardwright.frontend.training.loss_weights import COUNT, LossWeights
from shardwright.frontend.training.run_model import MadeModel
from shardwright.runtime.checkpoint.folders import TRAINER_FOLDER
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, UsageError, brief
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.swap import write_file
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer
except ImportError as error:
    raise ConfigError(
        "Hugging Face's Trainer is not installed",
        why=str(error),
        hint="pip install transformers accelerate",
    ) from error

_REFUSED: Mapping[str, tuple[str, str]] = {
    "fp16": (
        "torch's GradScaler looks at the gradients of one rank",
        "bf16=True, or your own loop with shardwright.LossScaler",
    ),
    "fsdp": ("shardwright splits the state itself", "parallel={..., 'use_zero': 1}"),
    "deepspeed": ("shardwright splits the state itself", "parallel={..., 'use_zero': 1}"),
    "torch_compile": ("forward runs the files of the plan", "leave it out"),
    "auto_find_batch_size": (
        "a rank that is out of memory leaves the others waiting",
        "give per_device_train_batch_size",
    ),
    "neftune_noise_alpha": (
        "it is a hook on the embedding, which the program does not call",
        "leave it out",
    ),
    "gradient_checkpointing": (
        "the programs are compiled with what the model had",
        "call model.gradient_checkpointing_enable() before the trainer is made, or let the plan "
        "recompute",
    ),
    "bf16_full_eval": ("the programs are compiled for the model's dtype", "bf16=True"),
    "fp16_full_eval": ("the programs are compiled for the model's dtype", "bf16=True"),
}
"""Options of ``TrainingArguments`` that cannot be honoured: why, and what to do instead."""


class ShardwrightMixin:
    """What makes a ``Trainer`` train models that several ranks share: put it in front of one.

        class Ours(ShardwrightMixin, SFTTrainer): ...

    ``model``: a model of transformers, or of peft around one, or one that was initialized already.
    ``parallel``: the config of :func:`shardwright.initialize` for the former.
    ``initialize_options``: its other arguments. Gradients are averaged over the units
    (``grad_reduction="mean"``), as the Trainer has it everywhere.

    Raises :class:`ConfigError` for options that cannot be honoured.
    """

    # What Trainer has.
    args: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    processing_class: Any
    state: Any
    gather_function: Callable[..., Any]
    create_scheduler: Callable[..., Any]
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    model_accepts_loss_kwargs: bool
    compute_loss: Callable[..., Any]
    _get_collator_with_removed_columns: Callable[..., Any]
    _prepare_inputs: Callable[..., dict[str, Any]]
    get_decay_parameter_names: Callable[..., list[str]]
    get_optimizer_cls_and_kwargs: Callable[..., tuple[Any, Any]]
    optimizer_cls_and_kwargs: tuple[Any, Any] | None
    _created_lr_scheduler: bool

    # What an evaluation calls its metrics, and how many samples the last one had.
    _evaluated: tuple[str, int] = ("eval", 0)

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *rest: Any,
        parallel: ComputeConfig | Mapping[str, Any] | None = None,
        initialize_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            raise ConfigError(
                "args are missing", hint="args=TrainingArguments('out', ...), as for Trainer"
            )
        _check_arguments(args, kwargs)
        if model is None:
            raise ConfigError(
                "model is missing",
                why="a model that is made anew for each trial (model_init) would need new programs",
                hint="model=AutoModelForCausalLM.from_pretrained(...)",
            )
        if not isinstance(parallel, ComputeConfig | Mapping | None):
            raise ConfigError(
                f"parallel={brief(parallel)} is no config",
                why="it says the policy and the ranks that share the model, as for initialize",
                hint='parallel={"pas_policy": "tp", "plan_ngpus": 2}',
            )
        # accelerate makes the process group, with its own choice of backend, before anything else.
        _ = args.device
        _check_zero(_zero_stage(model, parallel), args)
        options = dict(initialize_options or {})
        self._waiting: list[dict[str, Any]] = []
        if not asks_for_steps(parallel):
            made = _made_parallel(model, parallel, options)
            super().__init__(made, args, *rest, **kwargs)  # type: ignore[call-arg]
            self._check_counting()
            return
        assert isinstance(parallel, Mapping)
        self._check_own_loss(args, kwargs)
        # The example of a batch comes from the data, which subclasses may prepare.
        super().__init__(model, args, *rest, **kwargs)  # type: ignore[call-arg]
        self._become_stepped(model, _averaging(parallel), options)
        self._check_counting()

    @property
    def _ranks(self) -> RankMesh:
        ranks: RankMesh = self.model.parallel_module.ranks
        return ranks

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Programs lie where they run, and a model that is to be cut goes nowhere as a whole."""

    # Pipelines

    def _become_stepped(
        self, model: nn.Module, parallel: Mapping[str, Any], options: dict[str, Any]
    ) -> None:
        """Make the model parallel for whole steps. The batches of an accumulated step are the
        microbatches of its pipeline.
        """
        example = options.pop("dummy_forward_args", None) or self._example(model)
        with self.compute_loss_context_manager(), _drawing_nothing():
            self.model = self.model_wrapped = self.callback_handler.model = make_stepped(
                model, example, parallel,
                num_microbatches=self.args.gradient_accumulation_steps, **options,
            )  # fmt: skip

    def _check_counting(self) -> None:
        """Find out whether the model divides its loss by the number of labels that it is told. Many
        a model takes any argument, and the Trainer trusts them all: it multiplies losses by the
        number of replicas then, which is right for a sum and wrong for a mean.
        """
        if self._ranks.num_units == 1 or not self.model_accepts_loss_kwargs:
            return
        original = _original(self.model)
        try:
            example = self._example(original)
        except Exception:  # a dataset or a collator of the user's that cannot be asked beforehand
            return
        if COUNT not in example:
            return
        made = MadeModel(original)
        if LossWeights("tokens").unheard(made, example, trusts=True) is not None:
            self.args.average_tokens_across_devices = False

    def _example(self, model: nn.Module) -> dict[str, Any]:
        """A batch of the training data, with what the loop adds to it. Of a stream, which may not
        begin twice, it is a batch of tokens.
        """
        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        literals = MadeModel(model).literals
        if data is None or isinstance(data, Mapping) or not hasattr(data, "__getitem__"):
            batch = default_arguments(model, with_labels=True)
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
            with _drawing_nothing():
                size = min(self.args.per_device_train_batch_size, len(data))
                batch = dict(collate([data[index] for index in range(size)]))
        if self.model_accepts_loss_kwargs and "labels" in batch:
            batch[COUNT] = torch.ones(())
        return {**literals, **batch}

    def _check_own_loss(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse losses that are computed outside of the model, whose last stage has it."""
        own = {
            f"{type(self).__name__}.compute_loss": type(self).compute_loss
            is not Trainer.compute_loss,
            "compute_loss_func": kwargs.get("compute_loss_func") is not None,
            "label_smoothing_factor": bool(args.label_smoothing_factor),
        }
        for name, is_own in own.items():
            if is_own:
                raise ConfigError(
                    f"{name} is not for pipelines",
                    why="ranks run steps as a whole, up to the loss that the model returns",
                    hint="compute the loss in the model's forward, or use a plan without pipeline",
                )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One batch; of a pipeline, the whole step with the last of its batches."""
        if not isinstance(self.model, SteppedModel):
            loss: torch.Tensor = super().training_step(  # type: ignore[misc]
                model, inputs, num_items_in_batch
            )
            return loss
        model.train()
        is_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        told = {COUNT: num_items_in_batch} if is_counted else {}
        self._waiting.append({**self._prepare_inputs(inputs), **told})
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        factor = 1.0 / len(batches)
        if is_counted:
            # Gradients are averaged over units, and the number is that of all units together.
            factor = self._ranks.num_units if self.args.average_tokens_across_devices else 1
        losses = self.model.train_step(batches, lambda loss: loss * factor)
        return torch.stack(losses).sum().detach() * factor

    # Batches and metrics, by unit

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.prepare_data_loader = self._dealt_by_unit
        self.accelerator.gather_for_metrics = self.gather_function = self._gathered

    def _dealt_by_unit(self, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader of this rank's unit: ranks that share a model get the same batches."""
        accelerator, ranks = self.accelerator, self._ranks
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks.num_units,
            process_index=ranks.unit,
            split_batches=accelerator.split_batches,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )

    def _gathered(self, tensors: Any, use_gather_object: bool = False) -> Any:
        """Tensors of all units, one after another. Samples that fill up the last batch go away."""
        seen, whole = self.accelerator.gradient_state, self._gathered_whole(tensors)
        if not seen.end_of_dataloader or seen.remainder <= 0:
            return whole
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x[: seen.remainder], whole)

    def _gathered_whole(self, tensors: Any) -> Any:
        """Tensors of all units, one after another."""
        units = self._ranks.group((), across_units=True)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: units.all_gather_cat(x if x.ndim else x.reshape(-1)), tensors
        )

    def get_tp_size(self) -> int:
        """The ranks that get the same batch."""
        return self._ranks.unit_size

    # Counts and speeds, by unit: the stock ones count ranks

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self._ranks.unit_size

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """What the whole model computes for a batch, as this rank's share: ranks are summed."""
        operations: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        return operations // self._ranks.unit_size

    def get_num_trainable_parameters(self) -> int:
        """The number of trained parameters of the whole model. The start of ``train`` tells that of
        this rank.
        """
        return sum(p.numel() for p in _original(self.model).parameters() if p.requires_grad)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self._count_steps(logs)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().predict(*args, **kwargs)  # type: ignore[misc]
        self._count_steps(found.metrics)
        return found

    def _count_steps(self, metrics: dict[str, float]) -> None:
        """Correct how many steps per second an evaluation did, if ``metrics`` are of one."""
        prefix, num_samples = self._evaluated
        name = f"{prefix}_steps_per_second"
        if name in metrics and num_samples:
            batch = self.args.eval_batch_size
            told = math.ceil(num_samples / (batch * self.args.world_size))
            done = math.ceil(num_samples / (batch * self._ranks.num_units))
            metrics[name] = round(metrics[name] * done / told, 3)

    # The optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if isinstance(self.optimizer, ParallelOptimizer):
            return self._in_use(self.optimizer)
        if self.optimizer is not None:
            raise ConfigError(
                f"a {type(self.optimizer).__name__} was passed to the trainer",
                why="it would update the pieces of this rank with gradients that nobody sums",
                hint="optimizers=(shardwright.build_optimizer(model, ...), None), or "
                "optimizer_cls_and_kwargs=",
            )
        # By name, as pieces and empty parameters look like others to a rule by shape.
        is_stepped = isinstance(self.model, SteppedModel)
        original = self.model.original if is_stepped else self.model
        decayed = set(self.get_decay_parameter_names(original))
        make, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        if {"params", "model", "optimizer_dict"} & kwargs.keys() or not (
            isinstance(make, type) and issubclass(make, torch.optim.Optimizer)
        ):
            raise ConfigError(
                f"optim={str(self.args.optim)!r} is made for whole parameters",
                why="it takes the parameters of a model apart by itself, and ranks have pieces",
                hint="optim='adamw_torch', or optimizer_cls_and_kwargs=(a class, its arguments)",
            )

        def groups(name: str, parameter: nn.Parameter) -> dict[str, float]:
            return {"weight_decay": self.args.weight_decay if name in decayed else 0.0}

        trained = self.model.parallel_module if is_stepped else self.model
        return self._in_use(build_optimizer(trained, make, param_groups=groups, **kwargs))

    def _in_use(self, optimizer: ParallelOptimizer) -> ParallelOptimizer:
        self.optimizer = optimizer
        # The loop clears gradients by the model, and asks it for no_sync while it accumulates.
        self.model.__dict__["zero_grad"] = optimizer.zero_grad
        self.model.__dict__["no_sync"] = optimizer.no_sync
        return optimizer

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """What stands in for ``accelerator.prepare``."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        if self.gather_function != self.accelerator.gather_for_metrics:
            # Seq2SeqTrainer asks accelerate for what all ranks have, with samples that fill up.
            self.gather_function = self._gathered_whole
        if not self.accelerator._models:  # it would call accelerator.prepare_model
            self.accelerator._models.append(self.model)
        done = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        self._evaluated = (metric_key_prefix, done.num_samples)
        return done

    def compute_loss_context_manager(self) -> Any:
        if self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.optimizer.clip_gnorm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return float(self.optimizer.clip_gnorm() if grad_norm is None else grad_norm)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what ``from_pretrained`` reads, from all ranks; within a checkpoint, the pieces with
        the state of the optimizer.
        """
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            state: dict[str, Any] = {"step": self.state.global_step}
            if not self.args.save_only_model:
                state |= {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            self.model.save_parallelized(folder / TRAINER_FOLDER, **state)
            self._write_arguments(folder)
            return
        self.model.save_parallelized(folder, merge_checkpoints=True)
        self._write_arguments(folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _write_arguments(self, folder: Path) -> None:
        """Write the training arguments for people to read. The stock Trainer pickles them as
        ``training_args.bin``, which no one loads without running what is in it.
        """
        if self.args.should_save:
            text = self.args.to_json_string()
            write_file(folder / "training_args.json", text.encode())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """They are saved with the pieces."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The pieces are loaded with the optimizer, which is not made yet."""
        _check_checkpoint(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.model.from_parallelized(
                Path(checkpoint) / TRAINER_FOLDER,
                optimizer=self.optimizer,
                scheduler=self.lr_scheduler,
            )

    def _load_best_model(self) -> None:
        self.model.from_parallelized(Path(self.state.best_model_checkpoint) / TRAINER_FOLDER)


class ShardwrightTrainer(ShardwrightMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's ``Trainer`` for a model that several ranks share. See the top of this file for
    an example, and :class:`ShardwrightMixin` for what it takes besides.
    """


def _original(model: Any) -> Any:
    """What the model was before, without values."""
    if isinstance(model, SteppedModel):
        return model.original
    wrapper: Any = model
    inside = wrapper.get_base_model() if isinstance(model, InitializedPeft) else model
    return inside.__dict__[CALLS].programs.twin


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on as if nothing was."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _check_arguments(args: Any, kwargs: Mapping[str, Any]) -> None:
    for name, (why, hint) in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}={brief(getattr(args, name))}) is not for models that "
                "several ranks share",
                why=why,
                hint=hint,
            )
    if kwargs.get("model_init") is not None:
        raise ConfigError(
            "model_init is not for models that several ranks share",
            why="the trainer would make the model anew, and it would need new programs",
            hint="pass model=",
        )


def _made_parallel(
    model: nn.Module, parallel: Any, options: dict[str, Any]
) -> InitializedModel | InitializedPeft:
    """The model, initialized."""
    if isinstance(model, InitializedModel | InitializedPeft):
        if parallel is not None:
            raise UsageError(
                "parallel= was passed with a model that was initialized already",
                hint="leave it out, or pass the model as transformers made it",
            )
        config, ranks = model.parallel_module.compute_config, model.parallel_module.ranks
        assert config is not None
        # The stock Trainer averages over replicas, and so do learning rates and clipping that were
        # tuned with it.
        if ranks.num_units > 1 and config.grad_reduction != "mean":
            raise _not_a_mean(config.grad_reduction)
        return model
    if parallel is None:
        raise ConfigError(
            "parallel= is missing",
            why="it says how many ranks share the model",
            hint="parallel={'model_parallelism': {'enable': True, 'tensor_parallel_size': 2}}",
        )
    if isinstance(parallel, ComputeConfig):
        if parallel.runtime_ngpus > parallel.plan_ngpus and parallel.grad_reduction != "mean":
            raise _not_a_mean(parallel.grad_reduction)
        found: InitializedModel | InitializedPeft = initialize(model, parallel, **options)
        return found
    made: InitializedModel | InitializedPeft = initialize(model, _averaging(parallel), **options)
    return made


def _averaging(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with gradients averaged over the units. Raises :class:`ConfigError` for one that
    says something else.
    """
    if parallel.get("grad_reduction", "mean") != "mean":
        raise _not_a_mean(parallel["grad_reduction"])
    return {**parallel, "grad_reduction": "mean"}


def _zero_stage(model: nn.Module, parallel: Any) -> Any:
    """The stage of ZeRO that is asked for, or that the model has already."""
    if isinstance(model, InitializedModel | InitializedPeft):
        parallel = model.parallel_module.compute_config
    if isinstance(parallel, Mapping):
        return parallel.get("use_zero")
    return getattr(parallel, "use_zero", None)


def _check_zero(stage: Any, args: Any) -> None:
    """Refuse ZeRO-3 where units may get different numbers of batches."""
    if stage == 3 and not args.accelerator_config.even_batches:
        raise ConfigError(
            "use_zero=3 needs even batches",
            why="units gather weights together, so that all of them have to make the same calls, "
            "and accelerator_config has even_batches=False",
            hint="leave even_batches out, or use_zero=1 or 2",
        )


def _not_a_mean(reduction: str) -> ConfigError:
    return ConfigError(
        f"the model is made parallel with grad_reduction={reduction!r}",
        why="the Trainer counts on gradients that are averaged over the units",
        hint="grad_reduction='mean'; parallel= has it by default",
    )


def _check_checkpoint(folder: str) -> None:
    if not (Path(folder) / TRAINER_FOLDER).is_dir():
        found = ", ".join(sorted(os.listdir(folder))[:5])
        raise UsageError(
            f"{folder} is no checkpoint of this trainer",
            why=f"it has no folder {TRAINER_FOLDER!r}, but {found}",
            hint="load weights with from_pretrained before the trainer is made; go on from a "
            "checkpoint that ShardwrightTrainer has saved",
        )
