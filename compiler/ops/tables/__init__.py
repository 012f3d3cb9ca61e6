"""The operator tables, one file per kind of operator.

They name torch's functions as they stand in torch, also where a program has replaced some of them
before it first imports this package.
"""

import warnings

from shardwright.compiler.ops.definitions import CALLABLES
from shardwright.compiler.ops.originals import names_of, unpatched

with unpatched() as _stand_ins:
    from shardwright.compiler.ops.tables import (
        attention,
        cast,
        conv,
        create,
        dropout,
        embedding,
        experts,
        fourier,
        guards,
        indexing,
        joining,
        linalg,
        loss,
        matmul,
        norm,
        pointwise,
        pooling,
        positions,
        recurrent,
        reduction,
        shape,
        stepped,
    )

    NAMES = names_of(CALLABLES)
    """The names in torch of every operator."""

__all__ = [
    "NAMES",
    "attention",
    "cast",
    "conv",
    "create",
    "dropout",
    "embedding",
    "experts",
    "fourier",
    "guards",
    "indexing",
    "joining",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "pooling",
    "positions",
    "recurrent",
    "reduction",
    "shape",
    "stepped",
]

_lost = [name for function, name in _stand_ins.items() if CALLABLES.pop(function, None)]
if _lost:
    warnings.warn(
        f"{', '.join(_lost)} had been replaced before the first compile\n"
        "  why:   the function of torch that stood there cannot be found: where it is "
        "called, its operator has no rule\n"
        "  try:   import shardwright.compiler.ops.tables before it is replaced",
        stacklevel=2,
    )
