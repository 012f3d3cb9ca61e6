"""Operators that generated code calls in the place of PyTorch's, because a split factor or a draw
concerns other ranks.

They take PyTorch's arguments in PyTorch's order, then keywords: for each factor that may be split
the axis groups that split it, major to minor (``class_axes=(tp,)``), global counts and offsets, and
for random operators what names the draw. Without any of them they compute what PyTorch's operator
does.
"""

from shardwright.runtime.ops.attention import scaled_dot_product_attention
from shardwright.runtime.ops.attention_where import attention_where
from shardwright.runtime.ops.batch_norm import batch_norm
from shardwright.runtime.ops.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from shardwright.runtime.ops.cross_entropy import cross_entropy, nll_loss, row_weights
from shardwright.runtime.ops.dropout import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
)
from shardwright.runtime.ops.embedding import embedding
from shardwright.runtime.ops.experts import combine, dispatch
from shardwright.runtime.ops.group_norm import group_norm
from shardwright.runtime.ops.grouped_products import grouped_linear, grouped_mm
from shardwright.runtime.ops.guards import all_chosen, only_finite, unclamped
from shardwright.runtime.ops.layer_norm import layer_norm, rms_norm
from shardwright.runtime.ops.linear_beside import addmm_beside, linear_beside
from shardwright.runtime.ops.linear_cross_entropy import linear_cross_entropy
from shardwright.runtime.ops.means import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding_loss,
    gaussian_nll_loss,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    margin_ranking_loss,
    mean,
    mse_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    multilabel_soft_margin_loss,
    poisson_nll_loss,
    smooth_l1_loss,
    soft_margin_loss,
    triplet_margin_loss,
)
from shardwright.runtime.ops.places import (
    flip,
    getitem,
    interpolate,
    narrow_dim,
    pad_dims,
    roll,
    select,
    unfold,
)
from shardwright.runtime.ops.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    lp_pool1d,
    lp_pool2d,
    lp_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from shardwright.runtime.ops.recurrent import gru, lstm, rnn_relu, rnn_tanh
from shardwright.runtime.ops.sampling import (
    bernoulli,
    exponential_like,
    gumbel_softmax,
    multinomial,
    normal,
    normal_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    rrelu,
    uniform_like,
)
from shardwright.runtime.ops.scans import cumprod, cumsum, logcumsumexp
from shardwright.runtime.ops.softmax import log_softmax, logsumexp, softmax
from shardwright.runtime.ops.split_attention import split_attention
from shardwright.runtime.ops.stacking import stacked

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "addmm_beside",
    "all_chosen",
    "alpha_dropout",
    "attention_where",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "bernoulli",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "combine",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cosine_embedding_loss",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "dispatch",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "embedding",
    "exponential_like",
    "feature_alpha_dropout",
    "flip",
    "gaussian_nll_loss",
    "getitem",
    "group_norm",
    "grouped_linear",
    "grouped_mm",
    "gru",
    "gumbel_softmax",
    "hinge_embedding_loss",
    "huber_loss",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linear_beside",
    "linear_cross_entropy",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "lp_pool1d",
    "lp_pool2d",
    "lp_pool3d",
    "lstm",
    "margin_ranking_loss",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mean",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multinomial",
    "narrow_dim",
    "nll_loss",
    "normal",
    "normal_like",
    "only_finite",
    "pad_dims",
    "poisson_nll_loss",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rms_norm",
    "rnn_relu",
    "rnn_tanh",
    "roll",
    "row_weights",
    "rrelu",
    "scaled_dot_product_attention",
    "select",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "split_attention",
    "stacked",
    "triplet_margin_loss",
    "unclamped",
    "unfold",
    "uniform_like",
]
