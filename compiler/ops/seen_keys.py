"""Which keys the queries of an attention operator see, as far as that is known while compiling."""

from __future__ import annotations

from shardwright.compiler.ir.op import IROp
from shardwright.runtime.visible_keys import Band, Bands, all_keys, earlier_keys, pairs

GROWS = 1.25
"""The later half of the queries does so many times the work of the earlier one, or more."""


def seen_bands(op: IROp, num_queries: int, num_keys: int) -> Bands:
    """What is seen at most. Of marks that are known at run time only, a query is taken to see
    earlier keys where a mark of keys is at most one of queries, and else all.
    """
    bands = op.arg("bands")
    if bands is not None:
        return tuple(Band(*fields) for fields in bands)
    if op.arg("is_causal", False) or {"le", "lt"} & set(op.arg("comparisons", ())):
        return earlier_keys(num_queries, num_keys)
    return all_keys(num_queries, num_keys)


def is_told_late(op: IROp) -> bool:
    """Whether what is seen follows from marks with values that are known at run time only, such as
    lengths of documents. Then ranks even out their work in every step.
    """
    return any(name.startswith(("query_marks", "key_marks")) for name in op.operand_names)


def grows(op: IROp, num_queries: int, num_keys: int) -> bool:
    """Whether later queries see so many more keys that ranks with contiguous queries would have
    unequal work.
    """
    bands, half = seen_bands(op, num_queries, num_keys), num_queries // 2
    early = pairs(bands, ((0, half),))
    return pairs(bands, ((half, num_queries - half),)) > GROWS * early
