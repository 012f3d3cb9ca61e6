"""What a training step with split optimizer state costs, beside the same step made with PyTorch's
own parts.

    python benchmarks/split_optimizer_step.py [--pairs 20] [--only zero1-ddp]

The model, the batch and the rules are those of step_time.py: 2 ranks, policy dp, AdamW, float32,
gloo, one thread per rank.

    zero1-ddp        ZeRO-1, scattered and overlapped   against DDP, which splits nothing
    zero1-zero       the same                           against DDP with ZeroRedundancyOptimizer
    zero2-fsdp       ZeRO-2, overlapped                 against FSDP2 resharding after backward
    overlap-zero     ZeRO-1, gathered by their first use against ZeroRedundancyOptimizer

For each side also what a rank holds between steps (parameters, gradients, optimizer state, buffers
that stay), and the peak of live tensor bytes during a step, counted at every operator for both
sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from pairs import compare
from ranks import assert_same_training, gloo_rank, parser_of, start_ranks
from step_time import LEARNING_RATE, Step, make_batch, make_model, stepper
from storage_bytes import kept_by, peak_mib
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwright

Side = tuple[Step, Callable[[], list[Tensor]]]
"""A training step, and what the side keeps after it."""


def held_mib(kept: Iterable[Tensor]) -> float:
    """Each piece of memory once."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in kept]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local if x.numel()
    }
    return sum(storages.values()) / 2**20


def ours(options: dict[str, object], folder: str, batch: dict[str, Tensor]) -> Side:
    """The module compiled by shardwright, its optimizer state split."""
    config = shardwright.ComputeConfig(
        plan_ngpus=1, runtime_ngpus=dist.get_world_size(), grad_reduction="mean", **options
    )
    model = shardwright.parallelize(
        make_model(), batch, "dp", config, gen_savedir=folder, reuse="moo"
    )
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)

    def kept() -> list[Tensor]:
        buffers = (bucket._buffer for bucket in optimizer._reducer.buckets)
        return [*kept_by(model, optimizer), *(buffer for buffer in buffers if buffer is not None)]

    return stepper(model, optimizer, batch), kept


def ddp(batch: dict[str, Tensor]) -> Side:
    """DistributedDataParallel with the settings of step_time.py."""
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), lambda: list(kept_by(model, optimizer))


def zero_redundancy(batch: dict[str, Tensor]) -> Side:
    """DistributedDataParallel with ZeroRedundancyOptimizer, whose parameters are views of one
    buffer for each rank.
    """
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE
    )
    return stepper(model, optimizer, batch), lambda: list(kept_by(model, optimizer.optim))


def fsdp(batch: dict[str, Tensor]) -> Side:
    """FSDP2 that keeps gathered parameters between forward and backward, as ZeRO-2 does."""
    model = make_model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), lambda: list(kept_by(model, optimizer))


TABLE = {"bucket_cap_mb": 25, "contiguous_param_buffer": True}
ZERO_1 = {"distributed_optimizer": TABLE}
CASES: dict[str, tuple[dict[str, object], Callable[[dict[str, Tensor]], Side]]] = {
    "zero1-ddp": (ZERO_1, ddp),
    "zero1-zero": (ZERO_1, zero_redundancy),
    "zero2-fsdp": ({**ZERO_1, "use_zero": 2}, fsdp),
    "overlap-zero": (
        {"distributed_optimizer": {**TABLE, "overlap_param_sync": True}},
        zero_redundancy,
    ),
}


def run_rank(rank: int, case: str, folder: str, num_pairs: int) -> None:
    """One comparison on the calling rank; rank 0 prints."""
    options, peer = CASES[case]
    batch = make_batch(seed=rank)
    (our_step, our_tensors), (their_step, their_tensors) = ours(options, folder, batch), peer(batch)
    first, second = [(our_step(), their_step()) for _ in range(3)][-1]
    assert_same_training(first, second)
    ratio = compare(our_step, their_step, num_pairs=num_pairs, barrier=dist.barrier)
    held = held_mib(our_tensors()), held_mib(their_tensors())
    peaks = peak_mib(our_step, our_tensors()), peak_mib(their_step, their_tensors())
    if rank == 0:
        print(f"{case:13} {ratio}", flush=True)
        for title, (mine, theirs) in (("holds", held), ("peak", peaks)):
            print(
                f"  {title:11} {mine / theirs:.3f}  ({mine:.1f} MiB against {theirs:.1f} MiB)",
                flush=True,
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=list(CASES))
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank() as rank:
            return run_rank(rank, *arguments.rank_in, arguments.pairs)
    print("case          ours / theirs [95 % interval]", flush=True)
    for case in CASES:
        if arguments.only in (None, case):
            start_ranks(__file__, 2, [case], pairs=arguments.pairs)


if __name__ == "__main__":
    main()
