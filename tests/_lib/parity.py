"""Parity with one device, as an assertion. The bound is that of the product's own check; never
loosen it: a model that casts to float32 inside is run under :func:`precision.float64_casts`
instead.
"""

from __future__ import annotations

from typing import Any

from shardwright.frontend.verification.deviation import (
    BOUND,
    FLOOR,
    Deviation,
    deviations,
    largest,
    table,
    tensors_of,
)
from shardwright.frontend.verification.one_device import (
    OptimizerFactory,
    Reference,
    adamw,
    clone,
    load_buffers,
    reference_run,
)

__all__ = [
    "BOUND",
    "FLOOR",
    "Deviation",
    "OptimizerFactory",
    "Reference",
    "adamw",
    "assert_close_tree",
    "clone",
    "deviations",
    "largest",
    "load_buffers",
    "reference_run",
    "table",
    "tensors_of",
]


def assert_close_tree(ours: Any, reference: Any, kind: str = "tensors", *, show: int = 10) -> None:
    """Assert the parity bound on every tensor of two trees; all of them are of one ``kind``
    (losses, gradients, ...).

    Integers and booleans must be equal. Where something fails, the message is a table of the
    ``show`` worst tensors.

    Raises:
        AssertionError: a tensor is out of the bound, or the trees differ in structure.
    """
    found = deviations(ours, reference)
    failed = sum(deviation.excess > 1.0 for deviation in found)
    if failed:
        raise AssertionError(
            f"{failed} of {len(found)} {kind} out of the parity bound, worst "
            f"first\n{table(found[:show])}"
        )
