"""Why a plan looks as it does: what an operator or a module could do otherwise, what that costs,
and what binds.

Every row is a plan that was lowered and audited: the plan of the search with this one thing done
otherwise, on the same mesh, with the same stages, schedule and layers computed again. The rest is
as the plan has it, or as the placement has it that is the fastest with that choice, whichever is
better. So rows are comparable with each other and with the step of the plan.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.operator_file import load_times
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import strategies
from shardwright.compiler.passes.finish import finished
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import ops_of, suggestion
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.mesh_requests import MeshRequest
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.cutting.join_stages import joined
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.placement.constraints import allowed_strategies
from shardwright.policies.autodist.placement.place import (
    Placement,
    in_words,
    place,
    plan_of,
    runners_up,
)
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.search.placer import Placer
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

GIGABYTE = 1e9

TIE = 1e-9
"""Relative: seconds that differ by less are the same."""

MOST = 10
"""Choices that are audited, unless more are asked for."""

NOTHING_BINDS = "nothing: no other choice listed is faster"

REST_FOR_SPEED = ", the rest for speed alone"
"""The note at a choice that the plan makes, too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to do something: the seconds per step of a plan that does it so, infinite where there
    is none, and the bytes of its fullest rank. ``fits``: whether these are allowed. ``chosen``: of
    the plan itself.
    """

    name: str
    step_s: float
    peak_bytes: float = 0.0
    fits: bool = True
    chosen: bool = False


@dataclass(frozen=True)
class Explanation:
    """``choices``: fastest first, those that do not fit among them. ``binds``: what keeps the plan
    from a faster one, in words: constraints, the memory, or nothing. ``left_out``: how many more
    choices there are, which were not audited.
    """

    choices: tuple[Choice, ...]
    binds: str
    left_out: int = 0


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
        """The memory of a device."""
        limit_gb = self.options.memory_limit_gb
        return self.hardware.device.memory_bytes if limit_gb is None else limit_gb * GIGABYTE

    @property
    def positions(self) -> int:
        return len({stage.ranks for stage in self.best.plan.stages}) or 1

    @functools.cached_property
    def auditor(self) -> Auditor:
        """Audits plans as the search has audited the best one."""
        count = self.options.num_microbatches or self.options.update_freq or 1
        times, optimizer = load_times(self.options.hardware), self.options.optimizer_memory
        return Auditor(self.graph, self.config, self.hardware, count, optimizer, times)

    @functools.cached_property
    def lowered(self) -> Program | PipelineProgram:
        """The program of the best plan."""
        return self.auditor.lowered(self.best.plan)

    @functools.cached_property
    def _emitted(self) -> Program | PipelineProgram:
        return finished(self.lowered, self.config)

    def step_on(self, hardware: Hardware, config: ComputeConfig | None = None) -> float:
        """The step of the best plan on another machine, or with another config for which it is
        lowered alike.
        """
        if config is None or config == self.config:
            return replace(self.auditor, hardware=hardware).step_s(self._emitted)
        other = replace(self.auditor, hardware=hardware, config=config)
        return other.step_s(finished(self.lowered, config))

    @functools.cached_property
    def placer(self) -> Placer:
        return Placer(
            self.graph, self.config, self.options, self.hardware, self.auditor.times, clock=Clock()
        )

    def placed_at(self, op: str = "") -> int:
        """Which of the placements an operator is in: that of its stage, or of all, where stages are
        alike.
        """
        return (
            stage_of_ops(self.graph, self.best.plan)[op] if op and len(self.best.placed) > 1 else 0
        )

    def mesh(self, op: str = "") -> Mesh:
        """The mesh of the stage that an operator is in, or of the first one: where stages are
        alike, of all.
        """
        return self.best.placed[self.placed_at(op)].plan.mesh

    def mesh_request(self, op: str = "") -> MeshRequest:
        """The placement behind the best plan, of the stage of an operator, for speed alone."""
        plan, mesh = self.best.plan, self.mesh(op)
        ranks = plan.stages[self.placed_at(op)].ranks if plan.stages else tuple(range(mesh.size))
        return MeshRequest(mesh, ranks, self.auditor.num_microbatches, recompute=plan.recompute)

    def fastest(
        self, op: str, pin: Mapping[str, Mapping[str, str]] | None = None
    ) -> Placement | None:
        """The placement for speed alone on the mesh of an operator, some of it pinned; ``None``
        where a pin leaves nothing.
        """
        wanted = self.placer.request(self.mesh_request(op))
        if pin:
            wanted = replace(
                wanted, constraints=replace(wanted.constraints, pin={**self.options.pin, **pin})
            )
        try:
            found = place(wanted, pricing=self.placer.pricing_of(wanted))
        except PlanError:
            return None  # the module cannot follow the pin: that is what the row says
        return None if isinstance(found, Infeasible) else found


def check_operator(graph: PlannableGraph, name: str) -> None:
    """Raise :class:`PlanError` if a model has no such operator."""
    ops = ops_of(graph)
    if name not in ops:
        raise PlanError(f"the model has no operator {name!r}", hint=suggestion(name, ops))


def operators_of(graph: PlannableGraph, path: str) -> list[str]:
    """The operators of a module, in order. Raises :class:`PlanError` if there are none."""
    own = [
        op.name
        for op in graph.ops
        if op.module_path == path or op.module_path.startswith(f"{path}.")
    ]
    if not own:
        paths = sorted({op.module_path for op in graph.ops if op.module_path})
        raise PlanError(f"no operator belongs to module {path!r}", hint=suggestion(path, paths))
    return own


def explain_operator(request: Request, name: str, most: int = MOST) -> Explanation:
    """The ways to compute an operator on the mesh of its stage: those that promise most.

    Raises:
        PlanError: the model has no such operator.
    """
    check_operator(request.graph, name)
    # The fastest plan without this choice, and what the plan of the search does.
    fastest, planned = _free(request, name), _planned(request, name)
    # The best plan with each strategy of the operator.
    # A plan is built only for those that are shown.
    plan = functools.partial(plan_of, fastest.request, fastest.formulation)
    others = [
        _Other(found.name, found.cost_s, functools.partial(plan, found.choice))
        for found in runners_up(fastest, name)
        if found.choice is not None
    ]
    return _explained(request, fastest, [name], planned, others, most)


def explain_module(request: Request, path: str, most: int = MOST) -> Explanation:
    """What a module costs if it is cut along other dims of the model, or not at all, axis by axis.

    If stages differ, this is of the module's operators on the mesh of the first of them.

    Raises:
        PlanError: no operator belongs to such a module.
    """
    # A module may lie in several stages: its part in the first.
    own = operators_of(request.graph, path)
    names = [name for name in own if request.placed_at(name) == request.placed_at(own[0])]
    fastest, dims = _free(request, names[0]), request.graph.dims
    assert dims is not None
    others, impossible = [_Other(FASTEST, fastest.cost_s, lambda: fastest.plan)], []
    # One problem for each axis and dim: the module pinned, all else free.
    for axis in request.mesh(names[0]).names:
        for factor in (
            *sorted(
                {dims.classes[index].name for (op, _), index in dims.factors.items() if op in names}
            ),
            "R",
        ):
            words = f"{axis} not used" if factor == "R" else f"{axis} splits {factor}"
            # All other operators, and this one along other axes, choose anew.
            found = request.fastest(names[0], {path: {axis: factor}})
            if found is None:
                impossible.append(Choice(words, math.inf))
            else:
                others.append(_Other(words, found.cost_s, lambda plan=found.plan: plan))  # type: ignore[misc]
    told = _explained(request, fastest, names, AS_PLANNED, others, most)
    return replace(told, choices=(*told.choices, *impossible))


AS_PLANNED, FASTEST = "as planned", "the fastest placement"


@dataclass(frozen=True)
class _Other:
    """A choice that the placement for speed alone knows: its seconds there, and its plan for the
    mesh.
    """

    name: str
    cost_s: float
    plan: Callable[[], Plan]


def _explained(
    request: Request,
    fastest: Placement,
    names: Sequence[str],
    planned: str,
    others: Sequence[_Other],
    most: int,
) -> Explanation:
    """The choices for some operators of one mesh, the most promising of them audited. ``planned``:
    what the plan is called.
    """
    assert request.best.cost is not None
    peak = request.best.cost.peak_bytes
    # The plan itself is the first row; the others are audited as it was.
    rows = [
        Choice(planned, request.best.step_s, peak, peak <= request.memory_limit_bytes, chosen=True)
    ]
    waiting = sorted(others, key=lambda other: other.cost_s)
    # By predicted seconds, as auditing takes long.
    for other in waiting[:most]:
        row = _audited(request, names, other)
        if other.name not in (planned, FASTEST):
            rows.append(row)
        elif row.step_s < request.best.step_s * (1 - TIE):
            rows.append(
                replace(row, name=f"{planned}{REST_FOR_SPEED}") if other.name == planned else row
            )
    rows.sort(key=lambda row: (row.step_s, not row.chosen))
    constrained = _constrained(request, fastest, names)
    plan = request.best.plan
    loops = [note.reason for note in plan.notes if note.axis in plan.loops]
    return Explanation(
        tuple(rows),
        "; ".join([*constrained, *loops, *_faster(request, rows)]) or NOTHING_BINDS,
        len(waiting[most:]),
    )


def _faster(request: Request, rows: Sequence[Choice]) -> list[str]:
    """Why the plan is not as the fastest of some choices, if any is faster."""
    faster = [row for row in rows if row.step_s < request.best.step_s * (1 - TIE)]
    # Of the faster ones those that fit say more: the search has missed them.
    fitting = [row for row in faster if row.fits]
    if not faster:
        return []
    row = (fitting or faster)[0]
    takes = f"{row.name} takes {amount(row.step_s, 's')}, not {amount(request.best.step_s, 's')}"
    if row.fits:
        return [f"the search, which has not tried this: {takes}, and fits"]
    limit = amount(request.memory_limit_bytes, "B")
    return [
        (
            f"the memory: {takes}, but {amount(row.peak_bytes, 'B')} on a device, and {limit} "
            "are allowed"
        )
    ]


def _audited(request: Request, names: Sequence[str], other: _Other) -> Choice:
    """A choice as it is audited: with operators as a plan for their mesh has them, and the rest as
    the plan of the search has it (what they read stored as lowering finds best), or all as that
    plan has it; the better of both.
    """
    whole, placed = other.plan(), request.best.placed[request.placed_at(names[0])].plan
    ops = ops_of(request.graph)
    # Tensors that the operators read are stored as lowering finds best for them.
    read = {value.fqn for name in names for value in ops[name].operands if value.fqn is not None}
    alone = replace(
        placed,
        strategies={**placed.strategies, **{name: whole.assignment(name) for name in names}},
        stored={fqn: layout for fqn, layout in placed.stored.items() if fqn not in read},
    )
    found = []
    # All operators as the new plan has them, or only these: the better one is told.
    for plan in (whole, alone):
        try:
            cost = request.auditor(_in_place(request, names[0], plan))
        except PlanError:  # its pieces would be too small for a loop of the plan
            found.append(Choice(other.name, math.inf, fits=False))
            continue
        found.append(
            Choice(
                other.name,
                cost.step_s,
                cost.peak_bytes,
                cost.peak_bytes <= request.memory_limit_bytes,
            )
        )
    return min(found, key=lambda row: (not row.fits, row.step_s))


def _in_place(request: Request, op: str, whole: Plan) -> Plan:
    """The plan of the search with another placement in the stage of an operator, or in all, where
    stages are alike.
    """
    plan, placed = request.best.plan, [found.plan for found in request.best.placed]
    if len(placed) > 1:
        placed[request.placed_at(op)] = whole
        starts = [stage.first_op for stage in plan.stages[1:]]
        whole = joined(request.graph, placed, starts, plan.schedule, plan.num_microbatches)
    return replace(plan, strategies={**plan.strategies, **whole.strategies}, stored=whole.stored)


def _constrained(request: Request, found: Placement, names: Sequence[str]) -> list[str]:
    """What constraints say of operators, each thing once."""
    only = allowed_strategies(found.request.graph, found.request.constraints, found.request.mesh)
    ops = ops_of(request.graph)
    said = Counter(
        f"{_left(ops[name], left)} along {axis}"
        for name in names
        for axis, left in only.get(name, {}).items()
    )
    return [
        f"constraints: {words}" + (f" ({count} operators)" if count > 1 else "")
        for words, count in said.items()
    ]


def factor_dims(graph: PlannableGraph, name: str) -> dict[str, str]:
    """The dim of the model that each factor of an operator's rule is, as choices and pins name
    factors; those without a dim are left out.
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
    return (
        f"only {', '.join(sorted(left))}" if len(left) <= len(taken) else f"not {', '.join(taken)}"
    )


def _free(request: Request, name: str) -> Placement:
    """The placement for speed alone, on the mesh of an operator."""
    found = request.fastest(name)
    assert found is not None, "the plan itself is a placement"
    return found


def _planned(request: Request, name: str) -> str:
    """What the plan does with an operator, in words."""
    assignment = request.best.plan.strategies.get(name, {})
    return in_words(
        {
            axis: assignment[axis]
            for axis in request.mesh(name).names
            if assignment.get(axis, "R") != "R"
        }
    )
