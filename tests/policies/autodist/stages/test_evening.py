"""Even stages against all there are, and positions of several stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from shardwright.policies.autodist.stages.evening import even_stages, evened


def spans(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [sum(times[a:b]) for a, b in itertools.pairwise((0, *cuts, len(times)))]


def positions(times: Sequence[float], cuts: Sequence[int], placement: Sequence[int]) -> list[float]:
    sums = [0.0] * (max(placement) + 1)
    for position, seconds in zip(placement, spans(times, cuts), strict=True):
        sums[position] += seconds
    return sums


def squares(seconds: Sequence[float]) -> float:
    return sum(each**2 for each in seconds)


def test_no_stages_are_more_even() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 9)
        times = [float(rng.randint(0, 6)) for _ in range(size)]
        num_stages = rng.randint(1, size)
        found = even_stages(times, num_stages)
        assert len(found) == num_stages - 1 and list(found) == sorted({*found} - {0, size})
        every = itertools.combinations(range(1, size), num_stages - 1)
        least = min((max(spans(times, cuts)), squares(spans(times, cuts))) for cuts in every)
        own = max(spans(times, found)), squares(spans(times, found))
        assert own == pytest.approx(least), (times, num_stages, found)


@pytest.mark.parametrize("placement", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 0, 1, 2]])
def test_begins_are_moved_until_positions_are_even(placement: list[int]) -> None:
    rng = random.Random(1)
    far = far_before = 0
    for _ in range(200):
        times = [float(rng.randint(1, 9)) for _ in range(11)]
        times[-1] *= rng.choice([1, 6])  # a head longer than all layers of a stage
        cuts = even_stages(times, len(placement))
        moved = evened(times, cuts, placement)
        assert moved == sorted({*moved}) and len(moved) == len(cuts)
        before, after = (squares(positions(times, each, placement)) for each in (cuts, moved))
        assert after <= before
        every = itertools.combinations(range(1, 11), len(placement) - 1)
        best = min(squares(positions(times, other, placement)) for other in every)
        far, far_before = far + (after > 1.1 * best), far_before + (before > 1.1 * best)
    assert far < 0.35 * far_before, "local optima that are no good"


def test_a_long_head_shares_its_position_with_little() -> None:
    times = [*[4.0] * 8, 24.0]
    cuts = even_stages(times, 4)
    assert max(positions(times, cuts, [0, 1, 0, 1])) > 28.0
    assert positions(times, evened(times, cuts, [0, 1, 0, 1]), [0, 1, 0, 1]) == [28.0, 28.0]
