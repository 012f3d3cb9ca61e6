"""Writes to tensors, and through views to the tensors that they view.

A write to a tensor becomes a new value. A write to a view becomes a new value of the tensor that it
views, and so on up to the root. Other views of the same root take their values anew when they are
next read (:meth:`Recorder.current`).

Example: ``y = x[0]; y.add_(1); z = x + 1`` is recorded as three values. ``y1`` is ``x[0] + 1``,
``x1`` is ``x`` with ``y1`` in the place of row 0, and ``z`` is ``x1 + 1``.
"""

from __future__ import annotations

import torch

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace.calls.assignment import assign, scattered
from shardwright.compiler.trace.recorder import CUTS, Call, Recorder, TensorType, Variable
from shardwright.runtime.errors import TraceError


class ParameterChanged(TraceError):
    """Forward changes a parameter in place."""


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
    # The inverse of each kind of view, from those that show all elements to those that show a part.
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
        # order[i] is where dim i came from, so order.index(d) is where dim d has gone.
        inverse = tuple(order.index(dim) for dim in range(whole.ndim))
        return recorder.emit_one(torch.Tensor.permute, like, new, inverse)
    # Views of a part: the rest stays as it was.
    if name == "__getitem__":
        return assign(recorder, whole, args[1], new)
    if name == "select":
        return scattered(
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
        return scattered(
            recorder, torch.slice_scatter, like, whole, new, dim, start, start + length
        )
    # A piece begins where the pieces before it end.
    if name in ("split", "chunk", "tensor_split", "split_with_sizes"):
        dim = call.kwargs.get("dim", args[2] if len(args) > 2 else 0)
        sizes = [sibling.value.shape[dim] for sibling in view.siblings]
        start = sum(sizes[: view.index])
        return scattered(
            recorder, torch.slice_scatter, like, whole, new, dim, start, start + sizes[view.index]
        )
    if name == "unbind":
        return scattered(
            recorder, torch.select_scatter, like, whole, new, call.arg(1, "dim", 0), view.index
        )
    if name == "diagonal":
        rest = tuple(
            call.arg(i, key, default)
            for i, key, default in ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))
        )
        return scattered(recorder, torch.diagonal_scatter, like, whole, new, *rest)
    raise TraceError(
        f"an in-place operator changes a view made by {name}()",
        where=recorder.where(),
        why=f"there is no functional form of writing through {name}()",
        hint="write to the tensor itself by indexing (x[...] = y), or use torch.where",
    )


def _permutation(call: Call, ndim: int) -> list[int]:
    if call.name == "permute":
        dims = call.kwargs.get("dims", call.args[1:])
        dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
        return [dim % ndim for dim in dims]
    if call.name in ("mT", "mH"):
        return [*range(ndim - 2), ndim - 1, ndim - 2]
    return list(reversed(range(ndim)))
