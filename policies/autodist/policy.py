"""``autodist``: the best plan that can be found, with what is certain of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.compiler.cost.hardware import Hardware, load_hardware
from shardwright.compiler.cost.operator_file import load_times, times_file
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Certificate, Plan
from shardwright.compiler.schedule.generate import SCHEDULES
from shardwright.policies.autodist.batches import own_batch
from shardwright.policies.autodist.candidates import divisors, meshes, named, stage_sizes
from shardwright.policies.autodist.found import Candidate, Found
from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.policies.autodist.placement.formulation import Node, OpNode
from shardwright.policies.autodist.placement.memory_bound import least_step_s
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.problem import formulate
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.search import Search
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.space import Placed, Space, Wish
from shardwright.policies.autodist.variants import Variant, Variants
from shardwright.policies.partition import starts_at
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.saved import SavedOptions, load_plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.swap import write_file


@dataclass(frozen=True, kw_only=True)
class AutodistOptions:
    """Everything may be left to the search.

    **Machine.** ``hardware``: a preset or a hardware file, of at least ``plan_ngpus`` devices. ``memory_limit_gb``: of one
    device (default: what the hardware has).

    **Mesh.** ``mesh``: axes and sizes of the ranks of one pipeline position, major to minor; without it all meshes of up to
    ``max_axes`` axes are tried, none larger than ``max_split``. ``pin``, ``forbid``, ``stored``: see
    :class:`shardwright.policies.autodist.placement.constraints.Constraints`; they name axes, so that they need a ``mesh``.

    **Pipeline.** Searched where ``num_microbatches``, the samples of a step, is given. ``num_stages``: positions, 1 for no
    pipeline. ``schedule``, ``chunks``, ``stage_starts``: as for policy ``hybrid``. ``update_freq``: microbatches of a step
    whose gradients are accumulated, where there is no pipeline.

    **Batch.** ``global_batch``: the samples of a step, over all units, in the place of a number of microbatches.
    ``microbatch``: sizes of one unit's microbatch to choose from; where the model is traced for one size, only that one.
    ``batch_dims``: by path of an input, the dim that counts samples, where it cannot be told.

    **ZeRO.** ``zero``: stages to choose from where ``ComputeConfig(use_zero="auto")`` leaves it to the plan (default: all).

    **Recompute.** ``recompute``: module paths computed again, whatever the memory; ``[]``: none. Left out, layers are computed
    again as far as the memory asks for it.

    ``time_limit_s``: for the whole search. ``save_plan``: a file for the plan; ``load_plan``: use the plan of a file and search
    nothing.
    """

    hardware: str = "a100-80gb"
    memory_limit_gb: float | None = None
    mesh: Mapping[str, int] | None = None
    max_axes: int = 2
    max_split: int | None = None
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
    zero: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    time_limit_s: float = 120.0
    save_plan: str | None = None
    load_plan: str | None = None

    def __post_init__(self) -> None:
        if self.save_plan is not None and self.load_plan is not None:
            raise ConfigError(
                "policy 'autodist' has save_plan and load_plan",
                why=f"the plan in {self.load_plan} is used as it is, and nothing is found that could be saved",
                hint="leave out one of them",
            )
        if self.global_batch is None:
            alone = [name for name in ("microbatch", "batch_dims") if getattr(self, name)]
            if alone:
                raise ConfigError(
                    f"policy 'autodist' has {' and '.join(alone)} but no global_batch",
                    why="the samples of a step are cut into microbatches, and their number is not known",
                    hint="give global_batch, the samples of a step over all units",
                )
            return
        twice = [name for name in ("num_microbatches", "update_freq") if getattr(self, name) is not None]
        if twice:
            raise ConfigError(
                f"policy 'autodist' has global_batch and {' and '.join(twice)}",
                why=f"global_batch={self.global_batch} and the size of a microbatch say how many there are",
                hint=f"leave out {' and '.join(twice)}, or global_batch",
            )


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The fastest plan found, with its certificate."""
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    if options.load_plan is not None:
        return load_plan(SavedOptions(load_plan=options.load_plan, num_microbatches=options.num_microbatches), graph, config)
    hardware = load_hardware(options.hardware, config.runtime_ngpus)
    batch = None
    if options.global_batch is not None:
        batch = own_batch(graph, config, options.global_batch, options.microbatch, options.batch_dims)
    variants = Variants.of({batch: graph}, config, options.zero)
    plan = settled(search_variants(variants, options, hardware), config, hardware)
    save(options, plan)
    return plan


def reused(config: ComputeConfig, plan: Plan) -> None:
    """Write the plan that a compile has found made where a new one would have been written."""
    save(read_options(AutodistOptions, config.pas_config, policy="autodist"), plan)


