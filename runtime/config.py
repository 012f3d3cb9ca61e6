"""What a user asks of a compile: :class:`ComputeConfig` and the two choices that go beside it.

Everything is checked when the object is made: a value that cannot be honoured, or a combination
that would be ignored, is a :class:`ConfigError` in words. The rest of the program never checks a
setting again.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

from shardwright.runtime.arguments import MOST_LEVELS, checked, checked_late, is_too_deep
from shardwright.runtime.distributed_config import DistributedOptimizerConfig
from shardwright.runtime.errors import ConfigError, brief, did_you_mean, malformed
from shardwright.runtime.mesh import MOST_RANKS
from shardwright.runtime.named_fields import named_fields

OUTPUT_MODES = ("whole", "eval", "sharded", "drop")
INPUT_MODES = ("whole", "sharded")
"""What a rank gets of one output: all of it, all of it but for training steps, its own piece, or
nothing.
"""

RngMode = Literal["fast", "plan_independent"]
"""How random numbers are drawn: by each rank for its piece, or the same ones under every plan."""

AUTO = "auto"
"""``use_zero="auto"``: the plan says the stage of ZeRO."""


CHECK_RANKS_EVERY = 100
"""The number of steps in which ranks compare once what must be the same on all of them."""


class ReuseType(Enum):
    """What :func:`shardwright.parallelize` does with files it finds from an earlier call.

    ``MATCH``: use them if they are what this call would make, refuse if they are not, make them if
    absent. ``OVERRIDE``: make everything anew. ``MOO``, match or override: use them if they are
    what this call would make, else make them anew.
    ``GRAPH``: make plan and code anew; keep stored weights of a model that has not changed.
    """

    MATCH = "match"
    OVERRIDE = "override"
    MOO = "moo"
    GRAPH = "graph"


class BroadcastGenFilesStrategy(Enum):
    """Which files go from the node that compiled to nodes that do not have them.

    ``NONE``: none, the directory is shared between nodes, or copied by the user. ``ALL``: every
    file. ``NO_WEIGHTS``: every file but the initial weights; load with ``init_module_params=False``
    there. ``CODE``: the programs of the ranks and what is needed to check them.
    """

    NONE = "none"
    ALL = "all"
    NO_WEIGHTS = "no_weights"
    CODE = "code"


@named_fields
@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How many ranks a module is compiled for, and how it is to run on them.

    **Ranks.** ``plan_ngpus`` ranks form a unit and share one copy of the model; ``runtime_ngpus``
    ranks run in all, a multiple of it: the units are data-parallel copies. ``rank_order`` names the
    mesh axes of a unit major to minor, ``"dp-tp"`` (the last varies fastest with the rank);
    ``None`` leaves it to the policy.

    **Gradients.** Over the units they are summed, or averaged with ``grad_reduction="mean"``.
    ``use_async_reducer`` starts the reduction of a bucket while backward still runs; a bucket holds
    ``reducer_bucket_cap_mb`` MiB (``None``: 25, over many units 2 for each, at most 512).
    ``inference_only`` compiles no backward. ``use_zero`` splits optimizer state over the ranks that
    hold copies of a parameter: stage 1, or with 2 gradients are freed once they are reduced.
    ``zero_ngroups`` deals the units into groups that split the state among themselves;
    ``zero_use_reduce_scatter`` sends a rank the gradients it needs only (stage 2 always does).
    Stage 3 stores the parameters themselves in pieces over the units of a group, and over the axes
    that split the batch. ``"auto"`` leaves the stage to the plan: policy ``autodist`` searches it,
    and a saved plan may carry it. ``distributed_optimizer`` is the full option table: dtypes of
    state and gradients, overlap, buffers. It means stage 1 (and scatters) unless ``use_zero`` names
    another one; with ``use_zero=False`` each rank keeps the state of all that it holds.

    **Communication.** ``overlap_communication`` starts messages between the ranks of a unit early,
    and computes meanwhile: gradients of weights while gradients are summed, shared experts while
    tokens travel. Steps may hold more (docs/performance.md).

    **Model.** ``use_end2end``: the first result of ``forward`` is the loss, and ``train_step`` runs
    it. ``dynamic_dims`` names the input dims whose size may differ between calls: ``{"input_ids":
    {0: "batch", 1: "seq"}}``, where equal names mean equal sizes, or just ``{"input_ids": [0,
    1]}``. ``inputs``: by path of an argument, or of a container of arguments, ``"whole"`` (each
    rank is given all of it) or ``"sharded"``: the piece that the plan uses on it, such as a cache
    that an earlier call returned. ``outputs``: what ranks get of the results.
    ``"auto"``: all of them whole on every rank; but a training step of a model that returns a loss
    (a scalar with a gradient, called ``loss`` or first) leaves out the others where making them
    whole would cost anything. ``"all"``: whole in training too. ``"loss"``: the loss alone, always.
    Or by output path one of ``"whole"``, ``"eval"`` (left out of training steps), ``"sharded"``,
    ``"drop"``; the path of a container stands for what is in it, and paths not named are whole.
    ``constant_folding`` computes while compiling what depends on neither inputs nor weights, as far
    as it takes at most 1 MiB each. ``constants`` holds, by input path, the values of integer inputs
    that are the same in every call and decide sizes: ``{"image_grid_thw": [[1, 4, 4]]}``. They are
    compiled in, and a call with others is refused.

    **Randomness.** ``rng="fast"`` draws where the data is; ``"plan_independent"`` draws the same
    dropout masks under every plan. ``seed`` starts the generators.

    **Checks.** Ranks compare what must be the same, in the first step and then every
    ``check_ranks_every`` steps: within a unit the arguments of a call, everywhere the number of
    steps, the options of the optimizer, and parameters of which several ranks hold copies. 0 leaves
    the first comparison.

    ``pas_config`` goes to the policy, which checks its names. ``user_config`` is the user's own; it
    is part of what a compile is recognised by. Both must be made of JSON values.
    """

    plan_ngpus: int
    runtime_ngpus: int
    use_zero: bool | int | str | None = None
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    use_end2end: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    inference_only: bool = False
    constant_folding: bool = False
    pas_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    user_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rank_order: str | None = None
    outputs: str | Mapping[str, str] = field(default="auto", hash=False)
    inputs: Mapping[str, str] = field(default_factory=dict, hash=False)
    dynamic_dims: Mapping[str, Mapping[int, str] | Iterable[int]] = field(
        default_factory=dict, hash=False
    )
    constants: Mapping[str, Any] = field(default_factory=dict, hash=False)
    grad_reduction: str = "sum"
    rng: RngMode = "fast"
    seed: int = 0
    distributed_optimizer: DistributedOptimizerConfig | Mapping[str, Any] | None = None
    check_ranks_every: int = CHECK_RANKS_EVERY
    overlap_communication: bool = False

    def __post_init__(self) -> None:
        # Types first, field by field, then what fields mean together.
        for name in ("plan_ngpus", "runtime_ngpus", "zero_ngroups"):
            _check_count(name, getattr(self, name), at_least=1, at_most=MOST_RANKS)
        _check_count("seed", self.seed, at_least=0, at_most=2**63 - 1)
        _check_count("check_ranks_every", self.check_ranks_every, at_least=0, at_most=2**31)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is True or False", why=f"it is {brief(getattr(self, name))}"
                )
        _check_choice("grad_reduction", self.grad_reduction, ("sum", "mean"))
        _check_choice("rng", self.rng, ("fast", "plan_independent"))
        if self.distributed_optimizer is not None:
            object.__setattr__(
                self,
                "distributed_optimizer",
                DistributedOptimizerConfig.of(self.distributed_optimizer),
            )
        if self.use_zero is None:
            # Frozen: what is read into another form, or decided by other fields, is set past the
            # dataclass.
            object.__setattr__(self, "use_zero", self.distributed_optimizer is not None)
        _check_ranks(self)
        _check_bucket(self)
        _check_table(self)
        _check_zero(self)
        _check_order(self.rank_order)
        # Kept as JSON values: the config is digested, and written into files.
        for name in ("pas_config", "user_config"):
            object.__setattr__(self, name, _json_mapping(name, getattr(self, name)))
        object.__setattr__(self, "outputs", _read_outputs(self.outputs))
        object.__setattr__(self, "inputs", _read_modes("inputs", self.inputs, INPUT_MODES))
        object.__setattr__(self, "dynamic_dims", _read_dynamic_dims(self.dynamic_dims))
        object.__setattr__(self, "constants", _read_constants(self.constants))

    @classmethod
    @checked_late
    def of(cls, config: ComputeConfig | Mapping[str, Any]) -> ComputeConfig:
        """The config itself, or one made of a mapping of its fields; an unknown field is a
        :class:`ConfigError`.
        """
        if isinstance(config, ComputeConfig):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                "compute_config is a ComputeConfig, or a dict of its fields",
                why=f"it is a {type(config).__name__}",
            )
        known = tuple(f.name for f in fields(cls))
        for name in config:
            if name not in known:
                raise ConfigError(
                    f"ComputeConfig has no field {brief(name)}", hint=did_you_mean(name, known)
                )
        for name in ("plan_ngpus", "runtime_ngpus"):
            if name not in config:
                raise ConfigError(
                    f"compute_config lacks {name}", hint=f"add {name!r}: the number of ranks"
                )
        return cls(**config)

    @property
    def num_units(self) -> int:
        """The number of data-parallel copies of the unit."""
        return self.runtime_ngpus // self.plan_ngpus

    @property
    def leaves_zero_to_plan(self) -> bool:
        """Whether the plan says the stage of ZeRO."""
        return self.use_zero == AUTO

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 without. There is none before a plan has said it, where it is left
        to the plan.
        """
        assert not self.leaves_zero_to_plan, "with_zero() comes first"
        return int(self.use_zero or 0)

    @checked
    def with_zero(self, stage: int) -> ComputeConfig:
        """The config with a stage of ZeRO; without ZeRO nothing is left of what says how it splits.

        Raises :class:`ConfigError` if other settings do not go with it.
        """
        without = {} if stage else {"zero_ngroups": 1, "zero_use_reduce_scatter": False}
        return replace(self, use_zero=stage, **without)  # type: ignore[arg-type]

    @checked
    def with_bucket_cap(self, size_mb: float) -> ComputeConfig:
        """The config with buckets of ``size_mb`` MiB of gradients, wherever it says how large they
        are.

        Raises :class:`ConfigError` if the size is not above 0.
        """
        table = self.optimizer_table
        if table is None:
            return replace(self, reducer_bucket_cap_mb=size_mb)
        larger = replace(table, bucket_cap_mb=size_mb)
        return replace(self, distributed_optimizer=larger, reducer_bucket_cap_mb=None)

    @property
    def bucket_cap_name(self) -> str:
        """The setting that says how large buckets are: of the optimizer's table, where there is
        one.
        """
        table = self.optimizer_table
        return "reducer_bucket_cap_mb" if table is None else "distributed_optimizer.bucket_cap_mb"

    @property
    def optimizer_table(self) -> DistributedOptimizerConfig | None:
        """:attr:`distributed_optimizer` as it was read."""
        table = self.distributed_optimizer
        assert table is None or isinstance(table, DistributedOptimizerConfig)
        return table

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, in one order."""
        dims = {
            path: {str(dim): name for dim, name in dims.items()}
            for path, dims in self.dim_symbols().items()
        }
        table = None if self.optimizer_table is None else self.optimizer_table.to_json()
        own = {"dynamic_dims": dims, "distributed_optimizer": table}
        return {f.name: getattr(self, f.name) for f in fields(self)} | own

    @classmethod
    @checked
    def from_json(cls, data: Mapping[str, Any]) -> ComputeConfig:
        """The reverse of :meth:`to_json`."""
        with malformed(
            ConfigError, "dynamic_dims of a config maps inputs to their dims that may vary"
        ):
            found = data.get("dynamic_dims", {}).items()
            dims = {path: {int(dim): name for dim, name in dims.items()} for path, dims in found}
        return cls.of({**data, "dynamic_dims": dims})

    def digest(self) -> str:
        """The hex sha256 of the canonical JSON: equal for equal configs, in every process."""
        return hashlib.sha256(
            json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def dim_symbols(self) -> dict[str, dict[int, str]]:
        """:attr:`dynamic_dims` as it was read: input path to dim to the name of its size."""
        return {
            path: dict(dims)
            for path, dims in self.dynamic_dims.items()
            if isinstance(dims, Mapping)
        }


_FLAGS = (
    "zero_use_reduce_scatter",
    "use_end2end",
    "use_async_reducer",
    "inference_only",
    "constant_folding",
    "overlap_communication",
)


def _check_count(name: str, value: Any, *, at_least: int, at_most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(
            f"{name} is a whole number of at least {at_least}", why=f"it is {brief(value)}"
        )
    if value > at_most:
        raise ConfigError(
            f"{name} is a whole number of at most {at_most:,}", why=f"it is {brief(value)}"
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} cannot be {brief(value)}", hint=did_you_mean(value, choices))


def _check_ranks(config: ComputeConfig) -> None:
    plan, runtime = config.plan_ngpus, config.runtime_ngpus
    if runtime % plan:
        nearest = max(plan, runtime // plan * plan)
        raise ConfigError(
            "runtime_ngpus is not a multiple of plan_ngpus",
            why=f"{runtime} ranks cannot be dealt into units of {plan}",
            hint=f"runtime_ngpus={nearest} gives {nearest // plan} unit(s)",
        )


def _check_bucket(config: ComputeConfig) -> None:
    cap = config.reducer_bucket_cap_mb
    if cap is not None and (
        isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf
    ):
        raise ConfigError(
            "reducer_bucket_cap_mb is a size in MiB above 0, or None", why=f"it is {brief(cap)}"
        )
    if config.inference_only:
        for name in ("use_async_reducer", "reducer_bucket_cap_mb"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} has no meaning with inference_only",
                    why="without a backward there are no gradients to reduce",
                    hint=f"leave out {name}, or inference_only",
                )


def _check_table(config: ComputeConfig) -> None:
    """Refuse settings that the option table of the distributed optimizer contradicts."""
    table = config.optimizer_table
    if table is None:
        return
    if config.inference_only:
        raise ConfigError(
            "distributed_optimizer has no meaning with inference_only",
            why="it is about optimizer state and gradients, and there are none",
            hint="leave out distributed_optimizer, or inference_only",
        )
    if config.use_async_reducer and not table.overlap_grad_sync:
        raise ConfigError(
            "use_async_reducer and distributed_optimizer contradict each other",
            why="use_async_reducer=True and overlap_grad_sync=False say the opposite of when "
            "gradients are reduced",
            hint="leave out use_async_reducer",
        )
    cap_mb = config.reducer_bucket_cap_mb
    if cap_mb is not None and cap_mb != table.bucket_cap_mb:
        raise ConfigError(
            "reducer_bucket_cap_mb and distributed_optimizer contradict each other",
            why=f"reducer_bucket_cap_mb={cap_mb:g}, but bucket_cap_mb={table.bucket_cap_mb:g}",
            hint=f"set {config.bucket_cap_name}={cap_mb:g} in the place of reducer_bucket_cap_mb",
        )
    # ZeRO is not chosen yet.
    if config.leaves_zero_to_plan:
        return
    if table.overlap_param_sync and config.zero_stage in (0, 3):
        raise ConfigError(
            f"overlap_param_sync has no meaning with use_zero={config.use_zero}",
            why="after a step no parameters are gathered: " + _WHY_NOT_GATHERED[config.zero_stage],
            hint="leave out overlap_param_sync, or use stage 1 or 2",
        )
    if not table.contiguous_grad_buffer and config.zero_stage == 3:
        raise ConfigError(
            "contiguous_grad_buffer=False is not possible with use_zero=3",
            why="gradients would accumulate in the dtype of the parameters, and backward reduces "
            "them in the same dtype",
            hint="leave it out; grad_sync_dtype says in which dtype gradients are reduced and "
            "accumulated",
        )


_WHY_NOT_GATHERED = {
    0: "each rank updates all that it holds",
    3: "forward gathers each one when it is used, one ahead already",
}


def _check_zero(config: ComputeConfig) -> None:
    zero = config.use_zero
    if not isinstance(zero, int | str) or zero not in (AUTO, 0, 1, 2, 3):
        raise ConfigError(
            "use_zero is False, True (stage 1), a stage from 0 to 3, or 'auto' to leave it "
            "to the plan",
            why=f"it is {brief(zero)}",
        )
    if not zero:
        for name, default in (("zero_ngroups", 1), ("zero_use_reduce_scatter", False)):
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}={brief(getattr(config, name))} has no meaning without use_zero",
                    why="it says how ZeRO splits the optimizer state",
                    hint=f"set use_zero=True, or leave out {name}",
                )
    elif config.inference_only:
        raise ConfigError(
            "use_zero has no meaning with inference_only",
            why="ZeRO splits optimizer state, and there is none",
            hint="leave out use_zero, or inference_only",
        )
    elif config.num_units % config.zero_ngroups:
        raise ConfigError(
            "zero_ngroups does not divide the number of units",
            why=f"{config.runtime_ngpus} ranks in units of {config.plan_ngpus} are "
            f"{config.num_units} unit(s), "
            f"and they cannot be dealt into {config.zero_ngroups} groups",
        )


