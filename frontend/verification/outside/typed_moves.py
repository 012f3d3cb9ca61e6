"""The typing rules of adapters: how each changes the type along its axis.

Every rule is made of the transitions of ``spmd_types.rules``, which refuse an operand of another
type. Its backward follows from them, as that of our adapters does from their table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import spmd_types as spmd
from spmd_types import I, P, R, S, rules

from shardwright.frontend.verification.outside.spmd_layouts import (
    Typed,
    local_types,
    shard_axes,
    stand_in,
)
from shardwright.runtime import adapters, gathered_weights
from shardwright.runtime.ranks.groups import AxisGroup

Letter: TypeAlias = "spmd.PerMeshAxisSpmdType"


def moved(x: Typed, kind: str, axis: AxisGroup | str, src: Letter, dst: Letter) -> Typed:
    """``x`` after a transition along an axis, or along each of several joined ones."""
    names = axis.split("+") if isinstance(axis, str) else axis.name.split("+")
    # Axes that cut one dim leave it innermost first, as that is what the transitions take.
    for name in reversed(names):
        if name in local_types(x):
            x = ordered(getattr(rules, kind)(innermost(x, name), name, src=src, dst=dst))
    return x


def innermost(x: Typed, name: str) -> Typed:
    """``x``, whose axis ``name`` is the last of those that cut its dim.

    [Note: Order of axes] Our atoms say which part of a dim an axis cuts, so any of the axes may be
    gathered alone. A PartitionSpec only knows an order, and gives the last one free. So an order is
    no part of what is certified: it is changed where an axis is moved, and is that of the mesh
    elsewhere.
    """
    dims = shard_axes(x)
    if not any(name in axes[:-1] for axes in dims):
        return x
    rules.ignore(x)
    last = [(*(a for a in axes if a != name), name) if name in axes else axes for axes in dims]
    return stand_in(local_types(x), last)


def ordered(x: Typed) -> Typed:
    """``x`` with the axes of each dim in the order of the mesh."""
    order = list(spmd.current_mesh_names() or {})
    dims = shard_axes(x)
    canonical = [tuple(sorted(axes, key=order.index)) for axes in dims]
    return x if canonical == dims else stand_in(local_types(x), canonical)


def all_gather(*, x: Typed, axis: AxisGroup, dim: int, backward: str) -> Typed:
    dst = R if backward == "reduce_scatter" else I
    return moved(x, "all_gather", axis, S(dim), dst)


def all_gather_together(
    *, xs: tuple[Typed, ...], axis: AxisGroup, dim: int, backward: str
) -> tuple[Typed, ...]:
    return tuple(all_gather(x=x, axis=axis, dim=dim, backward=backward) for x in xs)


def narrow(*, x: Typed, axis: AxisGroup, dim: int, backward: str) -> Typed:
    src = I if backward == "all_gather" else R
    return moved(x, "convert", axis, src, S(dim))


def reduce_scatter(*, x: Typed, axis: AxisGroup, dim: int) -> Typed:
    return moved(x, "reduce_scatter", axis, P, S(dim))


def all_reduce(*, x: Typed, axis: AxisGroup, backward: str) -> Typed:
    return moved(x, "all_reduce", axis, P, R if backward == "all_reduce" else I)


def grad_all_reduce(*, x: Typed, axis: AxisGroup) -> Typed:
    return moved(x, "convert", axis, I, R)


def keep_one(*, x: Typed, axis: AxisGroup, backward: str) -> Typed:
    return moved(x, "convert", axis, R if backward == "keep_one" else I, P)


def grad_keep_one(*, x: Typed, axis: AxisGroup) -> Typed:
    return moved(x, "convert", axis, R, I)


def pad(*, x: Typed, axis: AxisGroup, dim: int) -> Typed:
    return moved(x, "convert", axis, S(dim), P)


def all_to_all(*, x: Typed, axis: AxisGroup, dim: int, to_dim: int) -> Typed:
    return moved(x, "all_to_all", axis, S(dim), S(to_dim))


def gathered(*, step: Any, pieces: tuple[Typed, ...]) -> tuple[Typed, ...]:
    """The rule of gathers of weights, one or several together."""
    dst = R if step.reduces else I
    return tuple(moved(x, "all_gather", step.axis, S(step.dim), dst) for x in pieces)


RULES: Mapping[type, Callable[..., Any]] = {
    adapters._AllGather: all_gather,
    adapters._AllGatherTogether: all_gather_together,
    adapters._Narrow: narrow,
    adapters._ReduceScatter: reduce_scatter,
    adapters._AllReduce: all_reduce,
    adapters._GradAllReduce: grad_all_reduce,
    adapters._KeepOne: keep_one,
    adapters._GradKeepOne: grad_keep_one,
    adapters._Pad: pad,
    adapters._AllToAll: all_to_all,
    gathered_weights._Gather: gathered,
}
"""The rule of each autograd function that moves a tensor between placements."""


@contextmanager
def typed_moves() -> Iterator[None]:
    """The autograd functions have their rules inside the ``with`` block."""
    for function, rule in RULES.items():
        function.spmd_typecheck = staticmethod(rule)  # type: ignore[attr-defined]
        spmd.register_autograd_function(function)
    try:
        yield
    finally:
        for function in RULES:
            del function.spmd_typecheck  # type: ignore[attr-defined]
