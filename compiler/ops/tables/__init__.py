"""The operator tables, one file per kind of operator. Importing this package fills the registry."""

from shardwright.compiler.ops.tables import (
    pointwise,
)

__all__ = [
    "pointwise",
]
