"""Operators: one class for all of them, with arguments bound to the names of the operator's
signature.

An argument is an :class:`IRValue`, a literal (number, string, bool, ``None``, dtype, ``slice``,
``Ellipsis``, a size expression), one of the run-time literals below, or a tuple of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwright.compiler.ir.value import IRValue, SourceLocation

if TYPE_CHECKING:
    from shardwright.compiler.ops.rule import OpRule

Arg = Any

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WhenTraining:
    """An argument that depends on ``self.training``: ``train`` if set, else ``eval``."""

    train: Arg
    eval: Arg


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of the rank that runs the program: stands for the device arguments met while
    tracing.
    """


@dataclass(frozen=True, slots=True)
class AxisRef:
    """A mesh axis as an argument: the rank's :class:`AxisGroup` along it."""

    name: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands in the result of a training step for an output, or outputs below a path, that the step
    leaves out.
    """

    path: str


@dataclass(frozen=True, slots=True)
class RankDraw:
    """A draw of random numbers as an argument (``self.draw("up_dropout", "tp")``): its name, and
    the axes along which ranks draw different ones. ``layout``: the text of that of the whole
    tensor, where every plan draws the same; ``sizes``: those in it that have names.
    """

    name: str
    axes: tuple[str, ...] = ()
    layout: str | None = None
    sizes: tuple[tuple[str, Arg], ...] = ()

    @property
    def of_piece(self) -> RankDraw:
        """The draw for the piece at hand, as every plan draws it that may draw what it pleases."""
        return RankDraw(self.name, self.axes)


@dataclass(frozen=True)
class IROp:
    """One operator call.

    ``target`` is the canonical name of the operator: a name in the operator registry, or the import
    path (``package.module.function``) of a function that has no entry there. ``args`` binds
    parameter names of its signature, in signature order, without those left at their defaults. An
    unregistered function keeps positional arguments under the names ``"0"``, ``"1"``, ...
    ``region`` names the recompute region the call stands in. ``autocast`` is the autocast dtype in
    force, if any. ``only_in`` is ``"train"`` for a buffer update that happens in training only.
    ``updates_buffers``: it writes to buffers among its operands when it runs, as a batch norm does
    to its running statistics, and runs even if nobody reads its results. ``summed``: the positions
    of operands whose gradient is added to one that is there already, as operators behind this one
    read the same value; what backward costs depends on it, and nothing else does.
    """

    name: str
    target: str
    args: tuple[tuple[str, Arg], ...]
    results: tuple[IRValue, ...]
    module_path: str = ""
    module_type: str = ""
    source: SourceLocation | None = None
    region: str | None = None
    autocast: torch.dtype | None = None
    grad_enabled: bool = True
    only_in: str | None = None
    updates_buffers: bool = False
    rule: OpRule | None = None
    summed: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The user's line and the module it runs for, for people: ``model.py:9 (blocks.0.up)``.
        There is no line where torch's own modules make the call, as in ``nn.Sequential``.
        """
        module = self.module_path or "top-level forward"
        return f"{self.source} ({module})" if self.source else module

    def arg(self, name: str, default: Arg = None) -> Arg:
        """The argument bound to ``name``."""
        return next((value for key, value in self.args if key == name), default)

    def has_arg(self, name: str) -> bool:
        """Whether an argument is bound to ``name``."""
        return any(key == name for key, _ in self.args)

    @property
    def draws(self) -> bool:
        """Whether the call draws random numbers, as lowering has written it."""
        return any(type(value) is RankDraw for _, value in self.args)

    @property
    def drawing_pieces(self) -> IROp:
        """The call with draws for the piece at hand in the place of draws by layout."""
        if not self.draws:
            return self
        args = ((name, arg.of_piece if type(arg) is RankDraw else arg) for name, arg in self.args)
        return self.changed(args=tuple(args))

    @cached_property
    def operands(self) -> tuple[IRValue, ...]:
        """The tensor arguments in signature order, those inside tuples included; a value used twice
        appears twice.
        """
        found: list[IRValue] = []
        for _, value in self.args:
            if type(value) is IRValue:  # by far the most
                found.append(value)
            elif isinstance(value, _NESTED):
                found += [leaf for leaf in leaves(value) if isinstance(leaf, IRValue)]
        return tuple(found)

    @cached_property
    def known(self) -> dict[Callable[[IROp], Any], Any]:
        """What functions decorated with :func:`once` have answered of it."""
        return {}

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The parameter name of each operand; ``tensors[0]``, ``tensors[1]`` for those inside a
        tuple.
        """
        names: list[str] = []
        for key, value in self.args:
            if isinstance(value, tuple):
                names += [
                    f"{key}[{i}]"
                    for i, leaf in enumerate(leaves(value))
                    if isinstance(leaf, IRValue)
                ]
            elif isinstance(value, IRValue | WhenTraining):
                # An argument by training may hold two tensors, and both are operands of that one
                # name.
                names += [key for leaf in leaves(value) if isinstance(leaf, IRValue)]
        return tuple(names)

    def changed(self, **fields: Any) -> IROp:
        """The call with some fields replaced, like :func:`dataclasses.replace`, in less time: every
        pass makes all operators of a large model anew. Without ``args`` the operands stay known.
        """
        found = object.__new__(IROp)
        found.__dict__.update(self.__dict__)
        # What was answered of this call may not hold for the other.
        found.__dict__.pop("known", None)
        if "args" in fields:
            found.__dict__.pop("operands", None)
        found.__dict__.update(fields)
        return found

    def map_args(self, function: Callable[[Arg], Arg]) -> IROp:
        """The call with ``function`` applied to every leaf of its arguments."""
        return self.changed(
            args=tuple(
                [
                    (
                        key,
                        map_leaves(value, function)
                        if isinstance(value, _NESTED)
                        else function(value),
                    )
                    for key, value in self.args
                ]
            )
        )

    def with_operands(self, operands: Iterable[IRValue]) -> IROp:
        """The call with its tensor arguments replaced, position by position."""
        operands = tuple(operands)
        if len(operands) == len(self.operands) and all(map(is_, operands, self.operands)):
            return self
        # map_args visits leaves in the order in which ``operands`` lists them.
        remaining = iter(operands)
        return self.map_args(lambda leaf: next(remaining) if isinstance(leaf, IRValue) else leaf)

    def retarget(self, target: str) -> IROp:
        """The call with another function as its target."""
        return self.changed(target=target)

    def with_args(self, **updates: Arg) -> IROp:
        """The call with some arguments replaced. They keep their places; new ones are appended."""
        known = {key for key, _ in self.args}
        args = tuple((key, updates.get(key, value)) for key, value in self.args)
        return self.changed(args=args + tuple((k, v) for k, v in updates.items() if k not in known))


def once(function: Callable[[IROp], Result]) -> Callable[[IROp], Result]:
    """Let a function of an operator answer once for each operator. Operators are immutable, and all
    of a large model are asked again and again.
    """

    @wraps(function)
    def asked(op: IROp) -> Result:
        known = op.known
        if function not in known:
            known[function] = function(op)
        found: Result = known[function]
        return found

    return asked


_NESTED = (tuple, list, slice, WhenTraining, RankDraw)
"""What arguments are made of that is no leaf."""


def leaves(arg: Arg) -> Iterator[Arg]:
    """The leaves of an argument, depth first."""
    if not isinstance(arg, _NESTED):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from leaves(item)
    elif isinstance(arg, slice):
        yield from leaves((arg.start, arg.stop, arg.step))
    elif isinstance(arg, RankDraw):
        yield from leaves((arg.name, arg.sizes))
    else:
        yield from leaves((arg.train, arg.eval))


def map_leaves(arg: Arg, function: Callable[[Arg], Arg]) -> Arg:
    """The argument rebuilt with ``function`` applied to its leaves."""
    if not isinstance(arg, _NESTED):
        return function(arg)
    if isinstance(arg, (tuple, list)):
        return tuple([map_leaves(item, function) for item in arg])
    if isinstance(arg, slice):
        return slice(*(map_leaves(item, function) for item in (arg.start, arg.stop, arg.step)))
    if isinstance(arg, RankDraw):
        sizes = tuple((name, function(size)) for name, size in arg.sizes)
        return RankDraw(function(arg.name), arg.axes, arg.layout, sizes)
    return WhenTraining(map_leaves(arg.train, function), map_leaves(arg.eval, function))


@once
def call_form(op: IROp) -> tuple[Hashable, ...]:
    """A key of the call without the names of its values. Calls of layers that are alike have the
    same key.
    """

    def described(value: IRValue) -> Hashable:
        return tuple(map(str, value.shape)), value.dtype, value.requires_grad, value.takes_gradient

    def leaf(arg: Arg) -> Any:
        return described(arg) if isinstance(arg, IRValue) else arg

    # Tensors one by one, which are most arguments; others as texts, as slices are no keys.
    arguments = [
        (name, described(value) if type(value) is IRValue else repr(map_leaves(value, leaf)))
        for name, value in op.args
    ]
    results = map(described, op.results)
    return op.target, (*arguments, *results), op.autocast, op.grad_enabled
