"""Elements chosen by a mask, ``x[mask]``: how many they are depends on values, so that no graph can
hold them.

What they are read for mostly needs no number of them: a sum, a mean or a loss over the chosen
elements is one over all, in which the others do not count. So a selection stays unmade until it is
read, and the functions of :data:`READERS` read it by operators on the whole tensor and the mask.
:data:`ELEMENTWISE` ones of selections by one mask are selections again. Whatever else reads it
needs the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.errors import TraceError

_HARMLESS = 0.5
"""What stands in places that were not chosen: functions, losses and their derivatives are finite
there. An operator of which they are not would make a gradient that is no number of one that is
zero.
"""


@dataclass(frozen=True)
class Selection:
    """``whole[mask]``. ``mask`` has the leading dims of ``whole``; ``mask_name`` is equal for equal
    masks.

    ``error``: why it cannot be made, and where the user's code asks for it. ``place``: which dim of
    the mask this is the index of, for ``torch.where(mask)[place]``.
    """

    whole: Tensor
    mask: Tensor
    mask_name: str
    error: TraceError
    place: int | None = None

    @property
    def row(self) -> torch.Size:
        """The shape of what one true element of the mask chooses."""
        return self.whole.shape[self.mask.ndim :]

    def of(self, whole: Tensor) -> Selection:
        """What the mask chooses of another tensor."""
        return Selection(whole, self.mask, self.mask_name, self.error)

    def filled(self, value: float) -> Tensor:
        """The whole with ``value`` in the places that were not chosen."""
        return self.whole.masked_fill(self.rows_of(self.mask.logical_not()), value)

    def row_dim(self, dim: int) -> int | None:
        """The dim of the whole that a dim of ``whole[mask]`` is, counted from the end; ``None`` for
        dim 0, which no tensor has.
        """
        counted = dim if dim < 0 else dim - 1 - len(self.row)
        return counted if -len(self.row) <= counted < 0 else None

    def rows_of(self, mask: Tensor) -> Tensor:
        """A tensor like the mask with dims of size 1 for those of a row."""
        return mask[(..., *[None] * len(self.row))] if self.row else mask

    def chosen_first(self) -> Tensor:
        """All elements in one row, those that are chosen in front and in their order: what they are
        in ``whole[mask]``.
        """
        dropped = self.mask.logical_not().flatten()
        # The chosen are 0, the dropped 1: a stable sort moves the chosen to the front and keeps
        # their order.
        order = dropped.to(torch.int64).argsort(stable=True)
        return self.whole.flatten(0, self.mask.ndim - 1)[order].flatten()

    def count(self) -> Tensor:
        """The number of chosen elements."""
        rows = self.mask.sum()
        return rows * math.prod(self.row) if self.row else rows

    def harmless(self) -> Tensor:
        """The whole with a number in the places that were not chosen that nothing divides by zero
        for, or the like.
        """
        return self.filled(
            _HARMLESS if self.whole.is_floating_point() or self.whole.is_complex() else 1
        )


def _sum(
    input: Selection, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dims = _dims(input, dim, keepdim)
    return NotImplemented if dims is None else input.filled(0).sum(dims, dtype=dtype)


def _mean(
    input: Selection, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dims = _dims(input, dim, keepdim)
    if dims is None:
        return NotImplemented
    count = input.count() if dim is None else input.mask.sum()
    return input.filled(0).sum(dims, dtype=dtype) / count


def _dims(selection: Selection, dim: Any, keepdim: bool) -> tuple[int, ...] | None:
    """The dims of the whole that a sum over all of a selection, or over its first dim, is taken
    over.
    """
    count = {
        None: selection.whole.ndim,
        0: selection.mask.ndim,
        # Dim 0 of ``whole[mask]``, counted from the end.
        -1 - len(selection.row): selection.mask.ndim,
    }
    (dim,) = dim if isinstance(dim, tuple | list) and len(dim) == 1 else (dim,)
    return (
        None
        if keepdim or isinstance(dim, tuple | list) or dim not in count
        else tuple(range(count[dim]))
    )


def _same_rows(*tensors: Any) -> bool:
    """Whether all are selections by one mask."""
    return (
        all(isinstance(x, Selection) for x in tensors) and len({x.mask_name for x in tensors}) == 1
    )


def _reduced(losses: Selection, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return {"sum": _sum, "mean": _mean}[reduction](losses)


def _elementwise(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """The reader of a loss that compares elements with elements."""

    def read(input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        if (
            args
            or not _same_rows(input, target)
            or any(isinstance(x, Tensor | Selection) for x in kwargs.values())
        ):
            return NotImplemented
        return _reduced(
            input.of(loss(input.harmless(), target.harmless(), reduction="none", **kwargs)),
            reduction,
        )

    return read


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    **kwargs: Any,
) -> Any:
    if not _same_rows(input, target) or len(input.row) != 1 or target.row:
        return NotImplemented
    # What was not chosen is a label that is ignored, so it counts neither in the sum nor in the
    # mean.
    logits, classes = input.filled(0), target.filled(ignore_index)
    options = {"weight": weight, "ignore_index": ignore_index, **kwargs}
    if reduction != "none":
        return F.cross_entropy(
            logits.flatten(0, -2), classes.flatten(), reduction=reduction, **options
        )
    return input.of(F.cross_entropy(logits.movedim(-1, 1), classes, reduction="none", **options))


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    **kwargs: Any,
) -> Any:
    """The loss of targets that lie end to end: the targets of each sample begin where those of the
    samples before it end.
    """
    if (
        not isinstance(targets, Selection)
        or not isinstance(target_lengths, Tensor)
        or targets.mask.ndim != 2
        or targets.row
    ):
        return NotImplemented
    chosen_first = targets.chosen_first()
    starts = target_lengths.cumsum(0) - target_lengths
    # [samples, longest]: the targets of each sample as a row; what lies behind its own is not read.
    places = starts[:, None] + torch.arange(targets.mask.shape[1], device=starts.device)
    rows = chosen_first[places.clamp(max=chosen_first.shape[0] - 1)]
    return F.ctc_loss(log_probs, rows, input_lengths, target_lengths, blank, reduction, **kwargs)


def _numel(input: Selection) -> Tensor:
    """A tensor in the place of a number: it can be compared in a check, and computed with."""
    return input.count()


def _masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    if (
        isinstance(input, Selection)
        or isinstance(mask, Selection)
        or not isinstance(source, Selection)
    ):
        return NotImplemented
    return input.masked_scatter(mask, source.chosen_first())


READERS: dict[str, Callable[..., Any]] = {
    "numel": _numel,
    "masked_scatter": _masked_scatter,
    "sum": _sum,
    "mean": _mean,
    "cross_entropy": _cross_entropy,
    "ctc_loss": _ctc_loss,
    **{
        loss.__name__: _elementwise(loss)
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)
    },
    "binary_cross_entropy_with_logits": _elementwise(F.binary_cross_entropy_with_logits),
}
"""The functions that may get a :class:`Selection` for a tensor, by name. They return
``NotImplemented`` where they need its size.
"""


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Any:
    plain = isinstance(input, Selection) and isinstance(weight, Tensor) and input.row
    return input.of(F.linear(input.harmless(), weight, bias)) if plain else NotImplemented


def _matmul(input: Any, other: Any) -> Any:
    # A matrix with more dims would pair them with the rows.
    is_matrix = isinstance(other, Tensor) and other.ndim == 2
    if not isinstance(input, Selection) or not is_matrix or not input.row:
        return NotImplemented
    return input.of(input.harmless().matmul(other))


def _norm(norm: Callable[..., Tensor]) -> Callable[..., Any]:
    """``F.layer_norm`` or ``F.rms_norm``, over dims of a row."""

    def of_rows(input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Selection) or len(normalized_shape) > len(input.row):
            return NotImplemented
        return input.of(norm(input.harmless(), normalized_shape, *args, **kwargs))

    return of_rows


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    # A table that is scaled where it is read, or by how often, would see rows that are not there.
    looks_at_all = max_norm is not None or scale_grad_by_freq
    if not isinstance(input, Selection) or not isinstance(weight, Tensor) or looks_at_all:
        return NotImplemented
    # Row 0 in the place of ids that were not chosen, which may be outside of the table.
    return input.of(F.embedding(input.filled(0), weight, padding_idx, sparse=sparse))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function along a dim of each row."""

    def of_rows(
        input: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None, _stacklevel: int = 3
    ) -> Any:
        (dim,) = dim if isinstance(dim, tuple | list) and len(dim) == 1 else (dim,)
        if not isinstance(input, Selection) or type(dim) is not int:
            return NotImplemented
        along = input.row_dim(dim)
        if along is None:
            return NotImplemented
        options = {"keepdim": True} if keepdim else {}
        options |= {} if dtype is None else {"dtype": dtype}
        return input.of(function(input.harmless(), along, **options))

    return of_rows


