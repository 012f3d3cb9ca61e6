"""Rows with intervals: limits over time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from choices import best_by_trying, random_problem

from shardwright.policies.autodist.solver import held_nodes, over_time
from shardwright.policies.autodist.solver.followers import merge_followers
from shardwright.policies.autodist.solver.held_nodes import HeldNodes, nodes_to_hold, search_held
from shardwright.policies.autodist.solver.local_search import cost_of
from shardwright.policies.autodist.solver.neighbourhood import improve_parts
from shardwright.policies.autodist.solver.network import Network, simplify, tighten
from shardwright.policies.autodist.solver.node_moves import Moves
from shardwright.policies.autodist.solver.priced import PricedMessages, search_priced
from shardwright.policies.autodist.solver.problem import (
    Infeasible,
    Problem,
    Row,
    Solution,
    evaluate,
    is_feasible,
)
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.solve import solve

USAGE = {0: np.array([5.0, 9.0]), 1: np.array([4.0, 6.0]), 2: np.array([100.0])}
TWO_MEET = Row(10.0, USAGE, {0: (0, 4), 1: (2, 6), 2: (4, 4)})


def check(problem: Problem) -> bool:
    """Solve and compare with all choices; whether there is one."""
    best, found = best_by_trying(problem), solve(problem, time_limit_s=3600)
    if isinstance(found, Infeasible):
        assert found.proven and best == math.inf, (found, best)
        return False
    assert (
        is_feasible(problem, found.choice) and found.cost == evaluate(problem, found.choice) == best
    )
    assert found.bound <= best and (found.gap <= 1e-9)
    return True


def test_a_row_with_intervals_counts_what_is_live_together() -> None:
    assert (
        TWO_MEET.used((0, 0, 0)) == 9
        and TWO_MEET.used((0, 1, 0)) == 11
        and TWO_MEET.used((1, 0, 0)) == 13
    )
    assert Row(1.0, {0: np.ones(1)}, {0: (3, 3)}).used((0,)) == 0.0
    with pytest.raises(AssertionError, match="intervals are not of the nodes"):
        Row(1.0, {0: np.ones(1)}, {})


def test_random_problems_with_intervals_equal_all_choices() -> None:
    feasible = [
        check(
            random_problem(
                seed,
                num_rows=seed % 2,
                num_interval_rows=1 + seed % 2,
                forbidden=0.02 if seed % 4 else 0.3,
            )
        )
        for seed in range(4000, 4200)
    ]
    assert 10 < feasible.count(False) < 100


def test_moments_that_are_added_one_by_one_end_at_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(over_time, "MAX_AT_ONCE", 0)
    monkeypatch.setattr(over_time, "NUM_STRETCHES", 2)
    for seed in range(4200, 4300):
        check(random_problem(seed, num_interval_rows=1, forbidden=0.1))


def test_moments_that_are_priced_at_once_end_at_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(over_time, "MAX_AT_ONCE", 0)
    monkeypatch.setattr(over_time, "MAX_PAIRS", 0)
    for seed in range(4300, 4360):
        check(random_problem(seed, num_interval_rows=1, forbidden=0.1))


def large(seed: int, limit: float) -> Problem:
    """Sixty nodes in a ring with chords, each live for some time."""
    rng = np.random.default_rng(seed)
    nodes = tuple(rng.random(4) for _ in range(60))
    edges = tuple((n, (n + step) % 60, rng.random((4, 4))) for n in range(60) for step in (1, 7))
    intervals = {
        n: (int(start), int(start + length))
        for n, (start, length) in enumerate(rng.integers(1, 30, (60, 2)))
    }
    return Problem(nodes, edges, (Row(limit, {n: rng.random(4) for n in range(60)}, intervals),))


@pytest.mark.slow
def test_prices_of_moments_bound_the_cost_and_lead_to_choices_within_the_limit() -> None:
    problem = large(0, 10.0)
    network = simplify(problem)
    assert isinstance(network, Network)
    progress = Progress(problem, 3600)
    search_priced(network, progress, 3600)
    assert progress.choice is not None and is_feasible(problem, progress.choice)
    assert 0.8 * progress.cost < progress.bound <= progress.cost
    found = solve(problem, time_limit_s=3600)
    assert (
        isinstance(found, Solution)
        and progress.bound <= found.cost
        and found.bound <= progress.cost
    )


@pytest.mark.slow
def test_parts_are_improved_within_limits_over_time() -> None:
    """A search from the choice that uses least comes near the best one within the limit."""
    problem = large(0, 10.0)
    network = simplify(problem)
    assert isinstance(network, Network) and len(network.moments) > 10 and not network.rows
    usage = problem.rows[0].usage
    start = network.condense([int(usage[node].argmin()) for node in range(60)])
    progress = Progress(problem, 3600)
    assert progress.propose(network.expand(dict(enumerate(start.tolist()))))
    assert progress.cost > 90.0
    choice = network.expand(dict(enumerate(improve_parts(network, start, progress).tolist())))
    # The best choice, by ``solve`` in a minute, costs 63.63.
    assert progress.cost == evaluate(problem, choice) < 64.5


def test_all_but_the_held_nodes_are_solved_exactly() -> None:
    problem = large(0, 10.0)
    network = simplify(problem)
    assert isinstance(network, Network)
    moves, rng = Moves(network), np.random.default_rng(0)
    prices = rng.random(len(network.moments))
    held = nodes_to_hold(network, 1 << 8, (), rng)
    # A ring with chords cannot be taken apart in tables of four nodes.
    assert 5 < len(held) < 30
    others = nodes_to_hold(network, 1 << 8, held, rng)
    assert len(set(others) & set(held)) < len(held) / 2
    start = np.zeros(60, dtype=np.intp)
    found = HeldNodes(network, held).solve(start, moves.costs(prices))
    assert (found[held] == 0).all() and (found != start).any()
    # With the same nodes held, the whole solver finds nothing cheaper.
    nodes = [
        cost + problem.rows[0].usage[n] * prices_of(network, n, prices)
        for n, cost in enumerate(problem.node_costs)
    ]
    for node in held:
        nodes[node] = np.where(np.arange(4) == network.strategies[node][0], nodes[node], np.inf)
    priced = Problem(tuple(nodes), problem.edges)
    best = solve(priced, time_limit_s=3600)
    assert isinstance(best, Solution) and best.gap == 0.0
    choice = network.expand(dict(enumerate(found.tolist())))
    assert evaluate(priced, choice) == pytest.approx(best.cost, rel=1e-12)


def prices_of(network: Network, node: int, prices: np.ndarray) -> float:
    """What one unit of a node's usage costs: the prices of its moments."""
    spans = network.moments.spans.get(node, ())
    return sum(float(prices[span.first : span.last].sum()) for span in spans)


