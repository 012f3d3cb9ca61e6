"""The program of the whole model on the mesh of a stage, operator by operator: seconds, layouts,
and what is held.

A *place* is the position of an operator in those of the graph; an adapter has that of the next
operator.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import (
    ADAM,
    OptimizerMemory,
    gradient_bytes,
    kept_bytes,
)
from shardwright.compiler.cost.time.adapter_time import message_s, movement_of, step_time
from shardwright.compiler.cost.time.after_backward import all_gradients_bytes, parameter_s
from shardwright.compiler.cost.time.backward_parts import parts_of_operator
from shardwright.compiler.cost.time.body_time import gathers_and_work
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.cost.time.gathers_ahead import hidden_ahead
from shardwright.compiler.cost.time.kept_weights import gathered_again
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.cost.time.split_backward_time import (
    parts_of_instructions,
)
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.program import Adapt, Compute, Declaration, Program, Step
from shardwright.compiler.plan.repeated_blocks import in_front, reads, writes
from shardwright.compiler.plan.zero import ranks_of_units
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.gathers_of_regions import GathersOfRegions
from shardwright.policies.autodist.stages.kept import Kept
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class Setting:
    """What costs depend on besides the program. ``ranks``: the unit's ranks that the mesh lies on.
    ``num_microbatches``: of a step. ``counts_kept``: whether what operators keep for the backward
    is asked for; where memory has no limit, nobody reads it. ``gathers_ahead``: what is hidden of
    gathers of weights costs nothing, as in an audit; else each is priced as if it were waited for.
    """

    hardware: Hardware
    config: ComputeConfig
    ranks: tuple[int, ...]
    optimizer: OptimizerMemory = ADAM
    times: OperatorTimes | None = None
    num_microbatches: int = 1
    counts_kept: bool = True
    gathers_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer, read at ``places``: bytes with gradient and optimizer state; seconds
    of adding to its gradient by microbatch, and of its reduction and update once per step. Every
    stage that reads it has its own.
    ``shared_bytes``: the bytes where another stage like this one has it, too: ZeRO deals the
    optimizer's state out to both.
    ``gradient_bytes``: how many of the bytes are the gradient's. ``declaration``: of one that is
    trained.
    """

    places: tuple[int, ...]
    held_bytes: float
    shared_bytes: float
    added_s: float = 0.0
    once_s: float = 0.0
    gradient_bytes: float = 0.0
    declaration: Declaration | None = None


ALIKE = (
    "by_place",
    "hidden",
    "_regions_ahead",
    "times",
    "forward_s",
    "backward_s",
    "parameters",
    "layouts",
    "kept",
)
"""What of a walk does not depend on what is computed again."""


