"""Experts of transformers: their one interface, answered by operators that know experts as a dim.

A model of transformers runs its experts through a registry of functions, of which its config names
one: a loop over experts that were hit, products by groups, batches of gathered weights. All compute
the same. For the time of a trace every name means :func:`routed_experts`.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from shardwright.compiler.ops.stand_ins import combine, dispatch, grouped_linear
from shardwright.runtime.errors import TraceError

REGISTRY = "transformers.integrations.moe"


def experts_interface() -> Any:
    """The class of transformers' registry of functions that run experts, if it is loaded."""
    return getattr(sys.modules.get(REGISTRY), "ExpertsInterface", None)


def experts_function(registry: Any, implementation: str | None, default: Any) -> Any:
    """What stands in the place of the registry's ``get_interface``."""
    as_loop = implementation in (None, "eager")

    def run(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return routed_experts(module, x, chosen, weights, autocast=as_loop)

    return run


def routed_experts(
    module: Any, x: Tensor, chosen: Tensor, weights: Tensor, *, autocast: bool
) -> Tensor:
    """What the experts of ``module`` make of the rows ``x [tokens, hidden]`` that were sent to
    them. ``chosen``, ``weights``: ``[tokens, top_k]``. ``autocast``: whether their products follow
    autocast, as those of the loop do.
    """
    if module._is_expert_parallel:
        raise TraceError(
            f"the experts of a {type(module).__name__} are split over ranks by transformers",
            hint="load the model without a distributed_config, and let a policy split them",
        )
    rows, gains, routing = dispatch(x, chosen, weights, num_experts=module.num_experts)
    if module.has_gate:
        rows = _product(module, "gate_up_proj", rows, routing, autocast=autocast)
        rows = module._apply_gate(rows)
    else:
        rows = module.act_fn(_product(module, "up_proj", rows, routing, autocast=autocast))
    rows = _product(module, "down_proj", rows, routing, autocast=autocast)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    rows = rows * gains.unsqueeze(-1)
    # Weights in float32 make rows of float32. These are summed so, and sent in the model's dtype.
    narrow = x.dtype if x.dtype.itemsize < rows.dtype.itemsize else None
    y = combine(rows, routing, dtype=narrow)
    return y.to(x.dtype)


def _product(module: Any, name: str, rows: Tensor, routing: Tensor, *, autocast: bool) -> Tensor:
    weight, transposed = getattr(module, name), bool(module.is_transposed)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    rows = grouped_linear(rows, weight, routing, bias, transposed=transposed, autocast=autocast)
    return rows
