"""Real problems with known answers: the instances of the intra-operator parallelism contest in
benchmarks/iopddl.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.solver.solve import solve

BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def iopddl() -> ModuleType:
    spec = importlib.util.spec_from_file_location("iopddl", BENCHMARKS / "iopddl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["iopddl"] = module
    spec.loader.exec_module(module)
    return module


def test_reading_makes_one_row_with_the_intervals(iopddl: ModuleType, tmp_path: Path) -> None:
    """Three nodes live in [0, 4), [2, 6), [4, 4): only what is live at 2 may exceed 10; the empty
    interval uses nothing.
    """
    nodes = {
        "intervals": [[0, 4], [2, 6], [4, 4]],
        "costs": [[1, 2], [3, 10**18], [0]],
        "usages": [[5, 9], [4, 6], [100]],
    }
    edges = {"nodes": [[1, 0]], "costs": [[1, 2, 3, 4]]}
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(
        gzip.compress(
            json.dumps({"problem": {"nodes": nodes, "edges": edges, "usage_limit": 10}}).encode()
        )
    )
    problem = iopddl.read(path)
    (row,) = problem.rows
    assert row.limit == 10 and {node: used.tolist() for node, used in row.usage.items()} == {
        0: [5, 9],
        1: [4, 6],
        2: [100],
    }
    assert row.intervals == {0: (0, 4), 1: (2, 6), 2: (4, 4)}
    assert problem.node_costs[1].tolist() == [3, np.inf]
    a, b, cost = problem.edges[0]
    assert (a, b, cost.tolist()) == (1, 0, [[1, 2], [3, 4]])
    found = solve(problem, time_limit_s=3600)
    assert (
        not isinstance(found, Infeasible)
        and found.choice == (0, 0, 0)
        and found.cost == found.bound == 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["B", "G"])
def test_small_instances_are_proved_optimal(iopddl: ModuleType, name: str) -> None:
    problem = iopddl.read(BENCHMARKS / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz")
    cost, bound, proof = iopddl.run(problem, time.monotonic() + 200)
    assert cost == bound == iopddl.BEST_KNOWN[name] and proof.startswith("optimal by")
