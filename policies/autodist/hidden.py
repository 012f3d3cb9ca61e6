"""What of the sums of gradients a bound may count where they run beside the backward (``use_async_reducer``).

Placements are found, and bounded, for a step whose parts come one after the other: ``W`` s of forwards and backwards, ``R`` s
of sums of gradients, ``O`` s of the optimizer. Beside the backward some of ``R`` is hidden; no plan avoids what is left:

- on one position sums run beside the last of ``m`` backwards, which takes no more than ``W / m``. At most ``min(R, W / m)`` is
  hidden, so that the step takes at least ``m / (m + 1)`` of ``W + R + O``;
- on a position with several stages the sums of one run beside the others' actions. The step takes at least ``max(W, R) + O``,
  half of all;
- on a position with one stage nothing is hidden: it ends with its last backward.
"""

from __future__ import annotations

from shardwright.runtime.config import ComputeConfig


def left_in_bound(config: ComputeConfig, num_positions: int, most_chunks: int, num_microbatches: int) -> float:
    """The share of a bound that holds in any case. ``most_chunks``: the stages that a position has at most."""
    if not config.use_async_reducer:
        return 1.0
    if num_positions == 1:
        return num_microbatches / (num_microbatches + 1)
    return 0.5 if most_chunks > 1 else 1.0
