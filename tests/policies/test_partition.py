"""Cuts into stages against all cuts there are."""

import itertools
import random

import plans
import pytest
import torch
from torch import nn

from shardwright.policies.partition import balanced_cuts, cut_traffic, evened
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


def test_gradients_go_back_over_a_cut_behind_the_first_parameter_only() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    graph = plans.annotated(plans.traced(model, {"input": torch.randn(2, 4)}))
    assert [op.target for op in graph.ops] == ["tanh", "linear", "tanh"]
    assert cut_traffic(graph, set())[1:] == [8.0, 16.0]


def position_sums(times: list[int], cuts: list[int], placement: list[int]) -> list[int]:
    sums = [0] * (max(placement) + 1)
    for position, (start, stop) in zip(placement, itertools.pairwise([0, *cuts, len(times)]), strict=True):
        sums[position] += sum(times[start:stop])
    return sums


@pytest.mark.parametrize("placement", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 0, 1, 2]])
def test_cuts_are_moved_until_positions_are_even(placement: list[int]) -> None:
    rng = random.Random(1)
    far = far_before = 0
    for _ in range(200):
        times, traffic = [rng.randint(1, 9) for _ in range(11)], [float(rng.randint(1, 3)) for _ in range(11)]
        times[-1] *= rng.choice([1, 6])  # a head longer than all layers of a stage
        cuts = balanced_cuts(times, traffic, len(placement))
        moved = evened(times, traffic, cuts, placement)
        most = max(traffic[cut] for cut in cuts)
        assert moved == sorted(set(moved)) and max(traffic[cut] for cut in moved) <= most
        before, largest = (max(position_sums(times, each, placement)) for each in (cuts, moved))
        assert largest <= before
        best = min(
            max(position_sums(times, list(other), placement))
            for other in itertools.combinations([i for i in range(1, 11) if traffic[i] <= most], len(placement) - 1)
        )
        far, far_before = far + (largest > 1.1 * best), far_before + (before > 1.1 * best)
    assert far < 0.35 * far_before, "local optima that are no good"


def test_a_long_head_shares_its_position_with_little() -> None:
    times, traffic = [*[4] * 8, 1, 24], [1.0] * 10
    cuts = balanced_cuts(times, traffic, 4)
    assert max(position_sums(times, evened(times, traffic, cuts, [0, 1, 0, 1]), [0, 1, 0, 1])) == 29


def test_a_long_head_leaves_no_stage_without_layers() -> None:
    """The head bounds the largest stage whatever the others are, and token ids are the least that can cross a cut."""
    times, traffic = [0, *[4] * 8, 24], [0.0, 0.1, *[1.0] * 8]
    cuts = balanced_cuts(times, traffic, 4)
    assert cuts[0] == 1, "a stage without any layer"
    assert position_sums(times, evened(times, traffic, cuts, [0, 1, 2, 3]), [0, 1, 2, 3]) == [12, 12, 8, 24]
