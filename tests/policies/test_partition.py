"""Cuts into stages against all cuts there are."""

import itertools
import random

import pytest

from shardwright.policies.partition import balanced_cuts
from shardwright.runtime.errors import PlanError

INFINITE = float("inf")


def best_by_enumeration(times: list[int], traffic: list[float], num_parts: int) -> tuple[int, float] | None:
    best = None
    for cuts in itertools.combinations(range(1, len(times)), num_parts - 1):
        if any(traffic[i] == INFINITE for i in cuts):
            continue
        bounds = [0, *cuts, len(times)]
        value = max(sum(times[a:b]) for a, b in itertools.pairwise(bounds)), sum(traffic[i] for i in cuts)
        best = value if best is None or value < best else best
    return best


def test_the_cuts_are_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        size = rng.randint(1, 9)
        num_parts = rng.randint(1, min(size, 5))
        times = [rng.randint(0, 6) for _ in range(size)]
        traffic = [float(rng.randint(1, 9)) if rng.random() < 0.85 else INFINITE for _ in range(size)]
        best = best_by_enumeration(times, traffic, num_parts)
        if best is None:
            with pytest.raises(PlanError, match="cannot be cut"):
                balanced_cuts(times, traffic, num_parts)
            continue
        cuts = balanced_cuts(times, traffic, num_parts)
        bounds = [0, *cuts, size]
        found = max(sum(times[a:b]) for a, b in itertools.pairwise(bounds)), sum(traffic[i] for i in cuts)
        assert found == best, (times, traffic, num_parts, cuts)


def test_too_few_places_to_cut() -> None:
    with pytest.raises(PlanError) as error:
        balanced_cuts([1, 1, 1], [0.0, INFINITE, 1.0], 3)
    assert str(error.value) == (
        "the graph cannot be cut into 3 stages\n  why:   it has 1 places where a stage may begin\n  try:   ask for fewer stages"
    )
