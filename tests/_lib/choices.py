"""Random small problems of the planner's solver, and their answers by trying every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np

from shardwright.policies.autodist.solver.problem import Array, Problem, Row


def random_problem(
    seed: int,
    *,
    max_nodes: int = 8,
    max_strategies: int = 5,
    least_nodes: int = 1,
    least_strategies: int = 1,
    num_rows: int = 0,
    num_interval_rows: int = 0,
    forbidden: float = 0.05,
    most: int = 40_000,
) -> Problem:
    """Any graph (cycles, dead ends, parallel edges, edges to itself), some entries inf, rows from
    impossible to loose.

    Costs are multiples of 1/8 up to 20 so that sums are exact and ties are frequent; at most
    ``most`` choices.
    """
    rng = np.random.default_rng(seed)
    while True:
        sizes = rng.integers(
            least_strategies, max_strategies + 1, rng.integers(least_nodes, max_nodes + 1)
        )
        if math.prod(sizes.tolist()) <= most:
            break

    def costs(*shape: int) -> Array:
        found = rng.integers(0, 160, shape) / 8.0
        found[rng.random(shape) < forbidden] = math.inf
        return found

    nodes = tuple(costs(size) for size in sizes)
    ends = rng.integers(0, len(sizes), (rng.integers(0, 2 * len(sizes)), 2))
    edges = tuple((int(a), int(b), costs(sizes[a], sizes[b])) for a, b in ends)
    rows = []
    for _ in range(num_rows):
        usage = {
            node: rng.integers(0, 64, size) / 8.0
            for node, size in enumerate(sizes)
            if rng.random() < 0.8
        }
        least, most_used = (
            sum(float(end(used)) for used in usage.values()) for end in (np.min, np.max)
        )
        rows.append(Row(least + (rng.random() * 0.8 - 0.05) * (most_used - least), usage))
    for _ in range(num_interval_rows):
        usage = {
            node: rng.integers(0, 64, size) / 8.0
            for node, size in enumerate(sizes)
            if rng.random() < 0.9
        }
        intervals = {
            node: (start, start + int(rng.integers(0, 8)))
            for node in usage
            for start in [int(rng.integers(0, 12))]
        }
        least, most_used = (
            _peak(intervals, {n: float(end(u)) for n, u in usage.items()})
            for end in (np.min, np.max)
        )
        rows.append(
            Row(least + (rng.random() * 0.8 - 0.05) * (most_used - least), usage, intervals)
        )
    return Problem(nodes, edges, tuple(rows))


def _peak(intervals: dict[int, tuple[int, int]], used: dict[int, float]) -> float:
    moments = range(max((end for _, end in intervals.values()), default=0))
    live = (
        (node for node, (start, end) in intervals.items() if start <= moment < end)
        for moment in moments
    )
    return max((sum(used[node] for node in nodes) for nodes in live), default=0.0)


def best_by_trying(problem: Problem) -> float:
    """The least cost of a feasible choice, from the table of all choices; inf if there is none."""
    num_nodes = problem.num_nodes

    def spread(array: Array, *nodes: int) -> Array:
        shape = [1] * num_nodes
        for node in nodes:
            shape[node] = len(problem.node_costs[node])
        return (array if list(nodes) == sorted(nodes) else array.T).reshape(shape)

    total = np.zeros([1] * num_nodes)
    for node, cost in enumerate(problem.node_costs):
        total = total + spread(cost, node)
    for a, b, cost in problem.edges:
        total = total + (spread(np.diagonal(cost), a) if a == b else spread(cost, a, b))
    for row in problem.rows:
        intervals = row.intervals or dict.fromkeys(row.usage, (0, 1))
        for moment in range(max((end for _, end in intervals.values()), default=0)):
            live = (node for node, (start, end) in intervals.items() if start <= moment < end)
            used = sum((spread(row.usage[node], node) for node in live), np.zeros([1] * num_nodes))
            total = np.where(used <= row.limit, total, math.inf)
    return float(total.min())


def repeated_chain(
    seed: int, *, num_blocks: int, block_size: int, num_strategies: int = 3, shared: bool = False
) -> Problem:
    """Equal blocks in a chain, the first and the last a little different; optionally a node that
    every block reads.
    """
    rng = np.random.default_rng(seed)
    nodes = [rng.integers(0, 99, num_strategies) / 8.0 for _ in range(block_size)]

    def table() -> Array:
        return rng.integers(0, 99, (num_strategies, num_strategies)) / 8.0

    inside = [
        (a, b, table())
        for a, b in itertools.combinations(range(block_size), 2)
        if b == a + 1 or rng.random() < 0.4
    ]
    link, read = table(), table()
    ends = rng.integers(0, 99, num_strategies) / 8.0
    all_nodes, edges = [], []
    for block in range(num_blocks):
        first = block * block_size
        all_nodes += nodes
        edges += [(first + a, first + b, cost) for a, b, cost in inside]
        edges += [(first - 1, first, link)] if block else []
        edges += [(first + block_size // 2, num_blocks * block_size, read)] if shared else []
    all_nodes[0], all_nodes[-1] = all_nodes[0] + ends, all_nodes[-1] + ends[::-1]
    blocks = tuple(tuple(range(b * block_size, (b + 1) * block_size)) for b in range(num_blocks))
    return Problem((*all_nodes, *([ends] if shared else [])), tuple(edges), blocks=blocks)
