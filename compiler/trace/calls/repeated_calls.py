"""Results of calls that were run before, on tensors alike.

The layers of a model make the same calls, on tensors of the same shapes. Torch's fake tensors need
a tenth of a millisecond or more for each of them. What a call gives follows from shapes, strides,
dtypes and the other arguments, so it is run once, and afterwards its results are made at once: new
fake tensors of the shapes that are known.

    x @ w    [32, 64] @ [64, 8], gradients flow   runs, and gives f32[32, 8]
    y @ v    [32, 64] @ [64, 8], gradients flow   gives f32[32, 8]

A view is made in the memory of the tensor that it views, where the first one began. One by numbers
and slices (``x[:, t]``) need not be run at all (``plain_views.py``).

[Note: views that are run each time] A write to a tensor can change whether gradients flow through
its views: after ``x.copy_(y)`` they flow if they flow through ``y``. Torch sees to that for views
that it has made, and not for those made here. So only views are made here that no write can change:
gradients flow through the tensor already, or never do, as it holds integers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    FakeTensor,
    in_kernel_invocation_manager,
)

from shardwright.compiler.ops.stand_ins import combine, dispatch, grouped_linear
from shardwright.compiler.trace.calls.plain_views import indexed_part
from shardwright.compiler.trace.context.autocast_regions import autocast_dtype
from shardwright.compiler.trace.context.fakes import TraceMode, new_fake

_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_IN_PYTHON = frozenset(
    {dispatch, grouped_linear, combine, F.silu, F.layer_norm, F.rms_norm, F.dropout}
)
"""Functions in Python that depend on their arguments alone. Of torch's own many warn, at the line
that calls them.
"""
_BY_MORE = frozenset({torch.as_strided, torch.Tensor.as_strided})
"""Functions whose results depend on more than keys hold: on where in its memory a tensor begins."""
_KERNELS = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled,
    torch._C._get_overrideable_sdp_enabled, torch._C._get_sdp_priority_order,
)  # fmt: skip
"""They say which kernels of attention are allowed, in which order: the strides of what it gives
follow from that, too.
"""
_PLAIN = (
    bool, int, float, str, type(None), type(Ellipsis), torch.dtype, torch.device,
    torch.memory_format, torch.layout,
)  # fmt: skip
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of a call. ``offset``: where in the memory of the first argument it begins, counted
    from where that begins; ``None`` for a result in memory of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class _Results:
    """What a call gives: one tensor, or ``kind`` of several."""

    of: tuple[_Result, ...]
    kind: type | None


class _NotPlain(Exception):
    """An argument decides by more than what keys hold."""


Known = dict[Hashable, _Results | int]
"""What calls gave, by their keys: new tensors, or the argument of that number as it was."""


class RepeatedCalls:
    """The calls of one run of ``forward``, and what they gave. ``known``: what calls gave in other
    runs, to which this one adds.
    """

    def __init__(self, mode: TraceMode, known: Known) -> None:
        self._mode, self._known = mode, known
        # Results of calls with gradients follow from it. Their own history is never walked.
        self._leaf = torch.zeros((), requires_grad=True)

    def key(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """All that the results of a call follow from; ``None`` where that is more than is known
        here.
        """
        # Dynamic sizes are compared by what was asked of them, which each call may add to.
        if self._mode.shape_env is not None or function in _BY_MORE:
            return None
        if not isinstance(function, _IN_C) and function not in _IN_PYTHON:
            return None
        parts: list[Any] = [
            function, torch.is_grad_enabled(), autocast_dtype(), torch.get_default_dtype()
        ]  # fmt: skip
        if function is F.scaled_dot_product_attention:
            parts += [str(allowed()) for allowed in _KERNELS]
        try:
            _add(parts, args)
            for name, value in kwargs.items():
                parts.append(name)
                _add(parts, value)
        except _NotPlain:
            return None
        return tuple(parts)

    def view(self, function: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """What ``x[index]`` gives by numbers and slices; ``None`` for all else."""
        if function is not torch.Tensor.__getitem__ or self._mode.shape_env is not None:
            return None
        viewed, index = args
        if not _keeps_views(viewed) or (part := indexed_part(viewed, index)) is None:
            return None
        result = _Result(part.shape, part.stride, viewed.dtype, viewed.requires_grad, part.offset)
        made: torch.Tensor = self._new(_Results((result,), None), [viewed])
        return made

    def results(self, key: Hashable, inputs: Sequence[torch.Tensor]) -> Any:
        """New results of a call that was run before; ``None`` if they are not known."""
        found = self._known.get(key)
        if found is None:
            return None
        return inputs[found] if isinstance(found, int) else self._new(found, inputs)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of all of a tensor."""
        if self._mode.shape_env is not None or not _keeps_views(tensor):
            view: torch.Tensor = torch.ops.aten.alias(tensor)
            return view
        shape, stride = tuple(tensor.shape), tensor.stride()
        result = _Result(shape, stride, tensor.dtype, tensor.requires_grad, offset=0)
        made: torch.Tensor = self._new(_Results((result,), None), [tensor])
        return made

    def _new(self, found: _Results, inputs: Sequence[torch.Tensor]) -> Any:
        """New tensors for results, of which views are in the memory of the first input."""
        made = [self._made(result, inputs[0]) for result in found.of]
        # Results with a gradient must have a node of autograd behind them, as real ones do.
        flows = [x for x, result in zip(made, found.of, strict=True) if result.requires_grad]
        if flows:
            through = iter(_follow(flows, self._leaf))
            made = [
                next(through) if result.requires_grad else x
                for x, result in zip(made, found.of, strict=True)
            ]
        return made[0] if found.kind is None else found.kind(made)

    def keep(self, key: Hashable, out: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Remember what a call gave, if new tensors or one of its arguments can say all of it."""
        same = [index for index, tensor in enumerate(inputs) if tensor is out]
        if len(same) == 1:
            self._known[key] = same[0]
            return
        kind = None if isinstance(out, torch.Tensor) else type(out)
        several = kind in (tuple, list) or (kind and kind.__module__ == "torch.return_types")
        if kind is not None and not several:
            return
        tensors = [out] if kind is None else list(out)
        results = tuple(_described(tensor, inputs) for tensor in tensors)
        if any(result is None for result in results):
            return
        # Results that share memory are more than their shapes say.
        if len({x.untyped_storage()._cdata for x in tensors}) == len(tensors):
            self._known[key] = _Results(tuple(r for r in results if r is not None), kind)

    def _made(self, result: _Result, viewed: torch.Tensor) -> torch.Tensor:
        if result.offset is None:
            return new_fake(self._mode, result.shape, result.stride, result.dtype)
        with in_kernel_invocation_manager(self._mode):
            memory = torch.empty(0, dtype=result.dtype, device="meta").set_(
                viewed.untyped_storage(),
                viewed.storage_offset() + result.offset,
                result.shape,
                result.stride,
            )
        return self._mode.fake(memory)


class _Follow(torch.autograd.Function):
    """Gives tensors a place in autograd's graph: they require a gradient, and are no leaves."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(made)


def _follow(made: list[torch.Tensor], leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Not ``_Follow.apply``, which the tracer looks at.
    apply: Any = super(torch.autograd.Function, _Follow).apply
    found: tuple[torch.Tensor, ...] = apply(made, leaf)
    return found


def _add(parts: list[Any], arg: Any) -> None:
    """Append what is known of an argument. Types are part of it: ``1 == 1.0 == True``."""
    kind = type(arg)
    if kind is FakeTensor:
        # What a call does may depend on more than shape and dtype here.
        if arg.constant is not None or arg.is_inference() or arg.dtype.is_complex:
            raise _NotPlain
        # Not where in its memory it begins: new results do not follow from that, and each step of
        # a loop reads another place of one tensor.
        place = (arg.shape, arg.stride())
        parts.extend((kind, *place, arg.dtype, arg.requires_grad, arg.is_leaf, arg.is_neg()))
    elif kind in (tuple, list, torch.Size):
        parts.extend((kind, len(arg)))
        for item in arg:
            _add(parts, item)
    elif kind is slice:
        parts.extend((kind, arg.start, arg.stop, arg.step))
        # A bound may be a symbolic size, whose value is no part of its text.
        for item in (arg.start, arg.stop, arg.step):
            if not isinstance(item, int | None):
                raise _NotPlain
    elif kind in _PLAIN:
        parts.extend((kind, arg))
    else:
        raise _NotPlain


def _keeps_views(tensor: Any) -> bool:
    """Whether no write to a tensor can change what its views say of gradients
    ([Note: views that are run each time]).
    """
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.is_inference():
        return False
    if tensor.dtype.is_complex or tensor.layout is not torch.strided or tensor.is_neg():
        return False
    if not tensor.dtype.is_floating_point:
        return True
    # Torch refuses writes to views of leaves.
    return tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled()


def _described(tensor: Any, inputs: Sequence[torch.Tensor]) -> _Result | None:
    """What a result is like; ``None`` if a new tensor would not be."""
    if type(tensor) is not FakeTensor or any(tensor is x for x in inputs):
        return None
    if tensor.layout is not torch.strided or tensor.constant is not None:
        return None
    if tensor.device != _CPU or tensor.is_inference() or tensor.dtype.is_complex:
        return None
    # Under no_grad nothing new requires a gradient.
    if tensor.is_neg() or (tensor.requires_grad and not torch.is_grad_enabled()):
        return None
    memory = tensor.untyped_storage()
    shape, stride = tuple(tensor.shape), tensor.stride()
    viewed = [x for x in inputs if x.untyped_storage()._cdata == memory._cdata]
    if viewed:
        (first, *others) = viewed
        keeps = first is inputs[0] and not others and _keeps_views(first)
        if not keeps or (first.dtype, first.requires_grad) != (tensor.dtype, tensor.requires_grad):
            return None
        offset = int(tensor.storage_offset()) - int(first.storage_offset())
        return _Result(shape, stride, tensor.dtype, tensor.requires_grad, offset)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    nbytes = (reach if tensor.numel() else 0) * tensor.element_size()
    if tensor.storage_offset() or memory.nbytes() != nbytes:
        return None
    return _Result(shape, stride, tensor.dtype, tensor.requires_grad)
