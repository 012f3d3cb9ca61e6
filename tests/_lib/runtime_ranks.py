"""What the spawned processes of tests/runtime run: see ``spawn.run_processes``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from placements import Sharded, convert, encode, transposed

from shardwright.runtime import adapters
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.world import count_communication, current_world


def collectives() -> dict[str, Any]:
    """Every collective of a communicator once, on 4 ranks as dp=2 x tp=2, with uneven and empty
    pieces.
    """
    world = current_world()
    mesh = RankMesh(Mesh((("dp", 2), ("tp", 2))))
    everyone, tp = world.everyone, mesh.axis("tp").communicator
    x = torch.arange(6.0).view(2, 3) + 10 * world.rank
    results: dict[str, Any] = {}
    with count_communication() as volume:
        for op in ("sum", "avg", "max", "min"):
            results[op] = everyone.all_reduce(x, op)
        async_sum = x.clone()
        async_average = x.clone()
        works = tp.all_reduce_async(async_sum), everyone.all_reduce_async(async_average, "avg")
        for work in works:
            work.wait()
        results["async"], results["async avg"] = async_sum, async_average
        results["gather"] = everyone.all_gather_cat(x, 0)
        results["gather_dim_1"] = everyone.all_gather_cat(x, 1)
        sizes = [2, 0, 1, 3]
        results["gather_uneven"] = everyone.all_gather_cat(
            x[:, :1].expand(2, sizes[world.rank]), 1, sizes
        )
        whole = torch.arange(24.0).view(4, 6) * (world.rank + 1)
        results["reduce_scatter"] = everyone.reduce_scatter(whole)
        results["reduce_scatter_uneven"] = everyone.reduce_scatter(whole, 1, sizes)
        flat = torch.arange(6.0) * (world.rank + 1)
        even = flat.clone()
        works = everyone.reduce_scatter_async_(flat, sizes), tp.reduce_scatter_async_(even, [3, 3])
        for work in reversed(works):
            work.wait()
        results["reduce_scatter_async"] = torch.split(flat, sizes)[world.rank].clone()
        results["reduce_scatter_async_even"] = torch.split(even, 3)[tp.index].clone()
        for name, chunks, group in (("uneven", sizes, everyone), ("even", [3, 3], tp)):
            buffer = torch.full((6,), -1.0)
            torch.split(buffer, chunks)[group.index].fill_(world.rank)
            group.all_gather_async_(buffer, chunks).wait()
            results[f"all_gather_async_{name}"] = buffer
        pieces = [torch.full((i + world.rank, 2), 10.0 * world.rank + i) for i in range(4)]
        results["all_to_all"] = everyone.all_to_all(pieces, [(world.rank + i, 2) for i in range(4)])
        results["broadcast"] = everyone.broadcast(x, 2)
        if world.rank == 0:
            everyone.send(x, 3)
        if world.rank == 3:
            results["received"] = everyone.receive((2, 3), x.dtype, 0, device=x.device)
        results["bfloat16"] = everyone.all_reduce(x.bfloat16())
        results["bool"] = everyone.all_gather_cat(torch.tensor([world.rank % 2 == 0]))
        results["object"] = world.broadcast_object({"text": "é", "rank": world.rank}, 1)
        results["objects"] = world.all_gather_object(["r"] * world.rank)
        world.barrier()
    results["volume"] = str(volume)
    results["units"] = (mesh.num_units, mesh.group(("tp",), across_units=True).ranks, repr(mesh))
    return results


def all_adapters(num_ranks: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and input gradient of every adapter of the table, uneven and segmented, from fixed
    values and gradients.
    """
    axis = RankMesh(Mesh((("tp", num_ranks),))).axis("tp")
    sharded = [Sharded(0, Cut((4,))), Sharded(1, Cut((5, 4))), Sharded(1, Cut((9,)))]
    results = {}
    generator = torch.Generator().manual_seed(0)
    for source, target in itertools.permutations([*sharded, "R", "P", "G"], 2):
        value, gradient = (
            torch.randn(4, 9, dtype=torch.float64, generator=generator) for _ in range(2)
        )
        x = encode(value, source, num_ranks, generator)[axis.index].clone().requires_grad_()
        y = convert(x, axis, source, target)
        (grad,) = torch.autograd.grad(
            y, x, encode(gradient, transposed(target), num_ranks, generator)[axis.index]
        )
        results[f"{source} -> {target}"] = y.detach(), grad
    return results


def compiled_adapters() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradients of a function of all adapters on 2 ranks, eager and compiled into one
    graph.
    """
    axis = RankMesh(Mesh((("tp", 2),))).axis("tp")

    def loss_of(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = (adapters.grad_all_reduce(x, axis) @ up).relu()
        y = adapters.all_reduce(hidden @ down, axis)  # [6, 8] R
        columns = adapters.narrow(y, axis, 1)
        whole = adapters.all_gather(columns * 2, axis, 1, backward="reduce_scatter")
        rows = adapters.reduce_scatter(whole / 2, axis, 0)
        back = adapters.all_to_all(rows, axis, 0, Cut((6,)), 1, Cut((8,)))
        kept = adapters.keep_one(
            adapters.grad_keep_one(adapters.grad_all_reduce(y, axis), axis), axis
        )
        return (back**2).sum() + kept.sin().sum() + adapters.pad(columns, axis, 1).cos().sum()

    generator = torch.Generator().manual_seed(axis.index)
    values = [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((6, 8), (8, 16), (16, 8))
    ]
    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        operands = [value.clone().requires_grad_() for value in values]
        loss = function(*operands)
        results.append([loss.detach(), *torch.autograd.grad(loss, operands)])
    return results[0], results[1]
