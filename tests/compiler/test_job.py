"""Ranks that act as one: threads that share a store stand for processes."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwright.compiler.job import Job
from shardwright.runtime.errors import DistributedError, TraceError
from shardwright.runtime.ranks import exchange as exchange_module
from shardwright.runtime.ranks.exchange import StoreExchange, WorldExchange
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


def on_ranks(num_ranks, act, store_timeout=timedelta(minutes=5)):
    """What ``act(job)`` returned or raised, by rank."""
    store = dist.HashStore()
    store.set_timeout(store_timeout)
    outcomes = [None] * num_ranks

    def run(rank):
        try:
            outcomes[rank] = act(Job("compiling Net", StoreExchange(store, rank, num_ranks, "compiling Net")))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def raise_(error):
    raise error


def test_a_job_of_one():
    job = Job("compiling Net")
    job.agree(model="Net")
    assert (job.rank, job.size) == (0, 1)
    assert job.first_rank_does(lambda: 3) == 3
    assert job.every_rank_does(lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        job.every_rank_does(lambda: 1 / 0)


def test_only_the_first_rank_works_and_all_get_the_result():
    worked = []
    outcomes = on_ranks(3, lambda job: job.first_rank_does(lambda: worked.append(job.rank) or {"made": True}))
    assert outcomes == [{"made": True}] * 3
    assert worked == [0]


def test_several_exchanges_in_a_row_do_not_mix():
    def act(job):
        first = job.first_rank_does(lambda: "a")
        gathered = job.gather(job.rank)
        return first, gathered, job.first_rank_does(lambda: "b"), job.every_rank_does(lambda: job.rank)

    assert on_ranks(3, act) == [("a", [0, 1, 2], "b", rank) for rank in range(3)]


def test_waiting_outlasts_the_stores_timeout():
    release = threading.Event()
    timer = threading.Timer(0.3, release.set)
    timer.start()
    timeout = timedelta(milliseconds=20)
    assert on_ranks(2, lambda job: job.first_rank_does(lambda: release.wait(600)), timeout) == [True, True]
    timer.join()


def test_an_error_of_the_first_rank_reaches_all_with_its_text():
    error = TraceError("the model branches on a value", where="net.py:3", why="x.sum() > 0", hint="use torch.where")
    first, second = on_ranks(2, lambda job: job.first_rank_does(lambda: raise_(error)))
    assert first is error
    assert type(second) is TraceError and str(second) == str(error)
    assert second.__notes__ == ["raised on rank 0 of 2"]


def test_an_unexpected_error_reaches_all_with_its_traceback():
    _, second = on_ranks(2, lambda job: job.first_rank_does(lambda: raise_(KeyError("weight"))))
    assert type(second) is DistributedError
    lines = str(second).splitlines()
    assert lines[:2] == ["compiling Net failed on rank 0", "  why:   Traceback (most recent call last):"]
    assert lines[-1] == "KeyError: 'weight'"


def test_an_error_of_any_rank_reaches_all():
    def act(job):
        return job.every_rank_does(lambda: raise_(ValueError("no space left")) if job.rank == 1 else "fine")

    first, second, third = on_ranks(3, act)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert type(other) is DistributedError
        assert str(other).startswith("compiling Net failed on rank 1\n") and str(other).endswith("ValueError: no space left")
        assert other.__notes__ == ["raised on rank 1 of 3"]


@pytest.mark.parametrize("verb", ["first_rank_does", "every_rank_does"])
def test_rank_zero_raises_when_the_others_have_read_the_error(verb, monkeypatch):
    """It may hold the store, which ends with its process."""
    monkeypatch.setattr(exchange_module, "CONFIRM_S", 600.0)
    read, raised = [], []

    def act(job):
        if job.rank == 1:
            time.sleep(0.3)
            read.append(time.monotonic())
        try:
            getattr(job, verb)(lambda: raise_(TraceError("broken")) if job.rank == 0 else None)
        finally:
            if job.rank == 0:
                raised.append(time.monotonic())

    assert [str(error) for error in on_ranks(2, act)] == ["broken", "broken"]
    assert raised[0] > read[0]


def test_rank_zero_does_not_wait_for_the_dead(monkeypatch):
    monkeypatch.setattr(exchange_module, "CONFIRM_S", 0.1)
    job = Job("compiling Net", StoreExchange(dist.HashStore(), 0, 2, "compiling Net"))
    with pytest.raises(TraceError, match="broken"):
        job.first_rank_does(lambda: raise_(TraceError("broken")))


def test_ranks_that_ask_for_different_things():
    outcomes = on_ranks(2, lambda job: job.agree(model="Net", policy=["tp", "dp"][job.rank]))
    for outcome in outcomes:
        assert str(outcome) == (
            "compiling Net: the ranks ask for different things\n"
            "  why:   policy is 'tp' on rank 0, 'dp' on rank 1\n"
            "  try:   all ranks make the same calls in the same order"
        )


def test_ranks_that_are_threads_of_one_process():
    def job():
        return Job("compiling Net", WorldExchange(current_world()))

    def act(rank):
        return job().first_rank_does(lambda: "made"), job().gather(rank)

    assert run_ranks(2, act) == [("made", [0, 1])] * 2
    with pytest.raises(TraceError, match="broken"):
        run_ranks(2, lambda rank: job().first_rank_does(lambda: raise_(TraceError("broken"))))
