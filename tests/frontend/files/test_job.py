"""Ranks that act as one: threads that share a store stand for processes."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from covers import spread

from shardwright.frontend.files.job import Job
from shardwright.runtime.errors import DistributedError, TraceError
from shardwright.runtime.ranks import exchange as exchange_module
from shardwright.runtime.ranks.exchange import StoreExchange, WorldExchange
from shardwright.runtime.ranks.processes import Process
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


def on_ranks(num_ranks, act, store_timeout=timedelta(minutes=5)):
    """What ``act(job)`` returned or raised, by rank."""
    store = dist.HashStore()
    store.set_timeout(store_timeout)
    outcomes = [None] * num_ranks

    def run(rank):
        try:
            outcomes[rank] = act(
                Job("compiling Net", StoreExchange(store, rank, num_ranks, "compiling Net"))
            )
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
    outcomes = on_ranks(
        3, lambda job: job.first_rank_does(lambda: worked.append(job.rank) or {"made": True})
    )
    assert outcomes == [{"made": True}] * 3
    assert worked == [0]


def test_several_exchanges_in_a_row_do_not_mix():
    def act(job):
        first = job.first_rank_does(lambda: "a")
        gathered = job.gather(job.rank)
        return (
            first,
            gathered,
            job.first_rank_does(lambda: "b"),
            job.every_rank_does(lambda: job.rank),
        )

    assert on_ranks(3, act) == [("a", [0, 1, 2], "b", rank) for rank in range(3)]


def test_waiting_outlasts_the_stores_timeout():
    release = threading.Event()
    timer = threading.Timer(0.3, release.set)
    timer.start()
    timeout = timedelta(milliseconds=20)
    assert on_ranks(2, lambda job: job.first_rank_does(lambda: release.wait(600)), timeout) == [
        True,
        True,
    ]
    timer.join()


def test_an_error_of_the_first_rank_reaches_all_with_its_text():
    error = TraceError(
        "the model branches on a value", where="net.py:3", why="x.sum() > 0", hint="use torch.where"
    )
    first, second = on_ranks(2, lambda job: job.first_rank_does(lambda: raise_(error)))
    assert first is error
    assert type(second) is TraceError and str(second) == str(error)
    assert second.__notes__ == ["raised on rank 0 of 2"]


def test_an_unexpected_error_reaches_all_with_its_traceback():
    _, second = on_ranks(2, lambda job: job.first_rank_does(lambda: raise_(KeyError("weight"))))
    assert type(second) is DistributedError
    lines = str(second).splitlines()
    assert lines[:2] == [
        "compiling Net failed on rank 0",
        "  why:   Traceback (most recent call last):",
    ]
    assert lines[-1] == "KeyError: 'weight'"


def test_an_error_of_any_rank_reaches_all():
    def act(job):
        return job.every_rank_does(
            lambda: raise_(ValueError("no space left")) if job.rank == 1 else "fine"
        )

    first, second, third = on_ranks(3, act)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert type(other) is DistributedError
        assert str(other).startswith("compiling Net failed on rank 1\n") and str(other).endswith(
            "ValueError: no space left"
        )
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


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "1")
    monkeypatch.setenv("SHARDWRIGHT_NOTICE_S", "0.1")


@pytest.mark.parametrize(("missing", "others"), spread([(0, (1, 2)), (2, (0, 1))], 2, first=1))
def test_a_rank_that_never_comes_is_given_up_by_name(short_limit, caplog, missing, others):
    """Whether it is the first one or another, and also by those that wait for whoever waits for
    it.
    """
    outcomes = on_ranks(
        3, lambda job: None if job.rank == missing else in_job(job, lambda: job.gather(0))
    )
    for rank in others:
        assert type(outcomes[rank]) is DistributedError
        lines = str(outcomes[rank]).splitlines()
        waiting = 0 if missing else rank  # rank 0 reads for all
        assert lines[0].startswith(f"compiling Net: rank {waiting} has waited ")
        assert lines[0].endswith(f" s for rank {missing}, and nothing has come")
        assert lines[1:] == [
            f"  why:   rank {missing} has not come so far",
            (
                f"  try:   look for the first error of rank {missing}; the limit is that of "
                "SHARDWRIGHT_TIMEOUT_S, in seconds"
            ),
        ]
    said = (
        f"rank {waiting} waits for rank {missing}: compiling Net, for 0 s so far; rank {missing} "
        "has not come so far"
    )
    assert said in caplog.messages


def in_job(job, act):
    with job:
        return act()


@pytest.mark.slow
def test_a_rank_that_works_is_waited_for_beyond_the_limit(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "2")
    release = threading.Event()
    threading.Timer(3.0, release.set).start()
    assert on_ranks(
        2, lambda job: in_job(job, lambda: job.first_rank_does(lambda: release.wait(600)))
    ) == [True, True]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_given_up(short_limit, monkeypatch):
    """A rank is stopped: its process is there, and gives no more signs of life."""
    monkeypatch.setattr(exchange_module.StoreExchange, "_beat", beat_once)
    given_up = threading.Event()

    def act(job):
        if job.rank == 0:
            return in_job(job, lambda: job.first_rank_does(lambda: given_up.wait(600)))
        try:
            return in_job(job, lambda: job.first_rank_does(lambda: None))
        finally:
            given_up.set()

    process = Process.own()
    assert str(on_ranks(2, act)[1]).splitlines()[1] == f"  why:   rank 0 ({process}) runs"


def beat_once(exchange, number, beat=StoreExchange._beat):
    if number == 0:
        beat(exchange, number)


def test_a_rank_that_leaves_tells_why():
    """Whatever it is doing: here it is interrupted, outside of what a job does for it."""

    def act(job):
        with job:
            if job.rank == 0:
                raise KeyboardInterrupt
            return job.first_rank_does(lambda: None)

    store = dist.HashStore()
    with pytest.raises(KeyboardInterrupt):
        act(Job("compiling Net", StoreExchange(store, 0, 2, "compiling Net")))
    with pytest.raises(
        DistributedError, match=r"(?s)compiling Net failed on rank 0.*KeyboardInterrupt"
    ):
        act(Job("compiling Net", StoreExchange(store, 1, 2, "compiling Net")))


def test_a_process_that_is_gone_is_not_waited_for(monkeypatch):
    store = dist.HashStore()
    gone = replace(Process.own(), pid=2**22 + 1)  # above the largest number of a process
    first = StoreExchange(store, 0, 2, "compiling Net")
    first._process = gone
    first._beat(0)
    with pytest.raises(DistributedError) as caught:
        StoreExchange(store, 1, 2, "compiling Net").broadcast_object(None)
    assert f"rank 0 ({gone}) is gone" in str(caught.value)


def test_a_store_that_is_gone_or_does_not_answer(short_limit):
    class Store:
        def check(self, keys):
            time.sleep(60)

        def set(self, key, value):
            raise dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")

    exchange = StoreExchange(Store(), 1, 2, "compiling Net")
    for act, why in (
        (lambda: exchange.all_gather_object(0), "Connection reset by peer"),
        (lambda: exchange.broadcast_object(None), "nothing came for 1 s"),
    ):
        with pytest.raises(DistributedError) as caught:
            act()
        assert str(caught.value) == (
            "compiling Net: the job's key-value store does not answer rank 1\n"
            f"  why:   {why}\n"
            "  try:   it lies in the process of torchrun, or else of rank 0: look for the "
            "first error there"
        )


def test_what_an_error_was_raised_from_reaches_all_too():
    def fail():
        try:
            raise KeyError("weight")
        except KeyError as error:
            raise TraceError("broken", hint="see the traceback above") from error

    _, second = on_ranks(2, lambda job: job.first_rank_does(fail))
    assert "KeyError: 'weight'" in second.__notes__[0]


def test_nothing_of_what_was_told_stays_in_the_store():
    stores = []

    def act(job):
        stores.append(job._exchange._store)
        for _ in range(20):
            job.gather(job.rank)

    on_ranks(3, act)
    assert stores[0].num_keys() <= 3  # the last one told, and what a store keeps for itself


@pytest.mark.slow
def test_threads_wait_for_the_first_rank_as_long_as_it_works(short_limit):
    release = threading.Event()
    threading.Timer(2.0, release.set).start()

    def act(rank):
        with Job("compiling Net", WorldExchange(current_world())) as job:
            return job.first_rank_does(lambda: release.wait(600))

    assert run_ranks(2, act) == [True, True]
