"""The planner's solver on chains of repeated blocks with one memory row.

    python benchmarks/solver.py [--limit 20] [--gap 1e-3]

A block is a chain of nodes with some skip edges and one edge from its first node to its last; the
last node of a block is tied to the first of the next. A strategy has a layout; edges cost nothing
between equal layouts and something between others; for half of the nodes faster strategies use more
memory. The row allows 60 % of what lies between the least usage and that of the fastest strategies.
All blocks may choose differently, the cost is that of all of them, and the bound holds for it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from shardwright.policies.autodist.solver.problem import Problem, Row, Solution
from shardwright.policies.autodist.solver.solve import solve

CASES = {
    "20,000 nodes": (80, 250, 8),
    "Llama-like": (126, 60, 40),
    "small": (32, 60, 8),
}
"""Blocks, nodes of a block, strategies of a node."""


def make(num_blocks: int, block_size: int, num_strategies: int, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    size = rng.integers(50, 2000, block_size)
    layout = np.stack([rng.permutation(num_strategies) for _ in range(block_size)])
    costs = np.floor(size[:, None] * rng.uniform(0.15, 1.0, layout.shape)) + 7
    usage = np.floor(size[:, None] * rng.uniform(0.1, 1.0, layout.shape)) + 1
    for node in np.flatnonzero(rng.random(block_size) < 0.5):
        usage[node][np.argsort(costs[node])] = np.sort(usage[node])[::-1]
    change = rng.integers(20, 1500, (num_strategies, num_strategies)).astype(float)
    np.fill_diagonal(change, 0.0)

    def table(a: int, b: int) -> np.ndarray:
        return np.floor(change[np.ix_(layout[a], layout[b])] * size[a] / 1000.0)

    pairs = {(node - 1, node) for node in range(1, block_size)} | {(0, block_size - 1)}
    pairs |= {
        (int(rng.integers(max(0, n - 6), n - 1)), n)
        for n in range(2, block_size)
        if rng.random() < 0.15
    }
    inside = [(a, b, table(a, b)) for a, b in sorted(pairs)]
    link = table(block_size - 1, 0)
    starts = range(0, num_blocks * block_size, block_size)
    edges = [(start + a, start + b, cost) for start in starts for a, b, cost in inside]
    edges += [(start - 1, start, link) for start in starts if start]
    least = usage.min(axis=1).sum() * num_blocks
    fastest = usage[np.arange(block_size), costs.argmin(axis=1)].sum() * num_blocks
    row = Row(
        least + 0.6 * (fastest - least),
        {start + node: usage[node] for start in starts for node in range(block_size)},
    )
    return Problem(tuple(costs) * num_blocks, tuple(edges), (row,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each case")
    parser.add_argument(
        "--gap", type=float, default=1e-3, help="stop when cost and bound are this near"
    )
    args = parser.parse_args()
    print("| case | blocks x nodes x strategies | wall s | CPU s | cost | bound | gap | proof |")
    print("|---|---|---|---|---|---|---|---|")
    for name, shape in CASES.items():
        problem = make(*shape)
        wall, cpu = time.monotonic(), time.process_time()
        found = solve(problem, time_limit_s=args.limit, target_gap=args.gap)
        wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
        assert isinstance(found, Solution)
        sizes = " x ".join(map(str, shape))
        numbers = (
            f"{wall_s:.2f} | {cpu_s:.2f} | {found.cost:.0f} | {found.bound:.0f} | {found.gap:.4%}"
        )
        print(f"| {name} | {sizes} | {numbers} | {found.proof} |", flush=True)


if __name__ == "__main__":
    main()
