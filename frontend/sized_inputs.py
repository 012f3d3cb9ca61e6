"""Dummy arguments of another number of samples: what a model is traced with for microbatches of a
size that is not theirs.

Example: ``plan.json`` is for microbatches of 32 samples, counted by dim 0 of ``input_ids``. Dummy
arguments with ``input_ids`` of [2, 64] become [32, 64]: their two rows, sixteen times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.plan.plan import Plan
from shardwright.runtime import structure


def inputs_of_plan(dummy_args: Mapping[str, Any], plan: Plan) -> Mapping[str, Any]:
    """The arguments with as many samples as the plan's microbatches have, if it says how many."""
    if plan.batch is None:
        return dummy_args
    return resized(dummy_args, plan.batch.dims, plan.batch.samples)


def resized(dummy_args: Mapping[str, Any], dims: Mapping[str, int], samples: int) -> dict[str, Any]:
    """The arguments with so many samples: theirs, over and over again. What is one tensor in two
    places stays one.

    Arguments without such a dim stay as they are: a plan that names one is refused when it is
    compared with the traced model.
    """
    made: dict[tuple[int, int], Tensor] = {}

    def resize(path: str, leaf: Any) -> Any:
        dim = dims.get(path)
        if dim is None or not isinstance(leaf, Tensor) or dim >= leaf.ndim or not leaf.shape[dim]:
            return leaf
        # A trace tells two arguments that are one tensor from two equal ones.
        if (id(leaf), dim) not in made:
            # Repeated, never made up: indices and masks stay such as the model can take.
            rows = torch.arange(samples, device=leaf.device) % leaf.shape[dim]
            made[id(leaf), dim] = (
                leaf.detach().index_select(dim, rows).requires_grad_(leaf.requires_grad)
            )
        return made[id(leaf), dim]

    return {name: structure.map_leaves(value, resize, name) for name, value in dummy_args.items()}
