"""Loops over time steps that ``forward`` writes in Python become one operator.

Python runs such a loop while it is traced, so the graph has the operators of all steps. Where they
are shown to repeat one step (``step_loops.py``), one operator ``time_steps`` takes their place.
What has read single steps reads its results:

    y = torch.stack([h_1, ..., h_512], 1)    is a result of the loop
    out[:, 0] = h_1; ...                     so is ``out``
    h_512                                    so is the value of the last step
    h_7                                      is a place of all values, stacked

A loop of which it cannot be shown stays as it is. So does one that carries nothing from step to
step, unless it is long: its steps can be computed side by side.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.op import Arg, IROp, map_leaves
from shardwright.compiler.ir.time_steps import TIME_STEPS, Stacked, StepIndex, TimeSteps
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.naming import Namer
from shardwright.compiler.trace.step_loops import (
    MIN_STEPS,
    Carry,
    Place,
    Read,
    StepLoop,
    StepLoops,
    key_of,
    may_repeat,
    runs,
)


def roll_time_steps(graph: IRGraph) -> IRGraph:
    """The graph with one operator for each loop over time steps."""
    if len(graph.ops) < 2 * MIN_STEPS or not may_repeat(graph.ops):
        return graph
    loops = StepLoops(graph)
    for run in runs([key_of(op) for op in graph.ops]):
        loop = loops.loop(run)
        if loop is not None:
            _Replacement(loops, loop).make()
    if not loops.instead:
        return graph
    ops: list[IROp] = []
    for position, op in enumerate(loops.ops):
        ops += loops.instead.get(position, [op])
    return graph.with_ops(tuple(ops))


class _Replacement:
    """One loop, from its operators to one operator ``time_steps`` and what reads its results."""

    def __init__(self, loops: StepLoops, loop: StepLoop) -> None:
        self.loops, self.loop = loops, loop
        self.last_step = loops.ops[self._position(loop.count - 1, 0) :][: loop.period]
        self.path = _common_path([op.module_path for op in self.last_step])
        self.words = Namer()  # of the values of one step
        self.inputs: dict[Hashable, IRValue] = {}
        self.operands: list[IRValue] = []
        self.values: dict[Place, IRValue] = {}
        self.stacks: dict[tuple[Place, int, bool], IRValue] = {}
        self.last: dict[Place, IRValue] = {}
        self.slices: dict[Hashable, IRValue] = {}  # those that move on with the steps
        self.behind: list[IROp] = []  # what reads single steps
        # Places whose operator writes a part of a result in each step.
        self.written = self._written()

    def _position(self, step: int, place: int) -> int:
        return self.loop.start + step * self.loop.period + place

    def _value(self, step: int, place: Place) -> IRValue:
        return self.loops.ops[self._position(step, place[0])].results[place[1]]

    def make(self) -> None:
        loop = self.loop
        first = [op for op in self.last_step if op.module_path == self.path] or self.last_step
        # Carried values first: they are the first parameters of the function.
        carries = self._all_carries()
        for carry in carries:
            self._input(
                ("carry", carry), loop.carried[carry], self._value(loop.count - 1, carry[0])
            )
        ops = self._step_ops()
        carried = tuple(
            self.values[place] if distance == 1 else self.inputs["carry", (place, distance - 1)]
            for place, distance in carries
        )
        self._give()
        stacked = tuple(
            Stacked(self.values[place], dim, is_new) for place, dim, is_new in self.stacks
        )
        last = tuple(self.values[place] for place in self.last)
        steps = TimeSteps(loop.count, ops, tuple(self.inputs.values()), carried, stacked, last)
        results = (*self.stacks.values(), *self.last.values())
        facts = self.last_step[0]
        rolled = IROp(
            self.loops.names.unique(f"{self.path}.time_steps"),
            TIME_STEPS,
            (("operands", tuple(self.operands)), ("steps", steps)),
            results,
            self.path,
            self.loops.graph.module_types.get(self.path, ""),
            first[0].source,
            facts.region,
            facts.autocast,
            facts.grad_enabled,
        )
        for position in range(loop.start, self._position(loop.count, 0)):
            self.loops.instead[position] = []
        end = self._position(loop.count, 0) - 1
        self.loops.instead[end] = [rolled, *self.behind]
        for op in (rolled, *self.behind):
            for index, value in enumerate(op.results):
                self.loops.producers[value.name] = op, index

    # -- one step

    def _all_carries(self) -> list[Carry]:
        """What is carried, without results that are written part by part."""
        written = {place for place, _ in self.written}
        return [carry for carry in self.loop.carried if carry[0] not in written]

    def _step_ops(self) -> tuple[IROp, ...]:
        """The operators of one step, in values of their own."""
        written = {place[0] for place, _ in self.written}
        ops: list[IROp] = []
        for place, (op, args) in enumerate(zip(self.last_step, self.loop.args, strict=True)):
            if place in written:
                continue
            given = tuple(
                (name, map_leaves(arg, lambda x: self._leaf(x, ops))) for name, arg in args
            )
            results = []
            for index, value in enumerate(op.results):
                made = self._own(value, self._word(value.name))
                self.values[place, index] = made
                results.append(made)
            ops.append(IROp(results[0].name, op.target, given, tuple(results), source=op.source))
        return tuple(ops)

    def _leaf(self, leaf: Arg, ops: list[IROp]) -> Arg:
        """A leaf of an argument, in the values of a step. A slice that moves on is an operator of
        its own, which is added to ``ops``.
        """
        if not isinstance(leaf, Read):
            return leaf
        if leaf.place is not None:
            return self.values[leaf.place]
        if leaf.carry is not None:
            return self.inputs["carry", leaf.carry]
        assert leaf.value is not None
        value = self._input(("value", leaf.value.name), leaf.value, leaf.value)
        if leaf.index is None:
            return value
        key = ("slice", leaf.value.name, repr(leaf.index))
        if key not in self.slices:
            shape = _sliced_shape(leaf.value.shape, leaf.index)
            made = replace(value, name=self.words.unique(f"{value.name}_t"), shape=shape)
            ops.append(
                IROp(made.name, "getitem", (("input", value), ("index", leaf.index)), (made,))
            )
            self.slices[key] = made
        return self.slices[key]

    def _input(self, key: Hashable, outside: IRValue, named: IRValue) -> IRValue:
        """The value of a step for one of outside; ``named``: what it is named after."""
        if key not in self.inputs:
            word = self._word(named.fqn or named.name)
            self.inputs[key] = self._own(named, word)
            self.operands.append(outside)
        return self.inputs[key]

    def _own(self, value: IRValue, word: str) -> IRValue:
        return IRValue(
            self.words.unique(word),
            value.shape,
            value.dtype,
            value.requires_grad,
            takes_gradient=value.takes_gradient,
        )

    def _word(self, name: str) -> str:
        """The name of a value without the path of its module and without numbers, so that the steps
        of two layers are alike.
        """
        name = identifier(name)
        prefix = f"{identifier(self.path)}_" if self.path else ""
        name = name.removeprefix(prefix)
        return re.sub(r"_\d+(?=_|$)", "", name) or "x"

    # -- what is read of it

    def _written(self) -> list[tuple[Place, IRValue]]:
        """The places of ``out[:, t] = h``, where every step writes one place of a result, in
        order, and nothing else reads the result; each with what it was before.
        """
        found = []
        for carry, before in self.loop.carried.items():
            place, distance = carry
            op, args = self.last_step[place[0]], dict(self.loop.args[place[0]])
            if op.target != "select_scatter" or distance != 1:
                continue
            index, source = args.get("index"), op.arg("src")
            plain = (
                isinstance(index, StepIndex)
                and abs(index.stride) == 1
                and min(index.at(0), index.at(self.loop.count - 1)) >= 0
                and isinstance(args.get("dim"), int)
                and source.dtype == op.results[0].dtype
                and args["input"] == Read(carry=carry)
                and isinstance(args["src"], Read)
                and args["src"].place is not None
            )
            if plain and self._only_at_the_end(place):
                found.append((place, before))
        return found

    def _only_at_the_end(self, place: Place) -> bool:
        """Whether a value is read by the same operator of the next step alone, and behind the loop
        as it is at its end.
        """
        for step in range(self.loop.count):
            value, is_last = self._value(step, place), step == self.loop.count - 1
            uses = self.loops.uses.get(value.name, [])
            following = [] if is_last else [self._position(step + 1, place[0])]
            inside = [use for use in uses if use < self._position(self.loop.count, 0)]
            if inside != following:
                return False
            if not is_last and (len(uses) > 1 or value.name in self.loops.given):
                return False
        return True

    def _give(self) -> None:
        """The results: what is read behind the loop of single steps, of the last one, or of all."""
        written = dict(self.written)
        for number, op in enumerate(self.last_step):
            for index in range(len(op.results)):
                place = (number, index)
                if place in written:
                    self._give_written(place, written[place])
                else:
                    self._give_place(place)

    def _give_place(self, place: Place) -> None:
        count, end = self.loop.count, self._position(self.loop.count, 0)
        steps: list[int] = []
        readers: dict[int, None] = {}
        for step in range(count):
            value = self._value(step, place)
            behind = [use for use in self.loops.uses.get(value.name, ()) if use >= end]
            readers |= dict.fromkeys(behind)
            if behind or value.name in self.loops.given:
                steps.append(step)
        if not steps:
            return
        if steps == [count - 1]:
            self.last[place] = self._value(count - 1, place)
            return
        # Operators that lay the values of steps end to end.
        left = set(steps)
        for position in readers:
            left -= self._joined(position, place)
        alone = [s for s in steps if s in left or self._read_alone(s, place, readers)]
        for step in alone:
            value = self._value(step, place)
            if alone == [count - 1]:
                self.last[place] = value
                continue
            stacked = self._stack(place, 0, is_new=True)
            args = {"input": stacked, "index": (step,)}
            self.behind.append(self._op("getitem", args, value))

    def _read_alone(self, step: int, place: Place, readers: dict[int, None]) -> bool:
        """Whether something still reads the value of one step by itself."""
        name = self._value(step, place).name
        if name in self.loops.given:
            return True
        return any(
            value.name == name
            for position in readers
            for op in self.loops.instead.get(position, [self.loops.ops[position]])
            for value in op.operands
        )

    def _joined(self, position: int, place: Place) -> set[int]:
        """Let an operator that lays values of steps end to end read them from the stacked ones.
        Returns the steps that it reads so.
        """
        op = (self.loops.instead.get(position) or [self.loops.ops[position]])[-1]
        if op.target not in ("stack", "cat"):
            return set()
        numbers = {self._value(step, place).name: step for step in range(self.loop.count)}
        tensors = op.arg("tensors")
        dim = op.arg("dim", 0)
        is_new = op.target == "stack"
        dim %= op.results[0].ndim
        parts: list[IRValue | list[int]] = []
        for tensor in tensors:
            step = numbers.get(tensor.name)
            if step is None:
                parts.append(tensor)
                continue
            before = parts[-1] if parts else None
            # Steps go on forwards or backwards. Pieces of several places cannot be turned around.
            ways = {1, -1} if is_new or tensor.shape[dim] == 1 else {1}
            if isinstance(before, list) and len(before) > 1:
                ways &= {before[1] - before[0]}
            goes_on = isinstance(before, list) and step - before[-1] in ways
            if goes_on:
                assert isinstance(before, list)
                before.append(step)
            else:
                parts.append([step])
        taken = [part for part in parts if isinstance(part, list) and len(part) > 1]
        if not taken:
            return set()
        made: list[IROp] = []
        if len(parts) == 1:
            self.loops.instead[position] = self._part(place, dim, taken[0], op, is_new=is_new)
            return set(taken[0])
        pieces: list[IRValue] = []
        for part in parts:
            if isinstance(part, list) and len(part) > 1:
                ops = self._part(place, dim, part, op, is_new=is_new, partial=True)
                made += ops
                pieces.append(ops[-1].results[0])
                continue
            value = self._value(part[0], place) if isinstance(part, list) else part
            if is_new:  # one more dim, as the stacked ones have it
                made.append(
                    self._op(
                        "unsqueeze",
                        {"input": value, "dim": dim},
                        self._like(value, _with(value.shape, dim, 1)),
                    )
                )
                value = made[-1].results[0]
            pieces.append(value)
        made.append(self._op("cat", {"tensors": tuple(pieces), "dim": dim}, op.results[0], op))
        earlier = self.loops.instead.get(position, [])[:-1]
        self.loops.instead[position] = [*earlier, *made]
        for new in made:
            for index, value in enumerate(new.results):
                self.loops.producers[value.name] = new, index
        return {step for part in taken for step in part}

    def _part(
        self,
        place: Place,
        dim: int,
        steps: list[int],
        op: IROp,
        *,
        is_new: bool,
        partial: bool = False,
    ) -> list[IROp]:
        """Operators that give some of the steps, in their order, as the result of ``op`` or a part
        of it. None if that is all steps in order: then the loop gives it.
        """
        whole = steps == list(range(self.loop.count))
        result = op.results[0]
        if whole and not partial and (place, dim, is_new) not in self.stacks:
            self.stacks[place, dim, is_new] = result
            return []
        stacked = self._stack(place, dim, is_new=is_new)
        length = 1 if is_new else self._value(0, place).shape[dim]
        low, high = min(steps), max(steps) + 1
        shape = _with(stacked.shape, dim, len(steps) * length, replaced=True)
        made: list[IROp] = []
        value = stacked
        bounds = (*(slice(None),) * dim, slice(low * length, high * length, None))
        backwards = steps[0] > steps[-1]
        if (low, high) != (0, self.loop.count) or (whole and not backwards):
            made.append(
                self._op("getitem", {"input": value, "index": bounds}, self._like(result, shape))
            )
            value = made[-1].results[0]
        if backwards:
            made.append(
                self._op("flip", {"input": value, "dims": (dim,)}, self._like(result, shape))
            )
        if not partial:
            made[-1] = replace(made[-1], results=(result,))
        return made

    def _give_written(self, place: Place, before: IRValue) -> None:
        """What every step has written a place of, at the end of the loop."""
        args = dict(self.loop.args[place[0]])
        index, dim, source = args["index"], args["dim"], args["src"]
        final = self._value(self.loop.count - 1, place)
        if not self.loops.uses.get(final.name) and final.name not in self.loops.given:
            return
        dim %= final.ndim
        key = (source.place, dim, True)
        ends = index.at(0), index.at(self.loop.count - 1)
        low, high, size = min(ends), max(ends) + 1, final.shape[dim]
        everything = (low, high) == (0, size)
        if everything and index.stride == 1 and key not in self.stacks:
            self.stacks[key] = final
            return
        value = self._stack(source.place, dim, is_new=True)
        if index.stride == -1:
            self.behind.append(
                self._op("flip", {"input": value, "dims": (dim,)}, self._like(value, value.shape))
            )
            value = self.behind[-1].results[0]
        pieces = [value]
        for start, stop in ((0, low), (high, size)):
            if start == stop:
                continue
            cut = (*(slice(None),) * dim, slice(start, stop, None))
            part = self._like(before, _with(before.shape, dim, stop - start, replaced=True))
            self.behind.append(self._op("getitem", {"input": before, "index": cut}, part))
            pieces.insert(0 if start == 0 else len(pieces), part)
        self.behind.append(self._op("cat", {"tensors": tuple(pieces), "dim": dim}, final))

    def _stack(self, place: Place, dim: int, *, is_new: bool) -> IRValue:
        """The values of all steps, laid end to end."""
        key = (place, dim, is_new)
        if key not in self.stacks:
            value = self._value(self.loop.count - 1, place)
            count = self.loop.count * (1 if is_new else value.shape[dim])
            self.stacks[key] = self._like(
                value, _with(value.shape, dim, count, replaced=not is_new), "steps"
            )
        return self.stacks[key]

    def _like(self, value: IRValue, shape: tuple[Any, ...], word: str = "") -> IRValue:
        name = self.loops.names.unique(f"{value.name}_{word}" if word else value.name)
        return IRValue(
            name,
            shape,
            value.dtype,
            value.requires_grad,
            ValueKind.ACTIVATION,
            takes_gradient=value.takes_gradient,
        )

    def _op(
        self, target: str, args: dict[str, Arg], result: IRValue, like: IROp | None = None
    ) -> IROp:
        facts = like or self.last_step[0]
        return IROp(
            like.name if like else self.loops.names.unique(f"{self.path}.{target}"),
            target,
            tuple((name, arg) for name, arg in args.items()),
            (result,),
            facts.module_path if like else self.path,
            facts.module_type,
            facts.source,
            facts.region,
            facts.autocast,
            facts.grad_enabled,
        )


def _with(
    shape: tuple[Any, ...], dim: int, size: Any, *, replaced: bool = False
) -> tuple[Any, ...]:
    """A shape with one more dim of a size, or with the size of a dim replaced."""
    return (*shape[:dim], size, *shape[dim + replaced :])


def _sliced_shape(shape: tuple[Any, ...], index: tuple[Arg, ...]) -> tuple[Any, ...]:
    """The shape of what ``getitem`` takes: a number takes its dim away, a slice of steps leaves as
    much as it is long.
    """
    found: list[Any] = []
    sizes = iter(shape)
    for item in index:
        if item is None:
            found.append(1)
            continue
        size = next(sizes)
        if isinstance(item, slice):
            if isinstance(item.start, StepIndex) and isinstance(item.stop, StepIndex):
                found.append(item.stop.start - item.start.start)
            else:
                found.append(len(range(*slice(item.start, item.stop, item.step).indices(size))))
    return (*found, *sizes)


def _common_path(paths: Sequence[str]) -> str:
    """The path of the innermost module that all of them are in."""
    parts = [path.split(".") if path else [] for path in paths]
    common = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)
