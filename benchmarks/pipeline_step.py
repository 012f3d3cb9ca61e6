"""What a pipelined training step costs, beside ``torch.distributed.pipelining`` with the same
schedule and the same stages.

    python benchmarks/pipeline_step.py [--pairs 20] [--ranks 2] [--only 1f1b]

An 8-layer GPT in float32, 8 microbatches, AdamW, CPU with one thread per rank, gloo. Stages begin
at the same blocks on both sides; the peer's stage modules are written by hand. Both sides live in
the same processes and take turns step by step. A step is zero_grad, all forwards and backwards,
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT
from pairs import compare
from ranks import gloo_rank, parser_of, start_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import shardwright

NUM_LAYERS, BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE, NUM_MICROBATCHES = 8, 4, 128, 2048, 8
LEARNING_RATE = 1e-3

PEERS: dict[str, tuple[type, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "1f1b_interleaved": (ScheduleInterleaved1F1B, 2),
    "zb_v": (ScheduleZBVZeroBubble, 2),
}
"""Schedule to the peer's class, and the stages of each rank."""


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(
        num_layers=NUM_LAYERS,
        hidden_size=256,
        num_heads=4,
        vocab_size=VOCAB_SIZE,
        max_length=SEQ_LENGTH,
    )


def make_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels of a whole step, [microbatches * batch, seq]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        VOCAB_SIZE, (NUM_MICROBATCHES * BATCH_SIZE, SEQ_LENGTH + 1), generator=generator
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class PeerStage(nn.Module):
    """The layers ``start:stop`` of the GPT, with the embedding in the first stage and the head in
    the last.
    """

    def __init__(self, model: GPT, start: int, stop: int) -> None:
        super().__init__()
        self.token, self.position = (model.token, model.position) if start == 0 else (None, None)
        self.blocks = model.blocks[start:stop]
        self.norm, self.head = (model.norm, model.head) if stop == NUM_LAYERS else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def ours(schedule: str, folder: str) -> Callable[[], float]:
    """The module compiled by shardwright."""
    num_ranks, chunks = dist.get_world_size(), PEERS[schedule][1]
    per_stage = NUM_LAYERS // (num_ranks * chunks)
    config = shardwright.ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        use_end2end=True,
        pas_config={
            "schedule": schedule,
            "chunks": chunks,
            "num_microbatches": NUM_MICROBATCHES,
            "stage_starts": [f"blocks.{i}" for i in range(per_stage, NUM_LAYERS, per_stage)],
        },
    )
    tokens, labels = make_batch()
    parts = zip(tokens.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    samples = [{"tokens": t, "labels": y} for t, y in parts]
    model = shardwright.parallelize(
        make_model(), samples[0], "pp", config, gen_savedir=folder, reuse="moo"
    )
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)

    def step() -> float:
        losses = model.train_step(samples)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses)

    return step


def peers(schedule: str) -> Callable[[], float]:
    """torch.distributed.pipelining with hand-written stages."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    kind, chunks = PEERS[schedule]
    num_stages = num_ranks * chunks
    per_stage = NUM_LAYERS // num_stages
    model = make_model()
    own = [rank]
    if chunks > 1:
        own.append(num_stages - 1 - rank if schedule == "zb_v" else rank + num_ranks)
    modules = [PeerStage(model, i * per_stage, (i + 1) * per_stage) for i in own]
    stages = [
        PipelineStage(m, i, num_stages, torch.device("cpu"))
        for m, i in zip(modules, own, strict=True)
    ]
    runner = kind(
        stages[0] if chunks == 1 else stages, NUM_MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=LEARNING_RATE)
    tokens, labels = make_batch()
    first, last = 0 in own, num_stages - 1 in own

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        runner.step(
            *([tokens] if first else []), **({"target": labels, "losses": losses} if last else {})
        )
        optimizer.step()
        return sum(loss.item() for loss in losses) / max(1, len(losses))

    return step


def run_rank(schedule: str, folder: str, num_pairs: int) -> None:
    """One comparison on the calling rank; rank 0 prints."""
    our_step, their_step = ours(schedule, folder), peers(schedule)
    first, second = our_step(), their_step()
    last = dist.get_rank() == (0 if schedule == "zb_v" else dist.get_world_size() - 1)
    assert not last or abs(first - second) < 1e-4 * abs(second), (
        f"the two sides train different things: {first}, {second}"
    )
    ratio = compare(our_step, their_step, num_pairs=num_pairs, barrier=dist.barrier)
    if dist.get_rank() == 0:
        print(f"{schedule:18} {dist.get_world_size()} ranks  {ratio}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4))
    parser.add_argument("--only", choices=list(PEERS))
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank():
            return run_rank(*arguments.rank_in, arguments.pairs)
    print("schedule                    ours / theirs [95 % interval]", flush=True)
    for num_ranks in (2, 4):
        for schedule in PEERS:
            if arguments.only in (None, schedule) and arguments.ranks in (None, num_ranks):
                start_ranks(__file__, num_ranks, [schedule], pairs=arguments.pairs)


if __name__ == "__main__":
    main()
