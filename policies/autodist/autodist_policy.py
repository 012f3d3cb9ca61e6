"""``autodist``: the best plan that can be found, with what is certain of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardwright.compiler.collector import only_new_objects
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.time.operator_file import load_times
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.certified import certified
from shardwright.compiler.plan.imbalance import Imbalance, capped
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.candidates.axis_roles import meshes_with
from shardwright.policies.autodist.candidates.clock import Clock, steady_share
from shardwright.policies.autodist.candidates.meshes import divisors, meshes, stage_sizes
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.candidates.simpler import simplest
from shardwright.policies.autodist.candidates.titles import first_of, refusals
from shardwright.policies.autodist.options import (
    AutodistOptions,
    check_imbalance_of_ranks,
    check_options,
    check_pipeline,
)
from shardwright.policies.autodist.placement.constraints import Constraints, allowed_strategies
from shardwright.policies.autodist.search.batch_sizes import BATCH, own_batch
from shardwright.policies.autodist.search.certificate import certificate
from shardwright.policies.autodist.search.placer import Placer, Pricings, constraints_on
from shardwright.policies.autodist.search.search import Search
from shardwright.policies.autodist.search.subsearches import (
    Subsearch,
    Subsearches,
)
from shardwright.policies.pipeline_mesh import hardware_files
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.saved_plan import SavedOptions, load_plan
from shardwright.policies.stage_places import starts_at
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError, TraceError, on_lines
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.swap import check_target, write_file
from shardwright.runtime.zero.settings import ReductionSettings


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The fastest plan found, with its certificate."""
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    # A saved plan takes the place of a search.
    if options.load_plan is not None:
        return load_plan(
            SavedOptions(load_plan=options.load_plan, num_microbatches=options.num_microbatches),
            graph,
            config,
        )
    if options.unit_sizes is not None:
        raise ConfigError(
            "option 'unit_sizes' of policy 'autodist' is for a search alone",
            why=f"a module is compiled for units of one size, plan_ngpus={config.plan_ngpus}",
            hint="search with shardwright.search_plan or `shardwright plan --plan-ngpus auto`, "
            "then compile with the plan found: policy 'saved'",
        )
    check_imbalance_of_ranks(config, options)
    check_save(options)
    hardware = load_hardware(options.hardware, config.runtime_ngpus)
    # Samples per step are dealt into microbatches and units first.
    batch = None
    if options.global_batch is not None:
        batch = own_batch(
            graph, config, options.global_batch, options.microbatch, options.batch_dims
        )
    # One search for each stage of ZeRO that the plan may choose.
    subsearches = Subsearches.of({batch: graph}, config, options.zero, options.imbalance)
    plan = settled(
        search_each(subsearches, options, hardware), config, hardware, subsearches.imbalance
    )
    graph = subsearches.chosen(plan).graph
    plan = certified(plan, graph, config, options.microbatches_of_step)
    save(options, plan)
    return plan


def reused(config: ComputeConfig, plan: Plan) -> None:
    """Write the plan that a compile has found made where a new one would have been written."""
    save(read_options(AutodistOptions, config.pas_config, policy="autodist"), plan)


def save(options: AutodistOptions, plan: Plan) -> None:
    """Write the plan where the options want it."""
    if options.save_plan is not None:
        write_file(Path(options.save_plan), plan.dumps().encode())


def check_save(options: AutodistOptions) -> None:
    """Refuse a place that the plan cannot be written to, before it is searched for. Raises
    :class:`ConfigError`.
    """
    if options.save_plan is not None:
        check_target(Path(options.save_plan), "save_plan")


