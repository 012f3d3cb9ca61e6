"""The linear and the integer program of a pairwise network, solved by libraries.

Variables: ``x[n, k]``, node ``n`` takes strategy ``k``; ``y[a, b, j, k]``, the ends of an edge take
``j`` and ``k``.

Objective: ``sum cost[n][k] x[n, k] + sum edge[a, b][j, k] y[a, b, j, k]``.

Constraints: each node takes one strategy; the marginals of y are x (``sum_k y[a, b, j, k] = x[a,
j]`` and the other way round), which is far tighter than ``y >= x + x - 1``; the rows. With x
integer, y is so by itself and stays continuous.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array


@dataclass(frozen=True)
class Answer:
    """What a library found.

    Attributes:
        choice: by node of the problem, rounded to the strategy with the largest x; None if there is
            no point.
        bound: proved by the library, up to its tolerances.
        integral: whether every x is 0 or 1.
        infeasible: whether the library says that there is none.
    """

    choice: NDArray[np.intp] | None
    bound: float
    integral: bool
    infeasible: bool


def solve_program(network: Network, *, integer: bool, time_limit_s: float) -> Answer:
    """Solve the program with HiGHS (integer) or GLOP (linear).

    Args:
        network: pairwise; the program has as many variables as its strategies and pairs.
        integer: whether x must be integer.
        time_limit_s: for building the program and for the library.
    """
    end_s = time.monotonic() + time_limit_s
    # Building the program counts, too.
    message, starts = _build(network, integer)
    model = mathopt.Model.from_model_proto(message)
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        return Answer(None, -math.inf, False, False)
    parameters = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=left_s))
    # A plan is optimal or it is not: no gap is accepted.
    if integer:
        parameters.relative_gap_tolerance = 0.0
        parameters.absolute_gap_tolerance = 0.0
    solver = mathopt.SolverType.HIGHS if integer else mathopt.SolverType.GLOP
    result = mathopt.solve(model, solver, params=parameters)
    reason = result.termination.reason
    infeasible = reason == mathopt.TerminationReason.INFEASIBLE
    bound = result.termination.objective_bounds.dual_bound + network.constant
    if not result.has_primal_feasible_solution():
        return Answer(None, bound, False, infeasible)
    values = np.array(
        [
            value
            for _, value in sorted(result.variable_values().items(), key=lambda item: item[0].id)
        ]
    )
    choice = np.zeros(len(network.strategies), dtype=np.intp)
    # The strategy of each node is that of the largest x; integral if all are 1.
    integral = True
    for node, start in starts.items():
        part = values[start : start + len(network.costs[node])]
        choice[node] = int(part.argmax())
        integral = integral and bool(part.max() > 1 - 1e-6)
    return Answer(choice, bound, integral, infeasible)


def _build(network: Network, integer: bool) -> tuple[model_pb2.ModelProto, dict[int, int]]:
    """The program as a message, written in whole arrays, and where each node's x start."""
    nodes = sorted(network.costs)
    sizes = [len(network.costs[node]) for node in nodes]
    starts = dict(zip(nodes, np.cumsum([0, *sizes])[:-1].tolist(), strict=True))
    num_x = sum(sizes)
    # First one row per node: its x sum to 1.
    costs: list[Array] = [network.costs[node] for node in nodes]
    upper: list[Array] = [np.ones(num_x)]
    right: list[Array] = [np.ones(len(nodes))]
    left: list[Array] = [np.ones(len(nodes))]
    rows: list[NDArray[np.int64]] = [np.repeat(np.arange(len(nodes)), sizes)]
    columns: list[NDArray[np.int64]] = [np.arange(num_x)]
    values: list[Array] = [np.ones(num_x)]
    num_rows, num_columns = len(nodes), num_x
    # Then for each edge a variable per open pair; the pairs of a strategy sum to its x, at both
    # ends.
    for (a, b), edge in sorted(network.edges.items()):
        open_pairs = np.isfinite(edge).ravel()
        index = np.full(edge.size, -1)
        index[open_pairs] = num_columns + np.arange(open_pairs.sum())
        for node, table in ((a, index.reshape(edge.shape)), (b, index.reshape(edge.shape).T)):
            which, _ = np.nonzero(table >= 0)
            pairs = table[table >= 0]
            size = len(table)
            rows += [num_rows + which, num_rows + np.arange(size)]
            columns += [pairs, starts[node] + np.arange(size)]
            values += [np.ones(len(pairs)), -np.ones(size)]
            left.append(np.zeros(size))
            right.append(np.zeros(size))
            num_rows += size
        costs.append(edge.ravel()[open_pairs])
        upper.append(np.full(int(open_pairs.sum()), math.inf))
        num_columns += int(open_pairs.sum())
    # Then the rows of memory, scaled to their room.
    for row in network.rows:
        unit = abs(row.room) or 1.0
        for node, used in row.usage.items():
            rows.append(np.full(len(used), num_rows))
            columns.append(starts[node] + np.arange(len(used)))
            values.append(used / unit)
        left.append(np.array([-math.inf]))
        right.append(np.array([row.room / unit]))
        num_rows += 1
    parts = [np.concatenate(part) for part in (costs, upper, left, right, values)]
    return _message(
        num_x if integer else 0, parts, np.concatenate(rows), np.concatenate(columns)
    ), starts


def _message(
    num_integers: int, parts: list[Array], rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> model_pb2.ModelProto:
    costs, upper, left, right, values = parts
    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(len(costs)))
    model.variables.lower_bounds.extend([0.0] * len(costs))
    model.variables.upper_bounds.extend(upper.tolist())
    # Choices are 0 or 1; what edges pay follows from them, and need not be called whole.
    model.variables.integers.extend([True] * num_integers + [False] * (len(costs) - num_integers))
    # The message holds what is not zero only, row by row.
    nonzero = np.flatnonzero(costs)
    model.objective.linear_coefficients.ids.extend(nonzero.tolist())
    model.objective.linear_coefficients.values.extend(costs[nonzero].tolist())
    model.linear_constraints.ids.extend(range(len(left)))
    model.linear_constraints.lower_bounds.extend(left.tolist())
    model.linear_constraints.upper_bounds.extend(right.tolist())
    kept = np.flatnonzero(values)
    order = kept[np.lexsort((columns[kept], rows[kept]))]
    model.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    model.linear_constraint_matrix.column_ids.extend(columns[order].tolist())
    model.linear_constraint_matrix.coefficients.extend(values[order].tolist())
    return model
