"""Example calls of operators, on which the prover runs: small, with sizes that do and do not
divide.

A call is a tuple ``(function, args)`` or ``(function, args, kwargs)``; the function may be an entry
of the registry.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.stand_ins import (
    all_chosen,
    any_chosen,
    attention_where,
    combine,
    dispatch,
    grouped_linear,
    only_finite,
    unclamped,
)

Call = tuple[Any, ...]


def _randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor whose gradient is compared."""
    return torch.randn(*shape, dtype=dtype, generator=_GENERATOR).requires_grad_()


def _rand(*shape: int) -> torch.Tensor:
    """Positive numbers without a gradient: probabilities, weights of classes, variances."""
    return torch.rand(*shape, dtype=torch.float64, generator=_GENERATOR)


def _scalar() -> torch.Tensor:
    return torch.tensor(1.5, dtype=torch.float64, requires_grad=True)


def _ints(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_GENERATOR)


_GENERATOR = torch.Generator().manual_seed(0)
X = _randn(4, 6, 7)
IDS = _ints(7, 4, 5)


def checks() -> list[Call]:
    """Calls of operators that check what a branch took for granted."""
    mask = torch.ones(4, 6, 1, dtype=torch.bool)
    checked = [(unclamped, (X, -9.0, 9.0)), (unclamped, (X, None, 9.0))]
    return [
        *checked,
        (only_finite, (X,)),
        (all_chosen, (X, mask)),
        (all_chosen, (X, mask[0])),
        (any_chosen, (mask,)),
    ]


def products() -> list[Call]:
    # Torch has it for neither float64 nor odd sizes.
    offs, f32 = (
        torch.tensor([3, 8], dtype=torch.int32),
        torch.float32,
    )
    return [
        (F.linear, (X, _randn(5, 7), _randn(5))),
        (F.linear, (X, _randn(5, 7))),
        (F.linear, (X, _randn(7))),
        (F.linear, (_randn(7), _randn(5, 7), _randn(5))),
        (torch.matmul, (_randn(3, 4, 6), _randn(6, 5))),
        (torch.matmul, (_randn(4, 3, 4, 6), _randn(1, 3, 6, 5))),
        (torch.Tensor.__matmul__, (_randn(4, 6), _randn(6))),
        (torch.Tensor.__rmatmul__, (_randn(6, 5), _randn(4, 6))),
        (torch.dot, (_randn(6), _randn(6))),
        (torch.vdot, (_randn(6), _randn(6))),
        (torch.bmm, (_randn(3, 4, 6), _randn(3, 6, 5))),
        (torch.addmm, (_randn(5), _randn(4, 6), _randn(6, 5)), {"beta": 0.5, "alpha": 2}),
        (torch.addmm, (_randn(4, 1), _randn(4, 6), _randn(6, 5))),
        (torch.addmv, (_randn(1), _randn(4, 2), _randn(2))),
        (torch.addr, (_randn(4, 5), _randn(4), _randn(5))),
        (torch.baddbmm, (_randn(3, 1, 5), _randn(3, 4, 6), _randn(3, 6, 5))),
        (torch.addbmm, (_randn(4, 5), _randn(3, 4, 6), _randn(3, 6, 5))),
        (torch.einsum, ("bhqd,bhkd->bhqk", _randn(2, 3, 4, 5), _randn(2, 3, 6, 5))),
        (torch.einsum, ("...ij,...jk", _randn(3, 4, 6), _randn(3, 6, 5))),
        (torch.einsum, ("ii,ij->j", _randn(4, 4), _randn(4, 5))),
        (torch.einsum, ("a,b,ab->", _randn(3), _randn(4), _randn(3, 4))),
        (torch.tensordot, (_randn(3, 4, 5), _randn(4, 5, 6)), {"dims": 2}),
        (torch.tensordot, (_randn(3, 4, 5), _randn(5, 3)), {"dims": ([0, 2], [1, 0])}),
        (torch.outer, (_randn(4), _randn(5))),
        (F.bilinear, (_randn(4, 3), _randn(4, 5), _randn(6, 3, 5), _randn(6))),
        (F.grouped_mm, (_randn(8, 24, dtype=f32), _randn(2, 24, 24, dtype=f32)), {"offs": offs}),
        (F.grouped_mm, (_randn(4, 3, 24, dtype=f32), _randn(4, 24, 24, dtype=f32))),
    ]


def experts() -> list[Call]:
    """Rows of seven tokens for five experts, of which some have none."""
    tokens, num_experts, hidden, inner = 7, 5, 6, 4
    scores = torch.rand(tokens, num_experts, generator=_GENERATOR) * torch.tensor([1, 1, 0, 2, 1])
    chosen = scores.topk(2).indices
    mask = torch.zeros(num_experts, tokens, dtype=torch.int64)
    mask[chosen.T, torch.arange(tokens)] = 1
    rows, several = _randn(num_experts * tokens, hidden), {"num_experts": num_experts}
    up, bias = _randn(num_experts, inner, hidden), _randn(num_experts, inner)
    x, weights = _randn(tokens, hidden), _randn(tokens, 2)
    return [
        (dispatch, (x, chosen, weights), several),
        (dispatch, (x, chosen), several),
        (dispatch, (x, chosen[:, :1], weights[:, :1]), several),
        (grouped_linear, (rows, up, mask)),
        (grouped_linear, (rows, up, mask, bias)),
        (grouped_linear, (rows, _randn(num_experts, hidden, inner), mask), {"transposed": True}),
        (combine, (rows, mask)),
    ]