def settled(
    found: SearchResult,
    config: ComputeConfig,
    hardware: Hardware,
    imbalance: Imbalance | None = None,
) -> Plan:
    """The best plan of a search, with its certificate. ``imbalance``: what was assumed of experts.
    Raises :class:`PlanError` if nothing
    fits.
    """
    # Nothing fits: say what came nearest, and what was not looked at.
    if found.answer is None:
        reasons = [*_least_in_words(found), *refusals(found)] or ["nothing was tried"]
        if found.interrupted is not None:
            reasons += (
                [f"not audited: {first_of([c.title for c in found.others])}"]
                if found.others
                else []
            )
            raise PlanError(
                f"no plan for {config.plan_ngpus} ranks was found in {found.seconds:.0f} s, until "
                f"the search was ended by {found.interrupted}",
                why=on_lines(reasons),
                hint="a longer time_limit_s, or less to search: mesh, num_stages or schedule given"
                + _less_memory(found, config),
            )
        raise PlanError(
            f"no plan for {config.plan_ngpus} ranks fits on {hardware.name}",
            why=on_lines(reasons),
            hint="a larger memory_limit_gb, or fewer constraints" + _less_memory(found, config),
        )
    best = found.answer.plan
    searches_units = config.pas_config.get("unit_sizes") is not None
    has_one_size = config.num_units > 1 and not searches_units
    # Over several units another stage may be faster, or take less memory.
    has_one_stage = (
        (config.num_units > 1 or searches_units)
        and not config.inference_only
        and not config.leaves_zero_to_plan
    )
    # An operator without an entry is computed whole on every rank, as an empty one says.
    strategies = {op: assignment for op, assignment in best.strategies.items() if assignment}
    return replace(
        best,
        strategies=strategies,
        policy="autodist",
        # Of several sizes of a unit, the figure is for the largest.
        imbalance=None if imbalance is None else capped(imbalance, best.mesh.size),
        certificate=certificate(
            found,
            found.answer,
            hardware,
            unit_ranks=config.plan_ngpus if has_one_size else None,
            zero_stage=config.zero_stage if has_one_stage else None,
        ),
    )


def _less_memory(found: SearchResult, config: ComputeConfig) -> str:
    """What else may be set so that a plan takes less memory, if that was too much of any."""
    if not (found.needed_bytes or found.least[1]):
        return ""
    ways = ["more ranks (plan_ngpus)"]
    has_units = config.num_units > 1 or config.pas_config.get("unit_sizes") is not None
    if has_units and not config.leaves_zero_to_plan and config.zero_stage < 3:
        ways.append("use_zero='auto' (over the units)")
    if config.pas_config.get("recompute") is not None:
        ways.append("recompute left to the search")
    if config.outputs != "loss":
        ways.append("outputs='loss'")
    ways.append("smaller microbatches")
    return f"; for less memory {', '.join(ways)}"


def _least_in_words(found: SearchResult) -> list[str]:
    """What nothing that was tried is below."""
    num_bytes, title, parts = found.least
    least = amount(num_bytes, "B", digits=4)
    return (
        [f"the least of what was audited is {least} on a device ({title}), most of it {parts}"]
        if title
        else []
    )


def search(
    graph: PlannableGraph, config: ComputeConfig, options: AutodistOptions, hardware: Hardware
) -> SearchResult:
    """What a search with these options finds for one graph, with every stage of ZeRO that the
    config leaves to it.

    Raises what :func:`search_each` raises.
    """
    return search_each(
        Subsearches.of({None: graph}, config, options.zero, options.imbalance), options, hardware
    )


def search_each(
    subsearches: Subsearches, options: AutodistOptions, hardware: Hardware, spent_s: float = 0.0
) -> SearchResult:
    """What searches with these options find, with the times of operators measured on the machine if
    there are any. ``spent_s``: the seconds of the limit that are over.

    Raises:
        ConfigError: options that contradict each other or the config; a file of times that is none.
        PlanError: constraints or stages that the model does not have.
    """
    for subsearch in subsearches.listed:
        check_pipeline(subsearch.config, options)
    for subsearch in subsearches.listed[:1]:
        _check_names(subsearch.graph, options)
    times = load_times(options.hardware)
    pricings: Pricings = {}
    alarm = Alarm(options.time_limit_s - spent_s)

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        chosen = options_of(subsearch, options, time_limit_s)
        clock = Clock(time_limit_s, steady=steady_share(options.time_limit_s))
        try:
            graph = subsearch.graph  # may be traced now
            _check_names(graph, options)
        except (TraceError, PlanError) as error:
            # Of the first size it was raised above. Others say nothing against those that can be.
            refused = SearchResult(arithmetic_bound_s=float("inf"), seconds=clock.seconds)
            refused.refuse("any plan", error)
            return refused
        space = replace(_space(graph, subsearch.config, chosen, hardware), others_s=others_s)
        placer = Placer(graph, subsearch.config, chosen, hardware, times, pricings, clock)
        return Search(
            graph, subsearch.config, hardware, space, placer,
            optimizer=chosen.optimizer_memory, times=times, clock=clock, alarm=alarm,
            least=placer.least_s,
        ).run()  # fmt: skip

    # A search makes millions of objects that stay: see ``compiler/collector.py``.
    with only_new_objects():
        found = subsearches.search(one, options.time_limit_s, spent_s, alarm)
    if found.audited:
        taken = simplest(found.audited, hardware, options.simpler_within)
        found.simpler = None if taken is found.best else taken
    return found


