"""Ranks as threads: exact sums, and errors where a cluster would hang."""

import re
import threading

import pytest
import torch
from torch.utils._pytree import tree_leaves

from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime.errors import ConfigError, DistributedError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import SoloWorld, current_world, use_world


def everyone():
    return current_world().everyone


def failing(num_ranks, fn, **keywords):
    """The full text of the DistributedError that running ``fn`` raises."""
    with pytest.raises(DistributedError) as caught:
        run_ranks(num_ranks, fn, **keywords)
    return str(caught.value)


def test_results_come_by_rank_with_arguments():
    assert run_ranks(3, lambda rank, a, b: (rank, a + b, current_world().rank), 1, 2) == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]
    assert isinstance(current_world(), SoloWorld)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:1", "there is no device cuda:1\n  why:   torch .* finds 0 GPUs here\n  try:   "),
        ("mps", "ranks that are threads run on the CPU or on a GPU of CUDA\n  why:   device is"),
    ],
)
def test_a_device_that_cannot_be_is_refused(device, said):
    with pytest.raises(ConfigError, match=said):
        run_ranks(2, lambda rank: rank, device=device)


def test_sums_are_taken_in_rank_order_and_equal_on_all_ranks():
    parts = [torch.tensor([1e16]), torch.tensor([1.0]), torch.tensor([-1e16]), torch.tensor([1.0])]
    parts = [p.double() for p in parts]
    for _ in range(5):
        sums = run_ranks(4, lambda rank: everyone().all_reduce(parts[rank]).item())
        assert sums == [1.0] * 4  # ((1e16 + 1) - 1e16) + 1 in float64; another order gives 0 or 2


def test_an_exception_ends_all_ranks_and_names_its_rank():
    def on_rank(rank):
        if rank == 2:
            raise KeyError("lost")
        everyone().barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, on_rank)
    assert caught.value.__notes__ == ["raised on rank 2 of 3"]


def test_an_exception_in_a_backward_ends_all_ranks():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if current_world().rank == 1:
                raise ZeroDivisionError("in backward")
            return everyone().all_reduce(grad)

    with pytest.raises(ZeroDivisionError, match="in backward"):
        run_ranks(2, lambda rank: Bad.apply(torch.ones(1, requires_grad=True)).sum().backward())


def test_a_rank_that_ends_while_others_wait():
    def on_rank(rank):
        if rank == 0:
            everyone().all_reduce(torch.zeros(2, 3))

    assert failing(2, on_rank) == (
        "rank 1 ended while others wait for it\n"
        "  why:   rank 0 waits in all_reduce(sum, float32[2, 3]) of ranks 0, 1 for rank 1"
    )


def test_ranks_that_wait_for_each_other():
    def on_rank(rank):
        mesh = RankMesh(Mesh((("dp", 2), ("tp", 2))))
        mesh.axis("dp" if rank in (0, 3) else "tp").communicator.barrier()

    text = failing(4, on_rank)
    assert text.startswith("the ranks wait for each other\n")
    assert (
        "rank 0 waits in barrier() of ranks 0, 2 for rank 2" in text
        and "rank 3 waits in barrier()" in text
    )


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            (lambda c: c.all_reduce(torch.zeros(2)), lambda c: c.all_gather(torch.zeros(2))),
            "all_gather(float32[2])",
        ),
        (
            (lambda c: c.all_reduce(torch.zeros(2)), lambda c: c.all_reduce(torch.zeros(3))),
            "all_reduce(sum, float32[3])",
        ),
        (
            (
                lambda c: c.all_reduce(torch.zeros(2)),
                lambda c: c.all_reduce(torch.zeros(2, dtype=torch.int64)),
            ),
            "int64[2]",
        ),
        (
            (lambda c: c.all_reduce(torch.zeros(2)), lambda c: c.all_reduce(torch.zeros(2), "max")),
            "all_reduce(max",
        ),
    ],
)
def test_members_that_call_different_collectives(calls, text):
    message = failing(2, lambda rank: calls[rank](everyone()))
    assert message.startswith("the ranks [0, 1] disagree about their collective call 0\n")
    assert text in message and "all_reduce(sum, float32[2])" in message


def test_a_rank_that_takes_too_long():
    release = threading.Event()

    def on_rank(rank):
        if rank == 0:
            release.wait()
        try:
            everyone().barrier()
        finally:
            release.set()

    text = failing(2, on_rank, timeout_s=0.2)
    assert (
        text == "ranks have waited 0.2 s in a collective\n  why:   rank 1 waits in barrier() of "
        "ranks 0, 1 for rank 0"
    )