def reductions() -> list[Call]:
    calls: list[Call] = [
        (torch.sum, (X,)),
        (torch.mean, (_scalar(),)),
        (torch.Tensor.sum, (X, -1, True)),
        (torch.sum, (X, (0, 2))),
        (torch.nansum, (X, 1)),
        (torch.count_nonzero, (_ints(2, 4, 5), 1)),
        (torch.mean, (X,)),
        (torch.mean, (X, -1, True)),
        (torch.Tensor.mean, (X, (0, 2))),
        (torch.std, (X, 1)),
        (torch.Tensor.var, (X, -1, False, True)),
        (torch.var, (X,), {"unbiased": False}),
        (torch.var_mean, (X, 1), {"correction": 0}),
        (torch.std_mean, (X, (0, 1))),
        (torch.amax, (X, (1, 2))),
        (torch.amin, (X, 1, True)),
        (torch.aminmax, (X,), {"dim": 1}),
        (torch.any, (X > 1, 1)),
        (torch.all, (X > -1,)),
        (torch.all, (X > -1,), {"dim": (), "keepdim": True}),
        (torch.sum, (X,), {"dim": ()}),
        (torch.argmax, (X, 1)),
        (torch.argmin, (X,)),
        (torch.nanmean, (X, 1)),
        (torch.prod, (X, 1)),
        (torch.max, (X,)),
        (torch.max, (X, 1)),
        (torch.max, (X, _randn(6, 1))),
        (torch.min, (X, 2, True)),
        (torch.median, (X, 1)),
        (torch.nanmedian, (X, 1)),
        (torch.mode, (_ints(4, 4, 6).double(),)),
        (torch.kthvalue, (X, 2, 1)),
        (torch.quantile, (X, 0.3, 1)),
        (torch.quantile, (X, _rand(2), 1, True)),
        (torch.nanquantile, (X, 0.5)),
        (torch.histc, (X,), {"bins": 4, "min": -2, "max": 2}),
        (torch.histc, (X.detach(), 4)),
        (torch.norm, (X,), {"dim": 1}),
        (torch.Tensor.norm, (X,)),
        (torch.linalg.vector_norm, (X, 3, (1,))),
        (torch.linalg.norm, (X,), {"dim": 2, "keepdim": True}),
        (torch.linalg.norm, (X, "nuc", (1, 2))),
        (torch.cumsum, (X, 1)),
        (torch.cumprod, (X, 1)),
        (torch.logcumsumexp, (X, 1)),
        (torch.cummax, (X, 1)),
        (torch.cummin, (X, 2)),
        (torch.topk, (X, 3)),
        (torch.sort, (X, 1)),
        (torch.argsort, (X, 1)),
        (torch.renorm, (X, 2, 1, 1.0)),
        (torch.softmax, (X, -1)),
        (F.softmax, (X,), {"dim": 0}),
        (F.log_softmax, (_randn(4, 5),)),  # without a dim
        (torch.log_softmax, (X, 1)),
        (F.softmin, (X, 1)),
        (torch._safe_softmax, (X, 1)),
        (torch.logsumexp, (X, 1)),
        (torch.logsumexp, (X, (0, 2), True)),
        (torch.cdist, (_randn(3, 4, 5), _randn(6, 5))),
        (F.cosine_similarity, (X, _randn(6, 7)), {"dim": -1}),
        (F.pairwise_distance, (_randn(4, 5), _randn(4, 5))),
    ]
    return calls


def norms() -> list[Call]:
    image, c = _randn(4, 6, 5), 6
    return [
        (F.layer_norm, (X, (7,), _randn(7), _randn(7))),
        (F.layer_norm, (X, (6, 7))),
        (F.rms_norm, (X, (7,), _randn(7))),
        (F.group_norm, (image, 3, _randn(c), _randn(c))),
        (F.batch_norm, (image, _rand(c), _rand(c), _randn(c), _randn(c)), {"training": True}),
        (F.batch_norm, (image, None, None), {"training": True}),
        (F.batch_norm, (image, _rand(c), _rand(c), _randn(c), _randn(c))),
        (F.instance_norm, (image,), {"weight": _randn(c), "bias": _randn(c)}),
        (F.instance_norm, (image, _rand(c), _rand(c))),
        (F.local_response_norm, (image, 2)),
        (F.normalize, (X,), {"dim": -1}),
        (torch._weight_norm, (X, _randn(1, 6, 1), 1)),
        (torch._weight_norm, (_randn(1, 7), _randn(1, 1))),
        (torch._weight_norm, (X, _randn(1)[0], -1)),
    ]


