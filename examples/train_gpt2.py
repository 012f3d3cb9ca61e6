"""Train an unmodified Hugging Face model on several ranks, and compare with one device if asked to.

    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy tp
    torchrun --nproc-per-node 4 examples/train_gpt2.py --policy tp --plan-ngpus 2     two copies of two ranks each
    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy dp --plan-ngpus 1     two copies
    torchrun --nproc-per-node 2 examples/train_gpt2.py --policy data --model llama --check

The ranks use their GPUs if each has one, else the CPU. Copies of the model (units) see different parts of every batch and
average their gradients, so that every setting follows the same path as one device on the whole batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from byte_text import VOCAB_SIZE, batches
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright

BATCH_SIZE, SEQ_LENGTH, LEARNING_RATE = 8, 64, 1e-3


def make_model(name: str) -> torch.nn.Module:
    """A small model of random weights, the same on every rank. Dropout is off: its masks would differ from one device's."""
    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCAB_SIZE, num_key_value_heads=4, max_position_embeddings=SEQ_LENGTH, **sizes)
        )
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_positions=SEQ_LENGTH, n_embd=128, n_layer=4, n_head=4, **quiet))


def train_alone(model: torch.nn.Module, num_steps: int) -> list[float]:
    """What one device does with the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for tokens in batches(num_steps, BATCH_SIZE, SEQ_LENGTH):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_parallel(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Compile on rank 0, load this rank's part, train; returns the mean of the units' losses per step."""
    world_size, plan_ngpus = dist.get_world_size(), arguments.plan_ngpus or dist.get_world_size()
    config = shardwright.ComputeConfig(plan_ngpus=plan_ngpus, runtime_ngpus=world_size, grad_reduction="mean", outputs="loss")
    share = BATCH_SIZE // config.num_units
    tokens = torch.zeros(share, SEQ_LENGTH, dtype=torch.int64)
    dummy_args = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    model = shardwright.parallelize(make_model(arguments.model), dummy_args, arguments.policy, config, reuse="moo").to(device)
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, config, lr=LEARNING_RATE)
    losses = []
    unit = dist.get_rank() // plan_ngpus
    for tokens in batches(arguments.steps, BATCH_SIZE, SEQ_LENGTH, part=unit, num_parts=config.num_units):
        optimizer.zero_grad()
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # equal on the ranks of a unit, so the mean over ranks is the mean over units
        losses.append(mean.item() / world_size)
        if dist.get_rank() == 0:
            print(f"step {len(losses):3}  loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--policy", default="tp", help="dp, tp or data")
    parser.add_argument("--plan-ngpus", type=int, help="ranks that share one copy of the model (default: all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="train on one device too and print the largest difference")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    losses = train_parallel(arguments, device)
    if arguments.check and dist.get_rank() == 0:
        alone = train_alone(make_model(arguments.model), arguments.steps)
        print(f"largest difference to one device: {max(abs(a - b) for a, b in zip(alone, losses, strict=True)):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
