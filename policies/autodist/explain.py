"""Why a plan looks as it does: the runners-up of an operator or a module, what a named alternative would cost, and what more
memory or faster links would buy. Every figure is that of a plan found by the same search, not an estimate of a difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.hardware import Hardware, Link, Tier
from shardwright.compiler.cost.memory import program_memory
from shardwright.compiler.cost.operator_file import load_times
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import strategies
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import ops_of, suggestion
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates import ROLES, role_of
from shardwright.policies.autodist.degrees import forbidden
from shardwright.policies.autodist.found import Candidate
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.placement.constraints import allowed_strategies
from shardwright.policies.autodist.placement.place import Placement, alternatives, in_words, place
from shardwright.policies.autodist.placer import Placer
from shardwright.policies.autodist.policy import search
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.space import Wish
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

GIGABYTE = 1e9

NO_LIMIT_GB = 1e9
"""More than any device has."""

TIE = 1e-9
"""Relative: seconds that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to do something, and the seconds per step of the best plan that does it so; infinite where none fits."""

    name: str
    step_s: float
    chosen: bool = False


@dataclass(frozen=True)
class Request:
    """What a search was asked for. ``best`` is what it found."""

    graph: PlannableGraph
    config: ComputeConfig
    options: AutodistOptions
    hardware: Hardware
    best: Candidate

    @property
    def memory_limit_bytes(self) -> float:
        """Of a device."""
        limit_gb = self.options.memory_limit_gb
        return self.hardware.device.memory_bytes if limit_gb is None else limit_gb * GIGABYTE

    @property
    def positions(self) -> int:
        return len({stage.ranks for stage in self.best.plan.stages}) or 1

    def mesh(self, op: str = "") -> Mesh:
        """The mesh of the stage that an operator is in, or of the first one: where stages are alike, of all."""
        plan, placed = self.best.plan, self.best.placed
        stage = stage_of_ops(self.graph, plan)[op] if op and len(placed) > 1 else 0
        return placed[stage].plan.mesh

    def wish(self, op: str = "") -> Wish:
        """The placement behind the best plan, of the stage of an operator, for speed alone."""
        mesh = self.mesh(op)
        return Wish(mesh, tuple(range(mesh.size)), self.options.num_microbatches or self.options.update_freq or 1)


def explain_operator(request: Request, name: str) -> list[Choice]:
    """Every way to compute an operator on the mesh of the plan, each with the best placement of all the others, cheapest first.

    Raises:
        PlanError: the model has no such operator.
    """
    found = _fastest(request, name)
    every, planned = alternatives(found, name), _planned(request, name)
    chosen = planned if planned in every else in_words(found.plan.strategies.get(name, {}))
    return [Choice(words, seconds, words == chosen) for words, seconds in every.items()]


def binding(request: Request, name: str, choices: Sequence[Choice]) -> str:
    """What keeps an operator from its fastest choice, of those of :func:`explain_operator`, in words: constraints, the memory,
    the pipeline, or nothing.
    """
    found, planned = _fastest(request, name), _planned(request, name)
    words = _constrained(request, found, [name])
    fastest, seconds = choices[0], {choice.name: choice.step_s for choice in choices}
    if seconds.get(planned, math.inf) > fastest.step_s * (1 + TIE):
        words.append(f"{_why_slower(request, found, [name])}; it has {planned}, and the fastest {fastest.name}")
    return "; ".join(words) or NOTHING_BINDS


NOTHING_BINDS = "nothing: no other choice is faster on this mesh"


def module_binding(request: Request, path: str) -> str:
    """The same of all operators of a module together, as far as they are on the mesh of the first."""
    names = _on_one_mesh(request, path)
    found = _fastest(request, names[0])
    words = _constrained(request, found, names)
    if _planned_s(request, names, found.cost_s) > found.cost_s * (1 + TIE):
        other = sum(_planned(request, name) != in_words(found.plan.strategies.get(name, {})) for name in names)
        count = f"{other} of its {len(names)} operators do otherwise in the fastest placement"
        words.append(f"{_why_slower(request, found, names)}; {count}")
    return "; ".join(words) or NOTHING_BINDS


def _constrained(request: Request, found: Placement, names: Sequence[str]) -> list[str]:
    """What constraints say of operators, each thing once."""
    only = allowed_strategies(found.request.graph, found.request.constraints, found.request.mesh)
    ops = ops_of(request.graph)
    said = Counter(f"{_left(ops[name], left)} along {axis}" for name in names for axis, left in only.get(name, {}).items())
    return [f"constraints: {words}" + (f" ({count} operators)" if count > 1 else "") for words, count in said.items()]


def _why_slower(request: Request, found: Placement, names: Sequence[str]) -> str:
    """Why a plan does not do what is fastest for operators: the memory, or what a pipeline asks for. ``found``: the fastest
    placement of the mesh. Of a pipeline another search says it, for one of this shape whose memory has no limit.
    """
    limit, takes = amount(request.memory_limit_bytes, "B"), amount(request.best.step_s, "s")
    if not request.best.plan.stages:
        optimizer = request.options.optimizer_memory
        needed = program_memory(lower(request.graph, found.plan), request.config, optimizer).peak_bytes
        if needed > request.memory_limit_bytes:
            return f"the memory: the fastest placement takes {amount(needed, 'B')}, and {limit} are allowed"
        return "the plan as a whole, which is not the fastest placement of one microbatch after the other"
    roomy = search(
        request.graph, request.config, replace(_same_shape(request), memory_limit_gb=NO_LIMIT_GB), request.hardware
    ).best
    if roomy is None or roomy.cost is None or roomy.step_s >= request.best.step_s * (1 - TIE):
        return "the pipeline, of which each stage runs beside the others: with more memory than there is it is no faster"
    with_room = replace(request, best=roomy)
    if all(_planned(with_room, name) == _planned(request, name) for name in names):
        return "the pipeline, of which each stage runs beside the others: with more memory than there is it does the same here"
    return (
        f"the memory: if there were no limit ({limit}), such a pipeline would do otherwise here, take"
        f" {amount(roomy.step_s, 's')} in the place of {takes}, and {amount(roomy.cost.peak_bytes, 'B')}"
    )


def factor_dims(graph: PlannableGraph, name: str) -> dict[str, str]:
    """By factor of an operator's rule, as choices and pins have it, the dim of the model that it is; factors without one left
    out.
    """
    assert graph.dims is not None
    rule = ops_of(graph)[name].rule
    assert rule is not None
    found = {factor.name: graph.dims.of_factor(name, factor.name) for factor in rule.factors}
    return {factor: dim.name for factor, dim in found.items() if dim is not None}


def _left(op: IROp, left: Collection[str]) -> str:
    """What constraints leave an operator, or what they take, whichever is shorter."""
    assert op.rule is not None
    taken = [strategy for strategy in strategies(op.rule) if strategy not in left]
    return f"only {', '.join(sorted(left))}" if len(left) <= len(taken) else f"not {', '.join(taken)}"


def _fastest(request: Request, name: str) -> Placement:
    """The placement for speed alone, on the mesh of an operator. Raises :class:`PlanError` if there is none of that name."""
    ops = ops_of(request.graph)
    if name not in ops:
        raise PlanError(f"the model has no operator {name!r}", hint=suggestion(name, ops))
    found = place(_placer(request).request(request.wish(name)))
    assert not isinstance(found, Infeasible), "the plan itself is a placement"
    return found


def _planned(request: Request, name: str) -> str:
    """What the plan does with an operator, in words."""
    assignment = request.best.plan.strategies.get(name, {})
    return in_words({axis: assignment[axis] for axis in request.mesh(name).names if assignment.get(axis, "R") != "R"})


def explain_module(request: Request, path: str) -> list[Choice]:
    """For every axis, what is computed in a module cut along another dim of the model, or not at all, the rest free; as the
    plan has it; and free, too, if that is faster.

    Raises:
        PlanError: no operator belongs to such a module.
    """
    graph = request.graph
    own = _operators_of(graph, path)
    assert graph.dims is not None
    dims = {graph.dims.classes[index].name for (name, _), index in graph.dims.factors.items() if name in own}
    first = own[0]
    free = _placement_s(request, {}, first)
    planned = _planned_s(request, _on_one_mesh(request, path), free)
    found = [Choice("as planned", planned, chosen=True)]
    found += [Choice("fastest", free)] if planned > free else []
    for axis in request.mesh(first).names:
        for wish in (*sorted(dims), "R"):
            words = f"{axis} not used" if wish == "R" else f"{axis} splits {wish}"
            found.append(Choice(words, _placement_s(request, {path: {axis: wish}}, first)))
    return sorted(found, key=lambda choice: (choice.step_s, not choice.chosen))


def _operators_of(graph: PlannableGraph, path: str) -> list[str]:
    """The operators of a module, in order. Raises :class:`PlanError` if there are none."""
    own = [op.name for op in graph.ops if op.module_path == path or op.module_path.startswith(f"{path}.")]
    if not own:
        paths = sorted({op.module_path for op in graph.ops if op.module_path})
        raise PlanError(f"no operator belongs to module {path!r}", hint=suggestion(path, paths))
    return own


def _on_one_mesh(request: Request, path: str) -> list[str]:
    """The operators of a module that are on the mesh of its first one."""
    own = _operators_of(request.graph, path)
    return [name for name in own if request.mesh(name) == request.mesh(own[0])]


def _planned_s(request: Request, names: Sequence[str], fastest_s: float) -> float:
    """Seconds of the best placement in which operators of one mesh do what the plan has them do: ``fastest_s`` where that is as
    fast, or cannot be placed so alone.
    """
    plan = request.best.plan
    pin = {name: {axis: plan.assignment(name).get(axis, "R") for axis in request.mesh(name).names} for name in names}
    seconds = _placement_s(request, pin, names[0])
    return seconds if fastest_s * (1 + TIE) < seconds < math.inf else fastest_s


def levers(request: Request) -> list[Choice]:
    """What one more gigabyte of memory, and links of twice the rate, would buy on the mesh of the plan; and without a memory
    limit, whether memory binds.
    """
    hardware, options = request.hardware, request.options
    limit = options.memory_limit_gb or hardware.device.memory_bytes / GIGABYTE
    fixed = _same_shape(request)
    variants = {
        "the plan": (fixed, hardware),
        "one more gigabyte of memory": (replace(fixed, memory_limit_gb=limit + 1), hardware),
        "memory without limit": (replace(fixed, memory_limit_gb=NO_LIMIT_GB), hardware),
        "links of twice the rate": (fixed, _faster_links(hardware, 2.0)),
    }
    found = []
    for name, (chosen, machine) in variants.items():
        best = search(request.graph, request.config, chosen, machine).best
        found.append(Choice(name, best.step_s if best else float("inf"), name == "the plan"))
    return found


def against(request: Request, sizes: Mapping[str, int]) -> Candidate:
    """The best plan on a named mesh, such as ``tp=8`` or ``pp=2, tp=4``. Axes with the name of a role (``dp``, ``sp``, ``ep``,
    ``tp``) split what that role splits.

    Raises:
        PlanError: nothing fits there, with the reasons.
    """
    inner = {axis: size for axis, size in sizes.items() if axis != "pp"}
    positions = sizes.get("pp", 1)
    if Mesh.of(sizes).size != request.config.plan_ngpus:
        raise PlanError(
            f"the mesh {Mesh.of(sizes)} has {Mesh.of(sizes).size} ranks",
            why=f"plan_ngpus={request.config.plan_ngpus}",
            hint="make the product of the sizes equal to plan_ngpus",
        )
    forbid = _by_role(request.graph, tuple(inner), request.options.forbid)
    options = replace(request.options, mesh=inner, degrees={}, num_stages=positions, forbid=forbid)
    found = search(request.graph, request.config, options, request.hardware)
    if found.best is None:
        reasons = "; ".join(f"{title}: {reason}" for title, reason in found.refused.items())
        raise PlanError(f"nothing fits on the mesh {Mesh.of(sizes)}", why=reasons or None)
    return found.best


def _by_role(graph: PlannableGraph, axes: tuple[str, ...], given: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What axes with a role in their name must leave alone, ``dp`` all but the batch, ``tp`` batch and sequence, besides what
    is forbidden already.
    """
    assert graph.dims is not None
    roles = dict(ROLES)
    forbid = {dim: tuple(axes) for dim, axes in given.items()}
    for dim in {found.name for found in graph.dims.classes}:
        for axis in axes:
            role = axis.rstrip("0123456789")
            if role in roles and role_of(dim) != role:
                forbid[dim] = (*forbid.get(dim, ()), axis)
    return forbid


