"""Gather neighbouring weights of a layer in one collective, and activations that one operator
reads, where that holds no more memory.

A weight that is stored in pieces is gathered right before its use, while the weight before it is
used. So at any time two neighbours are whole. In backward one of them has its gradient beside it. A
layer of small and large weights holds most at the two largest neighbours, and elsewhere less.
There several weights may come together: fewer collectives have fewer latencies, the bytes are the
same, and every result arrives in its place.

Example: of a layer with weights of 3, 1, 4 and 4 MB the last two are whole at once, 8 MB. The first
two can come together: 4 MB beside the next 4 MB. The layer has three gathers in the place of four.

A group stays within one layer (a stretch of one numbered module and one recompute region), and all
that reads its weights lies there, so that layers stay alike. What activations need beside the
weights differs from place to place. So the memory of a step is predicted with and without groups,
and groups that would raise its peak are split at the ends of layers, or left out. A compile knows
no machine: the memory is that over gloo, where summing the gradients of a group takes most.

Activations that are gathered right in front of the operator that reads them, such as keys and
values of attention, are whole at the same time in any case. They come together unless what their
message takes for a moment would raise the peak; or communication overlaps
(``passes/meanwhile.py``), where each is a message that may be started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import TypeVar

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.memory.pipeline_memory import pipeline_memory
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.time.adapter_time import end_to_end
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Instruction, Program
from shardwright.compiler.plan.repeated_blocks import container_of, path_of, reads, region_of
from shardwright.compiler.plan.zero import settled_config
from shardwright.runtime.config import ComputeConfig

Form = TypeVar("Form", Program, PipelineProgram)

_ENDS = ((False, False), (False, True), (True, True))
"""Whether the first and the last gather of a layer stay alone: what is tried, one after the other.
Beside them the neighbours from other layers are whole, a large output projection say.
"""


@dataclass(frozen=True)
class GatherTogether:
    """The pass: see the top of the file. ``config``: what the memory of a step depends on."""

    config: ComputeConfig
    name = "gathers"

    def __call__(self, program: Form) -> Form:
        """The program with gathers that join the ones before them."""
        return self._with_activations(self._with_weights(program))

    def _with_activations(self, program: Form) -> Form:
        if self.config.overlap_communication:
            return program
        found = _mapped(program, _with_joined_operands)
        if found == program:
            return program
        peaks = zip(self._peaks(found), self._peaks(program), strict=True)
        return found if all(peak <= before for peak, before in peaks) else program

    def _with_weights(self, program: Form) -> Form:
        if not any(len(stretch) > 1 for part in _programs(program) for stretch in _stretches(part)):
            return program
        # Joined gathers are whole at the same time: taken only if no rank's peak rises.
        most = self._peaks(program)
        tried = [program]
        for first_alone, last_alone in _ENDS:
            found = _mapped(
                program, partial(_joined, first_alone=first_alone, last_alone=last_alone)
            )
            if found in tried:
                continue
            tried.append(found)
            peaks = zip(self._peaks(found), most, strict=True)
            if all(peak <= before for peak, before in peaks):
                return found
        return program

    def _peaks(self, program: Program | PipelineProgram) -> list[int]:
        """The peak of each rank, in bytes."""
        config = settled_config(program.plan, self.config)
        if isinstance(program, PipelineProgram):
            return [memory.peak_bytes for memory in pipeline_memory(program, config)]
        return [program_memory(program, config).peak_bytes]


def _programs(program: Program | PipelineProgram) -> Sequence[Program]:
    return program.programs if isinstance(program, PipelineProgram) else (program,)


def _mapped(program: Form, function: Callable[[Program], Program]) -> Form:
    """The program with a function applied to each of its stages, or to itself without any."""
    if isinstance(program, PipelineProgram):
        return replace(program, programs=tuple(map(function, program.programs)))
    return function(program)


def _with_joined_operands(program: Program) -> Program:
    """The program with gathers of activations that join the ones right before them, where the next
    operator reads both.
    """
    body = list(program.body)
    reader: Instruction | None = None
    # From the end to the front, so that the operator behind each gather is known.
    for position in range(len(body) - 1, 0, -1):
        before, gather = body[position - 1], body[position]
        if not isinstance(gather, Adapt):
            reader = gather
        elif reader is not None and isinstance(before, Adapt):
            read = {value.name for value in reads(reader)}
            kind = _activation_kind(gather)
            alike = kind is not None and kind == _activation_kind(before)
            if alike and {before.result.name, gather.result.name} <= read:
                body[position] = replace(gather, joins=True)
    return replace(program, body=tuple(body))


def _activation_kind(gather: Adapt) -> tuple[object, ...] | None:
    """What gathers of activations have in common that one collective can do; ``None`` of other
    adapters. Weights, and what backward gathers again, are held in another way.
    """
    step, value = gather.step, gather.of
    is_held = gather.gathers_weight or gather.gathers_again or gather.in_loop
    if step.kind != "all_gather" or is_held or gather.choice is not None:
        return None
    cut = (step.axes, step.dim, step.cut, step.backward)
    place = gather.region, container_of(path_of(gather))
    return *cut, value.dtype, value.takes_gradient, *place


def _joined(program: Program, *, first_alone: bool, last_alone: bool) -> Program:
    """The program with the groups of every stretch. Weights that join come right behind the first
    of their group: nothing but the pieces is needed for that.
    """
    behind: dict[int, list[Adapt]] = {}
    moved: set[int] = set()
    for stretch in _stretches(program):
        sizes = [_bytes(gather, program) for gather in stretch]
        ends = _ends_of_groups(sizes, first_alone=first_alone, last_alone=last_alone)
        start = 0
        for end in ends:
            # The others join the collective of the first one, so they must follow it at once.
            first, *others = stretch[start:end]
            behind[id(first)] = [replace(gather, joins=True) for gather in others]
            moved.update(map(id, others))
            start = end
    body: list[Instruction] = []
    for instruction in program.body:
        if id(instruction) not in moved:
            body += [instruction, *behind.get(id(instruction), ())]
    return replace(program, body=tuple(body))


def _bytes(gather: Adapt, program: Program) -> int:
    """The bytes of the whole weight."""
    return local_bytes(gather.step.after, gather.of.dtype, program.plan.storage_mesh)


def _stretches(program: Program) -> Iterator[list[Adapt]]:
    """The gathers of each layer that could join each other, in their order: without another gather
    in between, over one axis, of one dtype.
    """
    readers: dict[str, set[int]] = {}
    layers = [
        list(instructions)
        for _, instructions in groupby(
            program.body, lambda i: (region_of(i), container_of(path_of(i)))
        )
    ]
    for position, layer in enumerate(layers):
        for instruction in layer:
            for value in reads(instruction):
                readers.setdefault(value.name, set()).add(position)
    # What lives on behind the layer must not be joined: the joined weight would be held as long.
    outside = {value.name for value in program.results()}
    outside |= {value.name for i in program.tail for value in reads(i)}
    outside |= {after.name for _, after in program.buffer_updates}
    for position, layer in enumerate(layers):
        gathers = [i for i in layer if isinstance(i, Adapt) and i.gathers_weight]

        def alone(gather: Adapt, position: int = position) -> bool:
            name = gather.result.name
            return name in outside or readers.get(name, set()) != {position}

        # groupby joins neighbours only, so the order of gathers stays what it was.
        for key, group in groupby(gathers, lambda g: None if alone(g) else _kind(g, program)):
            if key is not None:
                yield list(group)


def _kind(gather: Adapt, program: Program) -> tuple[object, ...] | None:
    """What gathers have in common that one collective can do; ``None`` of one that goes alone.
    Pieces must be as large as each other and lie one after the other in the whole.
    """
    step, mesh = gather.step, program.plan.storage_mesh
    if gather.value.kind is not ValueKind.PARAMETER or gather.choice is not None:
        return None
    if step.dim != 0 or not end_to_end(step, mesh):
        return None
    if mesh.axis_size(step.axis) == 1:
        return None
    return step.axes, step.backward, gather.of.dtype


def _ends_of_groups(sizes: Sequence[int], *, first_alone: bool, last_alone: bool) -> list[int]:
    """Cut the weights of a layer into the fewest groups that hold no more than the weights one by
    one do. Returns where each group ends; of several ways the one with the smallest groups in
    front.

    In forward a group is whole beside the next one; in backward a group and its gradients are whole
    beside the one before it.
    """
    pairs = list(pairwise(sizes))
    most_forward = max((a + b for a, b in pairs), default=0)
    most_backward = max((a + 2 * b for a, b in pairs), default=0)
    count = len(sizes)
    # best[start, end]: the fewest groups of the weights from 0 to ``end``, the last of which begins
    # at ``start``, and where the group before it begins.
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for end in range(1, count + 1):
        for start in range(end):
            size = sum(sizes[start:end])
            too_large = size > most_forward and end - start > 1
            kept_alone = end - start > 1 and (
                (first_alone and start == 0) or (last_alone and end == count)
            )
            if too_large or kept_alone:
                continue
            if start == 0:
                best[start, end] = (1, -1)
                continue
            found = []
            for before in range(start):
                # The group in front and this one are there at the same time; in backward this one
                # has its gradient beside it.
                in_front = sum(sizes[before:start])
                fits = in_front + size <= most_forward and in_front + 2 * size <= most_backward
                if (before, start) in best and fits:
                    found.append((best[before, start][0] + 1, before))
            if found:
                best[start, end] = min(found)
    _, start = min(
        (best[start, count][0], start) for start in range(count) if (start, count) in best
    )
    ends = [count]
    while start > 0:
        ends.append(start)
        start = best[start, ends[-2]][1]
    return ends[::-1]
