"""Timelines of communication beside a forward or a backward: gatherings of updated parameters, and
sums of gradients.

One stream computes, adapters included. Another one communicates bucket by bucket, each as soon as
it can. An adapter that uses the axes of a bucket under way waits for it, and a bucket waits for
such an adapter: one message at a time on a link. Where a machine hides only a part of what is under
way (``overlap`` of its hardware file), both streams take longer meanwhile by the other part. The
second stream has a clock of its own, which stands still for that time: ``late_s`` behind.

- Sums (``use_async_reducer``, ``overlap_grad_sync``) begin when the gradients of their bucket are
  complete, from the last parameter on. They end before the step of the optimizer; with ZeRO-2 the
  sums of each backward end before the next forward.
- Gatherings (``overlap_param_sync``) all begin when the optimizer is done, in the order of first
  use. The next forward waits for a bucket where it first reads one of its parameters. So every step
  begins with the gatherings of the step before it.

Example: two layers of 2 ms backward each, and a sum of 3 ms for each layer's bucket. Layer 2 ends
at 2 ms, and its sum runs from 2 to 5. Layer 1 ends at 4 ms, and its sum runs from 5 to 8. So the
step gets 4 ms longer than its backward, instead of 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.after_backward import Reduction
from shardwright.compiler.cost.time.body_time import BodyTime, communicates
from shardwright.compiler.plan.program import Adapt, Program
from shardwright.compiler.plan.repeated_blocks import reads
from shardwright.runtime.dealing import Entry, deal_buckets, in_use_order

Part = tuple[str, float, float]
"""The name of a part of the step, and the seconds at which it starts and ends."""

Bucket = list[str]
"""The names of its parameters."""


def gathered_beside(
    program: Program, body: BodyTime, reduction: Reduction, device: Device
) -> list[Part]:
    """The first forward from second 0 on, then the gatherings that run beside it."""
    parts: list[Part] = []
    arrival: dict[str, float] = {}  # when each parameter is there
    # When the last bucket on an axis is there. All buckets are under way from the start, so an
    # adapter on this axis waits until then.
    free_axes: dict[str, float] = {}
    now = 0.0
    buckets = buckets_of(program, reduction)
    # Buckets are filled from the last parameter on; the forward reads the first one first.
    for number in range(len(buckets) - 1, -1, -1):
        names = buckets[number]
        start, now = now, now + sum(reduction.parameters[name].gather_s for name in names)
        parts.append((f"gather bucket {number}", start, now))
        arrival |= dict.fromkeys(names, now)
        free_axes |= dict.fromkeys(
            (axis for name in names for axis in reduction.parameters[name].axes), now
        )
    all_there = now
    awaited: dict[int, float] = {}  # when everything is there that an instruction reads
    for name, index in _first_readers(program).items():
        awaited[index] = max(awaited.get(index, 0.0), arrival.get(name, 0.0))
    now = late_s = 0.0
    for index, (instruction, time) in enumerate(body.instructions):
        until = [awaited.get(index, 0.0)]
        if isinstance(instruction, Adapt) and time.forward_s and communicates(instruction.step)[0]:
            until += [free_axes.get(axis, 0.0) for axis in instruction.step.axes]
        now = max(now, max(until) + late_s)
        longer_s = _not_hidden_s(time.forward_s, all_there + late_s - now, device)
        now, late_s = now + time.forward_s + longer_s, late_s + longer_s
    now = max(now, body.launched_s[0])
    return [("forward", 0.0, now), *_later(parts, late_s)]


def summed_beside(
    program: Program,
    body: BodyTime,
    reduction: Reduction,
    device: Device,
    start_s: float,
    free_s: float = 0.0,
) -> list[Part]:
    """A backward from ``start_s`` on, then the sums of all gradients that run beside it.
    ``free_s``: when the communication before it ends.
    """
    first_reader = _first_readers(program)
    buckets = buckets_of(program, reduction)
    # A bucket is complete when the backward of the first reader of each of its parameters has run.
    complete = {
        name: first_reader.get(name, len(body.instructions)) for names in buckets for name in names
    }
    waiting = list(buckets)
    now, free = start_s, free_s
    # What is computed again is spread evenly over the backward.
    again = body.recomputed_s / max(1, len(body.instructions))
    parts: list[Part] = []
    under_way: list[tuple[set[str], float]] = []
    late_s = 0.0

    # Sums run one after the other on a stream of their own, from when the bucket is complete.
    def begin(ready: float) -> None:
        nonlocal free
        names = waiting.pop(0)
        begins = max(ready - late_s, free)
        free = begins + sum(reduction.parameters[name].sum_s for name in names)
        parts.append((f"reduce bucket {len(buckets) - len(waiting) - 1}", begins, free))
        under_way.append(
            ({axis for name in names for axis in reduction.parameters[name].axes}, free)
        )

    # The backward goes through the instructions from the last to the first.
    for index in range(len(body.instructions) - 1, -1, -1):
        instruction, time = body.instructions[index]
        # A group does one collective at a time: an adapter waits for sums over its own axes.
        if isinstance(instruction, Adapt) and time.backward_s and communicates(instruction.step)[1]:
            now = max(
                [
                    now,
                    *(
                        end + late_s
                        for axes, end in under_way
                        if not axes.isdisjoint(instruction.step.axes)
                    ),
                ]
            )
        busy_s = time.backward_s + again
        longer_s = _not_hidden_s(busy_s, free + late_s - now, device)
        now, late_s = now + busy_s + longer_s, late_s + longer_s
        while waiting and all(complete[name] >= index for name in waiting[0]):
            begin(now)
    backward_end = now = max(now, start_s + body.launched_s[1])
    # What is left is summed behind the backward.
    while waiting:
        begin(now)
    return [("backward", start_s, backward_end), *_later(parts, late_s)]


def _later(parts: Sequence[Part], late_s: float) -> list[Part]:
    """Parts of the second stream by the clock of the step. What is done before all of the delay is
    shown a little late, and never after what waits for it.
    """
    return [(name, start + late_s, end + late_s) for name, start, end in parts]


def _not_hidden_s(busy_s: float, under_way_s: float, device: Device) -> float:
    """The seconds that messages take from ``busy_s`` of computing, if some are under way for
    ``under_way_s`` of it.
    """
    together_s = min(busy_s, max(0.0, under_way_s))
    return together_s - device.hidden_s(together_s, together_s)


def _first_readers(program: Program) -> dict[str, int]:
    """The position of the first instruction that reads each source. The gradient of the source is
    complete when the backward of this instruction is done.
    """
    first: dict[str, int] = {}
    source: dict[str, str] = {}  # what an adapted value was made of
    for index, instruction in enumerate(program.body):
        for value in reads(instruction):
            first.setdefault(source.get(value.name, value.name), index)
        if isinstance(instruction, Adapt):
            source[instruction.result.name] = source.get(
                instruction.value.name, instruction.value.name
            )
    return first


def buckets_of(program: Program, reduction: Reduction) -> list[Bucket]:
    """The buckets of all parameters that communicate, filled from the last one that is used."""
    dtypes = {
        declaration.value.name: declaration.value.dtype for declaration in program.declarations
    }
    # Filled in the reverse of the order in which forward uses them, as the runtime does it.
    listed = [name for name, found in reduction.parameters.items() if found.communicates]
    used = (value.name for value in program.graph.used_parameters)
    names = [listed[index] for index in reversed(in_use_order(listed, used))]
    entries = []
    for name in names:
        found = reduction.parameters[name]
        entries.append(Entry(found.group, dtypes[name], found.bucket_bytes, found.is_apart))
    return [
        [names[index] for index in members]
        for members in deal_buckets(entries, reduction.bucket_bytes)
    ]
