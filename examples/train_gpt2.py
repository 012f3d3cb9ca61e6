r"""Train an unmodified Hugging Face model on several ranks; compare with one device if asked to.

    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy tp
    # two copies of two ranks each
    torchrun --nproc-per-node 4 examples/train_gpt2.py --policy tp --plan-ngpus 2
    # two copies of one rank each
    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy dp
    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy data --model llama --check --float64

The ranks use their GPUs if each has one, else the CPU. Copies of the model (units) see different
parts of every batch and average their gradients, so that every setting follows the same path as one
device on the whole batch.

Rank 0 compiles when the run starts. It need not: compiled before, on any machine, the files are
found and loaded.

    cd examples
    shardwright compile train_gpt2:gpt2 --policy tp --plan-ngpus 2 --set outputs=loss \
        --set grad_reduction=mean
    torchrun --nproc-per-node 2 train_gpt2.py --policy tp --reuse match
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from byte_text import VOCAB_SIZE, batches
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.frontend.verification.precision import float64_casts
from shardwright.runtime.pieces import local_piece

BATCH_SIZE, SEQ_LENGTH = 8, 64
ADAMW = {"lr": 1e-3, "eps": 1e-4}
"""Some gradients are zero but for rounding (those of attention key biases), which a smaller eps
would blow up.
"""


def make_model(name: str) -> torch.nn.Module:
    """A small model of random weights, the same on every rank. Dropout is off: its masks would
    differ from one device's.
    """
    torch.manual_seed(0)
    if name == "llama":
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
        }
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                num_key_value_heads=4,
                max_position_embeddings=SEQ_LENGTH,
                **sizes,
            )
        )
    quiet = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=SEQ_LENGTH, n_embd=128, n_layer=4, n_head=4, **quiet
        )
    )


def dummy_args(batch_size: int) -> dict[str, Any]:
    """Arguments of ``forward`` of the shapes to compile for."""
    tokens = torch.zeros(batch_size, SEQ_LENGTH, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    """What ``shardwright compile train_gpt2:gpt2`` compiles."""
    return make_model("gpt2"), dummy_args(BATCH_SIZE)


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    """What ``shardwright compile train_gpt2:llama`` compiles."""
    return make_model("llama"), dummy_args(BATCH_SIZE)


def train_alone(model: torch.nn.Module, num_steps: int) -> list[float]:
    """What one device does with the whole batch: the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for tokens in batches(num_steps, BATCH_SIZE, SEQ_LENGTH):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_parallel(model: shardwright.ParallelModule, num_steps: int) -> list[float]:
    """Train on all ranks, where each unit does its share of the batch. Returns the mean of the
    units' losses per step.
    """
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, **ADAMW)
    losses = []
    for tokens in batches(
        num_steps, BATCH_SIZE, SEQ_LENGTH, part=model.ranks.unit, num_parts=model.ranks.num_units
    ):
        optimizer.zero_grad()
        loss = model(
            input_ids=tokens.to(model.device), labels=tokens.to(model.device), use_cache=False
        ).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        # Equal on the ranks of a unit, so the mean over ranks is the mean over units.
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {len(losses):3}  loss {losses[-1]:.6f}", flush=True)
    return losses


def check(model: shardwright.ParallelModule, losses: list[float], alone: torch.nn.Module) -> None:
    """Print how far losses and final weights are from those of one device: rank 0 trains it, each
    rank compares its pieces.
    """
    expected = train_alone(alone, len(losses)) if dist.get_rank() == 0 else losses
    layouts = {declaration.name: declaration.layout for declaration in model.declarations}
    weights = dict(model.named_parameters())
    farthest = torch.zeros((), dtype=torch.float64, device=model.device)
    for name, whole in alone.named_parameters():
        whole = whole.detach().to(model.device)
        dist.broadcast(whole, src=0)
        piece = local_piece(whole, layouts[name], model.mesh, model.ranks.coords)
        if piece.numel():
            farthest = torch.maximum(
                farthest, (weights[name].detach() - piece).abs().max().double()
            )
    dist.all_reduce(farthest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        of_losses = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
        print(
            f"largest difference to one device: {of_losses:.1e} of a loss, "
            f"{farthest.item():.1e} of a final weight"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--policy", default="tp", help="dp, tp or data")
    parser.add_argument(
        "--plan-ngpus",
        type=int,
        help="ranks that share one copy of the model (default: all; for dp 1)",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--check",
        action="store_true",
        help="train on one device too and print the largest differences",
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compute in float64: the check then shows algebra, not rounding",
    )
    parser.add_argument(
        "--reuse",
        default="moo",
        help="files of an earlier compile: moo (if they match), match, override",
    )
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    world_size = dist.get_world_size()
    plan_ngpus = arguments.plan_ngpus or (1 if arguments.policy == "dp" else world_size)
    config = shardwright.ComputeConfig(
        plan_ngpus=plan_ngpus, runtime_ngpus=world_size, grad_reduction="mean", outputs="loss"
    )
    # The models cast to float32 inside: let that mean float64.
    with float64_casts() if arguments.float64 else nullcontext():
        alone = make_model(arguments.model)
        alone = alone.double() if arguments.float64 else alone
        example = dummy_args(BATCH_SIZE // config.num_units)
        model = shardwright.parallelize(
            alone, example, arguments.policy, config, reuse=arguments.reuse
        )
        losses = train_parallel(model.to(device), arguments.steps)
        if arguments.check:
            check(model, losses, alone)
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