def _check_size(graph: PlannableGraph, options: AutodistOptions) -> None:
    """Refuse a model that has less to do than there are stages, or nothing at all."""
    number, stages = len(graph.ops), options.num_stages or 1
    if number < stages:
        if not number:
            raise PlanError(
                "the model has no operators",
                why="what goes in comes out as it is, so that there is nothing to plan",
            )
        has = "1 operator" if number == 1 else f"{number} operators"
        raise PlanError(
            f"the model cannot be cut into {stages} stages",
            why=f"it has {has}, and a stage at least one",
        )


def _check_names(graph: PlannableGraph, options: AutodistOptions) -> None:
    """Refuse what the options name and the model does not have, and constraints that leave an
    operator nothing, before anything is searched.
    """
    if options.mesh is not None:
        allowed_strategies(
            graph, Constraints(options.pin, options.forbid, options.stored), Mesh.of(options.mesh)
        )
    mark_recompute(graph, options.recompute or ())


def options_of(
    subsearch: Subsearch, options: AutodistOptions, time_limit_s: float
) -> AutodistOptions:
    """The options of the search of one subsearch, with all chosen that tells it from the others."""
    chosen = replace(
        options,
        time_limit_s=time_limit_s,
        zero=None,
        global_batch=None,
        microbatch=None,
        batch_dims={},
        unit_sizes=None,
    )
    if subsearch.batch is None:
        return chosen
    # Microbatches of a pipeline, or gradients accumulated by the training loop: one count, two
    # options.
    name = "num_microbatches" if subsearch.config.use_end2end else "update_freq"
    return replace(chosen, **{name: subsearch.batch.num_microbatches})  # type: ignore[arg-type]


NEAR, NEAR_BESIDE = 1.03, 1.1
"""How many times the best step a candidate may be predicted to take, to be audited still. Audits
take what was predicted, except where collectives run beside passes, which predictions leave out.
"""

LAYERS_WORTH = 0.002
"""The share of a step that may be lost for stages that begin between layers: a file with whole
layers is easier to read.
"""


def _space(
    graph: PlannableGraph, config: ComputeConfig, options: AutodistOptions, hardware: Hardware
) -> SearchSpace:
    """The options as what is searched."""
    check_options(config, options)
    _check_size(graph, options)
    limit = (
        hardware.device.memory_bytes
        if options.memory_limit_gb is None
        else options.memory_limit_gb * 1e9
    )
    # GPipe is never faster than 1F1B, and holds more.
    schedules = [name for name, method in SCHEDULES.items() if method.trains and name != "gpipe"]
    if config.overlap_communication:
        # These put gradients of weights off themselves: none would be left beside a sum.
        schedules = [name for name in schedules if not SCHEDULES[name].splits_backward]
    if options.schedule is not None:
        schedules = [options.schedule]
    return SearchSpace(
        meshes=_meshes(config, options),
        num_microbatches=options.microbatches_of_step,
        num_positions=_num_positions(config, options),
        schedules=schedules,
        chunks=options.chunks,
        stage_starts=None
        if options.stage_starts is None
        else starts_at(graph, options.stage_starts),
        recompute=options.recompute,
        memory_bytes=limit,
        mixed=options.mesh is None,
        simple=True,
        zigzag=options.zigzag,
        pieces=options.loss_pieces,
        near=_near(config, options),
        simpler_within=options.simpler_within,
        tolerance=LAYERS_WORTH,
        constraints=lambda mesh: constraints_on(mesh, graph, options),
        pp_place=None if config.rank_order is None else _pp_place(config.rank_order),
    )


def _near(config: ComputeConfig, options: AutodistOptions) -> float:
    """How many times the best step is worth an audit. A plan may be as much slower and the answer,
    if it is simpler.
    """
    settings = ReductionSettings.of(config, config.num_units)
    is_beside = (
        settings.asynchronous or settings.overlaps_parameters or config.overlap_communication
    )
    return max(NEAR_BESIDE if is_beside else NEAR, 1 + options.simpler_within)