class Walk:
    """A program and its setting, with what is read off them once."""

    def __init__(self, program: Program, setting: Setting) -> None:
        self.program, self.setting = program, setting
        self.mesh: Mesh = program.plan.mesh
        self.storage_mesh: Mesh = program.plan.storage_mesh
        # by start, what backward_parts says of further places: as far as it was asked, and what
        # goes on with that
        self._parts: dict[int, tuple[list[tuple[float, float]], Iterator[tuple[float, float]]]] = {}
        self._operators: dict[tuple[str, frozenset[int]], tuple[float, float]] = {}
        self.storage_ranks = ranks_of_units(
            setting.ranks, max(1, program.plan.zero), setting.config.plan_ngpus
        )

    def recomputing(self, graph: IRGraph, recompute: tuple[str, ...]) -> Walk:
        """The same, with the modules that match patterns computed again: ``graph`` has them marked.
        Which adapters there are, and what each takes, is as without.
        """
        plan = replace(self.program.plan, recompute=recompute)
        found = Walk(replace(self.program, graph=graph, plan=plan), self.setting)
        # Worked out once for all that is computed again: most of what a walk takes.
        found.__dict__.update({name: getattr(self, name) for name in ALIKE})
        return found

    @cached_property
    def gradients_bytes(self) -> float:
        """The bytes of all gradients of the program, whole, as they are summed."""
        return all_gradients_bytes(self.setting.config, self.program.graph.used_parameters)

    @cached_property
    def by_place(self) -> tuple[tuple[int, Step], ...]:
        """Every instruction with its place."""
        positions = {op.name: index for index, op in enumerate(self.program.graph.ops)}
        found: list[tuple[int, Step]] = []
        place = len(positions) - 1
        for instruction in reversed(self.program.steps):
            if isinstance(instruction, Compute):
                place = positions[instruction.original.name]
            found.append((place, instruction))
        return tuple(found[::-1])

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of every value by name, copies included."""
        found: dict[str, Layout] = {d.value.name: d.layout for d in self.program.declarations}
        found.update(self.program.input_layouts)
        for instruction in self.program.steps:
            if isinstance(instruction, Adapt):
                found[instruction.result.name] = instruction.step.after
            else:
                results = zip(instruction.op.results, instruction.layouts, strict=True)
                found.update({value.name: layout for value, layout in results})
        return found

    @cached_property
    def times(self) -> tuple[OpTime, ...]:
        """Seconds of the instructions, in order, without what is hidden."""
        both = zip(self._waited, self.hidden, strict=True)
        return tuple(OpTime(t.forward_s - h[0], t.backward_s - h[1]) for t, h in both)

    @cached_property
    def hidden(self) -> tuple[tuple[float, float], ...]:
        """What of each instruction costs nothing, forward and backward: gathers of weights that the
        program begins one weight ahead, if nothing is computed again. In a stage its first ones
        are waited for, which is left out here: so no stage takes less.
        """
        found = {} if self._regions_ahead is None else self._regions_ahead.hidden
        return tuple(found.get(position, (0.0, 0.0)) for position in range(len(self.by_place)))

    @cached_property
    def _regions_ahead(self) -> GathersOfRegions | None:
        """What is hidden of gathers, and how regions change it; None where there are none, or each
        is waited for.
        """
        program, setting = self.program, self.setting
        if not setting.gathers_ahead or program.plan.loops:
            return None
        # An adapter that gathers again has both times of the gather here.
        times = [
            OpTime(t.forward_s, t.backward_s - t.forward_s * self._is_gathered_again(item))
            for (_, item), t in zip(self.by_place, self._waited, strict=True)
        ]
        ranks = setting.ranks, self.storage_ranks
        trains = not setting.config.inference_only
        gathers = gathers_and_work(program, setting.hardware, *ranks, times, trains=trains)
        device = setting.hardware.device
        if not gathers.messages:
            return None
        return GathersOfRegions(gathers, hidden_ahead(gathers, device), device)

    @cached_property
    def _waited(self) -> tuple[OpTime, ...]:
        """Seconds of the instructions, if every gather is waited for."""
        return tuple(self.time_of(instruction) for _, instruction in self.by_place)

    @property
    def exposed_s(self) -> float:
        """What gathers of weights take that could be hidden and is not, forward and backward."""
        hardware, found = self.setting.hardware, 0.0
        where = self.storage_mesh, self.storage_ranks, hardware
        for (_, item), hidden in zip(self.by_place, self.hidden, strict=True):
            if isinstance(item, Adapt) and item.gathers_weight:
                movement = movement_of(item.step, item.of.dtype, self.storage_mesh)
                count = 2 if self._is_gathered_again(item) else 1
                found += count * hardware.device.overlap * message_s(movement, *where) - sum(hidden)
        return found

    def _is_gathered_again(self, item: Step) -> bool:
        return isinstance(item, Adapt) and item.result.name in self._gathered_again

    @cached_property
    def forward_s(self) -> list[float]:
        """The forward seconds of the operator at each place, with its adapters."""
        return self._added_up([time.forward_s for time in self.times])

    @cached_property
    def backward_s(self) -> list[float]:
        """The backward seconds of the operator at each place, with its adapters."""
        return self._added_up([time.backward_s for time in self.times])

    @cached_property
    def kept(self) -> Kept:
        """What operators keep for the backward; nothing where that does not count."""
        if not self.setting.counts_kept:
            return Kept((), set(), self.mesh, {})
        own = {declaration.value.name for declaration in self.program.declarations}
        rng = self.setting.config.rng
        return Kept(self.by_place, own, self.mesh, self.layouts, rng)

    def again(self, start: int, stop: int, end: int | None = None) -> Again:
        """What it takes to compute the operators of a range again, and saves, in a stage that ends
        at place ``end``: by default that of the whole model. Adapters in front of the range, as
        emission puts them, run once.

        What the range gathers in its second run is begun ahead, as far as the setting says so.
        """
        # The instructions of these operators, and the adapters among them.
        own = slice(self._first[start], self._first[stop])
        inside = [
            (item, time)
            for (_, item), time in zip(self.by_place[own], self._waited[own], strict=True)
        ]
        last = len(self._first) if end is None else end

        def is_read_later(name: str) -> bool:
            return any(stop <= place < last for place in self._readers.get(name, ()))

        front = in_front([item for item, _ in inside], is_read_later, recompute=True)
        names = {adapter.result.name for adapter in front if isinstance(adapter, Adapt)}
        others = names | self._gathered_again  # that run in front, or for the backward anyway
        # The range runs a second forward, without what runs anyway.
        seconds = sum(
            t.forward_s
            for item, t in inside
            if not (isinstance(item, Adapt) and item.result.name in others)
        )
        if self._regions_ahead is not None:
            aside = {id(adapter) for adapter in front}
            positions = range(own.start, own.stop)
            runs = [p for p in positions if id(self.by_place[p][1]) not in aside]
            seconds -= self._regions_ahead.more_hidden_s(positions, runs)
        return Again(seconds, float(self.kept.saved(start, stop, names)))

    def backward_parts(self, start: int, stop: int) -> tuple[float, float]:
        """The backward of a stage of these places, which gets values from others, in two parts:
        gradients of what it gets, and of weights.
        """
        if start not in self._parts:
            self._parts[start] = [], self._parts_from(start)
        known, further = self._parts[start]
        known.extend(itertools.islice(further, max(0, stop - start + 1 - len(known))))
        return known[stop - start]

    def _parts_from(self, start: int) -> Iterator[tuple[float, float]]:
        """The sums over 0, 1, 2, ... places."""
        first = self._first[start]
        inputs = set(itertools.chain.from_iterable(self._differentiated[:first]))
        timed = self._timed[first:]
        # A stage is short: what lies behind it is not looked at.
        parts = parts_of_instructions(
            ((item, time) for _, item, time in timed), inputs, self._parts_of
        )
        inputs_s = weights_s = 0.0
        yield inputs_s, weights_s
        # Every place has an operator.
        for _, inside in groupby(zip(timed, parts, strict=True), key=lambda item: item[0][0]):
            for (_, item, _), (first_s, second_s) in inside:
                if self._is_gathered_again(item):
                    # for the gradient of what it is multiplied with
                    again_s = self.regathered_s[id(item)]
                    first_s, second_s = first_s + again_s, second_s - again_s
                inputs_s, weights_s = inputs_s + first_s, weights_s + second_s
            yield inputs_s, weights_s

    @cached_property
    def regathered_s(self) -> dict[int, float]:
        """What each gather takes that runs again in the backward, by identity."""
        timed = zip(self.by_place, self._waited, self.hidden, strict=True)
        return {
            id(item): waited.forward_s - hidden[1]
            for (_, item), waited, hidden in timed
            if self._is_gathered_again(item)
        }

    def _parts_of(self, item: Compute, time: OpTime, inside: frozenset[int]) -> tuple[float, float]:
        key = item.original.name, inside
        if key not in self._operators:
            self._operators[key] = parts_of_operator(
                item, time, inside, self.mesh, self.setting.hardware.device
            )
        return self._operators[key]

    @cached_property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)``: what the model itself computes again."""
        found, start = [], 0
        for region, ops in groupby(self.program.graph.ops, lambda op: op.region):
            stop = start + len(tuple(ops))
            found += [(start, stop)] if region is not None else []
            start = stop
        return tuple(found)

    @cached_property
    def _differentiated(self) -> list[list[str]]:
        """What each instruction writes that takes a gradient, but for what is made of weights."""
        return [
            []
            if _is_of_weight(item)
            else [value.name for value in writes(item) if value.takes_gradient]
            for item in self.program.steps
        ]

    @cached_property
    def _timed(self) -> list[tuple[int, Step, OpTime]]:
        return [
            (place, item, time)
            for (place, item), time in zip(self.by_place, self.times, strict=True)
        ]

    @cached_property
    def _first(self) -> list[int]:
        """The first instruction that has each place; behind the last operator, that after it."""
        found, last = [], 0
        for index, (_, item) in enumerate(self.by_place):
            if isinstance(item, Compute):
                found.append(last)
                last = index + 1
        return [*found, last]

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """Name of a value to the places that read it; what goes out of the program stands behind
        all operators.
        """
        found: dict[str, list[int]] = {}
        num_places, num_inside = len(self._first) - 1, self._first[-1]
        for index, (place, item) in enumerate(self.by_place):
            for value in reads(item):
                found.setdefault(value.name, []).append(place if index < num_inside else num_places)
        return found

    @cached_property
    def parameters(self) -> tuple[Held, ...]:
        """Parameters and buffers."""
        return tuple(self._parameters())

    def _added_up(self, seconds: list[float]) -> list[float]:
        found = [0.0] * len(self.program.graph.ops)
        for (place, _), time in zip(self.by_place, seconds, strict=True):
            found[place] += time
        return found

    def time_of(self, instruction: Step) -> OpTime:
        """Seconds of one instruction."""
        setting = self.setting
        if isinstance(instruction, Compute):
            return op_time(
                instruction.original,
                instruction.assignment,
                self.mesh,
                setting.hardware,
                setting.times,
                ranks=setting.ranks,
            )
        value = instruction.of
        time = step_time(
            instruction.step,
            value.dtype,
            self.storage_mesh,
            self.storage_ranks,
            setting.hardware,
            differentiable=value.takes_gradient,
        )
        # The backward gathers the weight once more before it uses it, in the time of the first
        # gather.
        again = instruction.result.name in self._gathered_again
        return replace(time, backward_s=time.backward_s + time.forward_s) if again else time

    @cached_property
    def _gathered_again(self) -> frozenset[str]:
        """What adapters gather once more in the backward."""
        return gathered_again(self.program)

    def _parameters(self) -> Iterator[Held]:
        setting, config = self.setting, self.setting.config
        homes = self._uses()
        # What parameters of one layout take is worked out once: those of layers are alike.
        known: dict[tuple[Layout, torch.dtype], tuple[float, float, float, float, float]] = {}
        for declaration in self.program.declarations:
            # A buffer holds its bytes and nothing else.
            value, layout, places = (
                declaration.value,
                declaration.layout,
                homes.get(declaration.value.name, (0,)),
            )
            num_bytes = local_bytes(layout, value.dtype, self.storage_mesh)
            if not value.requires_grad or value.kind is not ValueKind.PARAMETER:
                yield Held(places, num_bytes, num_bytes)
                continue
            if (alike := (layout, value.dtype)) in known:
                yield Held(places, *known[alike], declaration)
                continue
            num_elements = num_bytes / value.dtype.itemsize
            gradient = num_elements * gradient_bytes(setting.optimizer, value.dtype, config)
            # Held alone, or by two stages that share out the optimizer's state.
            kept = functools.partial(
                kept_bytes, setting.optimizer, layout, value.dtype, self.storage_mesh, config
            )
            held, shared = (num_bytes + gradient + kept(num_stages) for num_stages in (1, 2))
            each_s, once_s = parameter_s(
                declaration, self.storage_mesh, config, setting.hardware, setting.optimizer,
                setting.ranks, setting.num_microbatches, self.gradients_bytes,
            )  # fmt: skip
            known[alike] = held, shared, each_s, once_s, gradient
            yield Held(places, *known[alike], declaration)

    def _uses(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer to the places of its readers, ascending; of readers that every stage
        makes for itself, to the places that these are made for.
        """
        free = self.free_uses
        homes: dict[str, set[int]] = {}
        for place, op in enumerate(self.program.graph.ops):
            for value in op.operands:
                homes.setdefault(value.name, set()).update(free.get(place, (place,)))
        return {name: tuple(sorted(places)) for name, places in homes.items() if places}

    @cached_property
    def free(self) -> set[str]:
        """The names of the operators that every stage makes for itself."""
        return from_nothing(self.program.graph)

    @cached_property
    def free_uses(self) -> dict[int, tuple[int, ...]]:
        """Place of an operator that every stage makes for itself to those of the others that need
        it, ascending.
        """
        graph, free = self.program.graph, self.free
        needed: dict[str, set[int]] = {}
        found: dict[int, tuple[int, ...]] = {}
        # From the end: who needs a value is known before its maker comes.
        for place, op in reversed(list(enumerate(graph.ops))):
            places = {place}
            if op.name in free:
                places = set().union(*(needed.get(value.name, set()) for value in op.results))
                found[place] = tuple(sorted(places))
            for value in op.operands:
                needed.setdefault(value.name, set()).update(places)
        return found


def _is_of_weight(instruction: Step) -> bool:
    """Whether it makes a copy of a parameter or buffer."""
    return isinstance(instruction, Adapt) and instruction.of.kind in (
        ValueKind.PARAMETER,
        ValueKind.BUFFER,
    )
