"""What a training step with split optimizer state costs, beside the same step made with PyTorch's own parts.

    python benchmarks/optimizer_step.py [--pairs 20] [--only zero1-ddp]

The model, the batch and the rules are those of step_time.py: 2 ranks, policy dp, AdamW, float32, gloo, one thread per rank.

    zero1-ddp        ZeRO-1, scattered and overlapped   against DistributedDataParallel, which splits nothing
    zero1-zero       the same                           against DistributedDataParallel with ZeroRedundancyOptimizer
    zero2-fsdp       ZeRO-2, overlapped                 against FSDP2 without resharding after forward
    overlap-zero     ZeRO-1, parameters gathered until their first use    against ZeroRedundancyOptimizer

For each side also the bytes that a rank holds between steps of parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from pairs import compare
from step_time import LEARNING_RATE, Step, make_batch, make_model, stepper
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwright

Side = tuple[Step, Callable[[], float]]
"""A training step, and the MiB that the rank holds after it."""


def held_mib(module: nn.Module, optimizer: torch.optim.Optimizer, buffers: Iterable[Tensor | None] = ()) -> float:
    """Of parameters, gradients and optimizer state, each piece of memory once. ``buffers``: what else the optimizer keeps."""
    owners = [*module.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    state = (x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
    kept = [x for x in (*buffers, *(p.grad for p in owners)) if x is not None]
    return storage_bytes([*owners, *kept, *state]) / 2**20


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local if x.numel()}
    return sum(storages.values())


def ours(options: dict[str, object], folder: str, batch: dict[str, Tensor]) -> Side:
    """The module compiled by shardwright, its optimizer state split."""
    config = shardwright.ComputeConfig(plan_ngpus=1, runtime_ngpus=dist.get_world_size(), grad_reduction="mean", **options)
    model = shardwright.parallelize(make_model(), batch, "dp", config, gen_savedir=folder, reuse="moo")
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)
    buckets = optimizer._reducer.buckets
    return stepper(model, optimizer, batch), lambda: held_mib(model, optimizer, [bucket._buffer for bucket in buckets])


def ddp(batch: dict[str, Tensor]) -> Side:
    """DistributedDataParallel with the settings of step_time.py."""
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), lambda: held_mib(model, optimizer)


def zero_redundancy(batch: dict[str, Tensor]) -> Side:
    """DistributedDataParallel with ZeroRedundancyOptimizer, whose parameters are views of one buffer for each rank."""
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), lambda: held_mib(model, optimizer.optim)


def fsdp(batch: dict[str, Tensor]) -> Side:
    """FSDP2 that keeps gathered parameters between forward and backward, as ZeRO-2 does."""
    model = make_model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), lambda: held_mib(model, optimizer)


TABLE = {"bucket_cap_mb": 25, "contiguous_param_buffer": True}
ZERO_1 = {"distributed_optimizer": TABLE}
CASES: dict[str, tuple[dict[str, object], Callable[[dict[str, Tensor]], Side]]] = {
    "zero1-ddp": (ZERO_1, ddp),
    "zero1-zero": (ZERO_1, zero_redundancy),
    "zero2-fsdp": ({**ZERO_1, "use_zero": 2}, fsdp),
    "overlap-zero": ({"distributed_optimizer": {**TABLE, "overlap_param_sync": True}}, zero_redundancy),
}


def run_rank(case: str, folder: str, num_pairs: int) -> None:
    """One comparison on the calling rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options, peer = CASES[case]
    batch = make_batch(seed=dist.get_rank())
    (our_step, our_mib), (their_step, their_mib) = ours(options, folder, batch), peer(batch)
    first, second = [(our_step(), their_step()) for _ in range(3)][-1]
    assert abs(first - second) < 1e-4 * abs(second), f"the two sides train different things: loss {first} and {second}"
    ratio = compare(our_step, their_step, num_pairs=num_pairs, barrier=dist.barrier)
    if dist.get_rank() == 0:
        print(f"{case:13} {ratio}  holding {our_mib():.0f} against {their_mib():.0f} MiB", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--rank-in", nargs=2, metavar=("CASE", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_in:
        return run_rank(*arguments.rank_in, arguments.pairs)
    print("case          ours / theirs [95 % interval]", flush=True)
    for case in CASES:
        if arguments.only in (None, case):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            with tempfile.TemporaryDirectory() as folder:
                command = [*torchrun, __file__, "--rank-in", case, folder, "--pairs", str(arguments.pairs)]
                subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})


if __name__ == "__main__":
    main()