def save(options: AutodistOptions, plan: Plan) -> None:
    """Write the plan where the options want it."""
    if options.save_plan is not None:
        write_file(Path(options.save_plan), plan.dumps().encode())


def settled(found: Found, config: ComputeConfig, hardware: Hardware) -> Plan:
    """The best plan of a search, with its certificate. Raises :class:`PlanError` if nothing fits."""
    if found.best is None:
        raise PlanError(
            f"no plan for {config.plan_ngpus} ranks fits on {hardware.name}",
            why="; ".join(f"{title}: {reason}" for title, reason in found.refused.items()) or "nothing was tried",
            hint="more ranks (plan_ngpus), a larger memory_limit_gb, or fewer constraints",
        )
    best = found.best.plan
    strategies = {op: assignment for op, assignment in best.strategies.items() if assignment}
    return replace(best, strategies=strategies, policy="autodist", certificate=certificate(found, found.best, hardware))


def search(graph: PlannableGraph, config: ComputeConfig, options: AutodistOptions, hardware: Hardware) -> Found:
    """What a search with these options finds for one graph, with every stage of ZeRO that the config leaves to it.

    Raises what :func:`search_variants` raises.
    """
    return search_variants(Variants.of({None: graph}, config, options.zero), options, hardware)


def search_variants(variants: Variants, options: AutodistOptions, hardware: Hardware) -> Found:
    """What searches with these options find, with the times of operators measured on the machine if there are any.

    Raises:
        ConfigError: options that contradict each other or the config; a file of times that is none.
        PlanError: constraints or stages that the model does not have.
    """
    times = load_times(options.hardware)
    pricings: Pricings = {}

    def one(variant: Variant, time_limit_s: float, worth_s: float) -> Found:
        chosen = options_of(variant, options, time_limit_s)
        space = replace(_space(variant.graph, variant.config, chosen, hardware), worth_s=worth_s)
        placer = Placer(variant.graph, variant.config, chosen, hardware, times, pricings)
        return Search(
            variant.graph, variant.config, hardware, space, placer,
            times=times, time_limit_s=time_limit_s, least=placer.least_s,
        ).run()  # fmt: skip

    return variants.search(one, options.time_limit_s)


def options_of(variant: Variant, options: AutodistOptions, time_limit_s: float) -> AutodistOptions:
    """The options of the search of one variant, with all chosen that tells it from the others."""
    chosen = replace(options, time_limit_s=time_limit_s, zero=None, global_batch=None, microbatch=None, batch_dims={})
    if variant.batch is None:
        return chosen
    name = "num_microbatches" if variant.config.use_end2end else "update_freq"
    return replace(chosen, **{name: variant.batch.num_microbatches})  # type: ignore[arg-type]


def certificate(found: Found, best: Candidate, hardware: Hardware) -> Certificate:
    """What is certain of the best plan."""
    proof, space = best.placed[0].proof, f"{best.title}; {best.placed[0].space}"
    if best.is_mixed:
        assert best.attempt is not None
        proof = "the placements offered were chosen before the stages; with them the bound holds for every split between blocks"
        space = f"{best.title}; {len(best.attempt.offers)} placements offered to every stage"
    elif best.plan.stages:
        proof += "; the placement was chosen before the stages, of which the bound holds for every split between blocks"
    if not best.is_mixed and found.tried_mixed:
        proof += "; stages that differ were searched with the placements offered to them"
    if found.searched:
        proof += f"; searched one by one: {found.searched}"
    if found.interrupted is not None:
        proof += f"; the search ended by {found.interrupted}"
    tried = [f"{c.title}: {c.step_s * 1e3:.6g} ms, at least {c.bound_s * 1e3:.6g} ms" for c in found.tried]
    tried += [f"{title}: none of them takes less than {bound * 1e3:.6g} ms" for title, bound in found.bounds.items()]
    tried += [f"{title}: {reason}" for title, reason in found.refused.items()]
    return Certificate(best.step_s, min(found.bound_s, best.step_s), proof, space, hardware.name, tuple(tried))


def _space(graph: PlannableGraph, config: ComputeConfig, options: AutodistOptions, hardware: Hardware) -> Space:
    """The options as what is searched."""
    _check(config, options)
    limit = hardware.device.memory_bytes if options.memory_limit_gb is None else options.memory_limit_gb * 1e9
    schedules = [name for name, method in SCHEDULES.items() if method.trains and name != "gpipe"]
    if options.schedule is not None:
        schedules = [options.schedule]
    return Space(
        meshes=_meshes(config, options),
        num_microbatches=options.num_microbatches or options.update_freq or 1,
        num_positions=_num_positions(config, options),
        schedules=schedules,
        chunks=options.chunks,
        stage_starts=None if options.stage_starts is None else starts_at(graph, options.stage_starts),
        recompute=options.recompute,
        memory_bytes=limit,
        mixed=options.mesh is None,
        pp_place=None if config.rank_order is None else _pp_place(config.rank_order),
    )


