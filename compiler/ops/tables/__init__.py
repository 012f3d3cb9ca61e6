"""The operator tables, one file per kind of operator. Importing this package fills the registry."""

from shardwright.compiler.ops.tables import (
    attention,
    cast,
    conv,
    create,
    dropout,
    embedding,
    indexing,
    loss,
    matmul,
    norm,
    pointwise,
    pooling,
    recurrent,
    reduction,
    shape,
)

__all__ = [
    "attention",
    "cast",
    "conv",
    "create",
    "dropout",
    "embedding",
    "indexing",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "pooling",
    "recurrent",
    "reduction",
    "shape",
]
