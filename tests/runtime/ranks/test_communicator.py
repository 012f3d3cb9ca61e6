"""Communicators over processes and over threads do the same, and count it."""

import pytest
import runtime_ranks
import torch
import torch.distributed as dist
from spawn import run_processes

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import (
    DistributedWorld,
    SoloWorld,
    count_communication,
    counters,
    current_world,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_processes_and_threads_do_the_same():
    processes = run_processes(4, "runtime_ranks:collectives")
    threads = run_ranks(4, lambda rank: runtime_ranks.collectives())
    for rank, (a, b) in enumerate(zip(processes, threads, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert same(a[name], b[name]), f"{name} on rank {rank}: {a[name]} and {b[name]}"


def test_collectives():
    results = run_ranks(4, lambda rank: runtime_ranks.collectives())
    x = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(4)]
    whole = torch.arange(24.0).view(4, 6) * 10
    columns = [(0, 2), (2, 2), (2, 3), (3, 6)]
    for rank, result in enumerate(results):
        assert same(result["sum"], sum(x)) and same(result["avg"], sum(x) / 4)
        assert same(result["max"], x[3]) and same(result["min"], x[0])
        assert same(result["async"], x[rank // 2 * 2] + x[rank // 2 * 2 + 1])
        assert same(result["async avg"], sum(x) / 4)
        assert same(result["gather"], torch.cat(x)) and same(
            result["gather_dim_1"], torch.cat(x, 1)
        )
        assert same(
            result["gather_uneven"],
            torch.cat([x[r][:, :1].expand(2, n) for r, n in enumerate([2, 0, 1, 3])], 1),
        )
        assert same(result["reduce_scatter"], whole[rank : rank + 1])
        assert same(result["reduce_scatter_uneven"], whole[:, slice(*columns[rank])])
        flat, (start, stop) = torch.arange(6.0), columns[rank]
        assert same(result["reduce_scatter_async"], 10 * flat[start:stop])
        low = rank % 2 * 3
        assert same(result["reduce_scatter_async_even"], (rank // 2 * 4 + 3) * flat[low : low + 3])
        assert same(result["all_gather_async_uneven"], torch.tensor([0.0, 0, 2, 3, 3, 3]))
        assert same(
            result["all_gather_async_even"], torch.tensor([0.0] * 3 + [1.0] * 3) + rank // 2 * 2
        )
        assert same(
            result["all_to_all"], [torch.full((rank + i, 2), 10.0 * i + rank) for i in range(4)]
        )
        assert same(result["broadcast"], x[2]) and same(result["bfloat16"], sum(x).bfloat16())
        assert same(result["bool"], torch.tensor([True, False, True, False]))
        assert result["object"] == {"text": "é", "rank": 1} and result["objects"] == [
            ["r"] * n for n in range(4)
        ]
    assert same(results[3]["received"], x[0])
    assert results[0]["volume"] == (
        "phase      collective      axis   calls  elements  bytes\n"
        "forward    all_gather      world      4        64    244\n"
        "forward    all_reduce      world      5        30    108\n"
        "forward    all_to_all      world      1        12     48\n"
        "forward    reduce_scatter  world      2        48    192\n"
        "forward    send            world      1         6     24\n"
        "gradients  all_gather      tp         1         6     24\n"
        "gradients  all_gather      world      1         6     24\n"
        "gradients  all_reduce      tp         1         6     24\n"
        "gradients  all_reduce      world      1         6     24\n"
        "gradients  reduce_scatter  tp         1         6     24\n"
        "gradients  reduce_scatter  world      1         6     24\n"
        "setup      all_gather      world      2        36     64\n"
        "setup      broadcast       world      3        36     61"
    )


def test_rows_to_every_rank_are_those_of_an_all_to_all_and_count_alike():
    """Rank i sends i + j rows to rank j: uneven, and none from rank 0 to itself."""

    def on_rank(rank):
        everyone = current_world().everyone
        sizes = [rank + i for i in range(3)]
        x = torch.arange(2.0 * sum(sizes)).view(-1, 2) + 100 * rank
        with count_communication() as by_rows:
            found = everyone.all_to_all_rows(x, sizes, sizes)
        with count_communication() as by_pieces:
            shapes = [(size, 2) for size in sizes]
            wanted = torch.cat(everyone.all_to_all(x.split(sizes), shapes))
        return found, wanted, dict(by_rows.items()) == dict(by_pieces.items())

    for found, wanted, counted_alike in run_ranks(3, on_rank):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert counted_alike


def test_what_must_be_received():
    """The ring-optimal numbers of elements, for equal and for unequal pieces."""

    def on_rank(rank):
        everyone = current_world().everyone
        with count_communication() as volume:
            everyone.all_reduce(torch.zeros(8))
            everyone.all_gather(torch.zeros(3 + rank), 0, [3, 4, 5, 6])
            everyone.reduce_scatter(torch.zeros(18), 0, [3, 4, 5, 6])
            everyone.reduce_scatter(torch.zeros(8))
            everyone.all_to_all([torch.zeros(i) for i in range(4)], [(rank,)] * 4)
            everyone.broadcast(torch.zeros(5), 1)
        return {key.collective: value.received for key, value in volume.items()}

    for rank, received in enumerate(run_ranks(4, on_rank)):
        assert received == {
            "all_reduce": 12,
            "all_gather": 18 - (3 + rank),
            "reduce_scatter": 3 * (3 + rank) + 3 * 2,
            "all_to_all": 3 * rank,
            "broadcast": 0 if rank == 1 else 5,
        }


def test_counting_nests_and_totals():
    def on_rank(rank):
        everyone = current_world().everyone
        with count_communication() as outer:
            everyone.all_reduce(torch.zeros(2, dtype=torch.float64))
            with count_communication() as inner:
                everyone.named("tp").all_reduce(torch.zeros(3), phase="backward")
        everyone.barrier()
        assert counters().calls() == outer.calls() == 2 and inner.calls() == 1
        assert outer.elements("all_reduce") == 5 and outer.elements(axis="tp") == 3
        assert (
            outer.total(phase="backward").num_bytes == 12
            and outer.total(phase="forward").num_bytes == 16
        )
        assert outer.calls("all_gather") == 0
        counters().clear()
        assert counters().items() == []

    run_ranks(2, on_rank)


def test_a_group_of_one_copies():
    everyone = SoloWorld().everyone
    x = torch.arange(6.0).view(2, 3).t()
    results = [
        everyone.all_reduce(x),
        everyone.all_gather_cat(x, 1),
        everyone.reduce_scatter(x, 1),
        everyone.all_to_all([x], [x.shape])[0],
        everyone.broadcast(x, 0),
    ]
    for result in results:
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    everyone.barrier()
    everyone.all_reduce_async(x.contiguous()).wait()
    assert SoloWorld().broadcast_object({"a": (1, 2)}) == {
        "a": [1, 2]
    } and SoloWorld().all_gather_object("x") == ["x"]
    assert everyone.counters.items() == []


def test_groups_of_a_mesh():
    def on_rank(rank):
        mesh = RankMesh(Mesh((("dp", 2), ("tp", 3), ("one", 1))))
        return {
            "coords": (mesh.unit, mesh.rank, mesh.coords),
            "dp": mesh.axis("dp").communicator.ranks,
            "tp": (
                mesh.axis("tp").communicator.ranks,
                mesh.axis("tp").index,
                repr(mesh.axis("tp")),
            ),
            "one": (mesh.axis("one").size, mesh.axis("one").index),
            "both": mesh.group(["tp", "dp"]).ranks,
            "units": (mesh.units.communicator.ranks, mesh.units.name),
            "tp and units": (
                mesh.group("tp", across_units=True).ranks,
                mesh.group("tp", across_units=True).name,
            ),
            "pieces": (mesh.axis("tp").local_size(7), mesh.axis("tp").offset(7)),
        }

    assert run_ranks(12, on_rank)[10] == {
        "coords": (1, 4, {"dp": 1, "tp": 1, "one": 0}),
        "dp": (7, 10),
        "tp": ((9, 10, 11), 1, "tp=1/3"),
        "one": (1, 0),
        "both": (6, 7, 8, 9, 10, 11),
        "units": ((4, 10), "units"),
        "tp and units": ((3, 4, 5, 9, 10, 11), "tp+units"),
        "pieces": (2, 3),
    }


def test_a_world_that_does_not_divide_into_units():
    with pytest.raises(DistributedError) as caught:
        run_ranks(3, lambda rank: RankMesh(Mesh((("tp", 2),))))
    assert str(caught.value) == (
        "3 ranks cannot run a plan for 2\n"
        "  why:   the mesh is tp=2, and every unit of the plan needs all of it\n"
        "  try:   start a multiple of 2 ranks, e.g. torchrun --nproc_per_node=2"
    )


def test_a_group_of_ranks_that_do_not_exist():
    with pytest.raises(
        DistributedError,
        match=r"a group of ranks \[0, 2\] cannot be made\n.* the world has ranks 0 to 1",
    ):
        run_ranks(2, lambda rank: current_world().group([0, 2], "x"))


def test_pieces_that_are_every_second_number_are_gathered():
    x = torch.arange(6.0).view(3, 2)

    def run(rank):
        everyone = current_world().everyone
        return everyone.all_gather_cat(x[:, rank]), everyone.all_gather(
            x[: 2 + rank, rank], 0, [2, 3]
        )

    for whole, pieces in run_ranks(2, run):
        assert whole.tolist() == [0, 2, 4, 1, 3, 5]
        assert [piece.tolist() for piece in pieces] == [[0, 2], [1, 3, 5]]


def test_threads_refuse_what_nccl_does():
    def gather(x):
        return current_world().everyone.transport.all_gather(x, torch.empty(2, 3))

    with pytest.raises(AssertionError, match="NCCL sends contiguous tensors only"):
        run_ranks(2, lambda rank: gather(torch.zeros(3, 2)[:, 0]))
    with pytest.raises(AssertionError, match=r"NCCL sends no torch\.int16"):
        run_ranks(2, lambda rank: gather(torch.zeros(3, dtype=torch.int16)))


def test_without_a_gpu_the_default_backends_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {
        "is_initialized": True,
        "get_rank": 0,
        "get_world_size": 2,
        "get_backend_config": "cpu:gloo,cuda:nccl",
    }.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    assert DistributedWorld().device == torch.device("cpu")