def _num_positions(config: ComputeConfig, options: AutodistOptions) -> int | None:
    """The pipeline positions that the options leave, ``None`` for any."""
    if options.num_stages is not None:
        return options.num_stages
    if options.mesh is not None:
        return config.plan_ngpus // Mesh.of(options.mesh).size
    return None if options.num_microbatches is not None else 1


def _meshes(config: ComputeConfig, options: AutodistOptions) -> Mapping[int, list[Mesh]]:
    """By number of ranks, the meshes to try."""
    if options.mesh is not None:
        mesh = Mesh.of(options.mesh)
        if config.rank_order is not None:
            mesh = _ordered(mesh, [name for name in config.rank_order.split("-") if name != "pp"])
        return {mesh.size: [mesh]}
    most = options.max_split or config.plan_ngpus
    sizes = divisors(config.plan_ngpus)
    if options.num_microbatches is not None:
        sizes = sorted({*sizes, *stage_sizes(config.plan_ngpus)})
    found = {size: meshes(size, options.max_axes) for size in sizes}
    return {size: [m for m in listed if all(n <= most for _, n in m.axes)] for size, listed in found.items()}


def _pp_place(rank_order: str) -> int | None:
    """Before which axis of the mesh the order has the pipeline axis; None if it does not say."""
    names = rank_order.split("-")
    return names.index("pp") if "pp" in names else None


def _ordered(mesh: Mesh, names: list[str]) -> Mesh:
    if sorted(names) != sorted(mesh.names):
        raise PlanError(f"order {'-'.join(names)!r} does not name the axes of the mesh", why=f"axes {mesh.names}")
    return Mesh(tuple((name, mesh.axis_size(name)) for name in names))


