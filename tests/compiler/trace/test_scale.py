"""Real sizes: nothing of the weights may be touched."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from shardwright.compiler.trace import trace

SCRIPT = """
import torch, transformers
from pathlib import Path
from shardwright.compiler.trace import trace
with torch.device("meta"):
    config = transformers.LlamaConfig(num_hidden_layers={layers}, **{sizes})
    model = transformers.LlamaForCausalLM(config)
ids = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
graph = trace(model, {{"input_ids": ids, "labels": ids}})
# Not ru_maxrss: that is never less than what the process had that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(line for line in lines if line.startswith("VmHWM"))
print(len(graph.ops), int(peak.split()[1]) / 2**20)
"""

SIZES_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def measure(layers: int, sizes: dict[str, int]) -> tuple[int, float]:
    """Operators and peak memory in GiB of a trace in a fresh process."""
    code = SCRIPT.format(layers=layers, sizes=sizes)
    ops, gib = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return int(ops), float(gib)


@pytest.mark.slow
def test_operators_and_memory() -> None:
    layers = 80
    ops, gib = measure(layers, SIZES_70B)
    assert 40 * layers < ops < 80 * layers
    assert gib < 2


def test_nothing_keeps_the_module_alive() -> None:
    """Fakes of one trace hold each other through graphs of autograd, which Python's collector does
    not see into.
    """
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    graph = trace(module, {"input": torch.ones(2, 4)})
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None and graph.ops
