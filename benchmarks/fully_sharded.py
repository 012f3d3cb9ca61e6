"""What a training step costs when parameters are stored in pieces: ``use_zero=3`` beside PyTorch's
FSDP2.

    python benchmarks/fully_sharded.py [--pairs 20] [--layers 4]

A GPT in float32, AdamW, two ranks on the CPU with one thread each, gloo. The peer is
``fully_shard`` on every block and on the whole, as its documentation has it. Both sides live in the
same processes and take turns step by step, so that load from elsewhere meets both. A step is
zero_grad, forward, backward, optimizer step; each rank has a batch of its own.

Memory is the peak of live tensor bytes during a step, counted at every operator for both sides
alike: parameters, gradients, optimizer state, activations and buffers of collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import GPT
from pairs import compare
from ranks import assert_same_training, gloo_rank, parser_of, start_ranks
from step_time import LEARNING_RATE, SEQ_LENGTH, VOCAB_SIZE, Step, make_batch, stepper
from storage_bytes import kept_by, peak_mib
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwright

Side = tuple[Step, nn.Module, torch.optim.Optimizer]


def make_model(num_layers: int) -> GPT:
    """A model with one set of values on all ranks."""
    torch.manual_seed(0)
    return GPT(
        num_layers=num_layers,
        hidden_size=384,
        num_heads=6,
        vocab_size=VOCAB_SIZE,
        max_length=SEQ_LENGTH,
    )


def ours(num_layers: int, folder: str, batch: dict[str, Tensor]) -> Side:
    """Compiled with ``use_zero=3``."""
    config = shardwright.ComputeConfig(
        plan_ngpus=1,
        runtime_ngpus=dist.get_world_size(),
        use_zero=3,
        grad_reduction="mean",
        use_async_reducer=True,
    )
    model = shardwright.parallelize(
        make_model(num_layers), batch, "dp", config, gen_savedir=folder, reuse="moo"
    )
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), model, optimizer


def fsdp2(num_layers: int, batch: dict[str, Tensor]) -> Side:
    """Each block is gathered at once, the next one ahead of time; so is what lies around them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(num_layers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(model, optimizer, batch), model, optimizer


def run_rank(folder: str, num_layers: int, num_pairs: int) -> None:
    """The comparison on the calling rank; rank 0 prints."""
    batch = make_batch(seed=dist.get_rank())
    sides = ours(num_layers, folder, batch), fsdp2(num_layers, batch)
    first, second = (side[0]() for side in sides)
    assert_same_training(first, second)
    ratio = compare(sides[0][0], sides[1][0], num_pairs=num_pairs, barrier=dist.barrier)
    peaks = [peak_mib(step, kept_by(model, optimizer)) for step, model, optimizer in sides]
    if dist.get_rank() == 0:
        print(f"time    {ratio}", flush=True)
        print(
            f"memory  {peaks[0] / peaks[1]:.3f}  ({peaks[0]:.1f} MiB against {peaks[1]:.1f} MiB)",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__, rank_in=("DIR",))
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank():
            return run_rank(*arguments.rank_in, arguments.layers, arguments.pairs)
    print("        ours / theirs [95 % interval]", flush=True)
    start_ranks(__file__, 2, pairs=arguments.pairs, layers=arguments.layers)


if __name__ == "__main__":
    main()
