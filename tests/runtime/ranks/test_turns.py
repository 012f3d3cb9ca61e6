"""The order in which threads run."""

import threading
import time

import torch

from shardwright.runtime.ranks import threads
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


def barrier():
    current_world().everyone.barrier()


def test_one_runs_at_a_time_and_all_runs_have_one_order(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE_S", 60.0)  # whatever else the machine does

    def order(num_ranks):
        running, seen = [], []

        def on_rank(rank):
            for step in range(5):
                running.append(rank)
                seen.append((step, rank))
                sum(range(20_000))  # longer than a switch of threads
                assert running == [rank]
                running.remove(rank)
                barrier()

        run_ranks(num_ranks, on_rank)
        return seen

    first = order(4)
    assert first == order(4)
    # Before the first barrier, in the order of the ranks.
    assert first[:4] == [(0, rank) for rank in range(4)]
    assert [step for step, _ in first] == sorted(step for step, _ in first)


def test_a_rank_that_waits_for_something_else_keeps_nobody_waiting():
    release = threading.Event()

    def on_rank(rank):
        if rank == 0:
            assert release.wait(10)
        else:
            release.set()
        barrier()
        return rank

    assert run_ranks(2, on_rank) == [0, 1]


def test_long_operators_run_beside_each_other():
    seen, most = set(), []

    def on_rank(rank):
        seen.add(rank)
        time.sleep(0.4)  # lets go of the interpreter, as a large operator does
        most.append(len(seen))
        seen.remove(rank)
        barrier()

    run_ranks(3, on_rank)
    assert max(most) > 1


def test_a_failure_ends_those_that_have_had_no_turn_yet():
    done = []

    def on_rank(rank):
        if rank == 0:
            raise ValueError("no")
        barrier()
        done.append(rank)

    begin = time.monotonic()
    try:
        run_ranks(4, on_rank)
    except ValueError as error:
        assert "raised on rank 0 of 4" in error.__notes__
    assert not done and time.monotonic() - begin < 4


def test_who_waits_too_long_runs_on_and_says_so():
    """The late rank comes last, when the other has given up."""
    text = []

    def on_rank(rank):
        if rank == 1:
            while not text:
                time.sleep(0.01)
        try:
            current_world().everyone.all_reduce(torch.ones(1))
        except BaseException as error:
            text.append(type(error).__name__)
            raise

    try:
        run_ranks(2, on_rank, timeout_s=0.2)
    except Exception as error:
        assert str(error).startswith("ranks have waited 0.2 s in a collective")
    assert text == ["RankAbortedError", "RankAbortedError"]
