"""Two graphs of one module, traced in training and in eval mode, merged into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import Arg, IROp, WhenTraining
from shardwright.compiler.ir.time_steps import TimeSteps
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.opdef import REQUIRED


class _Different(Exception):
    """The two graphs differ in structure."""


def merge(train: IRGraph, eval_: IRGraph) -> IRGraph:
    """One graph for both modes.

    Arguments that differ become :class:`WhenTraining`; operators that only serve buffer updates in
    training are marked ``only_in="train"``; anything else makes the graph of eval mode the
    ``eval_graph`` of the other.
    """
    inputs = _by_name((*eval_.constant_inputs, *train.constant_inputs))
    buffers = _by_name((*eval_.constant_buffers, *train.constant_buffers))
    train = replace(train, constant_inputs=inputs, constant_buffers=buffers).live()
    eval_ = eval_.live()
    try:
        return _Merge(train, eval_).result()
    except _Different:
        return replace(train, eval_graph=_with_own_names(train, eval_))


def _by_name(
    read: tuple[tuple[str, torch.Tensor], ...],
) -> tuple[tuple[str, torch.Tensor], ...]:
    """Values by name, each name once, in the order of names."""
    return tuple(sorted(dict(read).items(), key=lambda item: item[0]))


class _Merge:
    def __init__(self, train: IRGraph, eval_: IRGraph) -> None:
        self.train, self.eval = train, eval_
        # Eval's name -> train's value.
        self.in_train = {
            value.name: value for value in train.sources if value.kind is not ValueKind.CONSTANT
        }
        self.train_constants = {value.name: tensor for value, tensor in train.constants}
        self.eval_constants = {value.name: tensor for value, tensor in eval_.constants}

    def result(self) -> IRGraph:
        # Operators apart from those that only update buffers: these must be the same in both modes.
        train_main, eval_main = _without_updates(self.train), _without_updates(self.eval)
        main_names = {op.name for op in train_main}
        eval_names = {op.name for op in eval_main}
        if len(train_main) != len(eval_main):
            raise _Different
        # Equal calls become one; arguments that differ follow the mode.
        merged = {a.name: self._op(a, b) for a, b in zip(train_main, eval_main, strict=True)}
        self._tree(self.train.output, self.eval.output)
        # Updates that evaluation makes, too, in order; the others are for training only.
        updating = [op for op in self.eval.ops if op.name not in eval_names]
        for op in self.train.ops:
            if op.name in main_names:
                continue
            if updating and updating[0].target == op.target:
                merged[op.name] = self._op(op, updating.pop(0))
            else:
                merged[op.name] = replace(op, only_in="train")
        if updating:
            raise _Different
        # Evaluation may not update what training leaves alone.
        kept = {before.name: after for before, after in self.train.buffer_updates}
        for before, after in self.eval.buffer_updates:
            if before.name not in kept or self._value(after).name != kept[before.name].name:
                raise _Different
        return replace(self.train, ops=tuple(merged[op.name] for op in self.train.ops))

    def _op(self, a: IROp, b: IROp) -> IROp:
        if (
            a.target != b.target
            or len(a.results) != len(b.results)
            or a.autocast != b.autocast
            or a.grad_enabled != b.grad_enabled
        ):
            raise _Different
        left, right = dict(a.args), dict(b.args)
        names = [*left, *(name for name in right if name not in left)]
        # An argument that one of them lacks has its default there.
        args = {name: self._arg(_given(a, left, name), _given(b, right, name)) for name in names}
        for x, y in zip(a.results, b.results, strict=True):
            if x.shape != y.shape or x.dtype != y.dtype:
                raise _Different
            self.in_train[y.name] = x
        opdef = registry.get(a.target)
        order = [p.name for p in opdef.parameters] if opdef else list(args)
        return replace(a, args=tuple((name, args[name]) for name in order if name in args))

    def _arg(self, a: Arg, b: Arg) -> Arg:
        if isinstance(a, IRValue) or isinstance(b, IRValue):
            if (
                not (isinstance(a, IRValue) and isinstance(b, IRValue))
                or self._value(b).name != a.name
            ):
                raise _Different
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._arg(x, y) for x, y in zip(a, b, strict=True))
        if _holds_value(a) or _holds_value(b) or (isinstance(a, TimeSteps) and a != b):
            raise _Different
        # The only difference that one operator may hold: a literal, such as dropout's probability.
        # 0.0 == -0.0, and they read differently.
        is_same = type(a) is type(b) and a == b and (type(a) is not float or repr(a) == repr(b))
        return a if is_same else WhenTraining(a, b)

    def _value(self, value: IRValue) -> IRValue:
        """The value of the training graph that stands for one of the eval graph."""
        if value.kind is ValueKind.CONSTANT and value.name not in self.in_train:
            other = next((v for v, _ in self.train.constants if v.name == value.name), None)
            if other is None or not _same_tensor(
                self.train_constants[value.name], self.eval_constants[value.name]
            ):
                raise _Different
            self.in_train[value.name] = other
        if value.name not in self.in_train:
            raise _Different
        return self.in_train[value.name]

    def _tree(self, a: Tree, b: Tree) -> None:
        if (
            a.kind != b.kind
            or a.type_path != b.type_path
            or [key for key, _ in a.children] != [key for key, _ in b.children]
        ):
            raise _Different
        if a.kind == "leaf" and isinstance(self._arg(a.value, b.value), WhenTraining):
            raise _Different
        for (_, x), (_, y) in zip(a.children, b.children, strict=True):
            self._tree(x, y)


def _without_updates(graph: IRGraph) -> list[IROp]:
    """The operators that the result needs, without those that only serve buffer updates."""
    return list(graph.live(updates=False).ops)


def _given(op: IROp, args: dict[str, Any], name: str) -> Arg:
    """An argument, or the default it was left at."""
    if name in args:
        return args[name]
    opdef = registry.get(op.target)
    default = (
        next((p.default for p in opdef.parameters if p.name == name), REQUIRED)
        if opdef
        else REQUIRED
    )
    if default is REQUIRED:
        raise _Different
    return default


def _holds_value(arg: Arg) -> bool:
    return isinstance(arg, IRValue) or (isinstance(arg, tuple) and any(map(_holds_value, arg)))


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _with_own_names(train: IRGraph, eval_: IRGraph) -> IRGraph:
    """``eval_`` with operators renamed that have the name of one of ``train``, so that a plan can
    speak of both; and constants that have a name, but not the values, of a constant of ``train``.
    """
    known = {value.name: tensor for value, tensor in train.constants}
    op_names = {op.name for op in (*train.ops, *eval_.ops)}
    renamed: dict[str, IRValue] = {}
    for value, tensor in eval_.constants:
        # One name must not stand for two tensors in one generated file.
        if value.name in known and not _same_tensor(known[value.name], tensor):
            renamed[value.name] = replace(value, name=f"{value.name}_eval")

    def new(arg: Arg) -> Arg:
        return renamed.get(arg.name, arg) if isinstance(arg, IRValue) else arg

    # A plan names the operators of both bodies in one table.
    taken = {op.name for op in train.ops}

    def own(op: IROp) -> IROp:
        name = _unused(f"{op.name}_eval", op_names) if op.name in taken else op.name
        return replace(op.map_args(new), name=name)

    return replace(
        eval_,
        ops=tuple(map(own, eval_.ops)),
        constants=tuple((new(value), tensor) for value, tensor in eval_.constants),
        buffer_updates=tuple((before, new(after)) for before, after in eval_.buffer_updates),
        output=eval_.output.map(new),
    )


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
