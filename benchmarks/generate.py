"""Tokens per second of ``generate`` beside those of transformers.

    python benchmarks/generate.py --pairs 8                                       # one rank
    torchrun --nproc_per_node=2 benchmarks/generate.py --pairs 8                  # tp of two ranks

On one rank the peer is the model itself, on several ranks its own tensor parallelism
(``from_pretrained(tp_plan="auto")``). Both keep a cache of keys and values, and give the same
tokens. The model is a Llama with random weights; times are those of processors (``--clock wall``
for an idle machine), each pair interleaved.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from pairs import compare

import shardwright


def model_folder(folder: Path, width: int, layers: int) -> Path:
    """A model with random weights, saved by rank 0."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            eos_token_id=None,
            pad_token_id=0,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    dist.barrier()
    return folder / "model"


def shared_folder() -> Path:
    """A temporary folder that all ranks know."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return Path(str(found[0]))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ.update(alone)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size, folder = dist.get_world_size(), shared_folder()
    path = model_folder(folder, options.width, options.layers)
    load = transformers.AutoModelForCausalLM.from_pretrained
    if size > 1:
        # It asks whether accelerate is installed, and uses nothing of it.
        asked_here: Any = importlib.import_module("transformers.integrations.accelerate")
        asked_here.is_accelerate_available = lambda: True
    theirs: Any = load(path) if size == 1 else load(path, tp_plan="auto")
    ours: Any = load(path)
    shardwright.initialize(ours, {"plan_ngpus": size}, gen_savedir=folder / "gen")
    torch.manual_seed(1)
    ids = torch.randint(1, 1024, (options.batch, options.prompt))
    asked = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": options.tokens,
        "do_sample": False,
    }
    expected, found = theirs.eval().generate(**asked), ours.eval().generate(**asked)
    same = bool(torch.equal(expected, found))
    ratio = compare(
        lambda: ours.generate(**asked),
        lambda: theirs.generate(**asked),
        num_pairs=options.pairs,
        num_warmup=1,
        barrier=dist.barrier,
        clock=time.process_time if options.clock == "processor" else time.perf_counter,
    )
    if dist.get_rank() == 0:
        rates = [options.batch * options.tokens / s for s in (ratio.ours_s, ratio.theirs_s)]
        print(f"{size} rank(s), {ours.config.num_hidden_layers} layers of {options.width}: {ratio}")
        print(f"{rates[0]:.0f} tokens/s against {rates[1]:.0f}; tokens are the same: {same}")
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
