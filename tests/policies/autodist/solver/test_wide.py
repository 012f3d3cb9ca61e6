"""The way of networks that are too wide for elimination, on small ones whose answers are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from choices import best_by_trying, random_problem

from shardwright.policies.autodist.solver import solve as solve_module
from shardwright.policies.autodist.solver import wide
from shardwright.policies.autodist.solver.eliminate import Elimination
from shardwright.policies.autodist.solver.linear_program import Answer, solve_program
from shardwright.policies.autodist.solver.message_passing import Messages
from shardwright.policies.autodist.solver.network import Network, simplify
from shardwright.policies.autodist.solver.problem import (
    Infeasible,
    Problem,
    Row,
    Solution,
    evaluate,
    is_feasible,
)
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.reduce import Reduced
from shardwright.policies.autodist.solver.wide import search_wide


def solve_wide(problem: Problem, time_limit_s: float = 3600.0) -> Solution | Infeasible:
    progress = Progress(problem, time_limit_s)
    network = simplify(problem)
    if isinstance(network, Infeasible):
        return network
    search_wide(network, problem, progress)
    return progress.result()


def test_random_problems_equal_all_choices() -> None:
    proofs = set()
    for seed in range(3000, 3075):
        problem = random_problem(seed, num_rows=seed % 3)
        best, found = best_by_trying(problem), solve_wide(problem)
        if isinstance(found, Infeasible):
            assert found.proven and best == math.inf, (seed, found, best)
            continue
        assert is_feasible(problem, found.choice) and found.cost == evaluate(problem, found.choice)
        assert found.cost == best and found.bound <= best, (seed, found, best)
        proofs.add(found.proof)
    assert any("integer program" in proof for proof in proofs) and any(
        "message" in proof for proof in proofs
    ), proofs


def grid(side: int, seed: int, *, rows: bool) -> Problem:
    """A grid of ``side * side`` nodes: elimination needs tables over ``side`` of them."""
    rng = np.random.default_rng(seed)
    nodes = tuple(rng.random(4) for _ in range(side * side))
    edges = [(n, n + 1, rng.random((4, 4))) for n in range(side * side) if (n + 1) % side]
    edges += [(n, n + side, rng.random((4, 4))) for n in range(side * (side - 1))]
    usage = {n: rng.random(4) for n in range(side * side)}
    return Problem(nodes, tuple(edges), (Row(0.35 * side * side, usage),) if rows else ())


@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_grid_is_solved_as_by_elimination(rows: bool) -> None:
    problem = grid(5, 0, rows=rows)
    known, found = solve_module.solve(problem, time_limit_s=3600), solve_wide(problem)
    assert isinstance(known, Solution) and isinstance(found, Solution) and known.gap == 0.0
    assert known.cost == pytest.approx(found.cost, rel=1e-12) and found.bound <= known.cost


def test_a_library_without_a_choice_leaves_a_bound_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time may end before the library has any choice, and before there is one from elsewhere."""
    problem = grid(4, 0, rows=True)
    network = simplify(problem)
    assert isinstance(network, Network)
    progress, reduced = Progress(problem, 60), Reduced(network)
    monkeypatch.setattr(wide, "solve_program", lambda *_, **__: Answer(None, 1.5, False, False))
    wide._integer_program(reduced, progress)
    assert progress.choice is None and progress.bound == 1.5 and not progress.done
    monkeypatch.undo()
    no_time = solve_program(reduced.network, integer=True, time_limit_s=0.0)
    assert no_time == Answer(None, -math.inf, False, False)


def test_messages_bound_the_optimum_and_never_fall() -> None:
    problem = grid(5, 1, rows=False)
    network = simplify(problem)
    assert isinstance(network, Network)
    best = solve_module.solve(problem, time_limit_s=3600)
    assert isinstance(best, Solution)
    messages = Messages(network)
    bounds = [
        step() + network.constant
        for _ in range(100)
        for step in (messages.forward, messages.backward)
    ]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(bounds))
    linear = solve_program(network, integer=False, time_limit_s=3600)
    assert best.cost - 0.02 * best.cost < bounds[-1] <= linear.bound + 1e-6 <= best.cost + 2e-6


def test_strategies_of_the_optimum_have_no_more_excess_than_the_gap() -> None:
    for seed in range(5):
        problem = grid(4, seed, rows=False)
        network = simplify(problem)
        assert isinstance(network, Network)
        best = solve_module.solve(problem, time_limit_s=3600)
        assert isinstance(best, Solution)
        messages = Messages(network)
        for _ in range(20):
            messages.backward()
            bound = messages.forward() + network.constant
        excess = messages.excess()
        for node, start in messages.start.items():
            strategy = int(np.searchsorted(network.strategies[node], best.choice[node]))
            assert excess[start + strategy] <= best.cost - bound + 1e-9


def test_taking_out_nodes_keeps_every_cost() -> None:
    shrunk = 0
    for seed in range(100):
        problem = random_problem(seed, max_nodes=8, num_rows=1, forbidden=0.0)
        network = simplify(problem)
        if isinstance(network, Infeasible):
            continue
        reduced = Reduced(network)
        sizes = {node: len(cost) for node, cost in reduced.network.costs.items()}
        whole = Elimination({node: node for node in sizes}, sizes, reduced.network.edges)
        value = whole.run(reduced.network.costs) + reduced.network.constant
        choice = np.zeros(problem.num_nodes, dtype=np.intp)
        whole.trace(choice)
        assert (
            value
            == evaluate(problem, reduced.expand(choice))
            >= best_by_trying(Problem(problem.node_costs, problem.edges))
        )
        shrunk += len(sizes) < len(network.costs)
    assert shrunk > 5
