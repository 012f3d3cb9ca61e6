"""Blocks of attention are computed, and their gradients.

torch's kernels do so where one serves the device and the dtype, so that scores are never whole;
elsewhere they are written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.runtime.ops.attention_blocks import Block, BlockGrads, Kernel, widened
from shardwright.runtime.ops.attention_kernels import CpuFlash, CudaEfficient, CudaFlash
from shardwright.runtime.ops.attention_written_out import WrittenOut
from shardwright.runtime.runs import Run

# Made once: the name ``float32`` means float64 where parity is checked.
_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CALL_FLOP = {"cpu": 2**22, "cuda": 2**33}
"""The floating-point operations that attention makes in the time that a call of its kernel takes,
with what it takes to merge the output.

That of a CPU was measured: 0.06 ms at 70 GFLOP/s. That of a GPU is put together from two numbers.
Each tile is 12 operators (``compiler/cost/time/attention_calls.py``), and one is taken to cost 5 us
of the host, as in the presets of machines. An H100 computes causal attention at 245 TFLOP/s, with
its backward (2 x 16 heads, 4096 queries of width 128: ``benchmarks/RESULTS.md``). That is 2**34.
The half of it stands here, as the pairs that take the place of calls are behind a mask, and the
kernel for these takes twice as long. No GPU has measured it as a whole.
"""


LEAST_CAUSAL = 128
"""The fewest queries of a causal block that is cut for the kernel of CPUs."""


def kernel_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cap: float | None = None,
    *,
    drops: bool = False,
) -> Kernel:
    """The kernel for tensors like these. No kernel caps scores, drops weights of our choice, gives
    the gradient of a floating mask, or an lse that can be merged where it hides all keys of a
    query.
    """
    is_floating = mask is not None and mask.is_floating_point()
    if drops or cap is not None or is_floating:
        return WrittenOut()
    if query.device.type == "cpu" and query.dtype in _CPU_DTYPES:
        return CpuFlash()
    if query.device.type == "cuda" and query.dtype in _CUDA_DTYPES:
        width = max(query.shape[-1], value.shape[-1])
        q, k, v = (
            x.new_empty(1, x.shape[1], 1, width, requires_grad=x.requires_grad)
            for x in (query, key, value)
        )
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, True)
        return (
            CudaFlash() if torch.backends.cuda.can_use_flash_attention(asked) else CudaEfficient()
        )
    return WrittenOut()


def _for_block(kernel: Kernel, block: Block) -> Kernel:
    """The kernel, or the one that serves a block which this one does not."""
    # Kernels hide keys before they multiply by the scale: minus infinity becomes nan or infinity
    # where that is zero or less.
    if block.flat is not None or not block.scale > 0:
        return WrittenOut()
    if block.bias is not None and isinstance(kernel, CudaFlash):
        return CudaEfficient()
    return kernel


def attend(kernel: Kernel, block: Block) -> tuple[Tensor, Tensor]:
    """The output of a block and its lse: zeros and minus infinity for a query that sees no key."""
    kernel = _for_block(kernel, block)
    if isinstance(kernel, WrittenOut):
        out, lse = kernel.forward(block)
    else:
        wide = block.of_one_width()
        out, lse = kernel.forward(wide.turned() if block.flipped else wide)
        out = out[..., : block.value.shape[3]]
        # Kernels have the causal form alone. Read backwards, keys from the i-th on are keys up to
        # the i-th.
        if block.flipped:
            return out.flip(2), lse.flip(2)
    if block.bias is None:
        return out, lse
    # What kernels give for a query without keys differs; merging needs nothing, with a weight of
    # zero.
    blind = (block.bias == -math.inf).all(-1).expand(lse.shape)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf)


def attend_backward(
    kernel: Kernel, block: Block, grad: Tensor, out: Tensor, lse: Tensor
) -> BlockGrads:
    """The gradients of a block; see :meth:`Kernel.backward`. An lse is finite, whatever it stands
    for where a query sees no key at all.
    """
    kernel = _for_block(kernel, block)
    if isinstance(kernel, WrittenOut):
        return kernel.backward(block, grad, out, lse)
    wide = block.of_one_width()
    given = (widened(grad, wide.value.shape[3]), widened(out, wide.value.shape[3]), lse)
    if block.flipped:
        grads = kernel.backward(wide.turned(), *(x.flip(2) for x in given))
    else:
        grads = kernel.backward(wide, *given)
    own = (block.query, block.key, block.value)
    found = zip((grads.query, grads.key, grads.value), own, strict=True)
    narrow = [grad[..., : x.shape[3]] for grad, x in found]
    return BlockGrads(*(x.flip(2) for x in narrow) if block.flipped else narrow)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A part of a block: these of its queries with these of its keys."""

    block: Block
    queries: Run
    keys: Run


def parts_of_backward(kernel: Kernel, block: Block) -> Sequence[BlockPart]:
    """The parts in which the gradients of a block are computed, and added up.

    torch's kernel of CPUs computes 512 keys at a time, seen or not. So the backward of a causal
    block of 512 queries takes as long as that of one which sees all. It is cut into two causal
    blocks of 256 queries and a rectangle, and these further, as long as that saves more than calls
    cost: 3.2 in the place of 4.1 ms for 4 heads of width 32. (The forward would gain little, as
    outputs have to be merged.) Blocks of fake tensors stay whole, as they are for other kernels.
    """
    num_queries, num_keys = block.query.shape[2], block.key.shape[2]
    whole = BlockPart(block, (0, num_queries), (0, num_keys))
    is_plain = block.causal and block.bias is None and num_queries == num_keys
    if not is_plain or not isinstance(kernel, CpuFlash) or isinstance(block.query, FakeTensor):
        return (whole,)
    pair_flop = 2 * block.query.shape[:2].numel() * (block.query.shape[3] + block.value.shape[3])
    # Two more calls, each with its additions.
    cut = _halved(num_queries, 2 * CALL_FLOP["cpu"] // max(1, pair_flop))
    if len(cut) == 1:
        return (whole,)
    parts = []
    for rows, columns in cut:
        query, key, value = (
            block.query.narrow(2, *rows),
            block.key.narrow(2, *columns),
            block.value.narrow(2, *columns),
        )
        own = replace(block, query=query, key=key, value=value, causal=rows == columns)
        parts.append(BlockPart(own, rows, columns))
    return parts


@lru_cache(maxsize=256)
def _halved(size: int, worth: int) -> tuple[tuple[Run, Run], ...]:
    """The parts of a causal block of so many queries, as queries and keys, cut in halves as long as
    a half saves more than ``worth`` pairs. The queries and keys of a causal part are the same.
    """
    half = -(-size // 128) * 64  # kernels take 64 queries at a time
    if size < LEAST_CAUSAL or half * (size - half) <= worth:
        return (((0, size), (0, size)),)
    later = tuple(
        ((half + rows[0], rows[1]), (half + columns[0], columns[1]))
        for rows, columns in _halved(size - half, worth)
    )
    return (*_halved(half, worth), *later, ((half, size - half), (0, half)))
