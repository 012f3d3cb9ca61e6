"""Bands hold the stages of few blocks, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.policies.autodist.stages.bands import band_of, most_blocks


@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_a_band_has_every_stage_of_few_blocks_once(width: int) -> None:
    num_blocks = 3
    starts, stops = np.indices((num_blocks + 1, num_blocks + 1))
    table = np.where(starts < stops, 10.0 * starts + stops, np.inf)
    band = band_of(num_blocks, width)
    found = band.of(table)
    assert found.shape == (width, num_blocks + 1)
    few = (starts < stops) & (stops - starts <= width)
    assert sorted(found[np.isfinite(found)].tolist()) == sorted(table[few].tolist())
    # What is at the start of each of them, too; nothing elsewhere.
    column = np.arange(num_blocks + 1.0)
    is_stage = np.isfinite(found)
    assert np.array_equal(band.at_start(column)[is_stage], found[is_stage] // 10)
    assert np.isinf(band.at_start(column)[~is_stage]).all()


def test_the_longest_stage_gives_the_width() -> None:
    stages = np.zeros((4, 4), dtype=bool)
    assert most_blocks(stages) == 0
    stages[0, 1] = stages[1, 3] = True
    assert most_blocks(stages) == 2
