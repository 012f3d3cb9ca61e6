"""Choosing elements by a mask while tracing, and reading them as ``selections.py`` says."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.stand_ins import all_chosen
from shardwright.compiler.trace.calls.call_arguments import binds, tensors_in
from shardwright.compiler.trace.calls.callables import is_getter
from shardwright.compiler.trace.recorder import Recorder, Variable
from shardwright.compiler.trace.values.constants import RANDOM, Constants
from shardwright.compiler.trace.values.selections import (
    READERS,
    ROW_BY_ROW,
    Selection,
    elementwise,
    of_elements,
)
from shardwright.runtime.errors import TraceError

UNRECORDED = {"is_floating_point", "retain_grad", "__repr__", "__format__", "__str__", "__hash__"}
"""Calls that no graph has."""

_FILLED = {"ones", "zeros", "full", "new_ones", "new_zeros", "new_full"}
"""Functions whose result has a size that is given, and the same number everywhere."""

_SIZELESS = {"dtype", "device", "ndim", "layout"}
"""What may be read of elements that a mask chooses, without knowing how many they are."""


class Mode(Protocol):
    """The function mode under which calls are recorded."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def on_fakes(self, arg: Any) -> Any:
        """An argument with captured tensors as fakes."""


class Selecting:
    """The selections of one trace."""

    def __init__(self, recorder: Recorder, constants: Constants, mode: Mode) -> None:
        self._recorder, self._constants, self._mode = recorder, constants, mode
        # By the ``id`` of a number of rows that forward has asked for: the selection that has them.
        self._counted: dict[int, Selection] = {}

    def is_read(self, arguments: Any) -> bool:
        """Whether there are selections among the arguments of a call."""
        return bool(self._recorder.selections) and any(map(self._of, tensors_in(arguments)))

    def select(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError
    ) -> Any:
        """What stands for ``x[mask]``, ``x.masked_select(mask)`` or ``torch.where(mask)``; ``None``
        if the call is none of these. ``error``: why elements cannot be made.
        """
        if (condition := _condition(name, args, kwargs)) is not None:
            return self._places_of(condition, error)
        names = {"__getitem__": ("x", "index"), "masked_select": ("input", "mask")}.get(name, ())
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(given) != 2 or set(given) != set(names):
            return None
        whole, index = self._mode.on_fakes(tuple(given[key] for key in names))
        items = _without_slices(index if isinstance(index, tuple) else (index,))
        if name == "masked_select":
            if not isinstance(index, torch.Tensor):
                return None
            # Masks of rows choose all of a row.
            if index.shape != whole.shape:
                common: Any = torch.broadcast_shapes  # has no types
                shape = common(whole.shape, index.shape)
                with self._mode:
                    index = index if index.shape == shape else index.expand(shape)
                    whole = whole if whole.shape == shape else whole.expand(shape)
            items = (index,)
        # Masks of known values are places, so the result has a size and any operator can follow.
        if (places := self._places(items)) is not None:
            with self._mode:
                return whole[places]
        # Else the rows that the mask chooses are not computed. What stands for them remembers the
        # whole tensor and the mask, and only calls that need no number of rows may read it.
        mask = items[0]
        if (
            len(items) > 1
            or not _is_mask(mask)
            or mask.ndim == 0
            or mask.shape != whole.shape[: mask.ndim]
        ):
            return None
        whole = self._as_it_is(whole)
        return self._stand_in(Selection(whole, self._as_it_is(mask), self._name(mask), error))

    def _name(self, mask: torch.Tensor) -> str:
        """The name of a mask: that of an equal one that has chosen before, if there is one.

        Models compute a mask twice (``x[ids == 5] = y[ids == 5]``). Both selections choose the same
        elements, which can be told from the calls that made their masks.
        """
        value = self._recorder.value(mask)
        others = (
            self._recorder.value(chosen.mask) for chosen in self._recorder.selections.values()
        )
        return next((other for other in others if self._same(other, value)), value).name

    def _places_of(self, condition: torch.Tensor, error: TraceError) -> tuple[torch.Tensor, ...]:
        """What ``torch.where(condition)`` stands for: along each dim, the index of every element,
        of which the condition chooses some.
        """
        mask = self._mode.on_fakes(condition)
        with self._mode:
            mask = mask if _is_mask(mask) else mask != 0
            along = [
                torch.arange(size).view(-1, *[1] * (mask.ndim - dim - 1)).expand(mask.shape)
                for dim, size in enumerate(mask.shape)
            ]
        mask, name = self._as_it_is(mask), self._name(mask)
        return tuple(
            self._stand_in(Selection(indices, mask, name, error, place))
            for place, indices in enumerate(along)
        )

    def _mask_of_places(self, index: Any) -> torch.Tensor | None:
        """The mask whose places an index is made of, one for each of its dims; else ``None``."""
        items = _without_slices(index if isinstance(index, tuple) else (index,))
        chosen = [self._of(item) if isinstance(item, torch.Tensor) else None for item in items]
        first = chosen[0] if chosen else None
        if first is None or first.mask.ndim != len(chosen):
            return None
        is_whole = all(
            found is not None and (found.mask_name, found.place) == (first.mask_name, place)
            for place, found in enumerate(chosen)
        )
        return first.mask if is_whole else None

    def _places(self, index: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """An index with the places where its masks are true; ``None`` without masks, or if the
        values of one are not known.
        """
        places: list[Any] = []
        if not any(map(_is_mask, index)):
            return None
        for item in index:
            # How many it chooses is mostly not asked.
            read = _is_mask(item) and not self._constants.is_assumed(item)
            known = self._constants.real(item) if read else None
            if _is_mask(item) and known is None:
                return None
            with unset_fake_temporarily():
                places += [item] if known is None else known.nonzero(as_tuple=True)
        return tuple(places)

    def _same(self, one: IRValue, other: IRValue) -> bool:
        """Whether two values are one, or made by equal calls."""
        (call, index), (again, position) = (
            self._recorder.calls.get(value.name, (None, 0)) for value in (one, other)
        )
        made_alike = (
            call is not None and call.name not in RANDOM and (call, index) == (again, position)
        )
        return one == other or made_alike

    def _as_it_is(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of now of a tensor, which forward may change in place later."""
        if not torch.is_grad_enabled():
            with self._mode:
                tensor = tensor.detach()
        kept: torch.Tensor = torch.ops.aten.alias(tensor)
        self._recorder.bind(kept, Variable(self._recorder.value(tensor)))
        return kept

    def _stand_in(self, chosen: Selection) -> torch.Tensor:
        """A fake for a selection; its size means nothing."""
        fake = torch.empty(0, *chosen.row, dtype=chosen.whole.dtype)
        self._recorder.selections[id(fake)] = chosen
        self._recorder.keep(fake)
        return fake

    def _count(self, chosen: Selection) -> torch.Tensor:
        """The number of rows of a selection, known as such from here on."""
        count = chosen.mask.sum()
        self._counted[id(count)] = chosen
        self._recorder.keep(count)
        return count

    def filled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``torch.ones(x[mask].shape[0], 4)`` and the like make: rows that the mask chooses of
        ones for each of its elements. ``None`` for other calls.
        """
        if not self._counted or name not in _FILLED:
            return None
        others, own = dict(kwargs), 1 if name.startswith("new_") else 0
        sizes = others.pop("size", args[own:])
        values: tuple[Any, ...] = ()
        if name.endswith("full") and "size" not in kwargs:
            sizes, values = args[own], args[own + 1 :]
        elif "size" in kwargs:
            values = args[own:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            (sizes,) = sizes
        chosen = self._counted.get(id(sizes[0])) if sizes else None
        if chosen is None:
            return None
        # ``rows.new_ones``: of the rows, only the dtype is used.
        like = [found.whole if (found := self._of(arg)) else arg for arg in args[:own]]
        with self._mode:
            whole = func(*like, (*chosen.mask.shape, *sizes[1:]), *values, **others)
        return self._stand_in(chosen.of(whole))

    def _of(self, tensor: torch.Tensor) -> Selection | None:
        return self._recorder.selections.get(id(tensor))

    def read(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that gets a selection: by operators on the whole tensor, if it needs no size."""
        if is_getter(func) and name in _SIZELESS or name in UNRECORDED:
            return func(*args, **kwargs)

        # ``x[torch.where(mask)]`` is ``x[mask]``, and so is what is written there.
        if name in ("__getitem__", "__setitem__"):
            mask = self._mask_of_places(args[1])
            if mask is not None:
                with self._mode:
                    return func(args[0], mask, *args[2:])

        # From the empty stand-ins to the selections that they stand for.
        def chosen(arg: Any) -> Any:
            return self._of(arg) or arg if isinstance(arg, torch.Tensor) else arg

        arguments, named = (
            tuple(map(chosen, args)),
            {key: chosen(arg) for key, arg in kwargs.items()},
        )
        result, form = NotImplemented, elementwise(name)
        with self._mode:
            if is_getter(func):
                of = self._of(args[0])
                if name == "shape" and of is not None:
                    return (self._count(of), *of.row)
            elif name == "size" and (arguments[1:] or tuple(named.values())) in (
                (0,),
                (-1 - len(arguments[0].row),),
            ):
                return self._count(arguments[0])
            elif name == "masked_scatter" and not named and self._puts_back(*arguments):
                target, mask, source = arguments
                return torch.where(mask, source.whole, target)
            elif name in READERS and binds(READERS[name], arguments, named):
                result = READERS[name](*arguments, **named)
            elif name == "__setitem__":
                result = self._write(*arguments)
            elif form is not None:
                result = of_elements(
                    getattr(torch.Tensor, form[0], func) if form[1] else func, arguments, named
                )
            by_row = ROW_BY_ROW.get(name)
            if result is NotImplemented and by_row and binds(by_row, arguments, named):
                result = by_row(*arguments, **named)
        if name == "masked_scatter" and result is not NotImplemented:
            warnings.warn(
                "the compiled module does not check that two masks choose equally many "
                f"elements: {self._recorder.where()}",
                stacklevel=3,
            )
        # Nothing reads it element by element. If the mask chooses everything, it is the whole
        # tensor in another shape.
        if result is NotImplemented and (every := self._taken_whole((args, kwargs))) is not None:
            with self._mode:
                return func(*every[0], **every[1])
        if result is NotImplemented:
            raise next(filter(None, map(self._of, tensors_in((args, kwargs))))).error
        # In place: the stand-in that the model holds means the new elements from now on.
        if form is not None and form[1]:
            self._recorder.selections[id(args[0])] = result
            return args[0]
        if isinstance(result, tuple):
            return tuple(map(self._stand_in, result))
        return self._stand_in(result) if isinstance(result, Selection) else result

    def _taken_whole(self, arguments: Any) -> Any:
        """The arguments with all elements in the place of selections, if the dummy arguments choose
        all of them.

        The program checks in every call that they do. ``None`` if the dummy arguments leave some
        out.
        """
        chosen = [
            found for tensor in tensors_in(arguments) if (found := self._of(tensor)) is not None
        ]
        if not all(self._constants.all_true_in_dummies(found.mask) for found in chosen):
            return None
        args, kwargs = arguments
        return tuple(map(self._whole, args)), {key: self._whole(arg) for key, arg in kwargs.items()}

    def _whole(self, arg: Any) -> Any:
        # Containers of torch and named tuples may not be rebuilt from their items.
        if type(arg) in (tuple, list):
            return type(arg)(map(self._whole, arg))
        found = self._of(arg) if isinstance(arg, torch.Tensor) else None
        if found is None:
            return arg
        warnings.warn(
            f"the mask at {self._recorder.where()} chooses every element of the dummy "
            "arguments: that is compiled in, and a "
            "call in which it leaves one out is refused",
            stacklevel=2,
        )
        with self._mode:
            checked = all_chosen(found.whole, found.rows_of(found.mask))
            checked = checked.flatten(0, found.mask.ndim - 1) if found.mask.ndim > 1 else checked
        self._constants.take_as_true(found.mask)
        return checked

    def _puts_back(self, target: Any, mask: Any, source: Any) -> bool:
        """Whether ``target.masked_scatter(mask, source)`` puts every row of a selection back to
        where it was chosen. That mask is the one that has chosen, with dims of size 1 for a row.
        """
        if not isinstance(target, torch.Tensor) or not isinstance(mask, torch.Tensor):
            return False
        if not isinstance(source, Selection) or source.whole.shape != target.shape:
            return False
        bare, inverted = self._without_row_dims(self._recorder.value(mask), source.mask.ndim)
        chosen, was_inverted = self._without_row_dims(
            self._recorder.value(source.mask), source.mask.ndim
        )
        return inverted == was_inverted and self._same(bare, chosen)

    def _without_row_dims(self, mask: IRValue, ndim: int) -> tuple[IRValue, bool]:
        """The mask ``[..., ndim dims]`` of which another one is made by dims behind its own, and
        whether that one is true where it is false.
        """
        inverted = False
        while (op := self._recorder.makers.get(mask.name)) is not None and op.operands:
            before = op.operands[0]
            turns = op.target in ("logical_not", "bitwise_not") and before.dtype == torch.bool
            if not turns and not _adds_last_dims(op, ndim):
                break
            mask, inverted = before, inverted != turns
        return mask, inverted

    def _write(self, target: Any, index: Any, chosen: Any) -> Any:
        """Write ``target[mask] = chosen``, where the same mask has chosen the elements."""
        (mask,) = index if isinstance(index, tuple) and len(index) == 1 else (index,)
        if (
            not isinstance(target, torch.Tensor)
            or not _is_mask(mask)
            or not isinstance(chosen, Selection)
        ):
            return NotImplemented
        by = self._recorder.value(chosen.mask)
        if not self._same(by, self._recorder.value(mask)) or chosen.whole.shape != target.shape:
            return NotImplemented
        # Elements that the mask leaves out stay: no size depends on values.
        target.copy_(torch.where(chosen.rows_of(chosen.mask), chosen.whole, target))
        return None


def _adds_last_dims(op: IROp, ndim: int) -> bool:
    """Whether an operator keeps the first ``ndim`` dims, and adds or repeats others behind them."""
    before, after = op.operands[0], op.results[0]
    if before.shape[:ndim] != after.shape[:ndim]:
        return False
    if op.target == "unsqueeze":
        return bool(op.arg("dim") % after.ndim >= ndim)
    if op.target == "getitem":  # mask[..., None], mask[:, :, None]
        index = op.arg("index")
        items = index if isinstance(index, tuple) else (index,)
        front = [item for item in items if item is not None]
        kept = front == [Ellipsis] or len(front) == before.ndim and all(map(_takes_all, front))
        return kept and items[: len(front)] == tuple(front)
    # Dims of the mask itself are as they were, so only those of size 1 behind them are repeated.
    return op.target == "expand" and before.ndim == after.ndim


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool


def _without_slices(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index without the slices at its end that take everything."""
    while len(items) > 1 and (items[-1] is Ellipsis or _takes_all(items[-1])):
        items = items[:-1]
    return items


def _takes_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _condition(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The argument of ``torch.where(condition)`` and of ``condition.nonzero(as_tuple=True)``; for
    other calls ``None``.
    """
    given = [*args, *(kwargs[key] for key in ("condition", "input") if key in kwargs)]
    others = {key: value for key, value in kwargs.items() if key not in ("condition", "input")}
    wanted = {"where": {}, "nonzero": {"as_tuple": True}}.get(name)
    if wanted is None or others != wanted or len(given) != 1:
        return None
    (condition,) = given
    # A number has no dims to be somewhere along.
    return condition if isinstance(condition, torch.Tensor) and condition.ndim else None
