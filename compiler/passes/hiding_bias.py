"""Whether what is added to scores may hide all keys of a query.

Kernels of attention keep the logarithm of a sum of weights for the backward. Where a large finite
number has been added to all scores of a query, such as -1e30, that logarithm is lost in it: the sum
of 5 equal weights is -1e30 + log(5) = -1e30, and gradients of values come out 5 times too large.
Softmax written out is exact there. So attention is left as it is written, unless each query is
known to keep a key:

    position_bias                                    known: a parameter, looked up
    slopes * (j - i)                                 known: slopes of heads, times positions
    where(j <= i, 0, -1e30)                          known: a query sees itself
    where(padding, 0, -1e30)                         known, if a sample has a key at all
    where(j <= i, 0, -1e30) + (1 - mask) * -1e30     not known

Whether a sample has a key is checked at run time (``any_chosen``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.mask_marks import MaskMarks, MaskReader

_LARGE = 1e3
"""A number that may hide a key when it is added to a score."""

_KEEPING = frozenset(("unsqueeze", "expand", "to", "contiguous"))
"""Operators that leave each number at its query and key."""

_BOUNDED = frozenset(
    ("view", "reshape", "squeeze", "getitem", "permute", "transpose", "flatten", "index_select")
    + ("repeat", "repeat_interleave", "flip", "cat", "stack")
    + ("sub", "mul", "div", "neg", "abs", "pow")
    + ("ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "zeros_like", "ones_like")
)
"""Operators whose results are of the size of their operands and numbers."""

_LEARNED = frozenset(
    ("embedding", "linear", "matmul", "addmm", "einsum", "mean", "layer_norm", "rms_norm")
    + ("tanh", "sigmoid", "softmax", "arange")
)
"""Operators whose results are no masks, whatever they get."""


class Hides(IntEnum):
    """What something that is added hides of a query: no key, others than its own, not all of them,
    the same ones of all queries of a sample, or perhaps all.
    """

    NONE = 0
    OTHERS = 1
    NOT_ALL = 2
    SAME = 3
    PERHAPS_ALL = 4


def masks_of_keys(
    reader: MaskReader, added: Iterable[IRValue], lengths: tuple[Size, Size]
) -> tuple[IROp, ...] | None:
    """Choices by masks of keys of which each must leave a sample a key, so that each query keeps
    one to whose score all of these add nothing large; ``None`` if that is not known of others.
    ``lengths``: of queries and keys.
    """
    reading = _Reading(reader, lengths)
    hides = _together([reading.of(value) for value in added])
    return None if hides is Hides.PERHAPS_ALL else tuple(reading.choices)


def hides_nothing(reader: MaskReader, added: Iterable[IRValue], lengths: tuple[Size, Size]) -> bool:
    """Whether all of these are known to hide no key of any query."""
    reading = _Reading(reader, lengths)
    return not any(reading.of(value) for value in added)


def _together(summands: Iterable[Hides]) -> Hides:
    """What a sum hides."""
    hiding = [one for one in summands if one]
    # Two masks of which each leaves a query its own key leave it together.
    one_key = len(hiding) < 2 or all(one is Hides.OTHERS for one in hiding)
    return max(hiding, default=Hides.NONE) if one_key else Hides.PERHAPS_ALL


class _Reading:
    def __init__(self, reader: MaskReader, lengths: tuple[Size, Size]) -> None:
        self._reader, self._lengths = reader, lengths
        self.choices: list[IROp] = []
        self._constants = {value.name: tensor for value, tensor in reader.graph.constants}

    def of(self, added: Arg) -> Hides:
        """What a summand hides."""
        if not isinstance(added, IRValue):
            is_small = not isinstance(added, int | float) or abs(added) < _LARGE
            return Hides.NONE if is_small else Hides.PERHAPS_ALL
        if not added.dtype.is_floating_point or added.kind is ValueKind.PARAMETER:
            return Hides.NONE
        if added.kind is ValueKind.BUFFER and _is_of_heads(added, self._lengths):
            return Hides.NONE
        tensor = self._constants.get(added.name)
        number = self._reader.number(added) if tensor is None else _largest(tensor)
        if number is not None:
            return Hides.NONE if abs(number) < _LARGE else Hides.PERHAPS_ALL
        op = self._reader.maker_of(added)
        return Hides.PERHAPS_ALL if op is None else self._of_op(op)

    def _of_op(self, op: IROp) -> Hides:
        if op.target in _LEARNED:
            return Hides.NONE
        if op.target == "where":
            return self._of_choice(op)
        if op.target in _KEEPING:
            return self.of(op.operands[0])
        found = [self.of(operand) for operand in op.operands]
        if op.target == "add":
            return _together(found)
        if op.target == "div" and not self._is_divided_by_much(op):
            return Hides.PERHAPS_ALL
        numbers = [self.of(arg) for _, arg in op.args if isinstance(arg, int | float)]
        is_bounded = op.target in _BOUNDED and not any([*found, *numbers])
        return Hides.NONE if is_bounded else Hides.PERHAPS_ALL

    def _is_divided_by_much(self, op: IROp) -> bool:
        """Whether a divisor is no small number: a power is none, nor is ``sqrt(64)``."""
        divisor = op.arg("other")
        if isinstance(divisor, IRValue):
            return self._reader.made_by(divisor, "pow") is not None
        return isinstance(divisor, int | float) and abs(divisor) > 1 / _LARGE

    def _of_choice(self, op: IROp) -> Hides:
        """``where(mask, kept, other)``."""
        mask, kept, other = (op.arg(name) for name in ("condition", "input", "other"))
        if self.of(kept):
            return Hides.PERHAPS_ALL
        if not self.of(other):
            return Hides.NONE
        if not isinstance(mask, IRValue):
            return Hides.PERHAPS_ALL
        marks = self._reader.of(mask, self._lengths)
        if marks is not None and marks.all_see:
            return Hides.OTHERS if marks.sees_itself else Hides.NOT_ALL
        if not (_is_of_keys(mask) or (marks is not None and self._are_of_keys(marks))):
            return Hides.PERHAPS_ALL
        self.choices.append(op)
        return Hides.SAME

    def _are_of_keys(self, marks: MaskMarks) -> bool:
        """Whether all queries of a sample see the same keys."""
        _, num_keys = self._lengths
        # Queries beyond all bands see no key at all.
        if marks.bands and not marks.bands_have_all:
            return False
        whole = (
            (band.low, band.end, band.low_step, band.end_step) == (0, num_keys, 0, 0)
            for band in marks.bands or ()
        )
        return all(whole) and all(_is_of_keys(of_queries) for of_queries, _, _ in marks.atoms)


def _is_of_keys(mark: Arg) -> bool:
    """Whether a mark, or a mask, is one for all queries."""
    return not isinstance(mark, IRValue) or mark.ndim < 2 or mark.shape[-2] == 1


def _is_of_heads(buffer: IRValue, lengths: tuple[Size, Size]) -> bool:
    """Whether a buffer has neither queries nor keys, as slopes of heads have not. (A single number
    may be one that hides.)
    """
    sizes = set(buffer.shape) - {1}
    return bool(sizes) and not sizes & set(lengths)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
