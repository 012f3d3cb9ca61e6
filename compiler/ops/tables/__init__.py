"""The operator tables, one file per kind of operator. Importing this package fills the registry."""

from shardwright.compiler.ops.tables import (
    attention,
    conv,
    dropout,
    embedding,
    loss,
    matmul,
    norm,
    pointwise,
    pooling,
    recurrent,
    reduction,
)

__all__ = [
    "attention",
    "conv",
    "dropout",
    "embedding",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "pooling",
    "recurrent",
    "reduction",
]
