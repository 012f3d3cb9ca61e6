"""torch's own kernels for blocks of attention: one for CPUs, two for CUDA. None has all scores in
memory at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.ops.attention_blocks import Block, BlockGrads

_ATEN: Any = torch.ops.aten


class CpuFlash:
    """torch's flash attention for CPUs. It reads wrong memory, silently, where the last dim is not
    dense, and ends the process where there are no queries or keys.

    It computes 512 keys at a time, seen or not: see ``parts_of_backward`` in
    :mod:`~shardwright.runtime.ops.attend_blocks`.
    """

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            *map(_dense, (block.query, block.key, block.value)),
            0.0,
            block.causal,
            attn_mask=_whole_bias(block),
            scale=block.scale,
        )
        return out, lse

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        tensors = (grad, block.query, block.key, block.value, out.to(grad.dtype))
        return BlockGrads(
            *_ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_dense, tensors),
                _dense(lse),
                0.0,
                block.causal,
                attn_mask=_whole_bias(block),
                scale=block.scale,
            )
        )


class CudaFlash:
    """torch's flash attention for CUDA, in half precision and without a mask. It takes less than
    half the time of :class:`CudaEfficient` (H100, 1024 to 4096 queries of width 64 and 128).
    """

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            *self._operands(block), 0.0, block.causal, False, scale=block.scale
        )
        return out, lse

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        query, key, value = self._operands(block)
        # State of the random numbers for dropout, of which there is none.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return BlockGrads(
            *_ATEN._scaled_dot_product_flash_attention_backward(
                _dense(grad),
                query,
                key,
                value,
                _dense(out.to(grad.dtype)),
                lse.contiguous(),
                None,
                None,
                query.shape[2],
                key.shape[2],
                0.0,
                block.causal,
                state,
                state[0],
                scale=block.scale,
            )
        )

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        return _dense(block.query), _dense(block.key), _dense(block.value)


class CudaEfficient:
    """torch's memory-efficient attention for CUDA, which takes any mask and all dtypes but
    float64.
    """

    ALIGNED = 32
    """The kernel's lse has room for a multiple of this many queries."""

    MASK_ALIGNED = 16
    """The rows of a mask lie at multiples of this many elements."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        query, key, value = self._operands(block)
        out, lse, _, _ = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, self._bias(block), True, 0.0, block.causal, scale=block.scale
        )
        return out, lse[..., : query.shape[-2]]

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        query, key, value = self._operands(block)
        # The kernel reads the logsumexp in whole aligned rows. With infinity there, exp(score -
        # inf) is 0.
        missing = -query.shape[-2] % self.ALIGNED
        padded = torch.nn.functional.pad(lse, (0, missing), value=math.inf)
        # In half precision the kernel takes the output for one that lies by queries, heads and
        # width, whatever its strides say.
        by_query = out.to(grad.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        # Seed and offset of dropout, of which there is none.
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
            _dense(grad),
            query,
            key,
            value,
            self._bias(block),
            by_query,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            block.causal,
            scale=block.scale,
        )
        heads = block.key.shape[1]
        return BlockGrads(of_query, _regrouped(of_key, heads), _regrouped(of_value, heads))

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        repeats = block.query.shape[1] // block.key.shape[1]
        key, value = (
            x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (block.key, block.value)
        )
        return _dense(block.query), _dense(key), _dense(value)

    def _bias(self, block: Block) -> Tensor | None:
        bias = _whole_bias(block)
        if bias is None:
            return None
        missing = -bias.shape[-1] % self.MASK_ALIGNED
        return torch.nn.functional.pad(bias, (0, missing))[..., : bias.shape[-1]]


def _whole_bias(block: Block) -> Tensor | None:
    """The bias in the shape of the scores, as kernels want it: without copying it."""
    if block.bias is None:
        return None
    query, key = block.query, block.key
    return block.bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _regrouped(grad: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were repeated."""
    return grad if grad.shape[1] == heads else torch.unflatten(grad, 1, (heads, -1)).sum(2)