def _parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """``chunk`` and ``split`` along a dim of each row."""

    def of_rows(input: Any, size: Any, dim: int = 0) -> Any:
        along = input.row_dim(dim) if isinstance(input, Selection) else None
        if along is None:
            return NotImplemented
        return tuple(map(input.of, function(input.whole, size, along)))

    return of_rows


ROW_BY_ROW: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "layer_norm": _norm(F.layer_norm),
    "rms_norm": _norm(F.rms_norm),
    "embedding": _embedding,
    "sum": _along(torch.Tensor.sum),
    "mean": _along(torch.Tensor.mean),
    "amax": _along(torch.Tensor.amax),
    "amin": _along(torch.Tensor.amin),
    "softmax": _along(torch.Tensor.softmax),
    "log_softmax": _along(torch.Tensor.log_softmax),
    "chunk": _parts(torch.Tensor.chunk),
    "split": _parts(torch.Tensor.split),
}
"""Functions that treat each row by itself, by name: the mask that has chosen their operand chooses
their result, too. They return ``NotImplemented`` for what looks at several rows.
"""

_SIGNS = {
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "neg", "abs", "and", "or",
    "xor", "invert", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip

ELEMENTWISE = {
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "remainder",
    "rsub", "pow", "sqrt", "rsqrt", "reciprocal", "neg", "negative", "abs", "sign", "exp",
    "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "logsigmoid", "softplus",
    "relu", "gelu", "silu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "logaddexp", "where", "eq", "ne", "lt", "le", "gt", "ge", "square", "logical_and",
    "logical_or", "logical_not", "to", "float", "double", "half", "bfloat16", "int", "long",
    "bool", "detach", "clone", "contiguous", "zeros_like", "ones_like", "full_like",
}  # fmt: skip
"""Functions, by name, whose result is chosen by the mask that has chosen their operands; signs are
in :data:`_SIGNS`.
"""


def elementwise(name: str) -> tuple[str, bool] | None:
    """The functional form of an elementwise function, and whether ``name`` writes to its first
    argument; else ``None``.
    """
    if name.startswith("__"):
        sign = name.strip("_")
        if sign in _SIGNS or sign[:1] == "r" and sign[1:] in _SIGNS:
            return name, False
        return (f"__{sign[1:]}__", True) if sign[:1] == "i" and sign[1:] in _SIGNS else None
    if name in ELEMENTWISE:
        return name, False
    return (name[:-1], True) if name.endswith("_") and name[:-1] in ELEMENTWISE else None


def of_elements(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an elementwise function makes of selections by one mask, numbers, and tensors that all
    rows share.
    """
    given = [*args, *kwargs.values()]
    chosen = [x for x in given if isinstance(x, Selection)]
    if not _same_rows(*chosen) or len({len(x.row) for x in chosen}) != 1:
        return NotImplemented
    if any(
        isinstance(x, Tensor) and x.ndim > len(chosen[0].row) or isinstance(x, tuple | list)
        for x in given
    ):
        return NotImplemented

    def full(x: Any) -> Any:
        # What the mask leaves out may be anything: in its place stand values that no function
        # chokes on, nor makes infinite gradients of.
        return x.harmless() if isinstance(x, Selection) else x

    return chosen[0].of(function(*map(full, args), **{key: full(x) for key, x in kwargs.items()}))
