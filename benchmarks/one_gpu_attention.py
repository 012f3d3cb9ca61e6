"""Attention in blocks by the kernels of a device: whether it is right, and how long it takes. Used
by ``one_gpu.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from one_gpu_tables import Line
from torch import Tensor

from shardwright.frontend.calibrate.timing import seconds_per_call
from shardwright.runtime.ops.attend_blocks import attend, attend_backward, kernel_for
from shardwright.runtime.ops.attention_blocks import Block, Kernel, as_bias
from shardwright.runtime.ops.attention_kernels import CpuFlash, CudaEfficient, CudaFlash
from shardwright.runtime.ops.attention_written_out import WrittenOut

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""How far blocks may be from the same ones in float64, relative to their norm."""


def attention_blocks(folder: Path, device: torch.device) -> Iterator[Line]:
    """Blocks of attention by the kernels of the device, beside the same ones written out in
    float64.
    """
    for dtype, bound in BOUNDS.items():
        kernels: set[str] = set()
        errors: list[float] = []
        for block, grad in _blocks(dtype, device):
            kernel = kernel_for(block.query, block.key, block.value, None)
            kernels.add(type(kernel).__name__)
            found = _of_block(kernel, block, grad)
            exact = _of_block(WrittenOut(), _exact(block), grad.double())
            errors.append(max(map(distance, found, exact)))
        name = str(dtype).removeprefix("torch.")
        yield Line(
            f"{len(errors)} blocks of attention in {name} by {', '.join(sorted(kernels))}",
            f"worst relative error {max(errors):.1e}, {bound:g} are allowed",
            max(errors) <= bound,
        )


def _blocks(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Block, Tensor]]:
    """Blocks of several sizes and kinds, each with a gradient of its output."""
    generator = torch.Generator(device).manual_seed(0)
    for width, (queries, keys), kind, key_heads in product(
        (8, 64, 128), ((3, 3), (2, 5), (65, 65), (200, 130)),
        ("full", "causal", "flipped", "some keys"), (4, 2),
    ):  # fmt: skip
        if kind in ("causal", "flipped") and queries != keys:
            continue
        shapes = ((4, queries), (key_heads, keys), (key_heads, keys), (4, queries))
        query, key, value, grad = (
            torch.randn(2, heads, rows, width, generator=generator, device=device).to(dtype)
            for heads, rows in shapes
        )
        bias = None
        if kind == "some keys":
            seen = torch.rand(2, 1, queries, keys, generator=generator, device=device) < 0.6
            seen[..., 0] = True
            bias = as_bias(seen, dtype)
        scale = width**-0.5
        yield Block(query, key, value, scale, kind == "causal", kind == "flipped", bias), grad


def _of_block(kernel: Kernel, block: Block, grad: Tensor) -> list[Tensor]:
    """The output, its lse and the gradients of a block. The output is handed back to the kernel as
    a ring does, which keeps it by heads.
    """
    out, lse = attend(kernel, block)
    # Of a flipped block the last query sees no key.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    out = out.contiguous()
    grads = attend_backward(kernel, block, grad, out, lse)
    return [out, lse, grads.query, grads.key, grads.value]


def _exact(block: Block) -> Block:
    query, key, value = (x.double() for x in (block.query, block.key, block.value))
    bias = None if block.bias is None else block.bias.double()
    return replace(block, query=query, key=key, value=value, bias=bias)


def distance(found: Tensor, exact: Tensor) -> float:
    """How far a tensor is from the exact one, relative to its norm."""
    return float((found.double() - exact).norm() / exact.norm())


def attention_times(folder: Path, device: torch.device) -> Iterator[Line]:
    """Forward and backward of causal blocks by each kernel that serves them, in bfloat16."""
    on_gpu = device.type == "cuda"
    kernels: tuple[Kernel, ...] = (
        (CudaFlash(), CudaEfficient()) if on_gpu else (CpuFlash(), WrittenOut())
    )
    sizes = ((1024, 128), (4096, 64), (4096, 128)) if on_gpu else ((128, 64),)
    for queries, width in sizes:
        query, key, value, grad = (
            torch.randn(2, 16, queries, width, device=device, dtype=torch.bfloat16)
            for _ in range(4)
        )
        block = Block(query, key, value, width**-0.5, causal=True)
        times = [
            seconds_per_call(partial(_of_block, kernel, block, grad), device, 0.2, 1e-2)
            for kernel in kernels
        ]
        words = ", ".join(
            f"{type(kernel).__name__} {seconds * 1e3:.2f} ms"
            for kernel, seconds in zip(kernels, times, strict=True)
        )
        yield Line(f"causal attention of {queries} queries of width {width}", words)
