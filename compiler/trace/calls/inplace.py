"""In-place operators as functional ones.

A write to a tensor becomes a new value. A write to a view becomes a new value of the tensor that it
views, and so on up to the root. Other views of the same root take their values anew when they are
next read (:meth:`Recorder.current`).

Example: ``y = x[0]; y.add_(1); z = x + 1`` is recorded as three values. ``y1`` is ``x[0] + 1``,
``x1`` is ``x`` with ``y1`` in the place of row 0, and ``z`` is ``x1 + 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwright.compiler.ir.op import Arg, RankDevice
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace.recorder import CUTS, Call, Recorder, TensorType, Variable
from shardwright.runtime.errors import TraceError


class ParameterChanged(TraceError):
    """Forward changes a parameter in place."""


METADATA_CHANGES = (
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
)
"""In-place operators that change shape and strides but no element: the tensor becomes a view of its
former self.
"""

_TRANSPOSES = {"transpose", "swapaxes", "swapdims"}
_RESHAPES = {
    "view",
    "reshape",
    "view_as",
    "reshape_as",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "ravel",
    "_unsafe_view",
}
_IDENTITIES = {
    "detach",
    "data",
    "alias",
    "contiguous",
    "to",
    "float",
    "double",
    "type_as",
    "dropout",
    "Identity",
    "expand_as",
    "clone",
}


_SIGNS = {f"__i{sign}__": f"__{sign}__" for sign in ("and", "or", "xor", "lshift", "rshift")}
"""In-place forms of operators for which torch has no method that ends in ``_``."""


def functional_form(function: Any, name: str) -> Callable[..., Any] | None:
    """The function that computes what an in-place method writes: ``Tensor.add`` for
    ``Tensor.add_``.
    """
    if name in _SIGNS:
        return getattr(torch.Tensor, _SIGNS[name])  # type: ignore[no-any-return]
    if not name.endswith("_") or name.endswith("__"):
        return None
    base = name[:-1]
    for home in (torch.Tensor, torch, torch.nn.functional):
        if hasattr(home, base):
            return getattr(home, base)  # type: ignore[no-any-return]
    return None


def _uniform(x: torch.Tensor, from_: float = 0.0, to: float = 1.0) -> torch.Tensor:
    return _scaled(torch.rand_like(x), to - from_, from_)


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return _scaled(torch.randn_like(x), std, mean)


def _bernoulli(x: torch.Tensor, p: torch.Tensor | float = 0.5) -> torch.Tensor:
    return torch.bernoulli(p.expand_as(x) if isinstance(p, torch.Tensor) else torch.full_like(x, p))


def _exponential(x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    """Draw exponential numbers. None is zero, as code often divides by them or takes logarithms."""
    return _scaled(
        (-torch.log1p(-torch.rand_like(x))).clamp(min=torch.finfo(x.dtype).tiny), 1 / lambd, 0
    )


def _log_normal(x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _normal(x, mean, std).exp()


def _cauchy(x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return _scaled(torch.tan((torch.rand_like(x) - 0.5) * math.pi), sigma, median)


def _geometric(x: torch.Tensor, p: float) -> torch.Tensor:
    numbers = x if x.is_floating_point() else x.double()
    drawn = (
        torch.log1p(-torch.rand_like(numbers)) / math.log1p(-p)
        if p < 1
        else torch.ones_like(numbers)
    )
    return drawn.ceil().clamp(min=1).to(x.dtype)


def _random(x: torch.Tensor, from_: int = 0, to: int | None = None) -> torch.Tensor:
    """Draw integers from ``from_`` on and below ``to``; without ``to``, among all integers that the
    dtype holds exactly.
    """
    every = (
        round(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max
    )
    return torch.randint_like(x, from_, every if to is None else to)


CLAMPS = ("clamp_", "clip_", "clamp_min_", "clamp_max_")
"""In-place operators that change no number inside a range."""


def bounds(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The bounds between which ``x.clamp_(...)`` or another of :data:`CLAMPS` keeps ``x``; ``None``
    if a bound is no number.
    """
    first, second = (*args, None, None)[:2]
    low, high = kwargs.get("min", first), kwargs.get("max", second)
    if name == "clamp_max_":
        low, high = None, kwargs.get("max", first)
    return (
        (low, high)
        if all(bound is None or isinstance(bound, int | float) for bound in (low, high))
        else None
    )


DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "bernoulli_": _bernoulli,
    "exponential_": _exponential,
    "log_normal_": _log_normal,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "random_": _random,
}
"""The methods that draw random numbers in place, each with a function that makes the same of
operators which draw alike on all ranks.
"""


