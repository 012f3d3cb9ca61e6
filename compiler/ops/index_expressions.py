"""Index expressions: what stands between the brackets of ``x[...]``, one item per dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.op import Arg
from shardwright.compiler.ir.size import Size, is_static, simplify
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import DimRefs, FactorKind, TensorRefs
from shardwright.compiler.ops.rule_builder import FREE, FROZEN, RuleBuilder, broadcast

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of an index. ``dim`` is the dim of the source that it reads; -1 for a new dim.

    ``kind``: ``full`` (all of the dim), ``strided`` (one place of every so many, all along it),
    ``slice`` (a part of it), ``int`` (a single place, also as a tensor without dims), ``new``
    (``None``), ``tensor`` (a tensor of places).
    """

    kind: str
    arg: Arg
    dim: int = -1


def read_index(index: Arg, shape: Shape) -> tuple[Item, ...] | None:
    """The items of an index into a tensor of this shape, one for each of its dims and new ones.

    ``None`` if the index holds truth values, slices bounded by tensors, or places written out in
    lists.
    """
    # ``x[i]`` is ``x[(i,)]``.
    args = index if isinstance(index, tuple) else (index,)
    if any(_is_opaque(arg) for arg in args):
        return None
    # `None` makes a dim and reads none, and an ellipsis stands for what is left over.
    num_read = sum(arg is not None and arg is not Ellipsis for arg in args)
    if num_read > len(shape):
        return None
    # Dims behind the index are taken whole.
    rest = (slice(None),) * (len(shape) - num_read)
    place = next((i for i, arg in enumerate(args) if arg is Ellipsis), len(args))
    items, dim = [], 0
    for arg in (*args[:place], *rest, *args[place + 1 :]):
        if arg is None:
            items.append(Item("new", None))
            continue
        items.append(Item(_kind(arg, shape[dim]), arg, dim))
        dim += 1
    return tuple(items)


def _is_opaque(arg: Arg) -> bool:
    if isinstance(arg, slice):
        return any(isinstance(bound, IRValue) for bound in (arg.start, arg.stop, arg.step))
    return isinstance(arg, bool | tuple | list) or (
        isinstance(arg, IRValue) and arg.dtype in (torch.bool, torch.uint8)
    )


def _kind(arg: Arg, size: Size) -> str:
    """The kind of an index of a dim of ``size``."""
    if isinstance(arg, slice):
        if arg.step in (None, 1) and _same(slice_bounds(arg, size), (0, size)):
            return "full"
        return "strided" if _is_strided(arg, size) else "slice"
    return "tensor" if isinstance(arg, IRValue) and arg.ndim > 0 else "int"


def _is_strided(bounds: slice, size: Size) -> bool:
    """Whether a slice takes the same place of every group of ``step``, and the groups make up the
    dim.
    """
    start, stop = slice_bounds(bounds, size)
    step = bounds.step or 1
    static = all(map(is_static, (start, stop, step, size)))
    return bool(
        static
        and step < size
        and size % step == 0
        and start == (bounds.start or 0) < step
        and stop == size
    )


def slice_bounds(bounds: slice, size: Size) -> tuple[Size, Size]:
    """``(start, stop)`` of a slice of a dim of this size, counted from the front."""

    def resolve(bound: Any, default: Size) -> Size:
        if bound is None:
            return default
        # A symbolic size is positive, so that sympy can tell the sign of most bounds.
        if (bound < 0) if is_static(bound) else bool(sympy.sympify(bound).is_negative):
            bound = simplify(size + bound)
        if is_static(bound) and is_static(size):
            return min(max(bound, 0), size)
        return simplify(bound)

    return resolve(bounds.start, 0), resolve(bounds.stop, size)


def slice_length(bounds: slice, size: Size) -> Size:
    """How many elements a slice takes of a dim of this size."""
    start, stop = slice_bounds(bounds, size)
    step = bounds.step or 1
    if is_static(start) and is_static(stop):
        return max(0, -(-(stop - start) // step))
    return simplify((stop - start + step - 1) // step)


def _same(left: tuple[Size, ...], right: tuple[Size, ...]) -> bool:
    return all(a == b or sympy.expand(a - b) == 0 for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True)
class Picked:
    """The factors of an indexing: of the source, of each index tensor in order, and of what is
    read.
    """

    source: TensorRefs
    indices: tuple[TensorRefs, ...]
    result: TensorRefs


def pick(
    build: RuleBuilder,
    items: Sequence[Item],
    shape: Shape,
    result: Shape | None = None,
    places: FactorKind = FREE,
) -> Picked:
    """The factors of reading ``items`` of a source of this shape; ``result`` is the shape read,
    where it is known.

    Dims read whole are free, and so are groups of which the same place is read. A dim that is
    sliced otherwise, or indexed by numbers or tensors, is frozen in the source: its places have
    meaning. ``places`` is the kind of the dims of index tensors.
    """
    source: list[DimRefs] = [()] * len(shape)
    read: list[DimRefs | Size] = []  # a size stands for a part of a dim
    positions: list[int] = []  # of the tensors, counted among all items that make dims
    for item in items:
        if item.kind == "new":
            read.append(())
            continue
        if item.kind == "full":
            source[item.dim] = build.dim(shape[item.dim])
            read.append(source[item.dim])
            continue
        if item.kind == "strided":
            groups = build.dim(shape[item.dim] // item.arg.step)
            source[item.dim] = (*groups, *build.dim(item.arg.step, FROZEN))
            read.append(groups)
            continue
        source[item.dim] = build.dim(shape[item.dim], FROZEN)
        if item.kind == "slice":
            read.append(slice_length(item.arg, shape[item.dim]))
        elif item.kind == "tensor":
            positions.append(len(read) + len(positions))
    tensors = [item.arg.shape for item in items if item.kind == "tensor"]
    together, refs_of_tensors = _broadcast(build, tensors, places)
    if positions:  # tensors side by side put their dims in their place, others in front of all
        # numpy's law of advanced indexing, which torch follows.
        side_by_side = positions == list(range(positions[0], positions[0] + len(positions)))
        at = positions[0] if side_by_side else 0
        read[at:at] = together
    dims = []
    for dim, refs in enumerate(read):
        if isinstance(refs, tuple):
            dims.append(refs)
        else:
            dims.append(build.dim(refs if result is None else result[dim], FROZEN))
    remaining = iter(refs_of_tensors)
    indices = tuple(
        next(remaining) if item.kind == "tensor" else ()
        for item in items
        if isinstance(item.arg, IRValue)
    )
    return Picked(tuple(source), indices, tuple(dims))


def _broadcast(
    build: RuleBuilder, shapes: Sequence[Shape], kind: FactorKind
) -> tuple[TensorRefs, list[TensorRefs]]:
    """The dims that tensors make together, and the factors of each."""
    ndim = max(map(len, shapes), default=0)
    sizes: list[Size] = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, start=ndim - len(shape)):
            sizes[dim] = size if sizes[dim] == 1 else sizes[dim]
    together = tuple(build.dim(size, kind) for size in sizes)
    return together, [broadcast(shape, together) for shape in shapes]
