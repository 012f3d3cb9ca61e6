"""What a step on one long sequence costs: policy ``cp`` beside torch's own context parallel.

    python benchmarks/context_steps.py [--pairs 10] [--ranks 2] [--seq 2048]

Llama layers in float32, AdamW, on the CPU with one thread for each rank, gloo. A step is zero_grad,
forward, backward, gradients added over the ranks, optimizer step.

The peer is ``torch.distributed.tensor.experimental``: its ring attention, with head-tail balance.
As shipped it knows no kernel of CPUs, so its own loops (``_templated_ring_attention`` and its
backward) are given that kernel here, without the dispatch of DTensor around them. ``ring``: keys
and values go round (``alltoall``); ``gather``: they are gathered (``allgather``). Seconds are those
of the processor, added over all ranks, so that they say what a step costs on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import compare
from ranks import gloo_rank, parser_of, start_ranks
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright

Step = Callable[[], Tensor]
ATEN: Any = torch.ops.aten
VOCAB = 256


def llama() -> LlamaForCausalLM:
    """A small model, with the same values on all ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2**17,
            use_cache=False,
        )
    )


def ours(tokens: Tensor, mode: str, folder: str) -> Step:
    """The model as it is, by policy ``cp``."""
    num_ranks = dist.get_world_size()
    config = shardwright.ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, pas_config={"cp_mode": mode}
    )
    batch = {"input_ids": tokens, "labels": tokens}
    model = shardwright.parallelize(
        llama(), batch, "cp", config, gen_savedir=f"{folder}/{mode}", reuse="moo"
    )
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class RingAttention(torch.autograd.Function):
    """torch's loops with its kernel of CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, lse, *_ = peer._templated_ring_attention(
            dist.group.WORLD,
            2,
            ATEN._scaled_dot_product_flash_attention_for_cpu,
            query=query,
            key=key,
            value=value,
            is_causal=True,
            dropout_p=0.0,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = peer._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return (*grads[:3], None)


def theirs(tokens: Tensor, mode: str) -> Step:
    """Each rank has an early and a late piece of the sequence."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(tokens.shape[1]).chunk(2 * num_ranks)
    own = torch.cat([pieces[rank], pieces[2 * num_ranks - 1 - rank]])
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:][:, own].flatten()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peer.set_rotate_method({"ring": "alltoall", "gather": "allgather"}[mode])

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
        return RingAttention.apply(query, key, value, options["scale"])  # type: ignore[no-any-return]

    # A mask of four dims is passed on as it is: none is made.
    batch = {
        "input_ids": tokens[:, own],
        "position_ids": own.unsqueeze(0),
        "attention_mask": torch.zeros(1, 1, 1, 1),
    }

    def step() -> Tensor:
        optimizer.zero_grad()
        with patch.object(F, "scaled_dot_product_attention", attention):
            logits = model(**batch).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels, reduction="sum") / (tokens.shape[1] - 1)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(summed.view_as(grad))
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss

    return step


def seconds_of_all() -> float:
    """The seconds that the processors gave all ranks so far."""
    spent = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


def run_rank(mode: str, folder: str, length: int, num_pairs: int) -> None:
    """The comparison on the calling rank; rank 0 prints."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (1, length), generator=generator)
    sides = ours(tokens, mode, folder), theirs(tokens, mode)
    losses = [[float(step()) for _ in range(3)] for step in sides]
    for first, second in zip(*losses, strict=True):
        assert abs(first - second) < 1e-4, losses
    ratio = compare(*sides, num_pairs=num_pairs, num_warmup=1, clock=seconds_of_all)
    if dist.get_rank() == 0:
        print(f"{mode:8}{ratio}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, pairs=10, rank_in=("MODE", "DIR"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    given = parser.parse_args()
    if given.rank_in:
        with gloo_rank():
            return run_rank(*given.rank_in, given.seq, given.pairs)
    print("        ours / theirs [95 % interval]", flush=True)
    for mode in ("ring", "gather"):
        start_ranks(__file__, given.ranks, (mode,), pairs=given.pairs, seq=given.seq)


if __name__ == "__main__":
    main()