def _check_order(order: str | None) -> None:
    if order is None:
        return
    names = order.split("-") if isinstance(order, str) else []
    if not names or not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise ConfigError(
            "rank_order is the names of the mesh axes, major to minor, joined by '-'",
            why=f"it is {brief(order)}",
            hint="for example 'dp-tp': neighbouring ranks differ along tp",
        )


_NAMES_OF_CODE = frozenset(
    ("F", "block", "float", "layer", "math", "max", "min", "operator", "self", "torch")
)
"""What generated code reads besides its variables."""


def _json_mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a dict", why=f"it is {brief(value)}")
    if is_too_deep(value):
        raise ConfigError(
            f"{name} is nested in itself, or too deeply",
            why=f"it has more than {MOST_LEVELS} levels",
        )
    # A copy, so that the config does not change with the caller's dict.
    copy: dict[str, Any] = _json_value(name, value)
    return copy


def _json_value(path: str, value: Any) -> Any:
    """A copy of ``value``, which is not nested too deeply, made of dicts, lists and JSON's
    scalars.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"the keys of {path} are strings", why=f"{brief(key)} is a {type(key).__name__}"
                )
        return {key: _json_value(f"{path}[{brief(key)}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if (
        value is None
        or isinstance(value, bool | int | str)
        # JSON has no infinity and no nan, and a config is hashed as JSON.
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    raise ConfigError(
        f"{path} is not a JSON value",
        why=f"it is {brief(value)}, a {type(value).__name__}; the config is stored beside the "
        "generated code",
        hint="use numbers, strings, lists and dicts",
    )


def _read_outputs(outputs: Any) -> str | dict[str, str]:
    if isinstance(outputs, Mapping):
        return _read_modes("outputs", outputs, OUTPUT_MODES)
    if not isinstance(outputs, str) or outputs not in ("auto", "all", "loss"):
        raise ConfigError(
            "outputs is 'auto', 'all', 'loss', or a dict from output path to 'whole', "
            "'eval', 'sharded' or 'drop'",
            why=f"it is {brief(outputs)}",
        )
    return str(outputs)


def _read_modes(field: str, given: Any, modes: tuple[str, ...]) -> dict[str, str]:
    """What is wanted of inputs or outputs, by path."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{field} is a dict from path to mode", why=f"it is {brief(given)}")
    for path, mode in given.items():
        if not isinstance(path, str):
            raise ConfigError(
                f"{field} maps {field.removesuffix('s')} paths to what is wanted of them",
                why=f"{brief(path)} is not a string",
            )
        _check_choice(f"{field}[{brief(path)}]", mode, modes)
    return dict(given)