def side_by_side(left: Candidate, right: Candidate) -> list[tuple[str, float, float]]:
    """Where the seconds of two plans go, on the rank that has most of each: name, left, right; the largest difference first."""
    assert left.cost is not None and right.cost is not None
    rows = [("step", left.step_s, right.step_s)]
    parts: dict[str, list[float]] = {}
    for side, candidate in enumerate((left, right)):
        assert candidate.cost is not None
        for rank in candidate.cost.ranks:
            for name, seconds in {"computing": rank.compute_s, **rank.comm_s, "waiting": rank.idle_s}.items():
                pair = parts.setdefault(name, [0.0, 0.0])
                pair[side] = max(pair[side], seconds)
    ordered = sorted(parts.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    return rows + [(name, a, b) for name, (a, b) in ordered if a or b]


def _placement_s(request: Request, pin: Mapping[str, Mapping[str, str]], op: str) -> float:
    """Seconds per step of the best placement with some of it pinned, on the mesh of the stage of an operator; infinite where a
    pin leaves nothing.
    """
    placer = _placer(replace(request, options=replace(request.options, pin={**request.options.pin, **pin})))
    try:
        found = place(placer.request(request.wish(op)))
    except PlanError:
        return float("inf")  # the module cannot follow the pin: that is what the row says
    return float("inf") if isinstance(found, Infeasible) else found.cost_s


def _placer(request: Request) -> Placer:
    return Placer(request.graph, request.config, request.options, request.hardware, load_times(request.options.hardware))


def _same_shape(request: Request) -> AutodistOptions:
    """Options that leave the search the mesh, the positions and the schedule of the plan."""
    plan: Plan = request.best.plan
    if len(request.best.placed) > 1:
        return replace(request.options, num_stages=request.positions, schedule=plan.schedule, chunks=1)
    mesh, degrees = request.mesh(), request.options.degrees
    forbid = forbidden(request.graph, mesh, degrees, request.options.forbid)
    options = replace(request.options, mesh=dict(mesh.axes), degrees={}, forbid=forbid, num_stages=request.positions)
    if not plan.stages:
        return replace(options, num_stages=None, num_microbatches=None, update_freq=request.wish().num_microbatches)
    return replace(options, schedule=plan.schedule, chunks=len(plan.stages) // request.positions)


def _faster_links(hardware: Hardware, factor: float) -> Hardware:
    """The machine with all rates of its links multiplied."""

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * factor

    def tier(item: Tier) -> Tier:
        kinds = {name: Link(link.latency_s, link.bytes_per_s * factor) for name, link in item.kinds.items()}
        return replace(
            item,
            bytes_per_s=item.bytes_per_s * factor,
            kinds=kinds,
            uplink_bytes_per_s=scaled(item.uplink_bytes_per_s),
            fabric_bytes_per_s=scaled(item.fabric_bytes_per_s),
        )

    return replace(hardware, tiers=tuple(map(tier, hardware.tiers)))


def cheapest(choices: Iterable[Choice], most: int) -> list[Choice]:
    """The first ``most`` choices, and the chosen one wherever it stands."""
    listed = list(choices)
    return [choice for index, choice in enumerate(listed) if index < most or choice.chosen]
