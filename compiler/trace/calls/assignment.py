"""``x[index] = y`` as operators that make a new value of ``x``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwright.compiler.ir.op import Arg, RankDevice
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace.recorder import Recorder, TensorType
from shardwright.runtime.errors import TraceError


def assign(recorder: Recorder, whole: IRValue, index: Arg, new: Arg) -> IRValue:
    """``whole`` after ``whole[index] = new``."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, IRValue) for item in items):
        return _assign_mixed(recorder, whole, items, new)
    return _assign_basic(recorder, whole, _aligned(items, whole.ndim), 0, new)


def _aligned(items: tuple[Arg, ...], ndim: int) -> tuple[Arg, ...]:
    """The index without ``...`` and ``None``, one item per dim; a mask of several dims is one item
    for all of them.
    """
    given = [item for item in items if item is not None]
    missing = ndim - sum(_num_dims(item) for item in given if item is not Ellipsis)
    position = next((place for place, item in enumerate(given) if item is Ellipsis), len(given))
    return (*given[:position], *[slice(None)] * missing, *given[position + 1 :])


def _num_dims(item: Arg) -> int:
    """How many dims of a tensor one item of an index is for."""
    return item.ndim if isinstance(item, IRValue) and item.dtype == torch.bool else 1


def _assign_mixed(recorder: Recorder, whole: IRValue, items: tuple[Arg, ...], new: Arg) -> IRValue:
    """``whole`` after an assignment with tensors in the index: numbers and slices take a part out,
    as torch does it, which the tensors index; the part goes back.
    """
    if None in [item for item in items if not isinstance(item, IRValue)]:
        return _assign_by_tensors(recorder, whole, items, new)
    # One number or slice at a time: take the part, write into it by what is left, put it back.
    aligned, dim = _aligned(items, whole.ndim), 0
    for position, item in enumerate(aligned):
        if not isinstance(item, IRValue) and item != slice(None):
            step = _step(whole, item, dim)
            part = recorder.emit_one(step.take.function, step.part, whole, *step.take.args)
            kept = (slice(None),) if isinstance(item, slice) else ()
            rest = (*aligned[:position], *kept, *aligned[position + 1 :])
            return _put_back(recorder, whole, step, _assign_mixed(recorder, part, rest, new))
        dim += _num_dims(item)
    last = max(place for place, item in enumerate(aligned) if isinstance(item, IRValue))
    return _assign_by_tensors(recorder, whole, aligned[: last + 1], new)


class _Call(NamedTuple):
    """A call on the tensor that is assigned to."""

    function: Callable[..., Any]
    args: tuple[Arg, ...]


class _Step(NamedTuple):
    """Taking a part out of a tensor, and putting it back. ``part``: what it looks like; ``shift``:
    how many dims are left of the one that it was taken from.
    """

    take: _Call
    put: _Call
    part: TensorType
    shift: int