def _read_constants(constants: Any) -> dict[str, Any]:
    """The values of constant inputs as nested lists of integers or truth values."""
    hint = (
        'for example {"image_grid_thw": [[1, 4, 4], [1, 4, 8]]}; tensors and arrays are fine, too'
    )
    if not isinstance(constants, Mapping):
        raise ConfigError(
            "constants maps inputs to their values", why=f"it is {brief(constants)}", hint=hint
        )
    read: dict[str, Any] = {}
    with malformed(ConfigError, "constants maps inputs to integers", hint=hint):
        for path, values in constants.items():
            listed = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(path, str) or not path or not _is_table(listed):
                raise ConfigError(
                    "constants maps inputs to integers",
                    why=f"it has {brief(path)}: {brief(values)}",
                    hint=hint,
                )
            read[path] = _as_lists(listed)
    # Sorted, as the order in which a user lists inputs must not change the digest.
    return dict(sorted(read.items()))


def _is_table(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return all(map(_is_table, values))
    return isinstance(values, int)


def _as_lists(values: Any) -> Any:
    return [_as_lists(item) for item in values] if isinstance(values, list | tuple) else values


def _read_dynamic_dims(dynamic_dims: Any) -> dict[str, dict[int, str]]:
    hint = "for example {'input_ids': {0: 'batch', 1: 'seq'}}, or {'input_ids': [0, 1]}"
    if not isinstance(dynamic_dims, Mapping):
        raise ConfigError(
            "dynamic_dims maps inputs to their dims that may vary",
            why=f"it is {brief(dynamic_dims)}",
            hint=hint,
        )
    result: dict[str, dict[int, str]] = {}
    for path, dims in dynamic_dims.items():
        if (
            not isinstance(path, str)
            or not path
            or isinstance(dims, str)
            or not isinstance(dims, Iterable)
        ):
            raise ConfigError(
                "dynamic_dims maps inputs to their dims that may vary",
                why=f"it has {brief(path)}: {brief(dims)}",
                hint=hint,
            )
        # A list of dims gives each a name of its own: ``input_ids_0``.
        stem = path.replace(".", "_")
        named = dict(dims) if isinstance(dims, Mapping) else {dim: f"{stem}_{dim}" for dim in dims}
        for dim, name in named.items():
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
                raise ConfigError(
                    f"dynamic_dims[{brief(path)}]: dims are numbers from 0",
                    why=f"{brief(dim)} is not one",
                    hint=hint,
                )
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(
                    f"dynamic_dims[{brief(path)}]: the name of a size is a Python identifier",
                    why=f"{brief(name)} is not one",
                    hint=hint,
                )
            if keyword.iskeyword(name) or name in _NAMES_OF_CODE or name.startswith("__"):
                raise ConfigError(
                    f"dynamic_dims[{path!r}]: a size cannot be called {name!r}",
                    why="the size is a variable of that name in generated code, where it means "
                    "something else",
                    hint=hint,
                )
        result[path] = dict(sorted(named.items()))
    return dict(sorted(result.items()))