def _num_positions(config: ComputeConfig, options: AutodistOptions) -> int | None:
    """The pipeline positions that the options leave, ``None`` for any."""
    if options.num_stages is not None:
        return options.num_stages
    if options.mesh is not None:
        return config.plan_ngpus // Mesh.of(options.mesh).size
    return None if options.num_microbatches is not None and not config.inference_only else 1


def _meshes(config: ComputeConfig, options: AutodistOptions) -> Mapping[int, list[Mesh]]:
    """The meshes to try, by number of ranks."""
    # A mesh that is given is the only one.
    if options.mesh is not None:
        mesh = Mesh.of(options.mesh)
        if config.rank_order is not None:
            mesh = _ordered(mesh, [name for name in config.rank_order.split("-") if name != "pp"])
        return {mesh.size: [mesh]}
    most = options.max_split or config.plan_ngpus
    # A position of a pipeline has a divisor of the ranks.
    sizes = divisors(config.plan_ngpus)
    # Stages may have sizes that do not divide the ranks: 3 of 8.
    if options.num_microbatches is not None:
        sizes = sorted({*sizes, *stage_sizes(config.plan_ngpus)})
    if options.degrees:
        found = {size: meshes_with(options.degrees, size, options.max_axes) for size in sizes}
    else:
        found = {size: meshes(size, options.max_axes) for size in sizes}

    def is_allowed(mesh: Mesh) -> bool:
        return all(axis_size <= most for _, axis_size in mesh.axes)

    left = {size: list(filter(is_allowed, listed)) for size, listed in found.items()}
    if _num_positions(config, options) == 1 and not left[config.plan_ngpus]:
        raise ConfigError(
            f"option 'max_split' of policy 'autodist' leaves no mesh of {config.plan_ngpus} ranks",
            why=f"every one of up to {options.max_axes} axes has an axis of more than {most}",
            hint="a larger max_split, or num_microbatches, so that ranks may be pipeline positions",
        )
    return left


def _pp_place(rank_order: str) -> int | None:
    """Before which axis of the mesh the order has the pipeline axis; None if it does not say."""
    names = rank_order.split("-")
    return names.index("pp") if "pp" in names else None


def _ordered(mesh: Mesh, names: list[str]) -> Mesh:
    if sorted(names) != sorted(mesh.names):
        raise PlanError(
            f"order {'-'.join(names)!r} does not name the axes of the mesh",
            why=f"axes {mesh.names}",
        )
    return mesh.of_axes((name, mesh.axis_size(name)) for name in names)


def files(config: ComputeConfig) -> list[Path]:
    """The files that the options name: of the machine, of times measured on it, of a plan."""
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    named = [Path(options.load_plan)] if options.load_plan is not None else []
    return [*hardware_files(options.hardware), *(path for path in named if path.is_file())]


def takes_traces(config: ComputeConfig) -> bool:
    """Whether the model is to be traced for several sizes of a microbatch: there is a
    ``global_batch``, and a program for which the number of samples may vary.
    """
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    if options.global_batch is None or options.load_plan is not None:
        return False
    return any(
        name == BATCH or options.batch_dims.get(path) == dim
        for path, dims in config.dim_symbols().items()
        for dim, name in dims.items()
    )


FOR_A_STEP = (
    "num_microbatches",
    "num_stages",
    "schedule",
    "chunks",
    "stage_starts",
    "global_batch",
    "microbatch",
    "batch_dims",
    "unit_sizes",
    "degrees",
    "save_plan",
    "load_plan",
)
"""Options that say how the first program of a module is found. A further one has its mesh."""


def following(config: ComputeConfig, first: Plan, stored: Mapping[str, Layout]) -> ComputeConfig:
    """The config that searches the best plan on the mesh of ``first``, for tensors that are stored
    as they are.
    """
    if first.mesh.turns:
        raise PlanError(
            "policy 'autodist' searches no plan beside one that deals positions in zigzag",
            why=f"all programs of a module have one mesh, and the first one's is {first.mesh}",
            hint="pas_config={\"zigzag\": False}, or policy 'cp'",
        )
    own = {name: value for name, value in config.pas_config.items() if name not in FOR_A_STEP}
    own["mesh"] = dict(first.mesh.axes)
    own["stored"] = {fqn: str(layout) for fqn, layout in stored.items()}
    return replace(config, pas_config=own)


POLICY = Policy(
    "autodist",
    apply,
    AutodistOptions,
    built_in=True,
    files=files,
    reused=reused,
    takes_traces=takes_traces,
    searches=True,
    following=following,
)
