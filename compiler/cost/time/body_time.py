"""The seconds of the instructions of one program on its slowest rank, by what they do.

Example: a product of 1 ms forward and 2 ms backward, and an all-reduce over tp of 0.5 ms behind it,
give ``compute_s`` 3 ms and ``comm_s`` ``{"tp all_reduce": 0.5 ms}``. If the product lies in a
recompute region, ``compute_s`` is 4 ms, of which ``recomputed_s`` is 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.machine.hardware import Device, Hardware
from shardwright.compiler.cost.time.adapter_time import joining_s, together_time
from shardwright.compiler.cost.time.backward_parts import parts_of_operator
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.cost.time.gathers_ahead import (
    Both,
    GathersAndWork,
    Message,
    Work,
    hidden_ahead,
)
from shardwright.compiler.cost.time.inner_messages import exchanges_in
from shardwright.compiler.cost.time.kept_weights import asked_again
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.cost.time.operator_traffic import BIASES
from shardwright.compiler.cost.time.token_copies import launches
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.plan.conversion import AdapterStep
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import (
    Adapt,
    Compute,
    Instruction,
    Loop,
    Program,
    gathers_at,
    joins,
)
from shardwright.compiler.plan.repeated_blocks import Run, group_blocks, region_of
from shardwright.runtime.layout import Mesh

# The collective of each kind of adapter, forward and backward. Other adapters send nothing.
_FORWARD = {kind: kind for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
_BACKWARD = {
    ("all_gather", "reduce_scatter"): "reduce_scatter",
    ("narrow", "all_gather"): "all_gather",
    ("reduce_scatter", None): "all_gather",
    ("all_reduce", "all_reduce"): "all_reduce",
    ("grad_all_reduce", None): "all_reduce",
    ("all_to_all", None): "all_to_all",
}


@dataclass(frozen=True)
class BodyTime:
    """The time of one program, forward and backward of one microbatch.

    - ``instructions``: each instruction with its time, in the order of the program.
    - ``compute_s``, ``comm_s``: these split the sum of all times. ``comm_s`` has names like
      ``"tp all_reduce"``.
    - ``recomputed_s``: the part of the sum in which the backward runs forwards again or gathers
      weights again; ``recomputes`` says whether there are such forwards. ``ahead_s``: what these
      gathers would take more if the backward began none of them one weight ahead.
    - ``comm_bytes``: the bytes that go through the collectives of ``comm_s``, counted as the
      runtime's ``CommunicationVolume`` counts them.
    - ``launched_s``: the seconds that forward and backward take as the host launches their
      operators. Neither takes less.
    """

    instructions: tuple[tuple[Instruction, OpTime], ...]
    compute_s: float
    comm_s: dict[str, float]
    recomputed_s: float
    recomputes: bool
    comm_bytes: dict[str, float] = field(default_factory=dict)
    launched_s: tuple[float, float] = (0.0, 0.0)
    ahead_s: float = 0.0

    @property
    def forward_s(self) -> float:
        return max(sum(time.forward_s for _, time in self.instructions), self.launched_s[0])

    @property
    def backward_s(self) -> float:
        """The seconds of the backward, those of recomputation included."""
        return max(self._device_backward_s, self.launched_s[1])

    @property
    def _device_backward_s(self) -> float:
        return sum(time.backward_s for _, time in self.instructions) + self.recomputed_s

    @property
    def backward_stretch(self) -> float:
        """How many times longer the backward is than its work, because of its launches."""
        device_s = self._device_backward_s
        return self.backward_s / device_s if device_s else 1.0

    @property
    def waiting_s(self) -> float:
        """The seconds in which the device waits for the host to launch something."""
        forward_s = sum(time.forward_s for _, time in self.instructions)
        device_s = forward_s + self._device_backward_s
        return self.forward_s + self.backward_s - device_s


def body_time(
    program: Program,
    hardware: Hardware,
    ranks: Sequence[int],
    times: OperatorTimes | None = None,
    *,
    trains: bool = True,
    unit_size: int | None = None,
    gathers_ahead: bool = True,
) -> BodyTime:
    """The times of a program whose mesh lies on ``ranks`` of a unit. ``unit_size``: the ranks of
    the whole unit (default: as many as ``ranks``). ``gathers_ahead``: as in :func:`audit.audit`.
    """
    size = len(ranks) if unit_size is None else unit_size
    storage_ranks = tuple(
        unit * size + rank for unit in range(max(1, program.plan.zero)) for rank in ranks
    )
    sums = _Sums(program.plan, hardware, tuple(ranks), storage_ranks, times, trains)
    # Instructions of recompute regions run twice.
    again = _recomputed(program) if trains else {}
    again_too = asked_again(program) if trains else {}
    instructions: list[tuple[Instruction, OpTime]] = []
    for position, instruction in enumerate(program.body):
        runs = 2 if id(instruction) in again else 1
        if joins(instruction):
            time = OpTime(0.0)  # the first of its group has it all
        elif isinstance(instruction, Loop):
            time = sums.of_loop(instruction, runs)
        elif isinstance(instruction, Adapt):
            # What an operator keeps is gathered a second time for its backward; a recompute region
            # gathers with the rest, which ``runs`` has.
            group = gathers_at(program.body, position)
            kept = [adapter for adapter in group if runs == 1 and adapter.result.name in again_too]
            time = sums.of_adapters(group, kept, runs)
        else:
            time = sums.of_call(instruction, runs)
        instructions.append((instruction, time))
    sums.hide_beside(instructions)
    sums.hide_meanwhile(instructions, again)
    again_s = {id(item): time.forward_s for item, time in instructions if id(item) in again}
    if gathers_ahead:
        hidden = sums.hide_ahead(program, instructions, again, again_too)
        for position, (_, second_s) in hidden.items():
            if (number := id(program.body[position])) in again_s:
                again_s[number] -= second_s
    return BodyTime(
        tuple(instructions),
        sums.compute_s,
        dict(sorted(sums.comm.items())),
        sums.recomputed_s,
        bool(again) or any(isinstance(instruction, Loop) for instruction in program.body),
        sums.volumes,
        _launched_s(instructions, again_s, hardware.device, sums.mesh),
        sums.ahead_s,
    )


def gathers_and_work(
    program: Program,
    hardware: Hardware,
    ranks: Sequence[int],
    storage_ranks: Sequence[int],
    times: Sequence[OpTime],
    *,
    trains: bool,
) -> GathersAndWork:
    """What a program gathers and does meanwhile, if backward ran nothing again. ``times``: those of
    its instructions, if every gather were waited for. There are no loops in it.
    """
    sums = _Sums(program.plan, hardware, tuple(ranks), tuple(storage_ranks), None, trains)
    instructions = list(zip(program.body, times, strict=True))
    return sums.gathers(program, instructions, {}, asked_again(program) if trains else {})


def _launched_s(
    instructions: Sequence[tuple[Instruction, OpTime]],
    again_s: Mapping[int, float],
    device: Device,
    mesh: Mesh,
) -> tuple[float, float]:
    """The seconds of forward and backward on a device whose queue a host fills, ``queue_s`` for
    each operator: one starts when it has been launched and all before it have ended.

    The host goes on to the backward while the device is still at the forward, unless the queue
    stops there. Large operators at the end of a model let it get ahead, and hide what it then takes
    for the layers' backward; in the forward they come too late for that. The backward launches once
    more what it computes again, which takes ``again_s``, by the identity of the instruction.
    """
    queue_s = device.queue_s
    if not any(queue_s):
        return 0.0, 0.0
    forwards: list[tuple[float, float]] = []  # launching, and running, in the order of the launches
    backwards: list[tuple[float, float]] = []
    for item, time in instructions:
        there, back = 1, 1
        if isinstance(item, Adapt):
            # Adapters cost a host next to nothing: published steps that it binds take as long on
            # four tensor-parallel ranks as on one.
            there, back = 0, 0
        elif isinstance(item, Compute):
            there, back = launches(item.original, item.assignment, mesh, device)
            back += _summing_kernels(item.original)
        forward = (queue_s[0] * there * (time.forward_s > 0), time.forward_s)
        forwards.append(forward)
        backwards.append((queue_s[1] * back * (time.backward_s > 0), time.backward_s))
        if id(item) in again_s:
            backwards.append((forward[0], again_s[id(item)]))
    launched_s = done_s = 0.0
    ends = []
    for calls in (forwards, reversed(backwards)):
        for launching_s, running_s in calls:
            launched_s += launching_s
            done_s = max(done_s, launched_s) + running_s
        ends.append(done_s)
        if device.queue_stops:
            launched_s = done_s
    return ends[0], ends[1] - ends[0]


def _summing_kernels(op: IROp) -> int:
    """How many kernels the backward of an operator has that sum gradients: that of its bias over
    rows, and those of operands that operators behind it read, too.
    """
    own = BIASES.get(op.target)
    bias = op.operands[own : own + 1] if own is not None else ()
    summed = [op.operands[i] for i in op.summed]
    return sum(value.takes_gradient for value in (*bias, *summed))


@dataclass
class _Sums:
    """The sums of a body so far. Loops count as axes of which a rank goes through all pieces one
    after the other, so ``ranks`` names each rank once for each piece.
    """

    plan: Plan
    hardware: Hardware
    ranks: tuple[int, ...]
    storage_ranks: tuple[int, ...]
    times: OperatorTimes | None
    trains: bool
    compute_s: float = 0.0
    recomputed_s: float = 0.0
    ahead_s: float = 0.0
    comm: dict[str, float] = field(default_factory=dict)
    volumes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # With ZeRO-3 adapters work on a mesh that goes over several units; operators do not.
        self.mesh = self.plan.computing_mesh
        self.storage_mesh = self.plan.with_loops(self.plan.storage_mesh)
        pieces = math.prod(loop.count for loop in self.plan.loops.values())
        self.ranks = tuple(rank for rank in self.ranks for _ in range(pieces))
        self.storage_ranks = tuple(rank for rank in self.storage_ranks for _ in range(pieces))

    def of_loop(self, loop: Loop, runs: int) -> OpTime:
        """Add a loop: each piece runs forward, again in backward, and backward. What is gathered
        ahead travels while the piece before it is computed.
        """
        forwards = loop.count * (runs + self.trains)
        ahead = list(loop.ahead.values())
        total, of_piece, ahead_s = OpTime(), OpTime(), 0.0
        for step in loop.body:
            if isinstance(step, Adapt):
                time = self.of_adapters((step,), (), forwards, loop.count)
            else:
                time = self.of_call(step, forwards, loop.count)
            total += OpTime(loop.count * time.forward_s, loop.count * time.backward_s)
            # Of these forwards one of each piece is the loop's own.
            self.recomputed_s -= (loop.count - 1) * time.forward_s
            if step in ahead:
                ahead_s += time.forward_s
            else:
                of_piece += time
        # In backward a piece is computed again, and back: there is more to hide behind.
        device = self.hardware.device
        hidden_s = (loop.count - 1) * device.hidden_s(ahead_s, of_piece.forward_s)
        total += OpTime(-hidden_s)
        if self.trains:
            whole_s = of_piece.forward_s + of_piece.backward_s
            self.recomputed_s -= (loop.count - 1) * device.hidden_s(ahead_s, whole_s)
            self.recomputed_s -= (runs - 1) * hidden_s
        doors = [self._door(door, loop.count) for door in (*loop.takes, *loop.gives)]
        for time in doors:
            self.compute_s += runs * time.forward_s + time.backward_s
            total += time
        return total

    def _door(self, door: Adapt, count: int) -> OpTime:
        """What it takes to copy all pieces of a tensor, or to add up what all of them share."""
        step, device = door.step, self.hardware.device
        num_bytes = max(
            local_bytes(layout, door.of.dtype, self.storage_mesh)
            for layout in (step.before, step.after)
        )
        backs = self.trains and door.of.takes_gradient
        if step.kind == "keep_one":
            zeros_s = (count - 1) * device.memory_s(num_bytes)
            return OpTime(zeros_s, zeros_s if backs else 0.0)
        if step.kind in ("narrow", "all_gather"):
            # Every element is read once and written once.
            copied = device.memory_s(2 * num_bytes)
            return OpTime(copied, copied if backs else 0.0)
        # In each turn: read the sum so far and a summand, and write the sum.
        added = count * device.memory_s(3 * num_bytes)
        return OpTime(0.0, added if backs and step.kind == "grad_all_reduce" else 0.0)

    def of_adapters(
        self, group: Sequence[Adapt], kept: Sequence[Adapt], runs: int, backwards: int = 1
    ) -> OpTime:
        """Add adapters that go in one collective. ``kept``: those that are gathered again."""
        step = group[0].step

        def seconds_of(part: Sequence[Adapt]) -> OpTime:
            steps = [(adapter.step, adapter.of.dtype) for adapter in part]
            return together_time(steps, self.storage_mesh, self.storage_ranks, self.hardware)

        # Frozen weights have no gradients.
        summed = [adapter for adapter in group if self.trains and adapter.of.takes_gradient]
        time = OpTime(seconds_of(group).forward_s, seconds_of(summed).backward_s)
        again_s = seconds_of(kept).forward_s
        self.recomputed_s += again_s + (runs - 1) * time.forward_s
        moved = {a.result.name: _exchanged_bytes(a, self.storage_mesh) for a in group}
        forward_bytes, backward_bytes, again_bytes = (
            sum(moved[adapter.result.name][way] for adapter in part)
            for part, way in ((group, 0), (summed, 1), (kept, 0))
        )
        # An adapter is communication in one direction and may be a copy in the other.
        for kind, seconds, num_bytes in (
            (_FORWARD.get(step.kind), runs * time.forward_s, runs * forward_bytes),
            (
                _BACKWARD.get((step.kind, step.backward)),
                backwards * time.backward_s,
                backwards * backward_bytes,
            ),
            (step.kind, again_s, again_bytes),
        ):
            if kind is None:
                self.compute_s += seconds
            elif seconds:
                self._add(f"{'+'.join(step.axes)} {kind}", seconds, num_bytes)
        return time

    def of_call(self, call: Compute, runs: int, backwards: int = 1) -> OpTime:
        """Add an operator."""
        op, assignment = call.original, call.assignment
        time = op_time(op, assignment, self.mesh, self.hardware, self.times, ranks=self.ranks)
        time = time if self.trains else OpTime(time.forward_s)
        self.compute_s += runs * time.forward_s + backwards * time.backward_s
        self.recomputed_s += (runs - 1) * time.forward_s
        for sent in exchanges_in(op, assignment, self.mesh, self.hardware, ranks=self.ranks):
            times = (runs, backwards if self.trains else 0)
            seconds = times[0] * sent.time.forward_s + times[1] * sent.time.backward_s
            num_bytes = times[0] * sent.forward_bytes + times[1] * sent.backward_bytes
            # The operator's own time has the exchange in it, which is counted as communication.
            self.compute_s -= seconds
            self._add(f"{sent.axis} all_to_all", seconds, num_bytes)
        return time

    def hide_beside(self, instructions: list[tuple[Instruction, OpTime]]) -> None:
        """Take from the backward of each adapter what runs while gradients of weights are computed
        beside it.
        """
        if not self.trains:
            return
        # The seconds of the gradient of each weight that a product leaves to an adapter.
        left_s: dict[str, float] = {}
        beside = {w.name for i, _ in instructions if isinstance(i, Adapt) for w in i.beside}
        for instruction, time in instructions if beside else ():
            if not isinstance(instruction, Compute):
                continue
            for number, value in enumerate(instruction.op.operands):
                if value.name in beside:
                    others = set(range(len(instruction.op.operands))) - {number}
                    device = self.hardware.device
                    parts = parts_of_operator(instruction, time, others, self.mesh, device)
                    left_s[value.name] = parts[1]
        for position, (instruction, time) in enumerate(instructions):
            if not isinstance(instruction, Adapt) or not instruction.beside:
                continue
            busy_s = sum(left_s.get(weight.name, 0.0) for weight in instruction.beside)
            hidden_s = self.hardware.device.hidden_s(time.backward_s, busy_s)
            instructions[position] = instruction, time + OpTime(0.0, -hidden_s)
            step = instruction.step
            self.comm[f"{'+'.join(step.axes)} {_BACKWARD[step.kind, step.backward]}"] -= hidden_s

    def hide_meanwhile(
        self, instructions: list[tuple[Instruction, OpTime]], again: Collection[int]
    ) -> None:
        """Take from each message that is started what runs while it is under way. ``again``: the
        instructions that backward runs a second time.
        """
        device = self.hardware.device
        for position, (instruction, time) in enumerate(instructions):
            if not isinstance(instruction, Adapt | Compute) or not instruction.meanwhile:
                continue
            (there, there_s), (back, back_s) = self._under_way(instruction, time)
            busy = OpTime()
            for other, its_time in instructions[position + 1 :][: instruction.meanwhile]:
                # Other messages keep the device no busier.
                busy += its_time if isinstance(other, Compute) else OpTime()
            hidden = OpTime(
                device.hidden_s(there_s, busy.forward_s), device.hidden_s(back_s, busy.backward_s)
            )
            instructions[position] = (
                instruction,
                time + OpTime(-hidden.forward_s, -hidden.backward_s),
            )
            runs = 2 if id(instruction) in again else 1
            self.recomputed_s -= (runs - 1) * hidden.forward_s
            for name, seconds in ((there, runs * hidden.forward_s), (back, hidden.backward_s)):
                if seconds:
                    self.comm[name] -= seconds

    def hide_ahead(
        self,
        program: Program,
        instructions: list[tuple[Instruction, OpTime]],
        again: Mapping[int, int],
        asked: Mapping[str, tuple[int, int]],
    ) -> dict[int, Both]:
        """Take from gathers of weights what runs while they are under way, as the one before them
        is used. ``again``: the region of each instruction that backward runs a second time.
        ``asked``: where backward needs what it gathers again.

        What is hidden, forward and again in backward, by position, is the result.
        """
        found = hidden_ahead(
            self.gathers(program, instructions, again, asked), self.hardware.device
        )
        for position, hidden in found.items():
            item, time = instructions[position]
            assert isinstance(item, Adapt)
            instructions[position] = item, time + OpTime(-hidden[0])
            self.recomputed_s -= hidden[1]
            self.ahead_s += hidden[1]
            if any(hidden):
                self.comm[f"{'+'.join(item.step.axes)} all_gather"] -= sum(hidden)
        return found

    def gathers(
        self,
        program: Program,
        instructions: Sequence[tuple[Instruction, OpTime]],
        again: Mapping[int, int],
        asked: Mapping[str, tuple[int, int]],
    ) -> GathersAndWork:
        """What is gathered, and what is done meanwhile: no work where nothing is gathered."""
        messages: dict[int, Message] = {}
        for position, (item, time) in enumerate(instructions):
            if isinstance(item, Adapt) and item.step.kind == "all_gather" and not joins(item):
                messages[position] = self._gathered(program, position, time, again, asked)
        work = [self._work(item, time, again) for item, time in instructions if messages]
        return GathersAndWork(program, messages, work, asked)

    def _gathered(
        self,
        program: Program,
        position: int,
        time: OpTime,
        again: Mapping[int, int],
        asked: Mapping[str, tuple[int, int]],
    ) -> Message:
        """What the gathers at a position send, without the copies around it."""
        group = gathers_at(program.body, position)
        kept = [a for a in group if a.result.name in asked and id(a) not in again]
        times = []
        for part in (group, kept):
            steps = [(adapter.step, adapter.of.dtype) for adapter in part]
            whole = together_time(steps, self.storage_mesh, self.storage_ranks, self.hardware)
            copied_s = joining_s(steps, self.storage_mesh, self.hardware)
            times.append(whole.forward_s - copied_s)
        # Some of it may be hidden behind something else already.
        forward_s = min(times[0], time.forward_s)
        return Message(forward_s, forward_s if id(group[0]) in again else times[1])

    def _work(self, item: Instruction, time: OpTime, again: Mapping[int, int]) -> Work:
        """What an instruction computes, and the axes over which it waits for messages."""
        if isinstance(item, Adapt):
            sends = communicates(item.step)
            axes = (
                item.step.axes if sends[0] and time.forward_s else (),
                item.step.axes if sends[1] and time.backward_s else (),
            )
            return Work(OpTime(), axes, again.get(id(item)))
        if isinstance(item, Loop):
            # Its messages travel beside what it computes, which hides nothing else.
            inside = {axis for a in item.body if isinstance(a, Adapt) for axis in a.step.axes}
            return Work(OpTime(), (inside, inside), again.get(id(item)))
        sent = exchanges_in(
            item.original, item.assignment, self.mesh, self.hardware, ranks=self.ranks
        )
        sent_s = OpTime(
            sum(message.time.forward_s for message in sent),
            sum(message.time.backward_s for message in sent),
        )
        busy = OpTime(
            max(0.0, time.forward_s - sent_s.forward_s),
            max(0.0, time.backward_s - sent_s.backward_s),
        )
        names = tuple(message.axis for message in sent)
        return Work(busy, (names, names), again.get(id(item)))

    def _under_way(
        self, instruction: Adapt | Compute, time: OpTime
    ) -> tuple[tuple[str, float], tuple[str, float]]:
        """The message of an instruction, forward and backward: the name under which it counts, and
        its seconds.
        """
        if isinstance(instruction, Adapt):
            step = instruction.step
            kinds = _FORWARD.get(step.kind), _BACKWARD.get((step.kind, step.backward))
            there, back = (f"{'+'.join(step.axes)} {kind}" if kind else "" for kind in kinds)
            return (there, time.forward_s if there else 0.0), (
                back,
                time.backward_s if back else 0.0,
            )
        sent = exchanges_in(
            instruction.original,
            instruction.assignment,
            self.mesh,
            self.hardware,
            ranks=self.ranks,
        )
        # Along several axes tokens go one after the other; the last of these messages is started.
        last = sent[-1] if instruction.op.target == "dispatch" else sent[0]
        name = f"{last.axis} all_to_all"
        back_s = last.time.backward_s if self.trains else 0.0
        return (name, last.time.forward_s - last.counts_s), (name, back_s)

    def _add(self, name: str, seconds: float, num_bytes: float) -> None:
        self.comm[name] = self.comm.get(name, 0.0) + seconds
        self.volumes[name] = self.volumes.get(name, 0.0) + num_bytes


def communicates(step: AdapterStep) -> tuple[bool, bool]:
    """Whether an adapter sends anything, forward and backward."""
    return step.kind in _FORWARD, (step.kind, step.backward) in _BACKWARD


def _exchanged_bytes(adapter: Adapt, mesh: Mesh) -> tuple[int, int]:
    """The bytes that counters see of an adapter's collectives, forward and backward: of a gather
    what comes out, of any other one what goes in.
    """
    step, dtype = adapter.step, adapter.of.dtype
    before, after = local_bytes(step.before, dtype, mesh), local_bytes(step.after, dtype, mesh)
    gathers = _BACKWARD.get((step.kind, step.backward)) == "all_gather"
    return after if step.kind == "all_gather" else before, before if gathers else after


def _recomputed(program: Program) -> dict[int, int]:
    """The instructions that the backward runs again, by identity, each with the number of its
    region.
    """
    if not any(region_of(instruction) is not None for instruction in program.body):
        return {}
    runs = (item for item in group_blocks(program) if isinstance(item, Run) and item.recompute)
    return {id(item): number for number, run in enumerate(runs) for item in run.instructions}