def test_held_nodes_lead_from_a_poor_choice_to_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_nodes, "PATIENCE", 10)
    monkeypatch.setattr(held_nodes, "MIN_STEP", 0.03)
    problem = large(0, 10.0)
    network = simplify(problem)
    assert isinstance(network, Network)
    usage = problem.rows[0].usage
    progress = Progress(problem, 3600)
    progress.propose([int(usage[node].argmin()) for node in range(60)])
    prices = search_held(network, progress, PricedMessages(network), 3600)
    assert progress.choice is not None and is_feasible(problem, progress.choice)
    # The best choice, by ``solve`` in a minute, costs 63.63.
    assert progress.cost < 66.0 and prices.max() > 0 == prices.min()


def test_moves_keep_count_of_costs_and_uses() -> None:
    network = simplify(large(3, 9.0))
    assert isinstance(network, Network)
    moves, progress = Moves(network), Progress(large(3, 9.0), 3600)
    moves.load(np.zeros(60, dtype=np.intp))
    assert (
        moves.over.max() > 0
        and moves.repair(progress, np.zeros(len(network.moments)))
        and moves.over.max() <= 0
    )
    before = cost_of(network, moves.choice)
    moves.descend(progress)
    assert cost_of(network, moves.choice) < before
    over, marginals = moves.over.copy(), moves.marginals.copy()
    moves.load(moves.choice)
    assert moves.over == pytest.approx(over, abs=1e-9) and moves.marginals == pytest.approx(
        marginals, abs=1e-9
    )


def test_a_row_over_time_that_cannot_be_kept_is_named() -> None:
    slack = Row(1000.0, {0: np.array([5.0, 9.0])})
    tight = Row(8.5, TWO_MEET.usage, TWO_MEET.intervals)
    found = solve(
        Problem((np.zeros(2), np.zeros(2), np.zeros(1)), rows=(slack, tight)), time_limit_s=3600
    )
    assert isinstance(found, Infeasible) and found.proven and found.row == 1
    assert (
        found.reason == "row 1: its limit is 8.5, and the least that any allowed choice uses is 9"
    )


def test_followers_are_merged_without_changing_a_cost() -> None:
    """A chain in which every second node takes the strategy of the one before."""
    rng = np.random.default_rng(0)
    same = np.where(np.eye(3) > 0, 0.0, math.inf)
    nodes = tuple(rng.integers(0, 99, 3) / 8.0 for _ in range(12))
    edges = tuple(
        (n, n + 1, same if n % 2 == 0 else rng.integers(0, 99, (3, 3)) / 8.0) for n in range(11)
    )
    usage = {n: rng.integers(0, 64, 3) / 8.0 for n in range(12)}
    problem = Problem(nodes, edges, (Row(30.0, usage, {n: (n, n + 6) for n in range(12)}),))
    network = simplify(problem)
    assert isinstance(network, Network)
    assert merge_followers(network, lambda: False) >= 5 and len(network.costs) <= 6
    assert all(np.isfinite(edge).all() for edge in network.edges.values())
    assert tighten(network, problem) is None
    found = solve(problem, time_limit_s=3600)
    assert (
        isinstance(found, Solution) and found.gap == 0.0 and found.choice[::2] == found.choice[1::2]
    )
