"""The footprint of one instruction: the bytes that it makes, keeps for the backward, and needs
while it runs, forward and backward.

Every instruction runs once per signature, on fake tensors (``FakeRank``), while ``LiveBytes``
counts. Buffers inside of kernels do not count.

Example: ``gelu`` of a float32 ``[8, 64]`` makes one storage of 2048 bytes and saves its operand.
Storages are numbered, operands first: ``storages=(1,)``, ``made=(2048,)``, ``saved=(0,)``,
``peak=2048``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from shardwright.compiler.cost.fake.fake_rank import REFUSALS, FakeRank, sizes_read
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.fake.saved_tensors import saving_to
from shardwright.compiler.cost.local_calls import local_shape
from shardwright.compiler.cost.machine.backend import MOST_MEMORY, Backend
from shardwright.compiler.cost.step_calls import (
    SHORT,
    extrapolated,
    is_long,
    shortened,
    stacked_shape,
)
from shardwright.compiler.ir.op import Arg, IROp, RankDraw, once
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.ops.tables.stepped import steps_of
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Loop
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @classmethod
    def contiguous(
        cls, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False
    ) -> TensorForm:
        """That of a new tensor."""
        return cls(shape, _contiguous(shape), dtype, requires_grad)

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements, where an element that a dim repeats counts once."""
        size = self.dtype.itemsize
        # Stride 0 is an expanded dim: all its positions are one element in memory.
        for length, stride in zip(self.shape, self.strides, strict=True):
            size *= length if stride else min(length, 1)
        return size


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward does to memory.

    Storages are numbered: first those of the operands, then those that the instruction makes.

    - ``results``: the form of each result, and ``storages`` the storage that it lies in.
    - ``made``: the bytes of each storage that the instruction makes.
    - ``saved``: the storages that autograd keeps for the backward.
    - ``peak``: the most bytes in use while it runs, beyond those in use before.
    - ``exact``: false for an instruction that fake tensors cannot run, as it needs numbers.
    """

    results: tuple[TensorForm, ...]
    storages: tuple[int, ...]
    made: tuple[int, ...]
    saved: tuple[int, ...]
    peak: int
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Backward:
    """What a backward does to memory: it computes the gradients of the operands in ``wanted``.

    Storages are numbered: first those of the gradients that came in, one for each result, then
    those that the backward makes. ``views``: whether each gradient is a view, which autograd never
    adds to in place. ``peak`` and ``exact`` are as in :class:`Forward`. An inexact backward is
    taken to make a new tensor for each gradient, and nothing else.
    """

    wanted: tuple[int, ...]
    gradients: tuple[TensorForm, ...]
    storages: tuple[int, ...]
    made: tuple[int, ...]
    peak: int
    views: tuple[bool, ...]
    exact: bool = True


_Found = tuple[dict[object, Forward], dict[object, Backward]]
"""The footprints that are known, by what they are of."""


@lru_cache(maxsize=64)
def footprints_of(mesh: Mesh, rng: RngMode = "fast", backend: Backend = MOST_MEMORY) -> Footprints:
    """The footprints on a mesh. There is one object per mesh and backend in this process, so that
    nothing runs twice. Those of one mesh share what they know of operators.
    """
    return Footprints(mesh, rng, backend, _found_on(mesh, rng))


@lru_cache(maxsize=64)
def _found_on(mesh: Mesh, rng: RngMode) -> _Found:
    return {}, {}


class Footprints:
    """The footprints of instructions on the rank at index 0 of every axis of ``mesh``, which
    communicates through ``backend``. ``found``: those that are known, which it adds to.
    """

    def __init__(
        self,
        mesh: Mesh,
        rng: RngMode = "fast",
        backend: Backend = MOST_MEMORY,
        found: _Found | None = None,
    ) -> None:
        self.rank = FakeRank(mesh, rng=rng, backend=backend)
        self._forwards, self._backwards = ({}, {}) if found is None else found

    def forward(
        self, instruction: Instruction, operands: Sequence[TensorForm], *, trains: bool = True
    ) -> Forward:
        """The footprint of an instruction's forward. ``trains``: whether autograd records it."""
        key = (self._signature(instruction), tuple(operands), trains)
        if key not in self._forwards:
            try:
                self._forwards[key] = self._run_forward(instruction, operands, trains)
            except REFUSALS:
                self._forwards[key] = self._assumed(instruction, operands, trains)
        return self._forwards[key]

    def backward(
        self,
        instruction: Instruction,
        operands: Sequence[TensorForm],
        incoming: Sequence[TensorForm | None],
        only: Sequence[int] | None = None,
    ) -> Backward:
        """The footprint of an instruction's backward.

        ``incoming``: the gradients of the results, ``None`` for a result that got none. ``only``:
        the positions of the operands whose gradients are computed; default all that take one.
        """
        chosen = range(len(operands)) if only is None else only
        wanted = tuple(i for i in chosen if operands[i].requires_grad)
        if not wanted:
            return Backward((), (), (), (), 0, ())
        key = (self._signature(instruction), tuple(operands), tuple(incoming), wanted)
        if key not in self._backwards:
            try:
                self._backwards[key] = self._run_backward(instruction, operands, incoming, wanted)
            # Fake tensors cannot run it: every gradient is taken to be a new tensor.
            except REFUSALS:
                made = tuple(operands[i].num_bytes for i in wanted)
                numbers = tuple(range(len(incoming), len(incoming) + len(made)))
                forms = tuple(operands[i] for i in wanted)
                views = (False,) * len(made)
                self._backwards[key] = Backward(
                    wanted, forms, numbers, made, sum(made), views, isinstance(instruction, Adapt)
                )
        return self._backwards[key]

    def _signature(self, instruction: Instruction) -> object:
        """A key that is equal for instructions that do the same with memory."""
        # An operator does not communicate.
        backend = None if isinstance(instruction, Compute) else self.rank.backend
        return _signature(instruction), backend

    # ---------------------------------------------------------------------------------------------
    # running

    def _operands(self, forms: Sequence[TensorForm]) -> list[Tensor]:
        return [
            self.rank.tensor(f.shape, f.dtype, strides=f.strides, requires_grad=f.requires_grad)
            for f in forms
        ]

    def _call(self, instruction: Instruction, operands: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(instruction, Adapt):
            return [self.rank.adapt(instruction.step, operands[0])]
        if isinstance(instruction, Loop):
            return self.rank.run_loop(instruction, operands)
        return self.rank.run(instruction.op, operands)

    def _run_forward(
        self, instruction: Instruction, forms: Sequence[TensorForm], trains: bool
    ) -> Forward:
        if isinstance(instruction, Compute) and is_long(instruction.op):
            return self._long_forward(instruction, forms, trains)
        operands = self._operands(forms)
        kept: list[Tensor] = []
        # The call runs on fake tensors, while ``live`` counts the bytes of new storages.
        with torch.set_grad_enabled(trains), LiveBytes(operands) as live, saving_to(kept):
            before = live.now
            results = self._call(instruction, operands)
        # From torch's address of a storage to its number. Two operands may share one.
        numbers: dict[int, int] = {}
        for index, x in enumerate(operands):
            numbers.setdefault(x.untyped_storage()._cdata, index)
        made: list[int] = []

        # Results and saved tensors are told by the number of their storage: operands first, then
        # new ones.
        def number(x: Tensor) -> int:
            storage = x.untyped_storage()
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(operands) + len(made)
                made.append(storage.nbytes())
            return numbers[storage._cdata]

        storages = tuple(map(number, results))
        saved = tuple(sorted({number(x) for x in kept}))
        return Forward(
            tuple(map(TensorForm.of, results)), storages, tuple(made), saved, live.peak - before
        )

    def _run_backward(
        self,
        instruction: Instruction,
        forms: Sequence[TensorForm],
        incoming: Sequence[TensorForm | None],
        wanted: Sequence[int],
    ) -> Backward:
        if isinstance(instruction, Compute) and is_long(instruction.op):
            return self._long_backward(instruction, forms, incoming, wanted)
        operands = self._operands(forms)
        kept: list[Tensor] = []
        # Forward again, to have a graph whose backward can be run.
        with torch.enable_grad(), saving_to(kept):
            results = self._call(instruction, operands)
        gradients = [
            None if f is None else self.rank.tensor(f.shape, f.dtype, strides=f.strides)
            for f in incoming
        ]
        # Only results to which a gradient came, and through which one can go on.
        sent = [
            (y, g)
            for y, g in zip(results, gradients, strict=True)
            if g is not None and y.requires_grad
        ]
        outputs, grad_outputs = [y for y, _ in sent], [g for _, g in sent]
        live = LiveBytes([*operands, *outputs, *grad_outputs, *kept])
        # No reference of this function may keep a tensor alive that backward would let go of.
        del results, sent
        kept.clear()  # the hooks that autograd has of each saved tensor hold the list
        with self.rank.mode, live:
            before = live.now
            found = torch.autograd.grad(
                outputs, [operands[i] for i in wanted], grad_outputs, allow_unused=True
            )
        # Storages by number, as in the forward: incoming gradients first, then new ones.
        numbers = {
            g.untyped_storage()._cdata: index for index, g in enumerate(gradients) if g is not None
        }
        made: list[int] = []
        storages = []
        given = [(i, g) for i, g in zip(wanted, found, strict=True) if g is not None]
        for _, g in given:
            storage = g.untyped_storage()
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(gradients) + len(made)
                made.append(storage.nbytes())
            storages.append(numbers[storage._cdata])
        forms_made = tuple(TensorForm.of(g) for _, g in given)
        views = tuple(g._is_view() for _, g in given)
        return Backward(
            tuple(i for i, _ in given),
            forms_made,
            tuple(storages),
            tuple(made),
            live.peak - before,
            views,
        )

    def _long_forward(
        self, instruction: Compute, forms: Sequence[TensorForm], trains: bool
    ) -> Forward:
        """The footprint of many time steps, from those of a few. What the steps keep counts as one
        storage.
        """
        op, count = instruction.op, steps_of(instruction.op).count
        runs = [self._run_forward(_shortened(instruction, n), forms, trains) for n in SHORT]
        few, more = runs
        first = len(forms)
        results = tuple(
            _longer(op, SHORT[1], index, form, count) for index, form in enumerate(more.results)
        )
        # Storages of results, then one for all that is kept beside them.
        storages: list[int] = []
        made: list[int] = []
        for form, storage in zip(results, more.storages, strict=True):
            if storage < first:  # of an operand, that no step has changed
                storages.append(storage)
                continue
            storages.append(first + len(made))
            made.append(form.num_bytes)

        def kept(run: Forward) -> int:
            own = {storage for storage in run.saved if storage >= first}
            return sum(run.made[storage - first] for storage in own - set(run.storages))

        saved = [storage for storage in more.saved if storage < first]
        saved += [
            storage
            for storage, before in zip(storages, more.storages, strict=True)
            if before in more.saved and storage not in saved
        ]
        if beside := extrapolated((kept(few), kept(more)), count):
            saved.append(first + len(made))
            made.append(beside)
        peak = extrapolated((few.peak, more.peak), count)
        return Forward(results, tuple(storages), tuple(made), tuple(sorted(saved)), peak)

    def _long_backward(
        self,
        instruction: Compute,
        forms: Sequence[TensorForm],
        incoming: Sequence[TensorForm | None],
        wanted: Sequence[int],
    ) -> Backward:
        """The footprint of the backward of many time steps, from those of a few."""
        op, count = instruction.op, steps_of(instruction.op).count
        few, more = (
            self._run_backward(
                _shortened(instruction, n),
                forms,
                [
                    form and _longer(op, count, index, form, n)
                    for index, form in enumerate(incoming)
                ],
                wanted,
            )
            for n in SHORT
        )
        return replace(more, peak=extrapolated((few.peak, more.peak), count))

    def _assumed(
        self, instruction: Instruction, forms: Sequence[TensorForm], trains: bool
    ) -> Forward:
        """The footprint of an instruction that fake tensors cannot run: each result is a new
        storage, and autograd keeps every operand and result.
        """
        if isinstance(instruction, Adapt):
            # An adapter's results follow from its layouts, without running it.
            return self._adapted(instruction, forms[0], trains)
        results = []
        made_here = (
            [(give.result, give.step.after) for give in instruction.gives]
            if isinstance(instruction, Loop)
            else zip(instruction.op.results, instruction.layouts, strict=True)
        )
        for value, layout in made_here:
            shape = local_shape(layout, self.rank.mesh)
            takes_gradient = value.takes_gradient and trains
            results.append(TensorForm.contiguous(shape, value.dtype, takes_gradient))
        # Storages are numbered over operands first, then results; each result has its own.
        made = tuple(form.num_bytes for form in results)
        storages = tuple(range(len(forms), len(forms) + len(made)))
        keeps = any(form.requires_grad for form in results)
        return Forward(
            tuple(results),
            storages,
            made,
            tuple(range(len(forms))) + storages if keeps else (),
            sum(made),
            exact=False,
        )

    def _adapted(self, instruction: Adapt, form: TensorForm, trains: bool) -> Forward:
        """The footprint of an adapter that picks elements by number, between two cuts of one dim.

        It holds a message as large as the piece that it has, one as large as the piece that it
        gets, and this piece. Autograd keeps nothing of it.
        """
        shape = local_shape(instruction.step.after, self.rank.mesh)
        result = TensorForm.contiguous(shape, form.dtype, form.requires_grad and trains)
        return Forward(
            (result,), (1,), (result.num_bytes,), (), form.num_bytes + 2 * result.num_bytes
        )


def _shortened(instruction: Compute, count: int) -> Compute:
    return replace(instruction, op=shortened(instruction.op, count))


def _longer(op: IROp, before: int, index: int, form: TensorForm, count: int) -> TensorForm:
    """The form of a result of ``before`` time steps for ``count`` of them."""
    shape = stacked_shape(shortened(op, before), index, form.shape, count)
    if shape == form.shape:
        return form
    return TensorForm.contiguous(shape, form.dtype, form.requires_grad)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides[: len(shape)]))


