"""What ``pp`` and ``hybrid`` share: their options, and stages on a mesh with a ``pp`` axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.time.operator_file import load_times, times_file
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.compiler.schedule.planned import by_hand
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.policies.memory_options import MemoryOptions
from shardwright.policies.partition import stage_starts
from shardwright.policies.stage_places import starts_at
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(MemoryOptions):
    """Options of a pipeline in ``pas_config``.

    ``num_stages``: positions in the pipeline. ``num_microbatches``: samples of a step (default:
    twice the positions).
    ``schedule``: ``1f1b``, ``gpipe``, ``1f1b_interleaved``, ``zb_h1``, ``zb_v``. ``chunks``: stages
    of each position (default: what the schedule needs). ``stage_starts``: module paths at which
    stages 1, 2, ... begin (default: between repeated layers, as far as that is about as fast as any
    other cut). ``hardware``: the preset or file whose times they are cut by.
    ``actions``: a schedule of your own instead, one text for each position (``0F0 0F1 0B0 0B1``).
    Others: :class:`MemoryOptions`, whose ``recompute`` may also name ``stage:<number>``.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    chunks: int | None = None
    stage_starts: tuple[str, ...] = ()
    hardware: str = "a100-80gb"
    actions: tuple[str, ...] = ()


def check_end2end(what: str, config: ComputeConfig) -> None:
    """A pipeline runs whole steps. ``what``: the policy or the plan that makes one, in words."""
    if not config.use_end2end:
        raise ConfigError(
            f"{what} needs use_end2end=True",
            why="a pipeline runs forward and backward of all samples itself, in train_step",
            hint="ComputeConfig(use_end2end=True, ...), on the command line --set "
            "use_end2end=true, with a model whose first result is the loss",
        )


def hardware_files(hardware: str) -> list[Path]:
    """The files that describe a machine, and what was measured on it; none of a preset."""
    measured = times_file(hardware)
    return (
        [] if measured is None else [path for path in (Path(hardware), measured) if path.is_file()]
    )


def add_stages(
    graph: PlannableGraph,
    config: ComputeConfig,
    plan: Plan,
    options: PipelineOptions,
    num_positions: int,
) -> Plan:
    """The plan cut into stages along the ``pp`` axis of its mesh, at operators that are needed."""
    graph = PlannableGraph.of(needed(graph, config))
    schedule = _schedule(options, num_positions)
    chunks = len(schedule.placement) // num_positions
    num_stages = schedule.num_stages
    # The mesh of one position.
    inner = plan.mesh.of_axes(axis for axis in plan.mesh.axes if axis[0] != "pp")
    if options.stage_starts:
        # A begin for every stage but the first.
        if len(options.stage_starts) != num_stages - 1:
            raise PlanError(
                f"{len(options.stage_starts)} stage starts for {num_stages} stages",
                why=f"{num_positions} positions x {chunks} chunks; the first stage begins at the "
                "beginning",
                hint=f"name {num_stages - 1} module paths",
            )
        starts = starts_at(graph, options.stage_starts)
    else:
        hardware, times = (
            load_hardware(options.hardware, config.runtime_ngpus),
            load_times(options.hardware),
        )
        # The model as one position would run it without stages; its times say where to cut.
        whole = replace(plan, mesh=inner, recompute=options.recompute)
        starts = stage_starts(
            graph, whole, schedule, config, hardware, times, plan.mesh.names.index("pp")
        )
    positions = [
        tuple(rank for rank in range(plan.mesh.size) if plan.mesh.coords(rank)["pp"] == position)
        for position in range(num_positions)
    ]
    stages = tuple(
        StagePlan(first_op, inner, positions[schedule.placement[index]])
        for index, first_op in enumerate(["", *starts])
    )
    return replace(
        plan,
        stages=stages,
        schedule=schedule.name,
        num_microbatches=schedule.num_microbatches,
        actions=options.actions,
    )


def _schedule(options: PipelineOptions, num_positions: int) -> Schedule:
    """The schedule asked for, by name or action by action."""
    if options.actions:
        schedule = by_hand(options.actions)
        if schedule.num_ranks != num_positions or options.num_microbatches not in (
            None,
            schedule.num_microbatches,
        ):
            raise PlanError(
                "the actions are for another pipeline",
                why=f"they have {schedule.num_ranks} positions and {schedule.num_microbatches} "
                "microbatches; asked for are "
                f"{num_positions} and {options.num_microbatches or 'any number'}",
                hint="one text of actions for each position",
            )
        return schedule
    method = SCHEDULES.get(options.schedule)
    if method is None or not method.trains:
        trained = [name for name, m in SCHEDULES.items() if m.trains]
        raise PlanError(
            f"there is no schedule {options.schedule!r} to train with",
            hint=f"one of {', '.join(trained)}",
        )
    num_microbatches = (
        2 * num_positions if options.num_microbatches is None else options.num_microbatches
    )
    chunks = method.min_chunks if options.chunks is None else options.chunks
    return generate(options.schedule, num_positions, num_microbatches, chunks)
