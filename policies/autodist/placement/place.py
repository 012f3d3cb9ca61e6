"""Place a graph on one mesh: the best strategy of every operator over all axes at once, and how
every parameter is stored.

The problem is stated in ``placement_problem.py`` and solved by
:mod:`shardwright.policies.autodist.solver`. The result is a plan, with its cost, a bound that no
plan of the space is below, and where the bound comes from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.placement.formulation import Formulation, OpNode, StoreNode
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import MAX_MIXED
from shardwright.policies.autodist.solver.problem import Infeasible, Problem, Solution
from shardwright.policies.autodist.solver.solve import solve
from shardwright.runtime.layout import Layout

MAX_CORRECTIONS = 6
"""How often the memory row is corrected by the memory that a lowered placement plan takes."""

CORRECTION, HURRIED_CORRECTION = 0.99, 0.9
"""How much below what is needed the row is corrected, so that it ends; and where that is to be
soon.
"""

EXTENSION, MAX_EXTENSIONS = 4.0, 5
"""The factor by which the time of the solver grows, and how often, while it has found nothing at
all where anything fits.
"""

LEANEST_GAP = 5e-3
"""How near to its bound a placement need be that uses least memory: whether that fits is what
matters. Of many choices that use as little, the fastest is not told apart in any time.
"""

TABLES = (
    "; what cutting values that every rank makes (rotary tables, masks) may save at most is taken "
    "off"
)
"""The words for a bound that is that much below the optimum."""


@dataclass(frozen=True)
class PlacementSpace:
    """What was searched: the operators, the strategies that they could choose from together, and
    the values whose copies were restricted to fewer sets of layouts than their readers could want.
    ``mixed``: the most strategies that one operator mixes, where that is fewer than there are axes.
    """

    num_operators: int
    num_assignments: int
    restricted: tuple[str, ...]
    mixed: int | None = None

    def __str__(self) -> str:
        text = f"chosen among {self.num_assignments} strategies of {self.num_operators} operators"
        if self.mixed is not None:
            text += f"; at most {self.mixed} strategies of an operator at once"
        if not self.restricted:
            return text
        number = len(self.restricted)
        which = "1 value that is" if number == 1 else f"{number} values that are"
        return (
            f"{text}; not every way of copying {which} read in many layouts was tried, and the "
            "bound leaves out the others (such as two shared copies, from which the rest are made)"
        )


@dataclass(frozen=True)
class Placement:
    """A plan, and what is certain of it: ``cost_s`` seconds per step (without what pipelines add),
    of which no plan of the ``space`` is below ``bound_s``, for the reason ``proof``. ``memory``: of
    a rank at its peak, where there is a limit, the graph is no stage of a pipeline, and there was
    time to measure. ``interrupted``: from the keyboard.
    """

    plan: Plan
    cost_s: float
    bound_s: float
    proof: str
    space: PlacementSpace
    memory: RankMemory | None
    request: PlacementRequest
    formulation: Formulation
    choice: tuple[int, ...]
    interrupted: bool = False

    @property
    def longest_s(self) -> float:
        """Seconds per step that no placement takes less in one operator: the longest of them, of
        those that are trained through, where each is placed to take least, and not computed again.
        """
        nodes = [node for node in self.formulation.nodes if isinstance(node, OpNode)]
        op_choices = [
            node.choices for node in nodes if any(value.requires_grad for value in node.op.results)
        ]
        least = [float((choices.forward_s + choices.backward_s).min()) for choices in op_choices]
        return self.request.microbatches * max(least, default=0.0)

    @property
    def gap(self) -> float:
        """How far above the bound the cost is, relative to the cost; 0 is proved optimal."""
        return max(0.0, (self.cost_s - self.bound_s) / self.cost_s) if self.cost_s > 0 else 0.0


def place(request: PlacementRequest, *, pricing: Pricing | None = None) -> Placement | Infeasible:
    """The best placement found in the time of the request.

    With a memory limit, the best plan without it is tried first: where it fits, the limit costs
    nothing. Else the memory row holds, corrected by what the lowered plan really takes until one
    fits. What the deadline leaves no time to measure keeps the row, as far as it was corrected, and
    has no ``memory``.

    ``pricing``: shared by requests for one mesh, ranks, hardware and times, which then only pay for
    what is new.

    Raises:
        PlanError: the constraints name something that does not exist, or leave an operator nothing
            to do.
    """
    formulation = formulate(request, pricing)
    started = time.monotonic()
    # Measured is only what is a whole step: one microbatch, nothing sent on.
    rows = formulation.problem.rows
    walked = bool(rows) and request.in_flight == 1 and "sent" not in request.outputs.values()
    # First without the row, unless there is no time to do it twice.
    problem = (
        replace(formulation.problem, rows=())
        if walked and not request.hurried
        else formulation.problem
    )
    memory: RankMemory | None = None
    smallest, measured_s = False, 0.0
    for _ in range(MAX_CORRECTIONS + 1):
        left = max(1.0, request.time_limit_s - (time.monotonic() - started))
        gap = max(request.target_gap, LEANEST_GAP) if smallest else request.target_gap
        solution = _solved(problem, left, gap)
        # Nothing satisfies the row as it is now.
        if isinstance(solution, Infeasible):
            least = solution.least_usage
            if smallest and memory is not None and (least is None or least <= rows[0].limit):
                # Some choice keeps the row as it was before it was corrected: what is too large is
                # its peak
                break
            if not walked or least is None or least <= problem.rows[0].limit or smallest:
                return solution
            # The row may have been corrected too far: what uses least of it may fit.
            smallest = True
            problem = replace(
                formulation.problem, rows=(replace(rows[0], limit=least * (1 + 1e-6)),)
            )
            continue
        # Tables that were left out make the proof weaker, and say so.
        proof = f"{solution.proof}{TABLES}" if formulation.slack else solution.proof
        found = placement_of(
            request, formulation, solution, solution.bound - formulation.slack, proof
        )
        # The lowered plan is walked: what it really holds decides.
        measuring = time.monotonic()
        if (
            not walked
            or solution.interrupted
            or (measured_s and measuring + measured_s > request.deadline)
        ):
            return found
        memory = program_memory(
            lower(formulation.graph, found.plan),
            request.config,
            request.optimizer,
            backend=request.hardware.backend,
        )
        found = replace(found, memory=memory)
        assert request.memory_limit_bytes is not None
        if memory.peak_bytes <= request.memory_limit_bytes:
            return found
        # Too large: tighten the row in proportion, and try again.
        measured_s = time.monotonic() - measuring
        used = rows[0].used(found.choice)
        limit = min(problem.rows[0].limit, used) if problem.rows else used
        correction = HURRIED_CORRECTION if request.hurried else CORRECTION
        limit *= correction * request.memory_limit_bytes / memory.peak_bytes
        problem = replace(formulation.problem, rows=(replace(rows[0], limit=limit),))
    # No more corrections.
    assert request.memory_limit_bytes is not None and memory is not None
    return _too_large(memory, request.memory_limit_bytes)


def _too_large(memory: RankMemory, limit_bytes: float) -> Infeasible:
    peak, limit = (amount(size, "B", digits=4) for size in (memory.peak_bytes, limit_bytes))
    return Infeasible(
        False, f"{peak} at the peak ({memory.moment}) of the best plan found, of {limit}"
    )


def _solved(problem: Problem, limit_s: float, target_gap: float) -> Solution | Infeasible:
    """What the solver answers in the time; where no row has to be kept, in more time until it has a
    choice at all.
    """
    solution = solve(problem, time_limit_s=limit_s, target_gap=target_gap)
    for _ in range(MAX_EXTENSIONS):
        if isinstance(solution, Solution) or solution.proven or problem.rows:
            break
        limit_s *= EXTENSION
        solution = solve(problem, time_limit_s=limit_s, target_gap=target_gap)
    return solution


def placement_of(
    request: PlacementRequest,
    formulation: Formulation,
    solution: Solution,
    bound_s: float,
    proof: str,
) -> Placement:
    """The placement that a solution says, with a bound of what it is a placement for."""
    # Settling makes the nodes of copies fit what operators have chosen.
    choice = formulation.settle(solution.choice)
    cost_s = formulation.cost(choice)
    return Placement(
        plan_of(request, formulation, choice),
        cost_s,
        # A bound may exceed the cost by rounding.
        min(cost_s, bound_s),
        proof,
        _space(request, formulation),
        None,
        request,
        formulation,
        choice,
        solution.interrupted,
    )


def plan_of(request: PlacementRequest, formulation: Formulation, choice: Sequence[int]) -> Plan:
    """The plan that a choice says."""
    strategies: dict[str, Assignment] = {}
    stored: dict[str, Layout] = {}
    # Strategies of operators and layouts of parameters; all other nodes follow from these.
    for node, chosen in zip(formulation.nodes, choice, strict=True):
        if isinstance(node, OpNode):
            strategies[node.op.name] = node.choices.assignments[chosen]
        elif isinstance(node, StoreNode):
            assert node.value.fqn is not None
            stored[node.value.fqn] = formulation.layouts[node.layouts[chosen]]
    # Tensors that no operator reads.
    for fqn in request.constraints.stored:
        layout = request.constraints.stored_layout(fqn)
        assert layout is not None
        stored.setdefault(fqn, layout)
    outputs = {path: wanted for path, wanted in request.outputs.items() if wanted != "sent"}
    return Plan(
        request.mesh,
        strategies,
        stored,
        dict(request.inputs),
        outputs,
        "autodist",
        recompute=request.recompute,
    )


@dataclass(frozen=True)
class RunnerUp:
    """A choice of one operator in words, and the best plan that has it: its seconds, and the
    ``choice`` of every node; infinite and ``None`` where there is none within the memory limit.
    """

    name: str
    cost_s: float
    choice: tuple[int, ...] | None


def runners_up(
    placement: Placement, op: str, *, time_limit_s: float | None = None
) -> list[RunnerUp]:
    """The best plan with each choice of an operator, the cheapest first."""
    formulation = placement.formulation
    index = next(
        i
        for i, node in enumerate(formulation.nodes)
        if isinstance(node, OpNode) and node.op.name == op
    )
    node = formulation.nodes[index]
    assert isinstance(node, OpNode)
    limit = placement.request.time_limit_s if time_limit_s is None else time_limit_s
    found: list[RunnerUp] = []
    # The problem again, with the choice pinned.
    for chosen, assignment in enumerate(node.choices.assignments):
        name = in_words(assignment)
        if chosen == placement.choice[index]:
            found.append(RunnerUp(name, placement.cost_s, placement.choice))
            continue
        # All other operators may choose anew, so this is the price of the choice, not of a change
        # to it.
        solution = solve(pinned(formulation.problem, index, chosen), time_limit_s=limit)
        if isinstance(solution, Infeasible):
            found.append(RunnerUp(name, float("inf"), None))
        else:
            choice = formulation.settle(solution.choice)
            found.append(RunnerUp(name, formulation.cost(choice), tuple(choice)))
    return sorted(found, key=lambda runner_up: runner_up.cost_s)


def alternatives(
    placement: Placement, op: str, *, time_limit_s: float | None = None
) -> Mapping[str, float]:
    """The seconds of :func:`runners_up`, by the choice in words."""
    return {
        found.name: found.cost_s for found in runners_up(placement, op, time_limit_s=time_limit_s)
    }


def pinned(problem: Problem, node: int, choice: int) -> Problem:
    """The problem with one choice made."""
    only = np.full(len(problem.node_costs[node]), np.inf)
    only[choice] = problem.node_costs[node][choice]
    return replace(
        problem, node_costs=(*problem.node_costs[:node], only, *problem.node_costs[node + 1 :])
    )


def in_words(assignment: Assignment) -> str:
    """``dp=split:b tp=G``; ``R`` if every axis is."""
    return " ".join(f"{axis}={strategy}" for axis, strategy in assignment.items()) or "R"


def _space(request: PlacementRequest, formulation: Formulation) -> PlacementSpace:
    operators = [node for node in formulation.nodes if isinstance(node, OpNode)]
    num_assignments = sum(node.choices.num_assignments for node in operators)
    mixed = MAX_MIXED if len(request.mesh.axes) > MAX_MIXED else None
    return PlacementSpace(len(operators), num_assignments, formulation.restricted, mixed)