def drawn(
    name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The tensor that ``x.uniform_(...)`` or another method of :data:`DRAWS` leaves in ``x``."""
    named = {"from_" if key == "from" else key: value for key, value in kwargs.items()}
    if name == "random_" and len(args) == 1 and "to" not in named:
        args = (0, *args)
    return DRAWS[name](x, *args, **named)


def _scaled(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    x = x if factor == 1 else x * factor
    return x if shift == 0 else x + shift


def write(recorder: Recorder, variable: Variable, value: IRValue) -> None:
    """Let ``variable`` hold ``value``, and change everything that it is a view of accordingly.

    Raises :class:`TraceError` for parameters, for tensors captured from outside, and for views with
    no known inverse.
    """
    root = variable.root
    if recorder.is_parameter(root.value):
        raise ParameterChanged(
            f"forward changes the parameter {root.value.fqn} in place",
            where=recorder.where(),
            why="parameters are changed by the optimizer only; the gradient and every rank's "
            "copy would be wrong",
            hint="change a copy of it, or make it a buffer; turn off the setting that asks for it "
            "(rescale_every of RWKV)",
        )
    if root.value.name in recorder.captured:
        raise TraceError(
            f"forward changes the tensor {root.value.name} in place, which is neither "
            "parameter nor buffer",
            where=recorder.where(),
            why="the change would be lost between calls",
            hint="make it a buffer with register_buffer()",
        )
    if recorder.gets_gradient(root.value) and (by := _unseen(variable)):
        raise TraceError(
            f"forward changes a tensor in place {by}, and a gradient comes to it",
            where=recorder.where(),
            why="torch gives it the gradient of what was written, as if it had not been changed; "
            "no operator does that",
            hint="write x = x + (new - x).detach() where that is meant, else leave out no_grad "
            "and .data",
        )
    # The write goes up to the root, view by view. The root's version tells other views of it that
    # their values are old.
    if variable.parent is not None:
        assert variable.call is not None
        whole = recorder.current(variable.parent)
        write(recorder, variable.parent, _write_through(recorder, variable, whole, value))
    else:
        variable.version += 1
    variable.value = value
    variable.version = root.version


def _unseen(variable: Variable) -> str:
    """The way in which a write to ``variable`` hides from autograd, in words; empty if autograd
    sees it.
    """
    if not torch.is_grad_enabled():
        return "under no_grad"
    link: Variable | None = variable
    while link is not None:
        if link.call is not None and link.call.name in CUTS:
            return "through .data" if link.call.name == "data" else f"through .{link.call.name}()"
        link = link.parent
    return ""


def _write_through(recorder: Recorder, view: Variable, whole: IRValue, new: IRValue) -> IRValue:
    """``whole`` with the elements that ``view`` shows replaced by ``new``: the inverse of the call
    that made the view.
    """
    call = view.call
    assert call is not None
    like = TensorType(whole.shape, whole.dtype, whole.requires_grad or new.requires_grad)
    name, args = call.name, call.args
    if name in _IDENTITIES:
        return new
    if name in _RESHAPES:
        return recorder.emit_one(torch.Tensor.reshape, like, new, whole.shape)
    if name in _TRANSPOSES:
        return recorder.emit_one(
            torch.Tensor.transpose, like, new, call.arg(1, "dim0"), call.arg(2, "dim1")
        )
    if name in ("T", "t", "mT", "H", "mH", "permute"):
        order = _permutation(call, whole.ndim)
        inverse = tuple(order.index(dim) for dim in range(whole.ndim))
        return recorder.emit_one(torch.Tensor.permute, like, new, inverse)
    if name == "__getitem__":
        return assign(recorder, whole, args[1], new)
    if name == "select":
        return _scattered(
            recorder,
            torch.select_scatter,
            like,
            whole,
            new,
            call.arg(1, "dim"),
            call.arg(2, "index"),
        )
    if name == "narrow":
        dim, start, length = call.arg(1, "dim"), call.arg(2, "start"), call.arg(3, "length")
        return _scattered(
            recorder, torch.slice_scatter, like, whole, new, dim, start, start + length
        )
    if name in ("split", "chunk", "tensor_split", "split_with_sizes"):
        dim = call.kwargs.get("dim", args[2] if len(args) > 2 else 0)
        sizes = [sibling.value.shape[dim] for sibling in view.siblings]
        start = sum(sizes[: view.index])
        return _scattered(
            recorder, torch.slice_scatter, like, whole, new, dim, start, start + sizes[view.index]
        )
    if name == "unbind":
        return _scattered(
            recorder, torch.select_scatter, like, whole, new, call.arg(1, "dim", 0), view.index
        )
    if name == "diagonal":
        rest = tuple(
            call.arg(i, key, default)
            for i, key, default in ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))
        )
        return _scattered(recorder, torch.diagonal_scatter, like, whole, new, *rest)
    raise TraceError(
        f"an in-place operator changes a view made by {name}()",
        where=recorder.where(),
        why=f"there is no functional form of writing through {name}()",
        hint="write to the tensor itself by indexing (x[...] = y), or use torch.where",
    )


def _scattered(
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


def _permutation(call: Call, ndim: int) -> list[int]:
    if call.name == "permute":
        dims = call.kwargs.get("dims", call.args[1:])
        dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
        return [dim % ndim for dim in dims]
    if call.name in ("mT", "mH"):
        return [*range(ndim - 2), ndim - 1, ndim - 2]
    return list(reversed(range(ndim)))


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
    return _scattered(recorder, step.put.function, like, whole, part, *step.put.args)


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
    if all(isinstance(item, IRValue) or item == slice(None) for item in items):
        indices = tuple(item if isinstance(item, IRValue) else None for item in items)
        return recorder.emit_one(torch.ops.aten.index_put, like, whole, indices, value)
    raise TraceError(
        "an assignment mixes tensors with numbers or parts of dims in its index",
        where=recorder.where(),
        why="it has no functional form",
        hint="use torch.where, index_copy, scatter, or tensors for all dims",
    )
