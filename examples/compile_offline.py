"""Compile a 7B Llama for many ranks on a machine that could not hold it: no weights, no GPU, no
process group.

    python examples/compile_offline.py [--plan-ngpus 8] [--layers 32] [--savedir DIR]

The files are loaded on the cluster by the same call with ``load_module=True``, under torchrun.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright

SEQ_LENGTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan-ngpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--savedir", default=".shardwright")
    arguments = parser.parse_args()

    def make_model() -> LlamaForCausalLM:
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=arguments.layers))

    tokens = torch.zeros(1, SEQ_LENGTH, dtype=torch.int64)
    start = time.perf_counter()
    shardwright.parallelize(
        LlamaForCausalLM,
        {"input_ids": tokens, "labels": tokens, "use_cache": False},
        "tp",
        shardwright.ComputeConfig(
            plan_ngpus=arguments.plan_ngpus, runtime_ngpus=arguments.plan_ngpus, outputs="loss"
        ),
        module_fn=make_model,
        gen_savedir=arguments.savedir,
        load_module=False,
        reuse="override",
    )
    seconds = time.perf_counter() - start
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
    print(
        f"compiled {arguments.layers} layers for {arguments.plan_ngpus} ranks in "
        f"{seconds:.1f} s, peak memory {peak_gb:.2f} GB"
    )
    files = sorted(Path(arguments.savedir).rglob("LlamaForCausalLM/*/gencode*.py"))
    print(f"{len(files)} source files, the first is {files[0]}")


if __name__ == "__main__":
    main()