def attention() -> list[Call]:
    sdpa = F.scaled_dot_product_attention
    q, k, v = _randn(3, 4, 6, 3), _randn(3, 4, 5, 3), _randn(3, 4, 5, 4)
    return [
        (sdpa, (q, k, v)),
        (sdpa, (q, k, v, _randn(1, 1, 6, 5))),
        (sdpa, (q, k, v, _randn(3, 1, 1, 5) > -1)),
        (sdpa, (q, q, q), {"is_causal": True}),
        (sdpa, (q, k, v), {"is_causal": True, "scale": 0.3}),
        (
            sdpa,
            (_randn(2, 4, 5, 3), _randn(2, 2, 5, 3), _randn(2, 2, 5, 3)),
            {"is_causal": True, "enable_gqa": True},
        ),
        (sdpa, (_randn(2, 8, 4, 3), _randn(2, 4, 5, 3), _randn(2, 4, 5, 3)), {"enable_gqa": True}),
        (
            sdpa,
            (_randn(2, 6, 4, 3), _randn(2, 2, 5, 3), _randn(2, 2, 5, 3), _randn(6, 4, 5)),
            {"enable_gqa": True},
        ),
        *(
            (
                sdpa,
                (_randn(2, 4, 5, 3), _randn(2, keys, 5, 3), _randn(2, values, 5, 2)),
                {"is_causal": True, "enable_gqa": True},
            )
            for keys, values in [(2, 4), (4, 2)]
        ),
        (sdpa, (_randn(6, 3), _randn(5, 3), _randn(5, 3))),
        (sdpa, (q, k, v), {"dropout_p": 0.5}),
        (sdpa, (q, q, q), {"dropout_p": 0.5, "is_causal": True}),
        (sdpa, (q, k, v, _randn(4, 6, 5)), {"dropout_p": 0.5}),
        # one number for all keys of a query: of each sample, which changes nothing but gradients
        (sdpa, (q, k, v, _randn(3, 1, 6, 1))),
        *attention_where_calls(),
    ]


