"""The solver against all choices of random small problems, repeated blocks, certificates, time and
interruption.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from choices import best_by_trying, random_problem, repeated_chain

from shardwright.policies.autodist.solver.eliminate import MAX_JOIN
from shardwright.policies.autodist.solver.network import Network, simplify
from shardwright.policies.autodist.solver.problem import (
    Infeasible,
    Problem,
    Row,
    Solution,
    evaluate,
    is_feasible,
)
from shardwright.policies.autodist.solver.relaxation import Relaxation
from shardwright.policies.autodist.solver.renumbering import Renumbering
from shardwright.policies.autodist.solver.solve import solve

NEVER_S = 3600.0


def check(problem: Problem) -> str:
    """Solve, compare with all choices, return the proof."""
    best = best_by_trying(problem)
    found = solve(problem, time_limit_s=NEVER_S)
    if isinstance(found, Infeasible):
        assert found.proven and best == math.inf, (found, best)
        return "infeasible"
    assert is_feasible(problem, found.choice)
    assert found.cost == evaluate(problem, found.choice) == found.bound == best, (found, best)
    assert found.proof.startswith("optimal by ")
    return found.proof.removeprefix("optimal by ")


def test_without_rows_random_problems_equal_all_choices() -> None:
    proofs = [
        check(random_problem(seed, forbidden=0.25 if seed % 4 == 0 else 0.05))
        for seed in range(200)
    ]
    assert set(proofs) == {"elimination", "infeasible"} and proofs.count("infeasible") > 10


def test_with_rows_random_problems_equal_all_choices() -> None:
    proofs = [check(random_problem(seed, num_rows=1 + seed % 3)) for seed in range(1000, 1200)]
    for expected in ("infeasible", "elimination", "Lagrange multipliers", "branch and bound"):
        assert sum(proof.startswith(expected) for proof in proofs) >= 10, expected


def test_ten_nodes_with_rows_equal_all_choices() -> None:
    for seed in range(2000, 2030):
        check(random_problem(seed, max_nodes=10, num_rows=1 + seed % 2, most=600_000))


@pytest.mark.slow
def test_ten_nodes_of_five_strategies_each_equal_all_choices() -> None:
    """The tables of all choices have nearly ten million entries."""
    for seed in range(3000, 3010):
        problem = random_problem(
            seed, max_nodes=10, least_nodes=10, least_strategies=5, num_rows=seed % 3, most=5**10
        )
        assert [len(cost) for cost in problem.node_costs] == [5] * 10
        check(problem)


@pytest.mark.parametrize("shared", [False, True])
def test_repeated_blocks_equal_the_unfolded_problem(shared: bool) -> None:
    for seed in range(20):
        num_blocks = 2 + seed % 3
        check(
            repeated_chain(seed, num_blocks=num_blocks, block_size=8 // num_blocks, shared=shared)
        )


def best_by_walking(
    problem: Problem, block_size: int, num_strategies: int, first_of_last: int
) -> float:
    """Dynamic programming from block to block over all choices of a block: no folding, no
    elimination order.
    """
    shape = (num_strategies,) * block_size
    choices = np.stack(np.unravel_index(np.arange(num_strategies**block_size), shape), axis=1)
    reach: np.ndarray | None = None
    for first in range(0, first_of_last + 1, block_size):
        own = sum(problem.node_costs[first + i][choices[:, i]] for i in range(block_size))
        for a, b, cost in problem.edges:
            if first <= a and b < first + block_size:
                own = own + cost[choices[:, a - first], choices[:, b - first]]
        link = next((cost for a, b, cost in problem.edges if (a, b) == (first - 1, first)), None)
        if reach is None or link is None:
            reach = own
        else:
            reach = (reach[:, None] + link[choices[:, -1][:, None], choices[:, 0][None, :]]).min(
                axis=0
            ) + own
    assert reach is not None
    return float(reach.min())


def test_long_repeated_chains_equal_a_walk_over_all_their_blocks() -> None:
    for seed in range(12):
        num_blocks = (7, 16, 33)[seed % 3]
        problem = repeated_chain(seed, num_blocks=num_blocks, block_size=4)
        found = solve(problem, time_limit_s=NEVER_S)
        assert isinstance(found, Solution)
        assert found.cost == found.bound == best_by_walking(problem, 4, 3, (num_blocks - 1) * 4)
        assert found.cost == evaluate(problem, found.choice)


def num_tables_computed(problem: Problem) -> int:
    network = simplify(problem)
    assert isinstance(network, Network)
    relaxation = Relaxation(network, shared=True, max_join=MAX_JOIN)
    return sum(len(batch.computed) for batch in relaxation.elimination.batches)


@pytest.mark.slow
def test_tables_of_repeated_blocks_are_computed_once_and_powers_in_the_logarithm() -> None:
    few, many = (
        num_tables_computed(repeated_chain(3, num_blocks=n, block_size=5)) for n in (16, 512)
    )
    assert many <= few + 3 * 6, (few, many)


def test_blocks_of_one_chain_may_choose_differently() -> None:
    """Staying costs 3 per block, alternating 1: folding blocks into one would miss it."""
    stay, change = 3.0, 1.0
    link = np.array([[stay, change], [change, stay]])
    problem = Problem((np.zeros(2),) * 9, tuple((n, n + 1, link) for n in range(8)))
    found = solve(problem, time_limit_s=NEVER_S)
    assert isinstance(found, Solution) and found.cost == 8.0 and set(found.choice) == {0, 1}


def chain_with_memory(num_nodes: int = 60, seed: int = 0, room: float = 0.5) -> Problem:
    rng = np.random.default_rng(seed)
    nodes = tuple(rng.random(4) for _ in range(num_nodes))
    edges = tuple((n, n + 1, rng.random((4, 4))) for n in range(num_nodes - 1))
    usage = {n: rng.random(4) for n in range(num_nodes)}
    least, most = (sum(float(end(used)) for used in usage.values()) for end in (np.min, np.max))
    return Problem(nodes, edges, (Row(least + room * (most - least) / 4, usage),))


def test_a_longer_chain_is_proved_optimal_within_one_row() -> None:
    found = solve(chain_with_memory(40), time_limit_s=NEVER_S)
    assert isinstance(found, Solution) and found.gap == 0.0 and "branch and bound" in found.proof


def test_a_row_that_cannot_be_kept_is_named_with_its_greatest_users() -> None:
    usage = {0: np.array([5.0, 6.0]), 1: np.array([1.0, 0.5]), 2: np.array([30.0, 20.0])}
    found = solve(
        Problem((np.zeros(2),) * 3, rows=(Row(100.0, usage), Row(25.0, usage))),
        time_limit_s=NEVER_S,
    )
    assert found == Infeasible(
        True,
        "row 1: its limit is 25, and the least that any allowed choice uses is 25.5",
        1,
        25.5,
        (2, 0, 1),
    )


def test_a_row_that_forbidden_pairs_make_impossible_is_certified() -> None:
    """Small strategies exist, but no two neighbours may take them."""
    wall = np.array([[math.inf, 0.0], [0.0, 0.0]])
    usage = {n: np.array([1.0, 4.0]) for n in range(8)}
    problem = Problem(
        (np.ones(2),) * 8, tuple((n, n + 1, wall) for n in range(7)), (Row(17.0, usage),)
    )
    found = solve(problem, time_limit_s=NEVER_S)
    assert isinstance(found, Infeasible) and found.proven and found.row == 0
    assert found.least_usage is not None and 17.0 < found.least_usage <= 20.0
    assert (
        found.reason
        == f"row 0: its limit is 17, and any allowed choice uses at least {found.least_usage:.6g}"
    )
    assert (
        solve(
            Problem(problem.node_costs, problem.edges, (Row(20.0, usage),)), time_limit_s=NEVER_S
        ).cost
        == 8.0
    )  # type: ignore[union-attr]


def test_improvements_are_reported_and_the_same_every_time() -> None:
    reports: list[list[tuple[float, float]]] = []
    problem = chain_with_memory(25)
    for _ in range(2):
        seen: list[tuple[float, float]] = []
        found = solve(
            problem,
            time_limit_s=NEVER_S,
            on_improvement=lambda cost, bound, seen=seen: seen.append((cost, bound)),
        )
        assert isinstance(found, Solution)
        assert all(bound <= cost for cost, bound in seen) and seen[-1] == (found.cost, found.cost)
        costs, bounds = zip(*seen, strict=True)
        assert list(costs) == sorted(costs, reverse=True) and list(bounds) == sorted(bounds)
        reports.append(seen)
    assert reports[0] == reports[1]


def test_an_interruption_returns_the_best_so_far_with_its_bound() -> None:
    def interrupt(cost: float, bound: float) -> None:
        if cost < math.inf:
            raise KeyboardInterrupt

    problem = chain_with_memory()
    found = solve(problem, time_limit_s=NEVER_S, on_improvement=interrupt)
    assert isinstance(found, Solution) and is_feasible(problem, found.choice)
    assert (
        0.0 < found.gap < 0.2
        and found.proof == "bound by Lagrange multipliers with exact elimination"
    )


def test_an_interruption_before_any_choice_goes_on_to_the_caller() -> None:
    def interrupt(cost: float, bound: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(chain_with_memory(), time_limit_s=NEVER_S, on_improvement=interrupt)


@pytest.mark.slow
def test_the_time_limit_and_the_target_gap_end_the_search() -> None:
    problem = chain_with_memory(900, room=0.7)
    start = time.process_time()  # what other processes take does not count
    found = solve(problem, time_limit_s=1.0)
    assert time.process_time() - start < 30.0  # it would go on for minutes
    # on a busy machine the time may be over before the first choice
    assert found.gap > 0.0 if isinstance(found, Solution) else not found.proven
    near = solve(problem, time_limit_s=NEVER_S, target_gap=0.01)
    assert isinstance(near, Solution) and near.gap <= 0.01


def test_a_start_is_repaired_and_never_made_worse() -> None:
    problem = chain_with_memory(40)
    best = solve(problem, time_limit_s=NEVER_S)
    assert isinstance(best, Solution)
    seen: list[float] = []
    again = solve(
        problem,
        time_limit_s=NEVER_S,
        start=best.choice,
        on_improvement=lambda cost, _: seen.append(cost),
    )
    assert again == best and seen[0] == best.cost
    exceeding = solve(problem, time_limit_s=NEVER_S, start=[3] * 40)
    assert isinstance(exceeding, Solution) and exceeding.cost == best.cost


def shuffled(problem: Problem, seed: int) -> Problem:
    """The problem with its nodes numbered at random, and the hint that says which
    correspond.
    """
    new = np.random.default_rng(seed).permutation(problem.num_nodes).tolist()
    nodes = [problem.node_costs[0]] * problem.num_nodes
    for node, cost in enumerate(problem.node_costs):
        nodes[new[node]] = cost
    rows = tuple(
        Row(row.limit, {new[node]: used for node, used in row.usage.items()})
        for row in problem.rows
    )
    blocks = tuple(tuple(new[node] for node in block) for block in problem.blocks)
    return Problem(
        tuple(nodes), tuple((new[a], new[b], cost) for a, b, cost in problem.edges), rows, blocks
    )


def test_the_hint_of_blocks_shows_repetition_and_changes_no_answer() -> None:
    plain = repeated_chain(3, num_blocks=64, block_size=5)
    mixed = shuffled(plain, 0)
    assert (
        num_tables_computed(Renumbering(mixed).problem)
        == num_tables_computed(plain)
        < num_tables_computed(mixed) / 2
    )
    for problem in (mixed, Problem(mixed.node_costs, mixed.edges)):
        found = solve(problem, time_limit_s=NEVER_S)
        assert (
            isinstance(found, Solution)
            and found.cost == evaluate(problem, found.choice) == found.bound
        )
        assert found.cost == solve(plain, time_limit_s=NEVER_S).cost  # type: ignore[union-attr]


def test_certificates_name_the_nodes_as_given() -> None:
    usage = {0: np.array([5.0, 6.0]), 1: np.array([1.0, 0.5]), 2: np.array([30.0, 20.0])}
    found = solve(
        Problem((np.zeros(2),) * 3, rows=(Row(25.0, usage),), blocks=((2,), (1,))),
        time_limit_s=NEVER_S,
    )
    assert isinstance(found, Infeasible) and found.nodes == (2, 0, 1)
    wall = Problem((np.zeros(1), np.full(2, math.inf)), blocks=((1,), (0,)))
    assert solve(wall, time_limit_s=NEVER_S) == Infeasible(
        True, "every strategy of one node is forbidden, by itself or by its neighbours", nodes=(1,)
    )
