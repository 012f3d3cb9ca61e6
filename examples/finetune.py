"""Fine-tune a model of transformers on several ranks: a loop of one's own, from base to export.

    torchrun --nproc-per-node 2 examples/finetune.py --policy tp
    # started again it goes on from its newest checkpoint, on other ranks, under another plan
    torchrun --nproc-per-node 3 examples/finetune.py --policy dp --steps 60
    torchrun --nproc-per-node 2 examples/finetune.py --base path/to/model --output tuned

Without --base it makes a small Llama first, so that nothing needs to be downloaded. The text is
data/text.txt, a token for each byte. `shardwright train` does all of this from a file of settings:
docs/finetuning.md.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from byte_text import VOCAB_SIZE, read_tokens
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright import data

LENGTH, GLOBAL_BATCH, MICROBATCH = 64, 12, 2
"""Tokens of a sample; samples of a step, on all ranks together; samples that a unit computes at
once. 12 divides by 1, 2, 3 and 6 units."""


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of the text. Models of transformers shift labels by themselves."""

    def __init__(self, tokens: Tensor) -> None:
        self.rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_base(folder: Path) -> None:
    """A small Llama of random weights, as save_pretrained writes it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=256, pad_token_id=0, **sizes, **heads
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load(base: Path, policy: str, output: Path) -> shardwright.ParallelModule:
    """The part of the model that is this rank's, with the values of the folder. Nobody holds all of
    it: the model is made without values, and each rank reads its own pieces.
    """
    config = AutoConfig.from_pretrained(base)

    def make() -> torch.nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    ids = torch.zeros(MICROBATCH, LENGTH, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    world = dist.get_world_size()
    compute = shardwright.ComputeConfig(
        plan_ngpus=1 if policy == "dp" else world,
        runtime_ngpus=world,
        use_end2end=True,  # train_step: gradients of several microbatches are added up
        grad_reduction="mean",
        pas_config={"num_microbatches": GLOBAL_BATCH // MICROBATCH} if policy == "pp" else {},
    )
    made = shardwright.parallelize(
        type(make()), example, policy, compute,
        module_fn=make, gen_savedir=output / "generated", reuse="moo",
    )  # fmt: skip
    model = made(init_params=False)
    shardwright.load_pretrained(base, model)
    return model


def evaluate(model: shardwright.ParallelModule, held_out: Windows) -> float:
    """The mean loss over the windows that fill whole batches, the same on all ranks."""
    model.eval()
    losses = [
        torch.stack([result.loss for result in model.infer_step(samples)]).mean()
        for samples in data.loader(
            held_out, model, global_batch=GLOBAL_BATCH, microbatch=MICROBATCH, device=model.device
        )
    ]
    model.train()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)  # the ranks of a unit have the same: their mean is that of the units
    return total.item() / dist.get_world_size()


def train(arguments: argparse.Namespace) -> None:
    """The loop."""
    output: Path = arguments.output
    base: Path = arguments.base or output / "base"
    is_first = dist.get_rank() == 0
    if arguments.base is None and is_first and not base.exists():
        make_base(base)
    dist.barrier()
    model = load(base, arguments.policy, output)
    # Biases and norms are not decayed. They are told by their dims.
    optimizer = shardwright.build_optimizer(
        model, torch.optim.AdamW, lr=arguments.lr, weight_decay=0.1,
        param_groups=lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {},
    )  # fmt: skip
    warmup, steps = 5, arguments.steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    tokens = read_tokens()
    held_out, rest = (
        Windows(tokens[: 2 * GLOBAL_BATCH * LENGTH]),
        tokens[2 * GLOBAL_BATCH * LENGTH :],
    )
    # Each unit reads samples of its own, and each rank what its part of the model takes of them.
    loader = data.loader(
        Windows(rest), model, global_batch=GLOBAL_BATCH, microbatch=MICROBATCH, shuffle=True,
        device=model.device,
    )  # fmt: skip
    checkpoints = output / "checkpoints"
    step = 0
    if (checkpoints / "LATEST").exists():
        loaded = shardwright.load_checkpoint(
            checkpoints, model, optimizer, scheduler=scheduler, loader=loader
        )
        step = loaded.step or 0
        if is_first:
            print(f"goes on after step {step}", flush=True)
    while step < steps:
        for samples in loader:
            number = len(samples)
            results = model.train_step(samples, scale_fn=lambda loss, n=number: loss / n)
            norm = optimizer.clip_gnorm(1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0 or step == steps:
                loss = torch.stack([result.loss for result in results]).mean()
                dist.all_reduce(loss)
                if is_first:
                    mean = loss.item() / dist.get_world_size()
                    print(f"step {step:3}  loss {mean:.6f}  norm {norm:.4f}", flush=True)
            if step % 20 == 0 or step == steps:
                held = evaluate(model, held_out)
                if is_first:
                    print(f"held out: loss {held:.6f}", flush=True)
                shardwright.save_checkpoint(
                    checkpoints, model, optimizer,
                    scheduler=scheduler, loader=loader, step=step, async_save=step < steps,
                )  # fmt: skip
            if step == steps:
                break
    exported = output / f"exported-{step}"
    if is_first and not exported.exists():
        shardwright.export_pretrained(checkpoints, exported, AutoConfig.from_pretrained(base))
        tuned = AutoModelForCausalLM.from_pretrained(exported)
        prompt = torch.tensor([list(b"The ")])
        ids = tuned.generate(prompt, max_new_tokens=20, do_sample=False)[0].tolist()
        print(bytes(ids).decode(errors="replace"))


def main() -> None:
    """Join the job, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a folder that save_pretrained wrote")
    parser.add_argument("--output", type=Path, default=Path("finetuned"))
    parser.add_argument("--policy", default="dp", help="dp, tp, data or pp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments)
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
