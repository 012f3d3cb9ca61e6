"""ZeRO-3: parameters stored in pieces over the units, on top of what the plan stores in pieces
anyway.

Units run copies of the program on batches of their own, so along them every parameter is used whole
and its gradient is a summand: G. Stored S over the units, as if they were one more mesh axis, it is
gathered before its uses, and its gradient arrives reduce-scattered: what is left to the reducer are
the groups of units that hold copies. The same holds for the axes of the plan on which a parameter
is G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import ZERO, Layout, Mesh

LARGE_VECTOR = 2**16
"""Vectors of fewer elements stay whole: norms and biases are a thousandth of a model, and each
would be a collective.
"""

NEARLY_BEST = 1.1
"""Among the ways to cut a tensor whose largest pieces are at most this much above the smallest, the
first dim is taken.
"""


def settled_config(plan: Plan, config: ComputeConfig) -> ComputeConfig:
    """The config with the stage of ZeRO that the plan says, where it leaves it to the plan.

    Raises:
        PlanError: the plan says none, or another one than the config.
        ConfigError: other settings do not go with the stage.
    """
    stage = plan.zero_stage
    if config.leaves_zero_to_plan:
        if stage is None:
            raise PlanError(
                "the plan says no stage of ZeRO",
                why=f"use_zero='auto' leaves it to the plan, and policy {plan.policy!r} chose none",
                hint="policy 'autodist' searches it; else name a stage, use_zero=0 to 3",
            )
        return config.with_zero(stage)
    if stage is not None and stage != config.zero_stage:
        raise PlanError(
            f"the plan was chosen for stage {stage} of ZeRO",
            why=f"use_zero is {config.use_zero!r}, and time and memory of the plan are those of "
            f"stage {stage}",
            hint=f"use_zero={stage}, or use_zero='auto' for what the plan says",
        )
    return config


def units_of_storage(config: ComputeConfig) -> int:
    """Over how many units the config has parameters stored: ``Plan.zero``."""
    return config.num_units // config.zero_ngroups if config.use_zero == 3 else 0


def in_pieces(layout: Layout, axes: Sequence[str], mesh: Mesh, num_units: int) -> Layout:
    """How a parameter is stored: ``layout`` cut along ``axes`` of ``mesh``, on which it is whole
    and its gradient a summand, and over the units. The result is a layout of
    ``mesh.over_units(num_units)``.
    """
    if (
        num_units > 1 and ZERO not in layout.cut_axes
    ):  # a stage that shares it, or the training body, was first
        axes = (*axes, ZERO)
    kept = tuple(axis for axis in layout.grad_partial if axis not in axes)
    return (
        cut_further(replace(layout, grad_partial=kept), axes, mesh.over_units(num_units))
        if axes
        else layout
    )


def is_large(value: IRValue) -> bool:
    """Whether it is worth cutting: matrices and what has more dims, and large vectors."""
    return len(value.shape) > 1 or prod(value.shape) >= LARGE_VECTOR


def cut_further(layout: Layout, axes: Sequence[str], mesh: Mesh) -> Layout:
    """``layout`` with ``axes`` cutting too, as the minor ones of the atom where that gives the
    smallest pieces.

    Of dims that do about as well the first one is taken: its pieces lie end to end, so that they
    are gathered in place.
    """
    layout = layout.normalized()
    first = dict.fromkeys(mesh.names, 0)  # its pieces are the largest
    found = []
    for dim, atoms in enumerate(layout.dims):
        for position, atom in enumerate(atoms):
            cut = replace(atom, axes=(*atom.axes, *axes))
            candidate = layout.with_dim(dim, (*atoms[:position], cut, *atoms[position + 1 :]))
            found.append((prod(candidate.local_shape(mesh, first)), candidate))
    smallest = min(size for size, _ in found)
    return next(candidate for size, candidate in found if size <= NEARLY_BEST * smallest)


def over_units(layout: Layout) -> Layout:
    """Where a tensor stored over the units is used: whole, its gradient a summand."""
    return replace(layout, grad_partial=tuple(sorted({*layout.grad_partial, ZERO})))
