"""The options of policy ``autodist``, and which of them contradict each other or the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.ops.tables.experts import IMBALANCE
from shardwright.compiler.plan.imbalance import check_reachable, imbalance_problem
from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.policies.autodist.candidates.axis_roles import check_degrees
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.layout import Mesh

SIMPLER_WITHIN = 0.02
"""The difference of two predicted steps, as a share, below which measured runs are in either order
about as often (docs/validation.md).
"""


@dataclass(frozen=True, kw_only=True)
class AutodistOptions:
    """Everything may be left to the search.

    **Machine.** ``hardware``: a preset or a hardware file, of at least ``plan_ngpus`` devices.
    ``memory_limit_gb``: of one device (default: what the hardware has).

    ``optimizer``: what keeps the state that memory and time are counted for, a class of
    ``torch.optim`` with settings (``"SGD(momentum=0.9)"``), or a class or function of one's own
    that takes parameters (``"my_module:make"``). Left out: Adam's two moments of every parameter.

    **Mesh.** ``mesh``: axes and sizes of the ranks of one pipeline position, major to minor;
    without it all meshes of up to ``max_axes`` axes are tried, none larger than ``max_split``.
    ``degrees``: by role (``dp``, ``sp``, ``ep``, ``tp``), among how many ranks its dims are split,
    whatever mesh it is; 1: not at all. ``pin``, ``forbid``, ``stored``: see
    ``Constraints``; they name axes, so
    that they need a ``mesh``.

    **Pipeline.** Searched where ``num_microbatches``, the samples of a step, is given.
    ``num_stages``: positions, 1 for no pipeline. ``schedule``, ``chunks``, ``stage_starts``: as for
    policy ``hybrid``. ``update_freq``: microbatches of a step whose gradients are accumulated,
    where there is no pipeline.

    **Batch.** ``global_batch``: the samples of a step, over all units, in the place of a number of
    microbatches.
    ``microbatch``: sizes of one unit's microbatch to choose from; where the model is traced for one
    size, only that one.
    ``batch_dims``: by path of an input, the dim that counts samples, where it cannot be told.
    ``unit_sizes``: numbers of ranks that may share one copy of the model, to choose from, each with
    as many units as there are ranks for; in the place of ``plan_ngpus``.

    **ZeRO.** ``zero``: stages to choose from where ``ComputeConfig(use_zero="auto")`` leaves it to
    the plan (default: all).

    **Recompute.** ``recompute``: module paths computed again, whatever the memory; ``[]``: none.
    Left out, layers are computed again as far as the memory asks for it.

    **Pieces.** ``loss_pieces``: whether the loss may run in pieces, one after the other, where a
    plan does not fit without.

    **Sequences.** ``zigzag``: whether an axis that splits the sequence may deal it in zigzag, which
    is tried where attention is causal.

    **Experts.** ``imbalance``: how many times its even share of rows the busiest rank is assumed to
    get where experts are split: a number, or numbers by module.

    **Decision.** ``simpler_within``: the share of a step that may be lost for a plan with fewer
    stages, fewer axes, fewer axes over slow links, or a lower stage of ZeRO
    (:mod:`~.candidates.simpler`).

    ``time_limit_s``: seconds of the clock on the wall for the whole search, which ends by itself
    when nothing is left. When they are over, the step under way is broken off.

    **Files.** ``save_plan``: a file for the plan; ``load_plan``: use the plan of a file and search
    nothing.
    """

    hardware: str = "a100-80gb"
    memory_limit_gb: float | None = None
    optimizer: str | None = None
    mesh: Mapping[str, int] | None = None
    max_axes: int = 2
    max_split: int | None = None
    degrees: Mapping[str, int] = field(default_factory=dict)
    pin: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forbid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    num_microbatches: int | None = None
    num_stages: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    stage_starts: tuple[str, ...] | None = None
    update_freq: int | None = None
    global_batch: int | None = None
    microbatch: tuple[int, ...] | None = None
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    unit_sizes: tuple[int, ...] | None = None
    zero: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    loss_pieces: bool = True
    zigzag: bool = True
    imbalance: float | Mapping[str, float] = IMBALANCE
    simpler_within: float = SIMPLER_WITHIN
    time_limit_s: float = 600.0
    save_plan: str | None = None
    load_plan: str | None = None

    def __post_init__(self) -> None:
        # Amounts by themselves first, then what they mean together.
        _check_amounts(self)
        if self.save_plan is not None and self.load_plan is not None:
            raise ConfigError(
                "policy 'autodist' has save_plan and load_plan",
                why=f"the plan in {self.load_plan} is used as it is, and nothing is found that "
                "could be saved",
                hint="leave out one of them",
            )
        # A global batch decides the number of microbatches. What deals it out has no meaning
        # without it, and another number of microbatches would contradict it.
        if self.global_batch is None:
            alone = [name for name in OF_A_BATCH if getattr(self, name)]
            if alone:
                raise ConfigError(
                    f"policy 'autodist' has {' and '.join(alone)} but no global_batch",
                    why="the samples of a step are dealt to units and cut into microbatches, and "
                    "their number is not known",
                    hint="give global_batch, the samples of a step over all units",
                )
            return
        twice = [
            name for name in ("num_microbatches", "update_freq") if getattr(self, name) is not None
        ]
        if twice:
            raise ConfigError(
                f"policy 'autodist' has global_batch and {' and '.join(twice)}",
                why=f"global_batch={self.global_batch} and the size of a microbatch say how many "
                "there are",
                hint=f"leave out {' and '.join(twice)}, or global_batch",
            )

    @property
    def microbatches_of_step(self) -> int:
        """How many microbatches a step has, as far as options say it: of a pipeline, or of a
        training loop that adds up gradients.
        """
        return self.num_microbatches or self.update_freq or 1

    @property
    def optimizer_memory(self) -> OptimizerMemory:
        """What the optimizer keeps. Raises :class:`ConfigError` if it cannot be told."""
        return (
            ADAM
            if self.optimizer is None
            else OptimizerMemory(named=NamedOptimizer(self.optimizer))
        )


COUNTS = (
    "max_axes",
    "max_split",
    "num_microbatches",
    "num_stages",
    "chunks",
    "update_freq",
    "global_batch",
)
"""Options that count something: at least 1."""

OF_A_BATCH = ("microbatch", "batch_dims", "unit_sizes")
"""Options that say how the samples of a step may be dealt out."""

OF_A_UNIT = ("mesh", "degrees", "num_stages", "stage_starts", "chunks")
"""Options that are about units of one size."""


def _check_amounts(options: AutodistOptions) -> None:
    """Refuse numbers that mean nothing."""
    problem = imbalance_problem(options.imbalance, "it")
    if problem is not None:
        raise ConfigError(
            "option 'imbalance' of policy 'autodist' says how many times its even share of tokens "
            "the busiest rank gets",
            why=problem,
            hint=f"1.0 for experts that are chosen evenly; it is {IMBALANCE} if it is left out",
        )
    for name in (*COUNTS, "memory_limit_gb", "time_limit_s", "simpler_within"):
        value, least = getattr(options, name), 1 if name in COUNTS else 0
        if value is not None and not value >= least:
            raise ConfigError(
                f"option {name!r} of policy 'autodist' cannot be {value!r}",
                why=f"it is at least {least}",
            )
    if options.max_axes > len(AXIS_NAMES):
        raise ConfigError(
            f"option 'max_axes' of policy 'autodist' cannot be {options.max_axes}",
            why=f"meshes of up to {len(AXIS_NAMES)} axes are searched",
            hint="give the option mesh for one of more axes",
        )
    for axis, size in (options.mesh or {}).items():
        if size < 1:
            raise ConfigError(
                f"the mesh of policy 'autodist' has an axis {axis!r} of size {size}",
                why="a size is at least 1",
            )


def check_imbalance_of_ranks(config: ComputeConfig, options: AutodistOptions) -> None:
    """Raise :class:`ConfigError` for an imbalance that no rank can have in the largest unit that is
    searched.
    """
    # Not a part of ``check_options``, which smaller units than the largest go through, too.
    most = max(options.unit_sizes or (config.plan_ngpus,))
    check_reachable(options.imbalance, most, "option 'imbalance' of policy 'autodist'")


def check_options(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse options that contradict each other or the config."""
    _check_unit_sizes(config, options)
    # Options that speak of axes need a mesh whose axes are known.
    given = [name for name in ("pin", "forbid", "stored") if getattr(options, name)]
    given += ["rank_order"] if config.rank_order is not None else []
    if given and options.mesh is None:
        raise ConfigError(
            f"policy 'autodist' has {' and '.join(given)} but no mesh",
            why="the axes they name are those of a mesh",
            hint="give the option mesh, for example {'dp': 2, 'tp': 4}",
        )
    check_degrees(options.degrees, config.plan_ngpus, options.num_stages)
    if options.degrees and options.mesh is not None:
        raise ConfigError(
            "policy 'autodist' has mesh and degrees",
            why="degrees are for the meshes that the search makes",
            hint="leave out one of them",
        )
    if options.mesh is not None:
        mesh = Mesh.of(options.mesh)
        positions = options.num_stages or 1
        if "pp" in mesh.names:
            raise ConfigError(
                "the mesh of policy 'autodist' has an axis 'pp'",
                why="it is the mesh of one pipeline position",
                hint=f"leave out the axis, and say num_stages={mesh.axis_size('pp')}",
            )
        if config.plan_ngpus % mesh.size:
            raise ConfigError(
                "the mesh of policy 'autodist' does not divide the ranks",
                why=f"mesh {mesh} has {mesh.size} ranks, plan_ngpus={config.plan_ngpus}",
                hint="make the product of the axes and num_stages equal to plan_ngpus",
            )
        if mesh.size * positions != config.plan_ngpus and (
            options.num_stages is not None or not options.num_microbatches
        ):
            raise ConfigError(
                f"the mesh of policy 'autodist' has {mesh.size} ranks",
                why=f"mesh {mesh}, num_stages={positions}, plan_ngpus={config.plan_ngpus}",
                hint="make the product of the axes and num_stages equal to plan_ngpus",
            )
    _check_stages(config, options)
    _check_uneven(config, options)
    # Options that mean pipelines.
    pipeline = [
        name
        for name in ("schedule", "chunks", "stage_starts")
        if getattr(options, name) is not None
    ]
    pipeline += ["num_stages"] if (options.num_stages or 1) > 1 else []
    if pipeline and options.num_microbatches is None:
        raise ConfigError(
            f"policy 'autodist' has {' and '.join(pipeline)} but no num_microbatches",
            why="a pipeline is planned for the number of samples of a step",
            hint="give num_microbatches",
        )
    if options.num_microbatches is not None and not config.use_end2end:
        raise ConfigError(
            "policy 'autodist' searches pipelines only with use_end2end=True",
            why=f"num_microbatches={options.num_microbatches} is given",
            hint="ComputeConfig(use_end2end=True, ...), with a model whose first result is the "
            "loss; or update_freq for "
            "gradients accumulated without a pipeline",
        )
    if options.schedule is not None and not getattr(
        SCHEDULES.get(options.schedule), "trains", False
    ):
        trained = [name for name, method in SCHEDULES.items() if method.trains]
        raise ConfigError(
            f"there is no schedule {options.schedule!r} to train with",
            hint=f"one of {', '.join(trained)}",
        )


