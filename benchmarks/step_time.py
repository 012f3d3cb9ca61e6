"""What a training step of generated code costs, beside the same step made with PyTorch's own parts.

    python benchmarks/step_time.py [--pairs 20] [--only tp] [--compile 1]

Four comparisons on a 4-layer GPT in float32, AdamW, CPU with one thread per rank, gloo:

    eager   generated code of one rank      against the module itself
    dp      policy dp, 2 ranks              against DistributedDataParallel
    tp      policy tp, 2 ranks              against DTensor's parallelize_module with loss_parallel
    checks  policy tp, 2 ranks that compare in every step whether they agree
                                            against ranks that compare in the first step only;
                                            with the median time of each kind of comparison

Both sides live in the same processes and take turns step by step, so that load from elsewhere meets
both. One rank is timed in CPU seconds, several by the wall clock. A step is zero_grad, forward,
backward, gradient synchronisation, optimizer step. The peers' settings are the best that were found
for this case. With ``--compile 1`` both models go through ``torch.compile``, ours with
``fullgraph=True``.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import GPT
from pairs import compare
from ranks import assert_same_training, gloo_rank, parser_of, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardwright
from shardwright.runtime.module import parallel_module
from shardwright.runtime.training.agreement import TrainingAgreement
from shardwright.runtime.training.copies import Copies

BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 8, 128, 8192
NUM_RANKS = {"eager": 1, "dp": 2, "tp": 2, "checks": 2}
LEARNING_RATE = 1e-3

Step = Callable[[], float]
"""One training step; returns the loss."""

COMPARISONS: Mapping[str, tuple[Any, str]] = {
    "steps and options": (TrainingAgreement, "_compare_standings"),
    "arguments": (parallel_module, "compare_inputs"),
    "parameters": (Copies, "find_on_all_ranks"),
}
"""What ranks compare, and the function that does it."""

Wrap = Callable[[nn.Module], nn.Module]
"""What is done to a model before it is called."""


def as_it_is(model: nn.Module) -> nn.Module:
    """The model."""
    return model


def make_model() -> GPT:
    """The 4-layer GPT, the same on every rank."""
    torch.manual_seed(0)
    return GPT(
        num_layers=4, hidden_size=384, num_heads=6, vocab_size=VOCAB_SIZE, max_length=SEQ_LENGTH
    )


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def stepper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    around_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Step:
    """A function that trains one step."""

    def step() -> float:
        optimizer.zero_grad()
        with around_backward():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(
    policy: str, folder: str, batch: dict[str, torch.Tensor], wrap: Wrap, *, every: int = 100
) -> Step:
    """The module compiled by shardwright, whose ranks compare with every so many steps whether they
    agree.
    """
    world_size = dist.get_world_size()
    config = shardwright.ComputeConfig(
        plan_ngpus=1 if policy == "dp" else world_size,
        runtime_ngpus=world_size,
        grad_reduction="mean",
        check_ranks_every=every,
        use_async_reducer=policy == "dp" and world_size > 1,
    )
    model = shardwright.parallelize(
        make_model(), batch, policy, config, gen_savedir=folder, reuse="moo"
    )
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)
    return stepper(wrap(model), optimizer, batch)


def eager(batch: dict[str, torch.Tensor], wrap: Wrap) -> Step:
    """The module itself."""
    model = make_model()
    return stepper(wrap(model), torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), batch)


def ddp(batch: dict[str, torch.Tensor], wrap: Wrap) -> Step:
    """DistributedDataParallel; a static graph and gradients that are views of the buckets are its
    fastest settings. It is compiled without the static graph, as torch's tutorial does it.
    """
    model = DistributedDataParallel(
        make_model(), gradient_as_bucket_view=True, static_graph=wrap is as_it_is
    )
    return stepper(wrap(model), torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), batch)


def dtensor_tp(batch: dict[str, torch.Tensor], wrap: Wrap) -> Step:
    """Megatron's plan by hand: column and row parallel linears, vocabulary-parallel embedding and
    loss.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    block = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    plan = {
        f"blocks.{index}.{name}": style
        for index in range(len(model.blocks))
        for name, style in block.items()
    }
    plan["token"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return stepper(wrap(model), optimizer, batch, around_backward=loss_parallel)


@contextlib.contextmanager
def timed_comparisons() -> Iterator[Mapping[str, list[float]]]:
    """Inside the ``with`` block, the seconds that each comparison of ranks takes, by its kind."""
    seconds: dict[str, list[float]] = {kind: [] for kind in COMPARISONS}
    originals = {kind: getattr(owner, name) for kind, (owner, name) in COMPARISONS.items()}

    def timed(kind: str, *args: Any) -> Any:
        begin = time.perf_counter()
        result = originals[kind](*args)
        seconds[kind].append(time.perf_counter() - begin)
        return result

    def method(kind: str) -> Callable[..., Any]:
        return lambda *args: timed(kind, *args)

    for kind, (owner, name) in COMPARISONS.items():
        setattr(owner, name, method(kind))
    try:
        yield seconds
    finally:
        for kind, (owner, name) in COMPARISONS.items():
            setattr(owner, name, originals[kind])


def run_rank(rank: int, case: str, folder: str, num_pairs: int, *, compiled: bool) -> None:
    """One comparison on the calling rank; rank 0 prints."""
    batch = make_batch(seed=rank if case == "dp" else 0)
    our_wrap: Wrap = partial(torch.compile, fullgraph=True) if compiled else as_it_is
    their_wrap: Wrap = torch.compile if compiled else as_it_is
    if case == "checks":
        ours_step = ours("tp", f"{folder}/always", batch, our_wrap, every=1)
        their_step = ours("tp", f"{folder}/once", batch, our_wrap, every=0)
    else:
        ours_step = ours("tp" if case == "tp" else "dp", folder, batch, our_wrap)
        their_step = {"eager": eager, "dp": ddp, "tp": dtensor_tp}[case](batch, their_wrap)
    first, second = ours_step(), their_step()
    assert_same_training(first, second)
    clock = time.process_time if case == "eager" else time.perf_counter
    with timed_comparisons() as seconds:
        ratio = compare(
            ours_step, their_step, num_pairs=num_pairs, barrier=dist.barrier, clock=clock
        )
    if rank == 0:
        print(f"{case:6} {ratio}", flush=True)
    if rank == 0 and case == "checks":
        for kind, found in seconds.items():
            print(
                f"       {kind}: {1e3 * statistics.median(found):.2f} ms, the median of "
                f"{len(found)}",
                flush=True,
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=list(NUM_RANKS))
    parser.add_argument("--compile", type=int, default=0, help="1: compile both sides")
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank() as rank:
            return run_rank(
                rank, *arguments.rank_in, arguments.pairs, compiled=bool(arguments.compile)
            )
    print("case   ours / theirs [95 % interval]", flush=True)
    for case, num_ranks in NUM_RANKS.items():
        if arguments.only in (None, case):
            start_ranks(
                __file__, num_ranks, [case], pairs=arguments.pairs, compile=arguments.compile
            )


if __name__ == "__main__":
    main()
