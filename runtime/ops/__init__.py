"""Operators that generated code calls in the place of PyTorch's, because a split factor or a draw
concerns other ranks.

They take PyTorch's arguments in PyTorch's order, then keywords: for each factor that may be split
the axis groups that split it, major to minor (``class_axes=(tp,)``), global counts and offsets, and
for random operators what names the draw. Without any of them they compute what PyTorch's operator
does.
"""

from shardwright.runtime.ops.attention import causal_attention, scaled_dot_product_attention
from shardwright.runtime.ops.batch_norm import batch_norm
from shardwright.runtime.ops.cross_entropy import cross_entropy, nll_loss
from shardwright.runtime.ops.dropout import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
)
from shardwright.runtime.ops.embedding import embedding
from shardwright.runtime.ops.experts import combine, dispatch, grouped_linear, grouped_mm
from shardwright.runtime.ops.guards import all_chosen, only_finite, unclamped
from shardwright.runtime.ops.layer_norm import layer_norm, rms_norm
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
from shardwright.runtime.ops.softmax import log_softmax, logsumexp, softmax
from shardwright.runtime.ops.stacking import stacked

__all__ = [
    "all_chosen",
    "alpha_dropout",
    "batch_norm",
    "bernoulli",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "causal_attention",
    "combine",
    "cosine_embedding_loss",
    "cross_entropy",
    "dispatch",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "embedding",
    "exponential_like",
    "feature_alpha_dropout",
    "gaussian_nll_loss",
    "grouped_linear",
    "grouped_mm",
    "gru",
    "gumbel_softmax",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "lstm",
    "margin_ranking_loss",
    "mean",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multinomial",
    "nll_loss",
    "normal",
    "normal_like",
    "only_finite",
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
    "rrelu",
    "scaled_dot_product_attention",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "stacked",
    "triplet_margin_loss",
    "unclamped",
    "uniform_like",
]