def _check(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse options that contradict each other or the config."""
    given = [name for name in ("pin", "forbid", "stored") if getattr(options, name)]
    given += ["rank_order"] if config.rank_order is not None else []
    if given and options.mesh is None:
        raise ConfigError(
            f"policy 'autodist' has {' and '.join(given)} but no mesh",
            why="the axes they name are those of a mesh",
            hint="give the option mesh, for example {'dp': 2, 'tp': 4}",
        )
    if options.mesh is not None:
        mesh = Mesh.of(options.mesh)
        positions = options.num_stages or 1
        if any(size < 1 for _, size in mesh.axes) or config.plan_ngpus % mesh.size or "pp" in mesh.names:
            why = f"mesh {mesh} is that of one pipeline position, plan_ngpus={config.plan_ngpus}"
            raise ConfigError(
                "the mesh of policy 'autodist' does not divide the ranks", why=why, hint="leave out the axis 'pp'"
            )
        if mesh.size * positions != config.plan_ngpus and (options.num_stages is not None or not options.num_microbatches):
            raise ConfigError(
                f"the mesh of policy 'autodist' has {mesh.size} ranks",
                why=f"mesh {mesh}, num_stages={positions}, plan_ngpus={config.plan_ngpus}",
                hint="make the product of the axes and num_stages equal to plan_ngpus",
            )
    _check_uneven(config, options)
    pipeline = [name for name in ("schedule", "chunks", "stage_starts") if getattr(options, name) is not None]
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
            hint="ComputeConfig(use_end2end=True, ...), with a model whose first result is the loss; or update_freq for "
            "gradients accumulated without a pipeline",
        )
    if options.schedule is not None and not getattr(SCHEDULES.get(options.schedule), "trains", False):
        trained = [name for name, method in SCHEDULES.items() if method.trains]
        raise ConfigError(f"there is no schedule {options.schedule!r} to train with", hint=f"one of {', '.join(trained)}")


def _check_uneven(config: ComputeConfig, options: AutodistOptions) -> None:
    """Refuse several stages on a position where positions cannot be alike."""
    several = [f"chunks={options.chunks}"] if (options.chunks or 1) > 1 else []
    if options.schedule is not None and getattr(SCHEDULES.get(options.schedule), "min_chunks", 1) > 1:
        several.append(f"schedule={options.schedule!r}")
    if several and options.num_stages is not None and config.plan_ngpus % options.num_stages:
        raise ConfigError(
            f"policy 'autodist' has num_stages={options.num_stages} and {' and '.join(several)}",
            why=f"{config.plan_ngpus} ranks do not divide into so many equal positions, and unequal ones run one stage each",
            hint="a num_stages that divides plan_ngpus, or schedule '1f1b'",
        )


TARGET_GAP, LARGE = 5e-3, 256
"""How near to its bound the placement on one of many meshes need be, and from how many operators on: meshes differ by more, and
the time is for all of them. On a mesh that is given, and for smaller models, placements are made as good as time allows.
"""

Pricings = dict[tuple[Mesh, tuple[int, ...]], Pricing]
"""By mesh and the ranks that it lies on, what does not change between placements."""

SHARE = 0.02
"""Of the time limit, for a placement that need not be better."""


class Placer:
    """Places the model, keeping what does not change between the wishes for one mesh."""

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        options: AutodistOptions,
        hardware: Hardware,
        times: OperatorTimes | None = None,
        pricings: Pricings | None = None,
    ) -> None:
        self.graph, self.config, self.options, self.hardware, self.times = graph, config, options, hardware, times
        self._deadline = time.monotonic() + options.time_limit_s
        self._pricings: Pricings = {} if pricings is None else pricings

    def request(self, wish: Wish) -> PlacementRequest:
        """What a wish asks of the placement, with what the options fix."""
        coarse = self.options.mesh is None and len(self.graph.ops) >= LARGE
        share = SHARE if coarse else 1.0
        return PlacementRequest(
            self.graph,
            wish.mesh,
            wish.ranks,
            self.hardware,
            self.config,
            memory_limit_bytes=wish.memory_bytes,
            constraints=Constraints(self.options.pin, self.options.forbid, self.options.stored),
            time_limit_s=max(1.0, min((self._deadline - time.monotonic()) / 2, share * self.options.time_limit_s)),
            target_gap=TARGET_GAP if coarse else 0.0,
            microbatches=wish.num_microbatches,
            outputs=output_wishes(self.graph, self.config),
            recompute=wish.recompute,
            in_flight=wish.in_flight,
            times=self.times,
        )

    def __call__(self, wish: Wish) -> Placed:
        request = self.request(wish)
        pricing = self._pricings.setdefault((wish.mesh, wish.ranks), Pricing(request))
        found = place(request, pricing=pricing)
        if isinstance(found, Infeasible):
            raise PlanError("no placement fits", why=_too_large(found, request, pricing))
        plan = found.plan if self.graph.eval_graph is None else _with_evaluation(found, self.graph.eval_graph)
        if self.options.mesh is None:
            plan = named(plan, split_dim_names(self.graph, plan))
        return Placed(plan, found.bound_s, found.proof, str(found.space))

    def least_s(self, wish: Wish) -> float:
        """Seconds per step that no plan for a wish with memory is below; what may be computed again is as the options say."""
        request = self.request(wish)
        pricing = self._pricings.setdefault((wish.mesh, wish.ranks), Pricing(request))
        return least_step_s(request, pricing, again=self.options.recompute is None)


def _too_large(found: Infeasible, request: PlacementRequest, pricing: Pricing) -> str:
    """Why nothing fits: how much is missing, and what takes most."""
    if found.row is None or found.least_usage is None or request.memory_limit_bytes is None:
        return found.reason
    nodes = formulate(request, pricing).nodes
    names = [_name(nodes[index]) for index in found.nodes[:3]]
    return (
        f"at least {found.least_usage / 1e9:.3g} GB, and {request.memory_limit_bytes / 1e9:.3g} GB are allowed; "
        f"most of it for {', '.join(names)}"
    )


def _name(node: Node) -> str:
    """What a node of the problem stands for: a parameter, an operator or a value."""
    return node.op.name if isinstance(node, OpNode) else node.value.fqn or node.value.name


def _with_evaluation(best: Placement, body: IRGraph) -> Plan:
    """The plan with strategies for the operators that only the evaluation body has, for the tensors as they are stored."""
    plan, request = best.plan, best.request
    names = {op.name for op in body.ops}
    pin = {op: {axis: found.get(axis, "R") for axis in plan.mesh.names} for op, found in plan.strategies.items() if op in names}
    held = {value.fqn for value in (*body.parameters, *body.buffers)}
    stored = {fqn: layout for fqn, layout in plan.stored.items() if fqn in held}
    graph = PlannableGraph.of(body)
    paths = {path for path, _ in body.output.leaves()}
    found = place(
        replace(
            request,
            graph=graph,
            constraints=Constraints(pin, {}, stored),
            memory_limit_bytes=None,
            outputs={path: wish for path, wish in request.outputs.items() if path in paths},
        )
    )
    assert not isinstance(found, Infeasible), found.reason
    return replace(plan, strategies={**found.plan.strategies, **plan.strategies})


def files(config: ComputeConfig) -> list[Path]:
    """The files that the options name: of the machine, of times measured on it, of a plan."""
    options = read_options(AutodistOptions, config.pas_config, policy="autodist")
    measured = times_file(options.hardware)
    named = [Path(options.hardware), measured] if measured is not None else []
    named += [Path(options.load_plan)] if options.load_plan is not None else []
    return [path for path in named if path is not None and path.is_file()]


POLICY = Policy("autodist", apply, AutodistOptions, built_in=True, files=files, reused=reused)
