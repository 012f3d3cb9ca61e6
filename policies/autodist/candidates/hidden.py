"""What a bound may count of the sums of gradients that run beside the backward
(``use_async_reducer``, ``overlap_grad_sync``), and of the gatherings of parameters that run beside
the next forward (``overlap_param_sync``).

Placements are found, and bounded, for a step whose parts come one after the other: ``W`` s of
forwards and backwards, ``R`` s of sums and gatherings, ``O`` s of the optimizer. Beside the passes
some of ``R`` is hidden; no plan avoids what is left:

- on one position gatherings run beside the first of ``m`` forwards and sums beside the last of
  ``m`` backwards, which together take no more than ``W / m``. At most ``min(R, W / m)`` is hidden,
  so that the step takes at least ``m / (m + 1)`` of ``W + R + O``. With ZeRO-2 sums run beside
  every backward, and ``min(R, W)`` may be hidden: half;
- on a position with several stages the sums and gatherings of one run beside the others' actions.
  The step takes at least ``max(W, R) + O``, half of all;
- on a position with one stage no sums are hidden: it ends with its last backward. Its parameters
  are gathered while it waits for its first microbatch, which bounds of pipelines count, too. The
  step takes at least as long as either: half of both.
"""

from __future__ import annotations

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.zero.settings import ReductionSettings


def left_in_bound(
    config: ComputeConfig, num_positions: int, most_chunks: int, num_microbatches: int
) -> float:
    """The share of a bound that holds in any case. ``most_chunks``: the stages that a position has
    at most.
    """
    settings = ReductionSettings.of(config, config.num_units)
    if not (settings.asynchronous or settings.overlaps_parameters):
        return 1.0
    if num_positions == 1:
        in_every_pass = settings.asynchronous and settings.frees_gradients
        return 0.5 if in_every_pass else num_microbatches / (num_microbatches + 1)
    return 0.5 if most_chunks > 1 or settings.overlaps_parameters else 1.0
