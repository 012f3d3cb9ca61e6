"""Attention of some queries to some keys, as a part of attention to all keys.

A block gives its output and, of every query, the logarithm of the sum of the exponentials of its
scores (``lse``). Two blocks of the same queries are merged by these (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). The gradient of a block is exact with the merged
output and lse in the place of its own (Liu et al. 2023, "Ring attention").

Tensors: query ``[batch, heads, queries, width]``, key and value ``[batch, key heads, keys,
width]``, lse ``[batch, heads, queries]``. Key head ``g`` serves query heads ``g * r`` to
``g * r + r - 1``.

torch's kernels compute blocks where one serves the device and the dtype, so that scores are never
whole; elsewhere they are written out, for some queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.runtime.ops.attention_dropout import TileDropout
from shardwright.runtime.runs import Run

_ATEN: Any = torch.ops.aten
_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Made once: the name ``float32`` means float64 where parity is checked.
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HOPELESS = -1e4
"""A mask whose best value for a query is less than this hides all keys from it alike."""

MOST_SCORES = 2**22
"""The most scores that are written out at a time, of all samples and heads."""

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


Flat = Literal["mean", "constant", "nan"]
"""What a query without keys gets of all keys and values.

``mean``: the mean of all values, as where a number was added to all scores beside which they are
lost in rounding; gradients reach the scores all the same. ``constant``: the same mean, as where the
number took the place of all scores; no gradient reaches these. ``nan``: where minus infinity was
added.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries, keys and values, and what the queries see. ``causal``: query ``i`` sees the first
    ``i + 1`` keys. ``flipped``: it sees all but the first ``i``. ``bias``: what is added to the
    scores, with dims that may be 1, and minus infinity where a key is not seen. ``alike``: what of
    it concerns all keys of a query, and is taken off the sum. ``cap``: scores ``s`` become ``cap *
    tanh(s / cap)`` before the bias is added. ``flat``: what queries without keys get, if these are
    such queries. ``dropout``: which weights are dropped. ``wants_bias``: the bias gets a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    flipped: bool = False
    bias: Tensor | None = None
    alike: Tensor | None = None
    cap: float | None = None
    flat: Flat | None = None
    dropout: TileDropout | None = None
    wants_bias: bool = False

    def of_one_width(self) -> Block:
        """The block with zeros behind the narrower of keys and values, as kernels take one width
        alone. They change no score, and give zeros behind the output.
        """
        width = max(self.query.shape[3], self.value.shape[3])
        if self.key.shape[3] == self.value.shape[3] == width:
            return self
        query, key, value = (_widened(x, width) for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def turned(self) -> Block:
        """A flipped block read backwards, which is a causal one."""
        query, key, value = (x.flip(2) for x in (self.query, self.key, self.value))
        return Block(query, key, value, self.scale, causal=True, cap=self.cap)


@dataclass(frozen=True, slots=True)
class BlockGrads:
    """The gradients of a block; that of the bias if it wants one."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


class Kernel(Protocol):
    """How blocks are computed."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """The output and its lse, whatever they are for queries that see no key."""

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        """The gradients. ``grad``, ``out``, ``lse``: of the merged output."""


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
    given = (_widened(grad, wide.value.shape[3]), _widened(out, wide.value.shape[3]), lse)
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


class CpuFlash:
    """torch's flash attention for CPUs. It reads wrong memory, silently, where the last dim is not
    dense, and ends the process where there are no queries or keys.

    It computes 512 keys at a time, seen or not: see :func:`parts_of_backward`.
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


class WrittenOut:
    """Scores as a tensor ``[batch, key heads, r, queries, keys]``, where no kernel serves: of as
    many queries at a time as make :data:`MOST_SCORES`.
    """

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        shape, dtype = block.query.shape[:3], block.query.dtype
        out = block.value.new_empty(*shape, block.value.shape[3])
        lse = block.query.new_empty(shape, dtype=merging_dtype(dtype))
        for part in enough_to_measure(block.query, _parts(block), _num_queries):
            its_out, its_lse = self._forward(part)
            out.narrow(2, *part.queries).copy_(its_out)
            lse.narrow(2, *part.queries).copy_(its_lse)
        return out, lse

    def _forward(self, part: _Part) -> tuple[Tensor, Tensor]:
        scores = part.scores(part.products())
        lse = scores.logsumexp(-1)
        weights = part.dropped((scores - _finite(lse)[..., None]).exp()).to(part.value.dtype)
        out = torch.einsum("bgrqk,bgkd->bgrqd", weights, part.value)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        of_query, of_key, of_value = (
            torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in (block.query, block.key, block.value)
        )
        of_bias = None
        if block.wants_bias and block.bias is not None:
            of_bias = torch.zeros_like(block.bias, memory_format=torch.contiguous_format)
        delta = common_gradient(grad, out, lse)
        for part in enough_to_measure(block.query, _parts(block), _num_queries):
            own = (x.narrow(2, *part.queries) for x in (grad, lse, delta))
            found = self._backward(part, *own)
            of_query.narrow(2, *part.queries).copy_(found.query)
            of_key.narrow(2, *part.keys).add_(found.key)
            of_value.narrow(2, *part.keys).add_(found.value)
            if of_bias is not None and found.bias is not None:
                view = part.of_bias(of_bias)
                view.add_(found.bias.sum_to_size(view.shape))
        return BlockGrads(of_query, of_key, of_value, of_bias)

    def _backward(self, part: _Part, grad: Tensor, lse: Tensor, delta: Tensor) -> BlockGrads:
        block, heads = part.block, part.key.shape[1]
        query, grad, lse, delta = (
            torch.unflatten(x, 1, (heads, -1)) for x in (part.query, grad, lse, delta)
        )
        products = part.products()
        # Backward of softmax attention (Dao et al., "FlashAttention", algorithm 4). With weights W,
        # dW = dO V' and dS = W * (dW - delta); b: batch, g: key heads, r: query heads of each, q,
        # k: positions. Weights that were dropped have no part in dW; delta is the same sum.
        weights = (part.scores(products) - lse[..., None]).exp()
        of_weights = torch.einsum("bgrqd,bgkd->bgrqk", grad, part.value)
        kept = part.factors(weights)
        if kept is not None:
            of_weights = of_weights * kept
        of_scores = weights * (of_weights - delta[..., None])
        of_products = of_scores
        if block.flat == "constant":
            of_products = torch.zeros_like(of_scores)
        elif block.cap is not None:
            # scores = cap * tanh(products / cap), whose derivative is 1 - tanh².
            of_products = of_scores * (1 - (products / block.cap).tanh().square())
        scaled = (of_products * block.scale).to(query.dtype)
        if kept is not None:
            weights = weights * kept
        return BlockGrads(
            torch.einsum("bgrqk,bgkd->bgrqd", scaled, part.key).flatten(1, 2),
            torch.einsum("bgrqk,bgrqd->bgkd", scaled, query),
            torch.einsum("bgrqk,bgrqd->bgkd", weights.to(grad.dtype), grad),
            of_scores.flatten(1, 2) if block.wants_bias else None,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of a block, and the keys that some of these see."""

    block: Block
    queries: Run
    keys: Run

    @property
    def query(self) -> Tensor:
        return self.block.query.narrow(2, *self.queries)

    @property
    def key(self) -> Tensor:
        return self.block.key.narrow(2, *self.keys)

    @property
    def value(self) -> Tensor:
        return self.block.value.narrow(2, *self.keys)

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias of the block, as a view."""
        rows = bias.narrow(2, *self.queries) if bias.shape[2] > 1 else bias
        return rows.narrow(3, *self.keys) if bias.shape[3] > 1 else rows

    def products(self) -> Tensor:
        """Queries times keys, scaled."""
        query = torch.unflatten(self.query, 1, (self.block.key.shape[1], -1))
        products = torch.einsum("bgrqd,bgkd->bgrqk", query, self.key)
        return products.to(merging_dtype(query.dtype)) * self.block.scale

    def scores(self, products: Tensor) -> Tensor:
        """What softmax is taken of."""
        block, scores = self.block, products
        heads = block.key.shape[1]
        if block.flat is not None:
            return torch.full_like(scores, math.nan if block.flat == "nan" else 0.0)
        if block.cap is not None:
            # The cap comes before bias and masks, as in Gemma 2: a mask of -inf would become -cap.
            scores = block.cap * (scores / block.cap).tanh()
        if block.bias is not None:
            scores = scores + _by_group(self.of_bias(block.bias), heads)
        if block.alike is not None:
            scores = scores - _by_group(self.of_bias(block.alike), heads)
        if block.causal or block.flipped:
            rows = torch.arange(self.queries[1], device=scores.device)[:, None] + self.queries[0]
            columns = torch.arange(self.keys[1], device=scores.device) + self.keys[0]
            hidden = columns > rows if block.causal else columns < rows
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def factors(self, weights: Tensor) -> Tensor | None:
        """What dropout multiplies these weights by."""
        dropout = self.block.dropout
        if dropout is None:
            return None
        factors = dropout.factors(self.queries, self.keys, weights)
        return torch.unflatten(factors, 1, (self.block.key.shape[1], -1))

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights behind dropout."""
        factors = self.factors(weights)
        return weights if factors is None else weights * factors


class _OfKeys(Protocol):
    """A part of attention, to so many keys."""

    @property
    def keys(self) -> Run: ...


Piece = TypeVar("Piece", bound=_OfKeys)


def enough_to_measure(
    query: Tensor, parts: Sequence[Piece], form: Callable[[Piece], object]
) -> Sequence[Piece]:
    """All parts; of attention of fake queries two of each form, by ``form``, with the most keys.

    Fake tensors are asked for memory alone, and parts of one form take the same. It needs two, as
    the first may still be there while the next one is made. A short window over 100,000 queries
    has 1,600 parts of three forms.
    """
    if not isinstance(query, FakeTensor):
        return parts
    forms: dict[object, list[int]] = {}
    for index, part in enumerate(parts):
        forms.setdefault(form(part), []).append(index)
    largest = (sorted(some, key=lambda i: parts[i].keys[1])[-2:] for some in forms.values())
    return [parts[index] for index in sorted(index for some in largest for index in some)]


def _parts(block: Block) -> list[_Part]:
    """A block in parts of at most :data:`MOST_SCORES` scores, or of one query each."""
    samples, heads, num_queries, _ = block.query.shape
    num_keys = block.key.shape[2]
    rows = max(1, MOST_SCORES // max(1, samples * heads * num_keys))
    parts = []
    for start in range(0, num_queries, rows):
        count = min(rows, num_queries - start)
        first = min(start, num_keys - 1) if block.flipped else 0
        end = min(start + count, num_keys) if block.causal else num_keys
        parts.append(_Part(block, (start, count), (first, end - first)))
    return parts


def _num_queries(part: _Part) -> int:
    return part.queries[1]


def _by_group(x: Tensor, heads: int) -> Tensor:
    """``[batch, query heads or 1, ...]`` with the dim of heads in two, as scores have it."""
    return torch.unflatten(x, 1, (heads, -1)) if x.shape[1] > 1 else x.unsqueeze(1)


def merging_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which outputs and their lse are merged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def common_gradient(grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """What all weights of a query have in common in the gradient of its scores, ``[batch, heads,
    queries]``: the sum of ``grad * out`` of the merged output. So a block needs no other block's
    weights (Dao, "FlashAttention-2", 2023).
    """
    return (grad.to(lse.dtype) * out).sum(-1)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add what a block gave to ``out`` and ``lse``, in place. Queries that saw no key so far have
    an lse of minus infinity.
    """
    # The part of all weights that the block has, exp(more_lse) / (exp(lse) + exp(more_lse)). Two
    # infinities of one sign have no difference.
    part = (more_lse - lse).sigmoid_().masked_fill_(more_lse == -math.inf, 0.0)
    out.lerp_(more.to(out.dtype), part.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def hidden_alike(mask: Tensor) -> Tensor | None:
    """What a floating mask, which is for all keys, takes from all keys of a query alike, ``[..., L,
    1]``, if that is much. Beside it scores are lost in rounding, as on one device; without it an
    lse has digits left.
    """
    if mask.dtype == torch.bool or not mask.shape[-1]:
        return None
    best = mask.detach().amax(-1, keepdim=True)
    return best.masked_fill((best >= HOPELESS) | (best == -math.inf), 0.0)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of ``F.scaled_dot_product_attention`` as a bias: minus infinity where a boolean one is
    false.
    """
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.to(dtype)


def _finite(lse: Tensor) -> Tensor:
    """An lse to subtract: any number serves where all scores are minus infinity."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _whole_bias(block: Block) -> Tensor | None:
    """The bias in the shape of the scores, as kernels want it: without copying it."""
    if block.bias is None:
        return None
    query, key = block.query, block.key
    return block.bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])


def _widened(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros behind its last dim."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _regrouped(grad: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were repeated."""
    return grad if grad.shape[1] == heads else torch.unflatten(grad, 1, (heads, -1)).sum(2)
