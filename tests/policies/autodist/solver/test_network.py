"""Rules that make a network smaller: each against its definition."""

from __future__ import annotations

import itertools

import numpy as np

from shardwright.policies.autodist.solver import network
from shardwright.policies.autodist.solver.network import _distinct, _most_above


def test_strategies_alike_are_compared_once_and_as_if_each_were() -> None:
    rng = np.random.default_rng(3)
    few = rng.integers(0, 6, (7, 5)).astype(float)
    few[few == 5] = np.inf
    edge = few[rng.integers(0, 7, 20)][:, rng.integers(0, 5, 12)]
    wanted = np.full((20, 20), -np.inf)
    for s, t in itertools.product(range(20), repeat=2):
        allowed = np.isfinite(edge[s])
        if allowed.any():
            wanted[s, t] = (edge[t][allowed] - edge[s][allowed]).max()
    assert (_most_above(edge) == wanted).all()
    rows, row_of = _distinct(edge)
    assert len(rows) == len(np.unique(edge, axis=0)) < 20 and (rows[row_of] == edge).all()
    assert network._undominated(np.zeros(20), [edge], [], {}).sum() <= len(rows)
