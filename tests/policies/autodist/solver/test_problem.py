"""Problems, evaluation, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwright.policies.autodist.solver.problem import (
    Problem,
    Row,
    Solution,
    evaluate,
    is_feasible,
)

CHAIN = Problem(
    node_costs=(np.array([1.0, 2.0]), np.array([3.0, 4.0, math.inf])),
    edges=(
        (0, 1, np.arange(6.0).reshape(2, 3)),
        (1, 0, np.full((3, 2), 10.0)),
        (0, 0, np.diag([5.0, 7.0])),
    ),
    rows=(Row(limit=3, usage={0: np.array([1, 2]), 1: np.array([1, 2, 3])}),),
)


def test_evaluate_adds_nodes_and_edges_of_both_directions() -> None:
    assert evaluate(CHAIN, (0, 1)) == 1 + 4 + 1 + 10 + 5
    assert evaluate(CHAIN, (1, 0)) == 2 + 3 + 3 + 10 + 7
    assert evaluate(CHAIN, (1, 2)) == math.inf


def test_rows_are_kept_up_to_the_rounding_of_their_sum() -> None:
    assert (
        is_feasible(CHAIN, (0, 1))
        and not is_feasible(CHAIN, (1, 1))
        and not is_feasible(CHAIN, (0, 2))
    )
    tenths = Row(limit=0.3, usage={n: np.array([0.1]) for n in range(3)})
    assert tenths.used((0, 0, 0)) > 0.3 and tenths.holds(tenths.used((0, 0, 0)))
    assert not tenths.holds(0.3 * (1 + 1e-11))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_costs_that_are_no_costs_are_refused(bad: float) -> None:
    with pytest.raises(AssertionError, match="a cost is nan or -inf"):
        Problem(node_costs=(np.array([0.0, bad]),))
    with pytest.raises(AssertionError, match="a cost is nan or -inf"):
        Problem(node_costs=(np.zeros(1), np.zeros(1)), edges=((0, 1, np.array([[bad]])),))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"edge 0 - 1: \(2, 2\) for \(2,\) and \(3,\) strategies"
    ):
        Problem(node_costs=(np.zeros(2), np.zeros(3)), edges=((0, 1, np.zeros((2, 2))),))
    with pytest.raises(AssertionError, match=r"row 0, node 1: \(2,\) for \(3,\) strategies"):
        Problem(node_costs=(np.zeros(2), np.zeros(3)), rows=(Row(1.0, {1: np.zeros(2)}),))


def test_gap_is_relative_to_the_cost() -> None:
    assert Solution((0,), 10.0, 9.0, "").gap == pytest.approx(0.1)
    assert Solution((0,), 10.0, 10.0, "").gap == 0.0