def _signature(instruction: Instruction) -> object:
    """A key that is equal for instructions that do the same."""
    if isinstance(instruction, Adapt):
        return instruction.step
    if isinstance(instruction, Loop):
        return _signature_of_loop(instruction)
    rule = instruction.original.rule
    # How many rows are chosen cannot be told from the call.
    rows = instruction.layouts if rule is not None and rule.densities is not None else ()
    return _signature_of_call(instruction.op), rows


def _signature_of_loop(loop: Loop) -> object:
    """What two loops must share: the calls, and which of them reads what of which."""
    # Values by the order in which they are met: two layers differ in names alone.
    numbers: dict[str, int] = {}

    def number(value: IRValue) -> int:
        return numbers.setdefault(value.name, len(numbers))

    found = []
    for step in (*loop.takes, *loop.body, *loop.gives):
        read, made = (
            ((step.value,), (step.result,))
            if isinstance(step, Adapt)
            else (step.op.operands, step.op.results)
        )
        places = tuple(map(number, read)), tuple(map(number, made))
        found.append((_signature(step), places))
    late = tuple(value.name in loop.late for value in loop.results)
    order = tuple(map(number, loop.operands))
    return loop.axis, loop.count, tuple(found), late, order


@once
def _signature_of_call(op: IROp) -> object:
    return op.target, _source(op), sizes_read(op), op.autocast, op.grad_enabled


def _source(op: IROp) -> str:
    # Layers that are alike differ in the names of their values, and of what they draw.
    names = {value.name: f"x{index}" for index, value in enumerate(op.operands)}

    def without_name(arg: Arg) -> Arg:
        return replace(arg, name="") if isinstance(arg, RankDraw) else arg

    unnamed = op.changed(args=tuple((name, without_name(arg)) for name, arg in op.args))
    return call_source(unnamed, lambda value: names[value.name], to_python)