def attention_where_calls() -> list[Call]:
    q, k, v = _randn(3, 4, 9, 3), _randn(3, 2, 9, 3), _randn(3, 2, 9, 3)
    place = torch.arange(9)
    rows, columns = place[:, None], place[None, :]
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0, 1, 1, 1, 1, 1, 1, 2, 2]])
    counts = torch.tensor([[1] * 9, [0, 0] + [1] * 7, [1, 1, 0, 1, 1, 1, 1, 1, 0]]).bool()
    within = (documents[:, None, :, None], documents[:, None, None, :])
    window = (3, 5, 1, 4, 1, 1), (5, 9, 3, 9, 1, 0)
    return [
        # windows, packed documents, documents of all samples, padding with a hole
        (attention_where, (q, k, v, (rows, rows - 3), (columns, columns), ("le", "gt"))),
        (attention_where, (q, k, v, (within[0], rows), (within[1], columns), ("eq", "le"))),
        (attention_where, (q, k, k, (rows // 4,), (columns // 4,), ("eq",)), {"scale": 0.3}),
        (attention_where, (q, q, q, (rows, 1), (columns, counts[:, None, None]), ("le", "eq"))),
        # what follows from sizes, sinks, capped scores
        (attention_where, (q, k, v), {"bands": ((0, 3, 0, 1, 0, 1), *window)}),
        (
            attention_where,
            (q, k, v, (rows,), (columns,), ("le",), _randn(4)),
            {"cap": 2.0, "bands": ((0, 9, 0, 9, 0, 0),)},
        ),
        # masks as they are: added behind a cap, and beside sinks that take the weight of a query
        # without keys
        (attention_where, (q, k, v, (), (), (), None, _randn(4, 9, 9)), {"cap": 2.0}),
        (attention_where, (q, k, v, (), (), (), _randn(4), counts[:, None, :, None])),
    ]


def images() -> list[Call]:
    x1, x2, x3 = _randn(3, 4, 6), _randn(3, 4, 5, 6), _randn(2, 4, 3, 4, 3)
    return [
        (F.conv1d, (x1, _randn(6, 4, 3), _randn(6))),
        (F.conv2d, (x2, _randn(6, 4, 3, 3), _randn(6)), {"padding": 1}),
        (F.conv2d, (_randn(4, 5, 6), _randn(6, 4, 3, 3), _randn(6)), {"padding": "same"}),
        (F.conv2d, (x2, _randn(6, 2, 3, 3), _randn(6)), {"groups": 2}),
        (F.conv1d, (x1, _randn(8, 1, 3)), {"groups": 4}),
        (F.conv3d, (x3, _randn(3, 4, 2, 2, 2))),
        (F.conv_transpose1d, (x1, _randn(4, 5, 3), _randn(5))),
        (F.conv_transpose2d, (x2, _randn(4, 3, 3, 3), _randn(6)), {"groups": 2, "stride": 2}),
        (F.conv_transpose3d, (x3, _randn(4, 3, 2, 2, 2))),
        (F.interpolate, (x2,), {"scale_factor": 2.0, "mode": "bilinear"}),
        (F.interpolate, (x1,), {"size": 4}),
        (F.grid_sample, (x2, _rand(3, 4, 5, 2)), {"align_corners": False}),
        (F.affine_grid, (_randn(3, 2, 3), (3, 4, 5, 6)), {"align_corners": False}),
        (F.unfold, (x2, 3)),
        (F.fold, (_randn(3, 2 * 9, 12), (5, 6), 3)),
        (F.pixel_shuffle, (_randn(2, 12, 3, 4), 2)),
        (F.pixel_unshuffle, (_randn(2, 3, 4, 6), 2)),
        (F.channel_shuffle, (_randn(2, 6, 3, 4), 2)),
        (F.max_pool1d, (x1, 2)),
        (F.max_pool2d, (x2, 2), {"return_indices": True}),
        (F.max_pool2d, (x2, 2)),
        (F.max_pool3d, (x3, 2)),
        (F.max_pool1d_with_indices, (x1, 2)),
        (F.max_pool2d_with_indices, (x2, 2)),
        (F.max_pool3d_with_indices, (x3, 2)),
        (F.avg_pool1d, (x1, 2)),
        (F.avg_pool2d, (x2, 2)),
        (F.avg_pool3d, (x3, 2)),
        (F.adaptive_avg_pool1d, (x1, 2)),
        (F.adaptive_avg_pool2d, (x2, 1)),
        (F.adaptive_avg_pool3d, (x3, 1)),
        (F.adaptive_max_pool1d, (x1, 2)),
        (F.adaptive_max_pool2d, (x2, 2)),
        (F.adaptive_max_pool3d, (x3, 2)),
        (F.adaptive_max_pool1d_with_indices, (x1, 2)),
        (F.adaptive_max_pool2d_with_indices, (x2, 2)),
        (F.adaptive_max_pool3d_with_indices, (x3, 2)),
        (F.lp_pool1d, (x1, 2, 2)),
        (F.lp_pool2d, (x2, 2, 2)),
        (F.lp_pool3d, (x3, 2, 2)),
    ]


def edges() -> list[Call]:
    """Calls that read beyond the piece of a rank: of one neighbour and of several, with padding at
    either end, and on ranks that make nothing.
    """
    short, line, image = _randn(2, 3, 4), _randn(2, 3, 9), _randn(1, 2, 5, 6)
    some = _ints(9, 3, 7)
    return [
        (F.conv1d, (line, _randn(2, 3, 3), _randn(2)), {"stride": 2, "padding": 1}),
        (F.conv1d, (short, _randn(3, 1, 4)), {"padding": 3, "groups": 3}),  # causal, then cut off
        (F.conv1d, (short, _randn(2, 3, 3)), {"padding": "same", "dilation": 3}),
        (F.conv1d, (_randn(3, 2), _randn(2, 3, 2), _randn(2)), {"padding": "same"}),
        (F.conv2d, (image, _randn(2, 2, 3, 4)), {"padding": "same", "dilation": (1, 2)}),
        (F.conv_transpose1d, (short, _randn(3, 2, 2), _randn(2)), {"stride": 2}),
        (F.conv_transpose1d, (short, _randn(3, 2, 1)), {"stride": 3, "output_padding": 2}),
        (
            F.conv_transpose1d,
            (line, _randn(3, 2, 3)),
            {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
        ),
        (F.max_pool1d, (line, 3), {"stride": 2, "padding": 1, "ceil_mode": True}),
        (F.max_pool2d, (image, 2), {"dilation": 2, "stride": 1}),
        (F.avg_pool1d, (line, 2), {"ceil_mode": True}),
        (F.avg_pool1d, (line, 3), {"stride": 2, "padding": 1}),
        (
            F.avg_pool2d,
            (image, 3),
            {"stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True},
        ),
        (F.avg_pool2d, (image, 2), {"divisor_override": 3}),
        (F.lp_pool1d, (line, 2, 3), {"ceil_mode": True}),
        (F.adaptive_avg_pool1d, (line, 3)),
        (F.adaptive_avg_pool2d, (_randn(1, 2, 4, 2), (2, 1))),
        (F.adaptive_max_pool1d, (line, 3)),
        (F.interpolate, (_randn(1, 2, 3, 2),), {"scale_factor": 2}),
        (F.interpolate, (short,), {"size": 16, "mode": "linear"}),
        (torch.Tensor.__getitem__, (line, (slice(None), slice(None), slice(None, -1)))),
        (torch.Tensor.__getitem__, (line, (0, slice(None), None, slice(2, None, 3)))),
        (torch.Tensor.__getitem__, (line, (slice(None), -1, slice(-1, None)))),
        (torch.Tensor.__getitem__, (some, (slice(None), slice(1, None)))),
        (torch.Tensor.__getitem__, (some > 3, (0, slice(1, None)))),
        (torch.narrow, (line, 2, 2, 6)),
        (torch.select, (line, 2, -2)),
        (F.pad, (line, (3, 0))),
        (F.pad, (short, (2, -3, 1, 1)), {"value": 1.5}),
        (torch.flip, (line, [2])),
        (torch.roll, (short, (-9, 1), (2, 0))),
        (torch.Tensor.unfold, (line, 2, 3, 2)),
        (F.group_norm, (_randn(2, 4, 2, 3), 2, _randn(4), _randn(4))),
        *_scans(),
    ]


def _scans() -> list[Call]:
    zeros, infinite = _randn(2, 7).detach(), _randn(2, 7).detach()
    zeros[0, 2] = zeros[1, 0] = zeros[1, 5] = 0.0
    infinite[0, :3] = -torch.inf
    return [
        (torch.cumsum, (_randn(2, 2), 1)),
        (torch.cumsum, (_ints(9, 2, 7) > 3, -1)),
        (torch.cumprod, (zeros.requires_grad_(), 1)),
        (torch.logcumsumexp, (infinite.requires_grad_(), 1)),
    ]


def tables() -> list[Call]:
    return [
        (F.embedding, (IDS, _randn(7, 6))),
        (F.embedding, (IDS, _randn(8, 6)), {"padding_idx": 3}),
        (F.embedding, (IDS, _randn(8, 6)), {"scale_grad_by_freq": True}),
        (F.embedding, (IDS, _randn(8, 6)), {"sparse": True}),
        (F.embedding_bag, (IDS, _randn(8, 6))),
        (F.embedding_bag, (IDS, _randn(8, 6)), {"mode": "sum", "per_sample_weights": _randn(4, 5)}),
        (F.embedding_bag, (IDS, _randn(8, 6)), {"mode": "max"}),
        (F.embedding_bag, (IDS, _randn(8, 6)), {"mode": "sum", "sparse": True}),
        (F.one_hot, (IDS, 8)),
        (F.embedding, (IDS, _randn(7, 6)), {"padding_idx": -1}),
    ]


def _reductions_of(function: Any, args: tuple[Any, ...], **kwargs: Any) -> list[Call]:
    return [
        (function, args, {**kwargs, "reduction": reduction})
        for reduction in ("mean", "sum", "none")
    ]


def losses() -> list[Call]:
    x, y, p = _randn(4, 5), _randn(4, 5), _rand(4, 5)
    chances = _rand(4, 5).requires_grad_()
    signs = _ints(2, 4).double() * 2 - 1
    logits, images = _randn(5, 7), _randn(4, 6, 3)
    classes, labels = _ints(7, 5), _ints(6, 4, 3)
    classes[1] = labels[0, 1] = -100  # ignored
    calls = [
        *_reductions_of(F.mse_loss, (x, y)),
        (F.mse_loss, (x, y), {"size_average": False}),
        *_reductions_of(F.l1_loss, (x, y)),
        *_reductions_of(F.smooth_l1_loss, (x, y)),
        *_reductions_of(F.huber_loss, (x, y)),
        *_reductions_of(F.binary_cross_entropy, (chances, p), weight=_rand(5)),
        *_reductions_of(
            F.binary_cross_entropy_with_logits, (x, p), pos_weight=_rand(5), weight=_rand(4, 1)
        ),
        *_reductions_of(F.kl_div, (x, p)),
        (F.kl_div, (x, p), {"reduction": "batchmean"}),
        *_reductions_of(F.poisson_nll_loss, (x, p)),
        *_reductions_of(F.gaussian_nll_loss, (x, y, _rand(4, 5) + 0.1)),
        (F.gaussian_nll_loss, (x, y, _rand(4) + 0.1)),
        (F.gaussian_nll_loss, (x, y, _rand(4, 1) + 0.1)),
        *_reductions_of(F.soft_margin_loss, (x, _ints(2, 4, 5).double() * 2 - 1)),
        *_reductions_of(F.hinge_embedding_loss, (x, _ints(2, 4, 5).double() * 2 - 1)),
        *_reductions_of(F.margin_ranking_loss, (_randn(4), _randn(4), signs)),
        *_reductions_of(F.cosine_embedding_loss, (x, y, signs)),
        *_reductions_of(F.triplet_margin_loss, (x, y, _randn(1, 5))),
        (F.triplet_margin_loss, (x, y, _randn(4, 1))),
        *_reductions_of(F.multi_margin_loss, (x, _ints(5, 4)), weight=_rand(5)),
        *_reductions_of(F.multilabel_margin_loss, (x, _ints(5, 4, 5))),
        *_reductions_of(
            F.multilabel_soft_margin_loss, (_randn(3, 4, 5), _rand(3, 4, 5)), weight=_rand(5)
        ),
        (F.multilabel_soft_margin_loss, (x, p), {"weight": _rand(4, 1)}),
        *_reductions_of(F.nll_loss, (logits, classes), weight=_rand(7)),
        (F.nll_loss, (images, labels), {"ignore_index": -100, "weight": _rand(6)}),
        (registry.get("row_weights"), (classes, _rand(7))),
        (registry.get("row_weights"), (labels,), {"ignore_index": 3}),
        *_reductions_of(F.cross_entropy, (logits, classes), weight=_rand(7), label_smoothing=0.1),
        *_reductions_of(F.cross_entropy, (logits, classes)),
        *_reductions_of(F.cross_entropy, (images, labels)),
        *_reductions_of(
            F.cross_entropy, (logits, _rand(5, 7)), weight=_rand(7), label_smoothing=0.1
        ),
        (F.cross_entropy, (images, _randn(4, 6, 3).detach().softmax(1).requires_grad_())),
        (F.cross_entropy, (_randn(7), torch.tensor(3))),
    ]
    return calls


def linear_losses() -> list[Call]:
    """A linear layer with its loss, which torch has from 2.13: all rows at once, and in chunks of
    which the last is shorter.
    """
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        return []
    x, matrix, bias = _randn(5, 4), _randn(7, 4), _randn(7)
    classes = _ints(7, 5)
    classes[1] = -100  # ignored
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    weighted = {"weight": _rand(7), "options": chunks}
    return [
        (function, (x, matrix, classes), {"linear_bias": bias, "label_smoothing": 0.1}),
        (function, (x, matrix, classes), {"linear_bias": bias, "options": chunks}),
        (function, (x, matrix, classes), weighted),
        (function, (x, matrix, classes), {**weighted, "reduction": "sum"}),
        (function, (x, matrix, classes), {"reduction": "none", "options": chunks}),
        (function, (x, matrix, _rand(5, 7).softmax(-1))),
        (function, (x[0], matrix, classes[0])),
    ]


def random() -> list[Call]:
    double = {"dtype": torch.float64}
    image = _randn(4, 6, 3, 3)
    return [
        (F.dropout, (X, 0.4)),
        (F.dropout, (X, 0.4, False)),
        (F.dropout1d, (_randn(4, 6, 3),)),
        (F.dropout2d, (image,)),
        (F.dropout3d, (_randn(2, 6, 2, 2, 2),)),
        (F.alpha_dropout, (X, 0.4, True)),
        (F.feature_alpha_dropout, (image, 0.4, True)),
        (F.rrelu, (X,), {"training": True}),
        (F.gumbel_softmax, (X,)),
        (F.gumbel_softmax, (X,), {"hard": True, "dim": 1}),
        (torch.rand, (4, 5), double),
        (torch.randn, ((4, 5),), double),
        (torch.randint, (9, (4, 5))),
        (torch.rand_like, (X,)),
        (torch.randn_like, (X,)),
        (torch.randint_like, (X, 2, 9)),
        (torch.bernoulli, (_rand(4, 5),)),
        (torch.Tensor.bernoulli_, (_rand(4, 5), 0.3)),
        (torch.normal, (_randn(4, 5), _rand(5))),
        (torch.normal, (0.0, 1.0, (4, 5)), double),
        (torch.multinomial, (_rand(4, 5), 3)),
        (torch.Tensor.normal_, (_rand(4, 5), 1.0, 2.0)),
        (torch.Tensor.uniform_, (_rand(4, 5), -1.0, 2.0)),
        (torch.Tensor.exponential_, (_rand(4, 5),)),
    ]


def recurrent() -> list[Call]:
    x, h, c = _randn(3, 4, 5), _randn(1, 4, 6), _randn(1, 4, 6)

    def weights(gates: int) -> list[torch.Tensor]:
        return [_randn(6 * gates, 5), _randn(6 * gates, 6), _randn(6 * gates), _randn(6 * gates)]

    rest = (True, 1, 0.0, False, False, False)
    return [
        (torch.lstm, (x, (h, c), weights(4), *rest)),
        (torch.lstm, (x.transpose(0, 1), (h, c), weights(4), *rest[:-1], True)),
        (torch.gru, (x, h, weights(3), *rest)),
        (torch.rnn_tanh, (x, h, weights(1), *rest)),
        (torch.rnn_relu, (x, h, weights(1), *rest)),
        (torch.lstm_cell, (x[0], (h[0], c[0]), *weights(4))),
        (torch.gru_cell, (x[0], h[0], *weights(3))),
        (torch.rnn_tanh_cell, (x[0], h[0], *weights(1))),
        (torch.rnn_relu_cell, (x[0], h[0], *weights(1)[:2])),
    ]


# fmt: off
UNARY = [
    "abs", "acos", "angle", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad",
    "digamma", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "floor", "frac", "i0", "isfinite", "isinf", "isnan",
    "isneginf", "isposinf",
    "isreal", "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit", "nan_to_num",
    "neg", "positive",
    "rad2deg", "real", "reciprocal", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin",
    "sinc", "sinh", "sqrt",
    "square", "tan", "tanh", "trunc", "clone", "detach", "conj", "conj_physical", "resolve_conj",
    "resolve_neg",
]
SPECIAL = [
    "bessel_j0", "bessel_j1", "entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr", "ndtr", "ndtri",
]
ACTIVATIONS = [
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish",
    "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
]
BINARY = [
    "add", "atan2", "copysign", "div", "eq", "float_power", "fmax", "fmin", "fmod", "ge", "gt",
    "hypot", "isclose",
    "ldexp", "le", "logaddexp", "logaddexp2", "logical_and", "logical_or", "logical_xor", "lt",
    "maximum", "minimum",
    "mul", "ne", "nextafter", "pow", "remainder", "rsub", "sub", "xlogy",
]
INTEGERS = [
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "gcd",
    "lcm",
]
# fmt: on


def pointwise() -> list[Call]:
    p, q, row, n = (
        _rand(3, 5).requires_grad_(),
        _rand(3, 1).requires_grad_(),
        _rand(5).requires_grad_(),
        _ints(6, 3, 5) + 1,
    )
    mask = _rand(3, 5) > 0.5
    return [
        *[(getattr(torch, name), (p,)) for name in UNARY],
        *[(getattr(torch.special, name), (p,)) for name in SPECIAL],
        *[(getattr(F, name), (p,)) for name in ACTIVATIONS],
        *[(getattr(torch, name), (p, q)) for name in BINARY],
        *[(getattr(torch, name), (n, n[:, :1])) for name in INTEGERS],
        (torch.bitwise_not, (n,)),
        (torch.acosh, (p.detach() + 1,)),
        (torch.special.zeta, (n + 1, n[:, :1])),
        (torch.floor_divide, (n, n[:, :1])),
        (torch.heaviside, (n - 3, n[0])),
        (torch.special.xlog1py, (p, q)),
        (torch.polygamma, (1, p)),
        (F.threshold, (p, 0.5, 0.0)),
        (F.prelu, (_randn(3, 5), row)),
        (F.glu, (_randn(3, 6),)),
        (torch.clamp, (p, 0.2, 0.7)),
        (torch.clamp_min, (p, q)),
        (torch.clamp_max, (p, 0.6)),
        (torch.lerp, (p, row, q)),
        (torch.complex, (p, row)),
        (torch.polar, (p, row)),
        (torch.imag, (torch.complex(p, q).detach(),)),
        (torch.view_as_real, (torch.complex(p, q).detach(),)),
        (torch.view_as_complex, (_rand(3, 4, 2).requires_grad_(),)),
        (torch.addcmul, (p, row, q), {"value": 2}),
        (torch.addcdiv, (p, row, q)),
        (torch.where, (mask, p, row)),
        (torch.masked_fill, (p, mask, 0.0)),
        (torch.Tensor.to, (p, torch.float32)),
        (torch.Tensor.to, (n.to(torch.uint8), torch.float64)),  # partial ones wrap around
        (torch.Tensor.contiguous, (p,)),
        (torch.alias_copy, (p,)),
    ]


def new_tensors() -> list[Call]:
    f64 = {"dtype": torch.float64}
    return [
        (torch.zeros, (4, 5), f64),
        (torch.ones, ((4, 5),), f64),
        (torch.full, ((4, 5), 2.0), f64),
        (torch.Tensor.new_zeros, (X, (4, 5))),
        (torch.zeros_like, (X,)),
        (torch.arange, (1, 12, 2)),
        (torch.eye, (4, 5), f64),
        (torch.tril_indices, (4, 5)),
        (torch.triu_indices, (4, 5)),
        (torch.linspace, (0, 1, 7), f64),
        (torch.logspace, (0, 1, 7), f64),
    ]


def indexed() -> list[Call]:
    table, i, j = _randn(6, 4, 5), _ints(6, 3), _ints(4, 3)
    places = _ints(4, 6, 3, 5)
    rows = torch.randperm(6, generator=_GENERATOR)[:4]
    getitem, put = torch.Tensor.__getitem__, torch.index_put
    return [
        (getitem, (table, (slice(None), slice(1, 3), 2))),
        (getitem, (table, (Ellipsis, None, slice(None, None, 2)))),
        (getitem, (table, (slice(None, None, 2), slice(1, 4, 2)))),
        (getitem, (table, (slice(2, None, 3), slice(-3, None, 2)))),
        (getitem, (table, i)),
        (getitem, (table, (i, j))),
        (getitem, (table, (slice(None), j))),
        (torch.index_select, (table, 1, j)),
        (torch.gather, (table, 1, places)),
        (torch.take_along_dim, (table, places), {"dim": 1}),
        (torch.take, (table, i)),
        (torch.narrow, (table, 0, 1, 3)),
        (torch.select, (table, 1, 2)),
        (torch.isin, (i, j)),
        (torch.isin, (2, j)),
        (torch.bucketize, (_rand(4, 5), torch.tensor([0.2, 0.5], dtype=torch.float64))),
        (torch.scatter, (table, 1, places, _randn(6, 3, 5))),
        (torch.scatter_add, (table, 1, places, _randn(6, 3, 5))),
        (torch.scatter_reduce, (table, 1, places, _randn(6, 3, 5), "sum")),
        (torch.index_add, (table, 0, i, _randn(3, 4, 5))),
        (torch.index_copy, (table, 0, rows, _randn(4, 4, 5))),
        (torch.index_fill, (table, 1, j, 0.0)),
        (torch.slice_scatter, (table, _randn(6, 2, 5), 1, 1, 3)),
        (torch.select_scatter, (table, _randn(6, 5), 1, 2)),
        (torch.diagonal_scatter, (_randn(4, 5, 5), _randn(4, 5), 0, 1, 2)),
        (put, (table, (rows,), _randn(4, 4, 5))),
        (registry.get("index_put_dims"), (table, (None, rows[:3] % 4), _randn(6, 3, 5))),
        (torch.masked_scatter, (table, table > 0, _randn(6, 4, 5))),
    ]


def views() -> list[Call]:
    x, square = _randn(4, 3, 6), _randn(3, 5, 5)
    return [
        (torch.Tensor.view, (x, 4, 3, 2, 3)),
        (torch.reshape, (x, (12, 6))),
        (torch.flatten, (x, 1)),
        (torch.unflatten, (x, 2, (2, 3))),
        (torch.squeeze, (_randn(4, 1, 5),)),
        (torch.unsqueeze, (x, 1)),
        (torch.transpose, (x, 0, 2)),
        (torch.t, (square[0],)),
        (torch.adjoint, (X,)),
        (torch.permute, (x, (2, 0, 1))),
        (torch.movedim, (x, 0, 2)),
        (torch.Tensor.expand, (_randn(3, 1), 4, 3, 5)),
        (torch.broadcast_tensors, (_randn(3, 1), _randn(5))),
        (torch.Tensor.repeat, (x, 2, 1, 1)),
        (torch.repeat_interleave, (x, 2, 1)),
        (torch.meshgrid, (_randn(3), _randn(4)), {"indexing": "ij"}),
        (torch.cat, ((x, _randn(4, 5, 6)), 1)),
        (torch.stack, ((x, _randn(4, 3, 6)), 1)),
        (torch.stack, ([nn.Parameter(_randn(3, 2)) for _ in range(4)],)),
        (torch.split, (x, 2, 2)),
        (torch.split, (x, (2, 4), 2)),
        (torch.chunk, (x, 4, 2)),  # three, which are empty on some of three ranks
        (torch.tensor_split, (x, 2, 0)),
        (torch.tensor_split, (x, torch.tensor([1, 3]))),
        (torch.unbind, (x, 1)),
        (torch.roll, (x, 1, 1)),
        (torch.flip, (x, (1,))),
        (torch.tril, (square,)),
        (torch.triu, (square,)),
        (F.pad, (x, (1, 2))),
        (torch.diff, (x,)),
        (torch.diagonal, (square, 0, 1, 2)),
        (torch.diag_embed, (_randn(3, 4),)),
        (torch.Tensor.unfold, (x, 2, 3, 1)),
    ]


def fourier() -> list[Call]:
    x, z = (
        _randn(4, 5, 8),
        torch.randn(4, 5, 8, dtype=torch.complex128, generator=_GENERATOR).requires_grad_(),
    )
    one_dim, two_dims = ("fft", "ifft", "rfft", "ihfft"), ("fft2", "ifft2", "rfft2", "ihfft2")
    return [
        *((getattr(torch.fft, name), (x,)) for name in (*one_dim, *two_dims)),
        *((getattr(torch.fft, name), (z,)) for name in ("irfft", "hfft", "irfft2", "hfft2")),
        (torch.fft.irfft, (z, 7, 1)),
        (torch.fft.fft, (x,), {"dim": 0, "norm": "ortho"}),
        (torch.fft.fftn, (x,), {"dim": (0, 2)}),
        (torch.fft.irfftn, (z, (4, 6))),
        *((getattr(torch.fft, name), (x, None, (1, 2))) for name in ("ifftn", "rfftn", "ihfftn")),
        (torch.fft.hfftn, (z, None, (1, 2))),
        (torch.fft.fftshift, (x, 1)),
        (torch.fft.ifftshift, (x,)),
        (torch.fft.fftfreq, (6,), {"dtype": torch.float64}),
        (torch.fft.rfftfreq, (6,), {"dtype": torch.float64}),
        (torch.stft, (_randn(3, 32), 8), {"window": _rand(8), "return_complex": True}),
        (torch.stft, (_randn(32), 8), {"window": _rand(8), "return_complex": True}),
        (torch.istft, (torch.view_as_complex(_randn(3, 5, 9, 2)), 8), {"window": 1 + _rand(8)}),
    ]


def matrices() -> list[Call]:
    a, tall, b = _randn(4, 3, 3), _randn(4, 5, 3), _randn(4, 3, 2)
    positive = (a @ a.mT + 5 * torch.eye(3, dtype=torch.float64)).detach().requires_grad_()
    triangle = {"upper": True}
    return [
        *(
            (getattr(torch.linalg, name), (positive,))
            for name in ("cholesky", "inv", "det", "slogdet", "eigh", "eigvalsh")
        ),
        *((getattr(torch.linalg, name), (tall,)) for name in ("qr", "svdvals", "pinv")),
        (torch.linalg.svd, (tall, False)),
        (torch.inverse, (positive,)),
        (torch.Tensor.det, (_randn(2, 4, 3, 3),)),
        (torch.logdet, (positive,)),
        (torch.matrix_exp, (a,)),
        (torch.matrix_power, (a, 3)),
        (torch.trace, (_randn(4, 4),)),
        (torch.linalg.solve, (positive, b)),
        (torch.linalg.solve, (positive[:1].detach(), b)),
        (torch.linalg.solve, (positive[0].detach(), _randn(3, 4))),
        (torch.linalg.solve, (positive[0].detach(), _randn(3))),
        (torch.linalg.solve, (positive, _randn(4, 2, 3)), {"left": False}),
        (torch.linalg.solve_triangular, (positive, b), triangle),
    ]


EXAMPLES: dict[str, list[Call]] = {
    function.__name__: function()
    for function in (
        pointwise,
        new_tensors,
        indexed,
        views,
        checks,
        products,
        experts,
        reductions,
        norms,
        attention,
        images,
        edges,
        tables,
        losses,
        linear_losses,
        random,
        recurrent,
        fourier,
        matrices,
    )
}
