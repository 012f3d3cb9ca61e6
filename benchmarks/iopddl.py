"""The planner's solver on the instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    python benchmarks/iopddl.py                              # the instances in benchmarks/iopddl
    python benchmarks/iopddl.py A=PATH/asplos-2025-iopddl-A.json.gz P=...
    python benchmarks/iopddl.py --limit 120 B

Prints cost, bound, gap, wall and CPU seconds beside the best known cost. The time limit is the contest's and includes reading.
A row says that what is live at one moment must fit; moments with equal live sets are one row. Large instances have tens of
thousands of rows over thousands of nodes: there, rows are added where the last choice exceeds the limit. A bound with some of
the rows is a bound with all of them; a cost is only printed for a choice that respects all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.policies.autodist.solver.problem import Infeasible, Problem, Row, evaluate
from shardwright.policies.autodist.solver.solve import solve

FOLDER = Path(__file__).parent / "iopddl"
LIMIT_S = {"P": 300.0}
"""Seconds; 60 for the others."""

BEST_KNOWN = {"A": 6.5486e9, "B": 532_843, "G": 217_039, "P": 6.51833e11, "S": 1.51138e9, "V": 1_617_084}
MAX_ENTRIES = 400_000
"""Nodes of all rows together up to which all rows are given at once."""

NUM_WINDOWS = 40
"""Where rows are added: one for each of so many spans of time in which the limit is exceeded."""

FIRST_SHARE = 0.6
"""Of the time left: what is spent before rows are added, and before the same rows are tried again from the best choice."""

IMPOSSIBLE = 1e17


@dataclass(frozen=True)
class Instance:
    """A problem whose rows are moments: ``intervals`` [nodes, 2] say when a node's usage counts (half-open)."""

    name: str
    problem: Problem  # without rows
    usages: tuple[np.ndarray, ...]
    intervals: np.ndarray
    limit: float

    def rows(self, moments: list[int]) -> tuple[Row, ...]:
        start, end = self.intervals.T
        live = [np.flatnonzero((start <= moment) & (moment < end)).tolist() for moment in moments]
        return tuple(Row(self.limit, {node: self.usages[node] for node in nodes}) for nodes in live)

    def over_time(self, used: list[float] | np.ndarray) -> np.ndarray:
        """The sum over live nodes of a number per node, by moment."""
        changes = np.zeros(int(self.intervals.max()) + 1)
        live = self.intervals[:, 0] < self.intervals[:, 1]
        np.add.at(changes, self.intervals[live, 0], np.asarray(used)[live])
        np.add.at(changes, self.intervals[live, 1], -np.asarray(used)[live])
        return np.cumsum(changes)

    def moments(self) -> list[int]:
        """One moment for every live set that is in no other and may exceed the limit: the last start before an end."""
        live = self.intervals[self.intervals[:, 0] < self.intervals[:, 1]]
        starts, ends = set(live[:, 0].tolist()), set(live[:, 1].tolist())
        most = self.over_time([used.max() for used in self.usages])
        found, grown = [], -1
        for moment in sorted(starts | ends):
            if moment in ends and grown >= 0 and most[grown] > self.limit:
                found.append(grown)
            if moment in ends:
                grown = -1
            if moment in starts:
                grown = moment
        return found


def read(name: str, path: Path) -> Instance:
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
    usages = tuple(np.array(values, dtype=np.float64) for values in nodes["usages"])
    limit = float(data.get("usage_limit", math.inf))
    return Instance(name, Problem(node_costs, tables), usages, np.array(nodes["intervals"]), limit)


def run(instance: Instance, deadline: float) -> tuple[float, float, str]:
    """Cost of a choice within all rows (inf if none was found), bound, proof."""
    moments = instance.moments()
    live = instance.over_time(np.ones(len(instance.usages)))
    whole = live[moments].sum() <= MAX_ENTRIES
    chosen = moments if whole else _peaks(instance, instance.over_time([used.min() for used in instance.usages]), moments)
    best, bound, proof = math.inf, -math.inf, "no bound"
    start = None
    while True:
        problem = Problem(instance.problem.node_costs, instance.problem.edges, instance.rows(chosen))
        left = deadline - time.monotonic()
        found = solve(problem, time_limit_s=left if whole else left * FIRST_SHARE, start=start)
        if isinstance(found, Infeasible):
            return best, math.inf if found.proven else bound, found.reason
        if found.bound > bound:
            bound, proof = found.bound, found.proof
        start = found.choice
        used = instance.over_time([usage[k] for usage, k in zip(instance.usages, start, strict=True)])
        over = [moment for moment in moments if used[moment] > instance.limit]
        if not over:
            best = min(best, evaluate(problem, start))
        if whole or best == found.bound or deadline - time.monotonic() < left * 0.1:
            return best, bound, proof
        chosen = sorted({*chosen, *_peaks(instance, used, over)}) if over else chosen


def _peaks(instance: Instance, used: np.ndarray, moments: list[int]) -> list[int]:
    """Of the moments, the one with the largest usage in every span of time."""
    spans = np.array(moments) * NUM_WINDOWS // (int(instance.intervals.max()) + 1)
    found = []
    for span in np.unique(spans):
        inside = np.array(moments)[spans == span]
        found.append(int(inside[np.argmax(used[inside])]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "instances", nargs="*", default=["B", "G", "V"], help="NAME of a copy in benchmarks/iopddl, or NAME=PATH"
    )
    parser.add_argument("--limit", type=float, help="seconds, instead of the contest's")
    args = parser.parse_args()
    print("| instance | nodes | cost | bound | gap | best known | above it | wall s | CPU s | limit s | proof |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for given in args.instances:
        name, _, path = given.partition("=")
        limit_s = args.limit or LIMIT_S.get(name, 60.0)
        wall, cpu = time.monotonic(), time.process_time()
        instance = read(name, Path(path) if path else FOLDER / f"asplos-2025-iopddl-{name}.json.gz")
        cost, bound, proof = run(instance, wall + limit_s)
        wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
        known = BEST_KNOWN.get(name, math.nan)
        gap = f"{(cost - bound) / cost:.3%}" if cost < math.inf else "–"
        above = f"{cost / known - 1:.3%}" if cost < math.inf else "–"
        numbers = f"{cost:.9g} | {bound:.9g} | {gap} | {known:.9g} | {above} | {wall_s:.1f} | {cpu_s:.1f} | {limit_s:g}"
        print(f"| {name} | {instance.problem.num_nodes} | {numbers} | {proof} |", flush=True)


if __name__ == "__main__":
    main()