def check_pipeline(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse pipelines where nothing is trained.

    Raises:
        ConfigError: a pipeline is asked for with ``inference_only``.
        PlanError: the schedule cannot have the positions, microbatches and chunks that are given
            with it.
    """
    # ``inference_only`` has no steps, so no pipelines either.
    num_stages = options.num_stages or 1
    asked = [
        name
        for name in ("num_microbatches", "schedule", "chunks", "stage_starts")
        if getattr(options, name) is not None
    ]
    asked += ["num_stages"] if num_stages > 1 else []
    if config.inference_only and asked:
        raise ConfigError(
            f"policy 'autodist' has {' and '.join(asked)}, and the config inference_only",
            why="it searches pipelines for training only",
            hint="leave them out; policies 'pp' and 'hybrid' make pipelines for infer_step",
        )
    # The schedule itself says which sizes it can have.
    method = SCHEDULES.get(options.schedule or "")
    if method is not None and num_stages > 1 and options.num_microbatches is not None:
        method.check(num_stages, options.num_microbatches, options.chunks or method.min_chunks)


def _check_unit_sizes(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse sizes of a unit into which the ranks cannot be dealt, and what is of one size."""
    sizes = options.unit_sizes
    if sizes is None:
        return
    ranks = config.runtime_ngpus
    unfit = [size for size in sizes if size < 1 or ranks % size]
    if unfit or not sizes or len(set(sizes)) < len(sizes):
        raise ConfigError(
            f"option 'unit_sizes' of policy 'autodist' cannot be {list(sizes)!r}",
            why=f"it lists numbers of ranks, each once, that divide runtime_ngpus={ranks}",
            hint=f"some of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
        )
    given = [name for name in OF_A_UNIT if getattr(options, name)]
    given += ["rank_order"] if config.rank_order is not None else []
    if given:
        raise ConfigError(
            f"policy 'autodist' has unit_sizes and {' and '.join(given)}",
            why="these are about units of one size",
            hint="leave out one of them",
        )


def _check_stages(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse more pipeline positions than ranks, and begins of stages that give another number of
    them.
    """
    if (options.num_stages or 1) > config.plan_ngpus:
        raise ConfigError(
            f"policy 'autodist' has num_stages={options.num_stages}",
            why=f"a pipeline position has at least one rank, plan_ngpus={config.plan_ngpus}",
        )
    if options.stage_starts is None:
        return
    # A begin for each stage but the first.
    number = len(options.stage_starts) + 1
    wanted = (options.num_stages or 1) * (options.chunks or 1)
    exact = options.num_stages is not None and options.chunks is not None
    if number % wanted or (exact and number != wanted):
        given = [
            f"{name}={value}"
            for name in ("num_stages", "chunks")
            if (value := getattr(options, name)) is not None
        ]
        raise ConfigError(
            f"policy 'autodist' has stage_starts for {number} stages and {' and '.join(given)}",
            why="the first stage begins at the first operator, every other one where "
            "stage_starts says",
            hint=f"name {wanted - 1} modules, or leave out "
            f"{' and '.join(name.split('=')[0] for name in given)}",
        )


def _check_uneven(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse several stages on a position where positions cannot be alike."""
    several = [f"chunks={options.chunks}"] if (options.chunks or 1) > 1 else []
    if (
        options.schedule is not None
        and getattr(SCHEDULES.get(options.schedule), "min_chunks", 1) > 1
    ):
        several.append(f"schedule={options.schedule!r}")
    if several and options.num_stages is not None and config.plan_ngpus % options.num_stages:
        raise ConfigError(
            f"policy 'autodist' has num_stages={options.num_stages} and {' and '.join(several)}",
            why=f"{config.plan_ngpus} ranks do not divide into so many equal positions, and "
            "unequal ones run one stage each",
            hint="a num_stages that divides plan_ngpus, or schedule '1f1b'",
        )
