"""What a training run is asked for: :class:`RunSettings`, as typed dataclasses.

Each field is a key of ``run.yaml`` and a flag of ``shardwright train`` by the same name:
``optimizer.name`` is ``optimizer: {name: AdamW}`` and ``--optimizer.name AdamW``. How they are read
is in ``read_settings.py``. Values are checked one by one there; what several of them mean together
is checked here, before a rank is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.runtime.errors import ConfigError

Precision = Literal[
    "model", "float64", "float32", "bfloat16", "float16", "bfloat16_autocast", "float16_autocast"
]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a function of yours, or one of transformers.

    ``function``: ``package.module:name`` of a function, or of a class, that makes the module;
    ``arguments`` are given to it. Or ``transformers``: a folder, or a name that is in the local
    cache. ``weights``: ``pretrained`` reads the folder's, ``random`` makes new ones from its
    ``config.json`` alone. ``config``: what to change in that configuration. ``auto_class``: the
    class of transformers that makes the model. ``call``: plain values for arguments of ``forward``
    (``{"use_cache": false}``, which transformers models get anyway).
    """

    function: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    transformers: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    config: Mapping[str, Any] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    call: Mapping[str, Any] = field(default_factory=dict)

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` unless one source is named."""
        _check_one(path, {"function": self.function, "transformers": self.transformers})
        if self.transformers is None and (self.config or self.weights != "pretrained"):
            raise ConfigError(
                f"{path}.config and {path}.weights are for models of transformers",
                why=f"this one is made by {self.function}",
                hint=f"pass what it needs as {path}.arguments",
            )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The samples: dicts with the names of ``forward``'s arguments.

    One of these: ``function``: ``package.module:name`` of a function that returns a dataset, with
    ``arguments``; ``jsonl``: a file or folder of JSON lines; ``tokens``: a Megatron token file;
    ``datasets``: a folder that ``save_to_disk`` of Hugging Face datasets wrote.

    ``length``: tokens of a sample. Token files are read as windows of that length; with
    ``tokenizer`` (a folder or a cached name) the field ``text`` of each sample is made into that
    many tokens, and what is padded does not count in the loss. ``transform``, ``collate``:
    functions as :func:`shardwright.data.loader` takes them.
    """

    function: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    jsonl: str | None = None
    tokens: str | None = None
    datasets: str | None = None
    length: int | None = None
    tokenizer: str | None = None
    text: str = "text"
    transform: str | None = None
    collate: str | None = None
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` unless one source is named, with what it needs."""
        sources = {
            name: getattr(self, name) for name in ("function", "jsonl", "tokens", "datasets")
        }
        _check_one(path, sources)
        _check_least(path, 1, length=self.length)
        _check_least(path, 0, seed=self.seed, num_workers=self.num_workers)
        needs_length = self.tokens is not None or self.tokenizer is not None
        if needs_length and self.length is None:
            raise ConfigError(
                f"{path}.length is missing",
                why="a sample is a row of that many tokens",
                hint=f"{path}.length: 2048",
            )
        if self.length is not None and not needs_length:
            raise ConfigError(
                f"{path}.length would do nothing",
                why="samples are taken as they are, where nothing is tokenized",
                hint=f"leave it out, or name a {path}.tokenizer",
            )
        if self.tokens is not None and self.tokenizer is not None:
            raise ConfigError(
                f"{path}.tokenizer would do nothing",
                why="a token file holds tokens already",
                hint="leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How ranks share the work.

    ``policy``: a built-in name, or ``package.module:name`` of a function. ``plan_ngpus``: the ranks
    of a unit, which share one copy of the model (default: all; 1 for ``dp``). ``use_zero``: the
    stage of ZeRO. ``options``: ``pas_config`` of the policy. ``compute``: other fields of
    ``ComputeConfig``. ``broadcast``: which generated files go to nodes that do not see the disk of
    rank 0.
    """

    policy: str = "dp"
    plan_ngpus: int | None = None
    use_zero: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    compute: Mapping[str, Any] = field(default_factory=dict)
    broadcast: Literal["none", "all", "no_weights", "code"] = "none"

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` for fields of ``compute`` that the run sets itself."""
        _check_least(path, 1, plan_ngpus=self.plan_ngpus)
        elsewhere = {
            "plan_ngpus": f"{path}.plan_ngpus",
            "use_zero": f"{path}.use_zero",
            "pas_config": f"{path}.options",
            "runtime_ngpus": "the number of ranks that are started",
            "use_end2end": "true: a step is train_step",
            "grad_reduction": "loss",
            "inference_only": "false",
        }
        for name in self.compute:
            if name in elsewhere:
                raise ConfigError(
                    f"{path}.compute.{name} is not for compute",
                    why=f"it is {elsewhere[name]}",
                    hint="leave it out there",
                )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer: a name of ``torch.optim``, or ``package.module:name`` of a class or function.

    ``options`` are its arguments. ``decay``: which parameters get its ``weight_decay``:
    ``matrices`` leaves out those of fewer than two dims (biases, norms), ``all`` none.
    """

    name: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    decay: Literal["matrices", "all"] = "matrices"


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate over the run, as a part of the optimizer's: up over ``warmup_steps``, then
    down to ``final`` of it at the last step (``cosine``, ``linear``), or not (``constant``).
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final: float = 0.0

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` for what is no part of a learning rate."""
        _check_least(path, 0, warmup_steps=self.warmup_steps)
        if not 0 <= self.final <= 1:
            raise ConfigError(f"{path}.final is a part from 0 to 1", why=f"it is {self.final:g}")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation on other samples: after every ``every_steps`` steps and at the end.

    ``data``: as the training data. ``max_steps``: the most global batches of an evaluation.
    """

    every_steps: int | None = None
    data: DataSettings | None = None
    max_steps: int | None = None

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` if there are steps without data, or data without steps."""
        _check_least(path, 1, every_steps=self.every_steps, max_steps=self.max_steps)
        if (self.every_steps is None) != (self.data is None):
            lacks = "data" if self.data is None else "every_steps"
            raise ConfigError(
                f"{path}.{lacks} is missing",
                why="evaluation needs samples, and to be told when",
                hint=f"set {path}.{lacks}, or leave out {path}",
            )
        if self.data is not None:
            self.data.check(f"{path}.data")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints: after every ``every_steps`` steps, at the end, and when a signal stops the run.

    ``folder``: default ``OUTPUT/checkpoints``. ``keep``: the newest so many stay (0: all).
    ``in_background``: training goes on while files are written. ``resume``: ``auto`` goes on from
    the newest checkpoint if there is one, ``never`` refuses a folder that has one, anything else is
    the folder of a checkpoint to go on from.
    """

    every_steps: int | None = None
    folder: str | None = None
    keep: int = 2
    in_background: bool = True
    resume: str = "auto"

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` for numbers that are none."""
        _check_least(path, 1, every_steps=self.every_steps)
        _check_least(path, 0, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is told: a record after every ``every_steps`` steps, as JSON lines in
    ``OUTPUT/log.jsonl`` and a line on the terminal. ``to``: other loggers besides. ``project``: of
    Weights & Biases. ``bar``: a progress bar on terminals.
    """

    every_steps: int = 1
    to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    project: str = "shardwright"
    bar: bool = True

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` for numbers that are none."""
        _check_least(path, 1, every_steps=self.every_steps)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """A closer look at some steps. ``first_step``, ``num_steps``: those that ``torch.profiler``
    records, on the ranks named. ``memory_step``: the step after which the allocations on a CUDA
    device are written as a snapshot (https://pytorch.org/memory_viz).
    """

    first_step: int | None = None
    num_steps: int = 3
    ranks: tuple[int, ...] = (0,)
    memory_step: int | None = None

    def check(self, path: str) -> None:
        """Raise :class:`ConfigError` for numbers that are none."""
        _check_least(
            path, 1,
            first_step=self.first_step, num_steps=self.num_steps, memory_step=self.memory_step,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A training run.

    ``output``: the folder of everything it writes. ``steps`` or ``epochs``: how long it is.
    ``global_batch``: the samples of a step, on all ranks together; ``microbatch``: those that a
    unit computes at once (default: all of its share), whose gradients are added up. ``precision``:
    the dtype of parameters and products; ``model`` leaves the model as it is. ``clip_norm``: the
    most that the norm of all gradients may be. ``loss``: ``mean`` averages the losses of
    microbatches, ``tokens`` weighs them by their counted labels, ``auto`` does the latter where the
    model takes ``num_items_in_batch``. ``on_world_change``: what to do with a checkpoint of another
    number of ranks. ``num_ranks``: how many ranks to start where no launcher has (default: one for
    each GPU). ``export``: a folder for the trained model. ``hooks``: functions by what they follow.
    ``hardware``: a preset or a hardware file, for predictions and MFU.
    """

    output: str
    model: ModelSettings
    data: DataSettings
    global_batch: int
    steps: int | None = None
    epochs: int | None = None
    microbatch: int | None = None
    precision: Precision = "model"
    clip_norm: float | None = None
    loss: Literal["auto", "mean", "tokens"] = "auto"
    seed: int = 0
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    on_world_change: Literal["replan", "refuse"] = "replan"
    num_ranks: int | None = None
    export: str | None = None
    hooks: Mapping[str, str] = field(default_factory=dict)
    hardware: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "data", "parallel", "schedule", "evaluation", "checkpoints"):
            getattr(self, name).check(name)
        self.log.check("log")
        self.profile.check("profile")
        _check_one("", {"steps": self.steps, "epochs": self.epochs})
        _check_least(
            "", 1,
            steps=self.steps, epochs=self.epochs, global_batch=self.global_batch,
            microbatch=self.microbatch, num_ranks=self.num_ranks,
        )  # fmt: skip
        _check_least("", 0, seed=self.seed)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError("clip_norm is above 0", why=f"it is {self.clip_norm:g}")


def _check_one(path: str, given: Mapping[str, Any]) -> None:
    """Refuse anything but one of several settings that stand for each other."""
    names = [f"{path}.{name}" if path else name for name in given]
    found = [name for name, value in zip(names, given.values(), strict=True) if value is not None]
    if len(found) == 1:
        return
    raise ConfigError(
        f"{' and '.join(found)} stand for the same" if found else f"{names[0]} is missing",
        why=f"one of {', '.join(names)} is needed",
    )


def _check_least(path: str, least: int, **given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < least:
            title = f"{path}.{name}" if path else name
            raise ConfigError(
                f"{title} is a whole number of at least {least}", why=f"it is {value}"
            )
