"""The planner's solver on the instances of the ASPLOS/EuroSys 2025 contest on intra-operator
parallelism.

    python benchmarks/iopddl.py                              # the instances in benchmarks/iopddl
    python benchmarks/iopddl.py A=PATH/asplos-2025-iopddl-A.json.gz P=...
    python benchmarks/iopddl.py --limit 120 B

Prints cost, bound, gap, wall and CPU seconds beside the best known cost. The time limit is the
contest's and includes reading. With ``--cpu`` it is counted in CPU seconds of this process, so that
what else runs on the machine changes little. The limit is one row with intervals: at every moment,
what is live must fit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from pathlib import Path

import numpy as np

from shardwright.policies.autodist.solver.problem import Infeasible, Problem, Row
from shardwright.policies.autodist.solver.solve import solve

FOLDER = Path(__file__).parent / "iopddl"
LIMIT_S = {"G": 120.0, "P": 240.0, "S": 240.0, "V": 300.0}
"""The contest's seconds; 60 for the others."""

BEST_KNOWN = {
    "A": 6.5486e9,
    "B": 532_843,
    "G": 217_039,
    "P": 6.51833e11,
    "S": 1.51138e9,
    "V": 1_617_084,
}
IMPOSSIBLE = 1e17


def read(path: Path) -> Problem:
    """Read an instance of the contest."""
    with gzip.open(path) as file:
        data = json.load(file)["problem"]
    nodes, edges = data["nodes"], data["edges"]

    def costs(values: list[int]) -> np.ndarray:
        array = np.array(values, dtype=np.float64)
        array[array >= IMPOSSIBLE] = math.inf
        return array

    node_costs = tuple(costs(values) for values in nodes["costs"])
    tables = tuple(
        (a, b, costs(values).reshape(len(node_costs[a]), len(node_costs[b])))
        for (a, b), values in zip(edges["nodes"], edges["costs"], strict=True)
    )
    usages = {
        node: np.array(values, dtype=np.float64) for node, values in enumerate(nodes["usages"])
    }
    intervals = {node: (start, end) for node, (start, end) in enumerate(nodes["intervals"])}
    return Problem(
        node_costs, tables, (Row(float(data.get("usage_limit", math.inf)), usages, intervals),)
    )


def run(problem: Problem, deadline: float) -> tuple[float, float, str]:
    """Cost of a choice within the limit (inf if none was found), bound, proof."""
    known = [-math.inf]
    found = solve(
        problem,
        time_limit_s=deadline - time.monotonic(),
        on_improvement=lambda _, bound: known.__setitem__(0, bound),
    )
    if isinstance(found, Infeasible):
        return math.inf, math.inf if found.proven else known[0], found.reason
    return found.cost, found.bound, found.proof


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "instances",
        nargs="*",
        default=["B", "G", "V"],
        help="NAME of a copy in benchmarks/iopddl, or NAME=PATH",
    )
    parser.add_argument("--limit", type=float, help="seconds, instead of the contest's")
    parser.add_argument("--cpu", action="store_true", help="limits are CPU seconds")
    args = parser.parse_args()
    if args.cpu:
        time.monotonic = time.process_time  # the time that limits are of
    print(
        "| instance | nodes | cost | bound | gap | best known | above it | wall s | CPU s | "
        "limit s | proof |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for given in args.instances:
        name, _, path = given.partition("=")
        limit_s = args.limit or LIMIT_S.get(name, 60.0)
        wall, cpu = time.monotonic(), time.process_time()
        problem = read(Path(path) if path else FOLDER / f"asplos-2025-iopddl-{name}.json.gz")
        cost, bound, proof = run(problem, wall + limit_s)
        wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
        known = BEST_KNOWN.get(name, math.nan)
        gap = f"{(cost - bound) / cost:.3%}" if cost < math.inf else "–"
        above = f"{cost / known - 1:.3%}" if cost < math.inf else "–"
        numbers = (
            f"{cost:.9g} | {bound:.9g} | {gap} | {known:.9g} | {above} | {wall_s:.1f} | "
            f"{cpu_s:.1f} | {limit_s:g}"
        )
        print(f"| {name} | {problem.num_nodes} | {numbers} | {proof} |", flush=True)


if __name__ == "__main__":
    main()