def _step(whole: IRValue, item: Arg, dim: int) -> _Step:
    """The step for a number or a slice in an index."""
    size = whole.shape[dim]
    # A slice keeps the dim, a number takes it out.
    if isinstance(item, slice):
        start, stop, step = _bounds(item, size)
        length = -((start - stop) // step) if step != 1 else stop - start
        shape, shift = (*whole.shape[:dim], length, *whole.shape[dim + 1 :]), 1
        bounds = (dim, start, stop, step) if step != 1 else (dim, start, stop)
        take = _Call(torch.Tensor.__getitem__, ((*[slice(None)] * dim, item),))
        put = _Call(torch.slice_scatter, bounds)
    else:
        shape, shift = (*whole.shape[:dim], *whole.shape[dim + 1 :]), 0
        take, put = (
            _Call(torch.Tensor.select, (dim, item)),
            _Call(torch.select_scatter, (dim, item)),
        )
    return _Step(take, put, TensorType(shape, whole.dtype, whole.requires_grad), shift)


def _put_back(recorder: Recorder, whole: IRValue, step: _Step, part: IRValue) -> IRValue:
    like = TensorType(whole.shape, whole.dtype, whole.requires_grad or part.requires_grad)
    return scattered(recorder, step.put.function, like, whole, part, *step.put.args)


def _assign_basic(
    recorder: Recorder, whole: IRValue, items: tuple[Arg, ...], dim: int, new: Arg
) -> IRValue:
    """Assign from dim ``dim`` on: what the first item takes out is assigned to by the rest, and put
    back.
    """
    while items and items[0] == slice(None):
        items, dim = items[1:], dim + 1
    if not items:
        return fitted(recorder, whole, new)
    item, rest = items[0], items[1:]
    step = _step(whole, item, dim)
    if all(other == slice(None) for other in rest):
        # The old part is overwritten as a whole: no need to read it.
        part = fitted(recorder, step.part, new)
    else:
        taken = recorder.emit_one(step.take.function, step.part, whole, *step.take.args)
        part = _assign_basic(recorder, taken, rest, dim + step.shift, new)
    return _put_back(recorder, whole, step, part)


def _bounds(item: slice, size: Any) -> tuple[Any, Any, Any]:
    if all(
        bound is None or isinstance(bound, int)
        for bound in (item.start, item.stop, item.step, size)
    ):
        return item.indices(size)
    start = 0 if item.start is None else item.start
    stop = size if item.stop is None else item.stop
    return _from_start(start, size), _from_start(stop, size), item.step or 1


def _from_start(bound: Any, size: Any) -> Any:
    """A bound counted from the start; one whose sign depends on a dynamic size is not negative."""
    negative = bound < 0 if isinstance(bound, int) else bound.is_negative
    return bound + size if negative else bound


def fitted(recorder: Recorder, like: IRValue | TensorType, new: Arg) -> IRValue:
    """What a copy of ``new`` holds: ``new`` with the dtype and shape of ``like``; a number becomes
    a full tensor.
    """
    shape, dtype = tuple(like.shape), like.dtype
    # A number fills a tensor of this shape.
    if not isinstance(new, IRValue):
        return recorder.emit_one(
            torch.full,
            TensorType(shape, dtype, False),
            shape,
            new,
            dtype=dtype,
            device=RankDevice(),
        )
    value = new
    # As torch's copy does it: cast first, then drop dims of size 1, then broadcast.
    if value.dtype != dtype:
        value = recorder.emit_one(
            torch.Tensor.to, TensorType(value.shape, dtype, value.requires_grad), value, dtype
        )
    if value.shape != shape:
        if value.ndim > len(shape):  # leading dims of size 1
            cut = value.shape[value.ndim - len(shape) :]
            value = recorder.emit_one(
                torch.Tensor.reshape, TensorType(cut, dtype, value.requires_grad), value, cut
            )
        if value.shape != shape:
            value = recorder.emit_one(
                torch.Tensor.expand, TensorType(shape, dtype, value.requires_grad), value, *shape
            )
    return value


def _assign_by_tensors(
    recorder: Recorder, whole: IRValue, items: tuple[Arg, ...], new: Arg
) -> IRValue:
    requires_grad = whole.requires_grad or isinstance(new, IRValue) and new.requires_grad
    like = TensorType(whole.shape, whole.dtype, requires_grad)
    mask = items[0]
    scalar = not isinstance(new, IRValue) or product(new.shape) == 1
    # ``x[mask] = number`` is ``masked_fill``, with the mask spelled out to all dims.
    if len(items) == 1 and isinstance(mask, IRValue) and mask.dtype == torch.bool and scalar:
        if mask.ndim < whole.ndim:
            shape = (*mask.shape, *[1] * (whole.ndim - mask.ndim))
            mask = recorder.emit_one(
                torch.Tensor.reshape, TensorType(shape, mask.dtype, False), mask, shape
            )
        if isinstance(new, IRValue) and new.ndim:
            new = recorder.emit_one(
                torch.Tensor.reshape, TensorType((), new.dtype, new.requires_grad), new, ()
            )
        return recorder.emit_one(torch.Tensor.masked_fill, like, whole, mask, new)
    # Everything else is ``index_put``, with a value of the target's dtype.
    value = (
        new
        if isinstance(new, IRValue)
        else fitted(recorder, TensorType((), whole.dtype, False), new)
    )
    if value.dtype != whole.dtype:
        value = recorder.emit_one(
            torch.Tensor.to,
            TensorType(value.shape, whole.dtype, value.requires_grad),
            value,
            whole.dtype,
        )
    if all(isinstance(item, IRValue) for item in items):
        return recorder.emit_one(torch.Tensor.index_put, like, whole, items, value)
    # ``None`` stands for a dim that is taken whole.
    if all(isinstance(item, IRValue) or item == slice(None) for item in items):
        indices = tuple(item if isinstance(item, IRValue) else None for item in items)
        return recorder.emit_one(torch.ops.aten.index_put, like, whole, indices, value)
    raise TraceError(
        "an assignment mixes tensors with numbers or parts of dims in its index",
        where=recorder.where(),
        why="it has no functional form",
        hint="use torch.where, index_copy, scatter, or tensors for all dims",
    )


def scattered(
    recorder: Recorder,
    scatter: Callable[..., Any],
    like: TensorType,
    whole: IRValue,
    part: IRValue,
    *args: Arg,
) -> IRValue:
    """``scatter(whole, part, *args)``. Complex numbers go by real and imaginary part, as torch's
    scatters have no gradient for them.
    """
    if not whole.dtype.is_complex:
        return recorder.emit_one(scatter, like, whole, part, *args)
    dtype = whole.dtype.to_real()
    halves = []
    # (real, imaginary) of the whole and of the part, scattered each by itself.
    for half in (torch.real, torch.imag):
        parts = [
            recorder.emit_one(half, TensorType(x.shape, dtype, x.requires_grad), x)
            for x in (whole, part)
        ]
        halves.append(
            recorder.emit_one(
                scatter, TensorType(like.shape, dtype, like.requires_grad), *parts, *args
            )
        )
    return recorder.emit_one(torch.complex, like, *halves)