def test_a_receive_without_a_send():
    text = failing(
        2, lambda rank: everyone().receive((2,), torch.float32, 1) if rank == 0 else None
    )
    assert re.search(r"rank 1 ended .*\n.*rank 0 waits in receive\(float32\[2\]\) for rank 1", text)


def test_what_was_exchanged_may_be_changed():
    def on_rank(rank):
        x = torch.full((2,), float(rank))
        gathered = everyone().all_gather(x)
        exchanged = everyone().all_to_all([x, x], [(2,), (2,)])
        summed, sent = everyone().all_reduce(x), everyone().broadcast(x, 1)
        if rank == 0:
            everyone().send(x, 1)
        x.fill_(-1)
        results = [
            [t.clone() for t in gathered],
            [t.clone() for t in exchanged],
            summed.clone(),
            sent.clone(),
        ]
        for t in (*gathered, *exchanged, summed, sent):
            t.fill_(-2)
        return [*results, everyone().receive((2,), x.dtype, 0)] if rank == 1 else results

    for results in run_ranks(2, on_rank):
        assert (
            [t.tolist() for t in results[0]] == [[0, 0], [1, 1]] == [t.tolist() for t in results[1]]
        )
        assert results[2].tolist() == [1, 1] and results[3].tolist() == [1, 1]
        assert len(results) == 4 or results[4].tolist() == [0, 0]


def test_async_all_reduce_meets_later():
    def on_rank(rank):
        mesh = RankMesh(Mesh((("dp", 2), ("tp", 2))))
        x, y = torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])
        first = mesh.axis("dp").communicator.all_reduce_async(x, "avg")
        second = mesh.axis("tp").communicator.all_reduce_async(y)
        for work in (first, second) if rank % 2 else (second, first):
            work.wait()
        return x.item(), y.item()

    assert run_ranks(4, on_rank) == [(2.0, 21.0), (3.0, 21.0), (2.0, 25.0), (3.0, 25.0)]


ASYNC = {
    "all_reduce": lambda c, x: c.all_reduce_async(x),
    "all_gather": lambda c, x: c.all_gather_async_(x, [3, 3]),
    "reduce_scatter": lambda c, x: c.reduce_scatter_async_(x, [3, 3]),
}
BLOCKING = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_gather": lambda c, x: c.all_gather_cat(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "several all_gathers": lambda c, x: c.all_gather_together_async([x[:2], x[2:]]).wait(),
    "several reduce_scatters": lambda c, x: c.reduce_scatter_together([x[:2], x[2:]]),
    "all_to_all": lambda c, x: c.all_to_all([x[:3], x[3:]], [(3,), (3,)]),
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "messages": lambda c, x: c.send(x, 0) if c.index else c.receive((6,), torch.float32, 1),
}


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("name", list(ASYNC))
def test_a_rank_that_waited_holds_nothing_more_though_another_is_late(name, last):
    joined, through = threading.Event(), threading.Event()

    def on_rank(rank):
        with LiveBytes() as live:
            x = torch.ones(6)
            if rank == last:
                joined.wait()
            work = ASYNC[name](everyone(), x)
            joined.set()
            assert live.now == live.peak == x.nbytes
            if rank == last:
                through.wait()
            work.wait()
            del x, work
            through.set()
            return live.now, live.peak

    assert run_ranks(2, on_rank) == [(0, 24)] * 2


@pytest.mark.parametrize("name", list(BLOCKING))
def test_the_bytes_that_live_on_a_rank_are_its_own(name):
    def on_rank(rank):
        with LiveBytes() as live:
            x = torch.ones(6)
            for _ in range(20):
                results = BLOCKING[name](everyone(), x)
                storages = {
                    t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in tree_leaves(results)
                    if t is not None
                }
                assert live.now == x.nbytes + sum(storages.values())
                del results

    run_ranks(2, on_rank)


def test_ranks_run_in_the_callers_grad_mode():
    with torch.no_grad():
        assert run_ranks(2, lambda rank: torch.is_grad_enabled()) == [False, False]
    assert run_ranks(2, lambda rank: torch.is_grad_enabled()) == [True, True]


def test_use_world_is_of_one_thread():
    with use_world(SoloWorld()) as world:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_world()))
        thread.start()
        thread.join()
        assert current_world() is world and seen[0] is not world
