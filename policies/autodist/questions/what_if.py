"""What would become of a plan if one thing were otherwise: more memory, faster links, another mesh.
Every figure is that of a plan that was audited, not an estimate of a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware, Link, Tier
from shardwright.compiler.passes.chosen_rows import imbalance_of, with_imbalance
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.imbalance import Imbalance, capped, imbalance_text, scaled
from shardwright.compiler.plan.outputs import returns_more_than_loss
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.axis_roles import ROLES, forbidden, role_of
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.candidates.titles import refusals
from shardwright.policies.autodist.options import AutodistOptions, check_options, check_pipeline
from shardwright.policies.autodist.questions.explain import GIGABYTE, TIE, Choice, Request
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, on_lines
from shardwright.runtime.layout import Mesh

NO_LIMIT_GB = 1e9
"""More than any device has."""


def levers(request: Request) -> list[Choice]:
    """What would help on the mesh of the plan: one more gigabyte of memory, memory without limit,
    links of twice the rate. For a model that returns more than its loss: to return the loss alone.
    For a model with experts: tokens that choose them more evenly, or less.

    The plan itself stands in a row where nothing better is found. If the same search is better on
    this mesh alone, that is a row of its own, as it is no merit of the others.
    """
    hardware, options, best = request.hardware, request.options, request.best
    limit = (
        hardware.device.memory_bytes / GIGABYTE
        if options.memory_limit_gb is None
        else options.memory_limit_gb
    )
    # The same mesh, positions and schedule, so that only one thing changes at a time.
    fixed = replace(request, options=_same_shape(request))
    # What to change, and what it is called.
    changed = {
        "the same search on this mesh alone": fixed,
        "one more gigabyte of memory": replace(
            fixed, options=replace(fixed.options, memory_limit_gb=limit + 1)
        ),
        "memory without limit": replace(
            fixed, options=replace(fixed.options, memory_limit_gb=NO_LIMIT_GB)
        ),
        "links of twice the rate": replace(fixed, hardware=_faster_links(hardware, 2.0)),
    }
    if returns_more_than_loss(request.graph, request.config):
        changed['outputs="loss": nothing else returned'] = replace(
            fixed, config=replace(request.config, outputs="loss")
        )
    for name, imbalance in _other_routings(request).items():
        changed[name] = replace(
            fixed,
            graph=with_imbalance(request.graph, imbalance),
            options=replace(fixed.options, imbalance=imbalance),
        )
    assert best.cost is not None
    found = [Choice("the plan", best.step_s, best.cost.peak_bytes, chosen=True)]
    for name, asked in changed.items():
        # The plan as it is may gain as well, without another search.
        same = asked.hardware is hardware and asked.graph is request.graph
        cost = best.cost if same else asked.auditor(best.plan)
        other = search(asked.graph, asked.config, asked.options, asked.hardware).answer
        if other is not None and other.cost is not None and other.step_s < cost.step_s * (1 - TIE):
            cost = other.cost
        # Rows that say nothing new are left out.
        if asked is not fixed or cost is not best.cost:
            found.append(Choice(name, cost.step_s, cost.peak_bytes))
    return found


def _other_routings(request: Request) -> dict[str, Imbalance]:
    """Other ways in which tokens may choose experts: how many times its share the busiest rank then
    gets, twice as much as is assumed, or all. None for a model without experts, or on one rank.
    """
    assumed, num_ranks = imbalance_of(request.graph), request.config.plan_ngpus
    if assumed is None or num_ranks == 1:
        return {}
    twice = capped(scaled(assumed, 2), num_ranks)
    name = f"the busiest rank with {imbalance_text(twice)} times its share of tokens"
    if twice == num_ranks:
        name += ", which is all of them"
    rows: dict[str, Imbalance] = {"experts chosen evenly": 1.0, name: twice}
    return {name: imbalance for name, imbalance in rows.items() if imbalance != assumed}


def against(request: Request, sizes: Mapping[str, int]) -> Candidate:
    """The best plan on a named mesh, such as ``tp=8`` or ``pp=2, tp=4``. Axes with the name of a
    role (``dp``, ``sp``, ``ep``, ``tp``) split what that role splits.

    Raises:
        PlanError: nothing fits there, with the reasons.
        ConfigError, PlanError: what :func:`options_on` raises.
    """
    options = options_on(request.graph, request.config, request.options, sizes)
    found = search(request.graph, request.config, options, request.hardware)
    if found.answer is None:
        raise PlanError(
            f"nothing fits on the mesh {Mesh.of(sizes)}", why=on_lines(refusals(found)) or None
        )
    return found.answer


def options_on(
    graph: PlannableGraph, config: ComputeConfig, options: AutodistOptions, sizes: Mapping[str, int]
) -> AutodistOptions:
    """Options of a search on the mesh that :func:`against` is given, and on no other.

    Raises:
        PlanError: the mesh has not as many ranks as the plan.
        ConfigError: the other options do not allow it, a pipeline without a number of microbatches
            for example.
    """
    mesh = Mesh.of(sizes)
    if mesh.size != config.plan_ngpus:
        raise PlanError(
            f"the mesh {mesh} has {mesh.size} ranks",
            why=f"plan_ngpus={config.plan_ngpus}",
            hint="make the product of the sizes equal to plan_ngpus",
        )
    inner = {axis: size for axis, size in sizes.items() if axis != "pp"}
    forbid = _by_role(graph, tuple(inner), options.forbid)
    found = replace(options, mesh=inner, degrees={}, num_stages=sizes.get("pp", 1), forbid=forbid)
    check_options(config, found)
    check_pipeline(config, found)
    return found


def _by_role(
    graph: PlannableGraph, axes: tuple[str, ...], given: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """What axes with a role in their name must leave alone, ``dp`` all but the batch, ``tp`` batch
    and sequence, besides what is forbidden already.
    """
    assert graph.dims is not None
    roles = dict(ROLES)
    forbid = {dim: tuple(axes) for dim, axes in given.items()}
    for dim in {found.name for found in graph.dims.classes}:
        for axis in axes:
            role = axis.rstrip("0123456789")
            # ``tp2`` has the role of ``tp``. Axes of any other name are free.
            if role in roles and role_of(dim) != role:
                forbid[dim] = (*forbid.get(dim, ()), axis)
    return forbid


def side_by_side(left: Candidate, right: Candidate) -> list[tuple[str, float, float]]:
    """Where the seconds of two plans go, on the rank that has most of each: name, left, right; the
    largest difference first.
    """
    assert left.cost is not None and right.cost is not None
    rows = [("step", left.step_s, right.step_s)]
    # By kind of time, the most that any rank has of it.
    parts: dict[str, list[float]] = {}
    for side, candidate in enumerate((left, right)):
        assert candidate.cost is not None
        for rank in candidate.cost.ranks:
            for name, seconds in {
                "computing": rank.compute_s,
                **rank.comm_s,
                "waiting": rank.idle_s,
            }.items():
                pair = parts.setdefault(name, [0.0, 0.0])
                pair[side] = max(pair[side], seconds)
    ordered = sorted(parts.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    return rows + [(name, a, b) for name, (a, b) in ordered if a or b]


def _same_shape(request: Request) -> AutodistOptions:
    """Options that leave the search the mesh, the positions and the schedule of the plan."""
    plan: Plan = request.best.plan
    # Stages with meshes of their own: no one mesh could be asked for.
    if len(request.best.placed) > 1:
        return replace(
            request.options, num_stages=request.positions, schedule=plan.schedule, chunks=1
        )
    mesh, degrees = request.mesh(), request.options.degrees
    # Degrees become a mesh, which says no longer what each axis is for; what they rule out is kept
    # as forbidden strategies.
    forbid = forbidden(request.graph, mesh, degrees, request.options.forbid)
    options = replace(
        request.options,
        mesh=dict(mesh.axes),
        degrees={},
        forbid=forbid,
        num_stages=request.positions,
    )
    if not plan.stages:
        return replace(
            options,
            num_stages=None,
            num_microbatches=None,
            update_freq=request.mesh_request().num_microbatches,
        )
    return replace(options, schedule=plan.schedule, chunks=len(plan.stages) // request.positions)


def _faster_links(hardware: Hardware, factor: float) -> Hardware:
    """The machine with all rates of its links multiplied."""

    def scaled(rate: float | None) -> float | None:
        # ``None`` is no limit, which stays none.
        return None if rate is None else rate * factor

    def tier(item: Tier) -> Tier:
        kinds = {
            name: Link(link.latency_s, link.bytes_per_s * factor)
            for name, link in item.kinds.items()
        }
        return replace(
            item,
            bytes_per_s=item.bytes_per_s * factor,
            kinds=kinds,
            uplink_bytes_per_s=scaled(item.uplink_bytes_per_s),
            fabric_bytes_per_s=scaled(item.fabric_bytes_per_s),
        )

    return replace(hardware, tiers=tuple(map(tier, hardware.tiers)))
