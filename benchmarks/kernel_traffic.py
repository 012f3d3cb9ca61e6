"""The bytes that kernels of torch move in a step, beside what the cost model counts.

    python benchmarks/kernel_traffic.py

A Llama of width 2048 takes a step on tensors without memory, and torch's dispatcher tells of every
kernel, its operands and its results. Matrix products and attention are left out: their time is that
of their arithmetic. The model is the case "batch" of ``one_gpu_plans.py``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from one_gpu_plans import ON_GPU, program_of, traced
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.time.arithmetic import may_multiply
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.plan.program import Compute, steps
from shardwright.runtime.layout import Mesh

PRODUCTS = ("mm", "bmm", "addmm")
FREE = ("detach", "alias", "_unsafe_view", "empty")
"""Kernels that move nothing; views are known by their schemas."""


class Kernels(TorchDispatchMode):
    """Counts bytes by kernel and direction: what is read, each operand once, and written."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = "forward"
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and name not in (*PRODUCTS, *FREE):
            key = self.direction, name
            leaves = tree_leaves((args, kwargs, results))
            self.bytes[key] += sum(_bytes(x) for x in leaves if isinstance(x, Tensor))
            self.calls[key] += 1
        return results


def _bytes(x: Tensor) -> int:
    """What lies in memory of it: an expanded dim is there once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * int(torch.Size(n for n, stride in sizes if stride).numel())


class NoAttention(torch.autograd.Function):
    """Stands for a kernel that is not counted."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shape = key.shape
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(grad), grad.new_empty(ctx.shape), grad.new_empty(ctx.shape)


def no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls."""
    return NoAttention.apply(query, key, value).transpose(1, 2), None


def main() -> None:
    warnings.simplefilter("ignore")
    (case,) = (case for case in ON_GPU.plans if case.name == "batch")
    found = measured(case)
    table = Table("kernel", "direction", "calls", "GB")
    for key, num_bytes in found.bytes.most_common(16):
        table.add_row(key[1], key[0], str(found.calls[key]), f"{num_bytes / 1e9:.2f}")
    Console(width=100).print(table)
    counted = predicted(case)
    for index, direction in enumerate(("forward", "backward")):
        moved = sum(n for key, n in found.bytes.items() if key[0] == direction)
        print(
            f"{direction}: kernels move {moved / 1e9:.1f} GB, "
            f"the cost model counts {counted[index] / 1e9:.1f} GB"
        )


def measured(case: Any) -> Kernels:
    """The kernels of a step of the model itself."""
    AttentionInterface.register("none", no_attention)
    model = traced(ON_GPU, case, ON_GPU.plan_layers)
    model.model.rotary_emb.to("meta")
    model.config._attn_implementation = "none"
    with Kernels() as kernels:
        loss = model(**ON_GPU.sample(case, "meta")).loss
        kernels.direction = "backward"
        loss.backward()
    return kernels


def predicted(case: Any) -> tuple[float, float]:
    """What the cost model counts for all operators but products and attention: what they take on a
    device that does nothing but move memory. Of products the sums of their operands' gradients
    count.
    """
    hardware = load_hardware("h100", 1)
    device = replace(hardware.device, launch_s=0.0)
    hardware = replace(hardware, device=device)
    forward_s = backward_s = 0.0
    for step in steps(program_of(ON_GPU, case).body):
        if isinstance(step, Compute):
            op = step.original
            time = op_time(op, {}, Mesh(), hardware)
            if may_multiply(op):
                alone = op_time(replace(op, summed=()), {}, Mesh(), hardware)
                time = OpTime(0.0, time.backward_s - alone.backward_s)
            forward_s += time.forward_s
            backward_s += time.backward_s
    return forward_s * device.bytes_per_s, backward_s * device.bytes_per_s


if __name__ == "__main__":
    main()
