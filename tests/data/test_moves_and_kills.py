"""Loaders that move and jobs that are killed: short forms of tests/product/data.py."""

import pytest
from data_kills import kill
from data_moves import move


def test_a_run_that_moves_is_given_the_batches_of_one_rank():
    assert move(4, seed=1, moves_each=2) > 4


@pytest.mark.slow
def test_many_moves():
    """More of them: tests/product/data.py."""
    assert move(8, seed=2, moves_each=4) > 8


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_when_ranks_or_workers_are_killed(tmp_path):
    counts = kill(6, 0, tmp_path, num_steps=20)
    assert counts["rank"] + counts["worker"] == 6
