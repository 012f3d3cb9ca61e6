"""ZeRO-3: parameters stored in pieces over the units, on top of what the plan stores in pieces
anyway.

Units run copies of the program on batches of their own. So along the units every parameter is used
whole, and its gradient is a summand: G. ZeRO-3 stores it S over the units, as if they were one more
mesh axis. Then it is gathered before its uses, and its gradient arrives reduce-scattered. The
reducer is left with the sums over groups of units that hold copies. The axes of the plan on which a
parameter is G are treated alike.

Example: a weight [768, 768] on 4 units is stored as [768/zero, 768], a quarter on each, and used as
[768, 768] G(zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO

LARGE_VECTOR = 2**16
"""The fewest elements of a vector that is cut. Norms and biases are a thousandth of a model, and
each of them would need a collective.
"""

NEARLY_BEST = 1.1
"""How much larger than the smallest the pieces may be if an earlier dim is cut (see
:func:`cut_further`).
"""


def settled_config(plan: Plan, config: ComputeConfig) -> ComputeConfig:
    """The config with its stage of ZeRO, which the plan says if the config leaves it to the plan.

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
    """The number of units over which the config stores parameters, for ``Plan.zero``."""
    return config.num_units // config.zero_ngroups if config.use_zero == 3 else 0


def in_pieces(layout: Layout, axes: Sequence[str], mesh: Mesh, num_units: int) -> Layout:
    """The layout in which a parameter is stored: ``layout`` cut along ``axes`` of ``mesh``, on
    which it is whole and its gradient a summand, and over the units. The result is a layout of
    ``mesh.over_units(num_units)``.
    """
    # A stage that shares it, or the training body, may have cut it over the units already.
    if num_units > 1 and ZERO not in layout.cut_axes:
        axes = (*axes, ZERO)
    kept = tuple(axis for axis in layout.grad_partial if axis not in axes)
    if not axes:
        return layout
    return cut_further(replace(layout, grad_partial=kept), axes, mesh.over_units(num_units))


def is_large(value: IRValue) -> bool:
    """Whether a tensor is worth cutting: a large vector, or anything of two or more dims."""
    return len(value.shape) > 1 or prod(value.shape) >= LARGE_VECTOR


def cut_further(layout: Layout, axes: Sequence[str], mesh: Mesh) -> Layout:
    """``layout`` with ``axes`` cutting too. They become the minor axes of the atom where that gives
    the smallest pieces.

    Of dims that do about as well the first one is taken: its pieces lie end to end, so they can be
    gathered in place.
    """
    layout = layout.normalized()
    found = []
    for dim, atoms in enumerate(layout.dims):
        for position, atom in enumerate(atoms):
            cut = replace(atom, axes=(*atom.axes, *axes))
            candidate = layout.with_dim(dim, (*atoms[:position], cut, *atoms[position + 1 :]))
            # 10 rows over 8 ranks leave one rank with 2, a fifth of all; another dim may cut
            # evenly.
            found.append((prod(candidate.largest_shape(mesh)), candidate))
    smallest = min(size for size, _ in found)
    return next(candidate for size, candidate in found if size <= NEARLY_BEST * smallest)


def over_units(layout: Layout) -> Layout:
    """The layout in which a tensor that is stored over the units is used: whole, and its gradient a
    summand.
    """
    return replace(layout, grad_partial=tuple(sorted({*layout.grad_partial, ZERO})))


def ranks_of_units(ranks: Sequence[int], num_units: int, unit_size: int) -> tuple[int, ...]:
    """The global ranks of the first units, each of which has ``ranks`` of its own."""
    if num_units == 1:
        return tuple(ranks)  # the same object, as there may be a million
    return tuple(unit * unit_size + rank for unit in range(num_units) for rank in ranks)
