"""The seconds of the instructions of one program on its slowest rank, by what they do.

Example: a product of 1 ms forward and 2 ms backward, and an all-reduce over tp of 0.5 ms behind it,
give ``compute_s`` 3 ms and ``comm_s`` ``{"tp all_reduce": 0.5 ms}``. If the product lies in a
recompute region, ``compute_s`` is 4 ms, of which ``recomputed_s`` is 1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.adapter_time import together_time
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.cost.time.inner_messages import exchanges_in
from shardwright.compiler.cost.time.kept_weights import gathered_again
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.plan.conversion import AdapterStep
from shardwright.compiler.plan.program import Adapt, Instruction, Program, gathers_at, joins
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
      weights again; ``recomputes`` says whether there are such forwards.
    - ``comm_bytes``: the bytes that go through the collectives of ``comm_s``, counted as the
      runtime's ``CommunicationVolume`` counts them.
    """

    instructions: tuple[tuple[Instruction, OpTime], ...]
    compute_s: float
    comm_s: dict[str, float]
    recomputed_s: float
    recomputes: bool
    comm_bytes: dict[str, float] = field(default_factory=dict)

    @property
    def forward_s(self) -> float:
        return sum(time.forward_s for _, time in self.instructions)

    @property
    def backward_s(self) -> float:
        """The seconds of the backward, those of recomputation included."""
        return sum(time.backward_s for _, time in self.instructions) + self.recomputed_s


def body_time(
    program: Program,
    hardware: Hardware,
    ranks: Sequence[int],
    times: OperatorTimes | None = None,
    *,
    trains: bool = True,
    unit_size: int | None = None,
) -> BodyTime:
    """The times of a program whose mesh lies on ``ranks`` of a unit. ``unit_size``: the ranks of
    the whole unit (default: as many as ``ranks``).
    """
    # With ZeRO-3 adapters work on a mesh that goes over several units; operators do not.
    mesh, storage_mesh = program.plan.mesh, program.plan.storage_mesh
    size = len(ranks) if unit_size is None else unit_size
    storage_ranks = tuple(
        unit * size + rank for unit in range(max(1, program.plan.zero)) for rank in ranks
    )
    # Instructions of recompute regions run twice.
    again = _recomputed(program) if trains else set()
    again_too = gathered_again(program) if trains else frozenset()
    instructions: list[tuple[Instruction, OpTime]] = []
    comm: dict[str, float] = {}
    volumes: dict[str, float] = {}
    compute_s = recomputed_s = 0.0
    for position, instruction in enumerate(program.body):
        runs = 2 if id(instruction) in again else 1
        if joins(instruction):
            instructions.append((instruction, OpTime(0.0)))  # the first of its group has it all
            continue
        if isinstance(instruction, Adapt):
            group, step = gathers_at(program.body, position), instruction.step

            def seconds_of(part: Sequence[Adapt]) -> OpTime:
                steps = [(adapter.step, adapter.of.dtype) for adapter in part]
                return together_time(steps, storage_mesh, storage_ranks, hardware)

            # Frozen weights have no gradients. What an operator keeps is gathered a second time for
            # its backward; a recompute region gathers with the rest, which ``runs`` has.
            summed = [adapter for adapter in group if trains and adapter.of.takes_gradient]
            kept = [adapter for adapter in group if runs == 1 and adapter.result.name in again_too]
            time = OpTime(seconds_of(group).forward_s, seconds_of(summed).backward_s)
            again_s = seconds_of(kept).forward_s
            recomputed_s += again_s
            moved = {a.result.name: _exchanged_bytes(a, storage_mesh) for a in group}
            forward_bytes, backward_bytes, again_bytes = (
                sum(moved[adapter.result.name][way] for adapter in part)
                for part, way in ((group, 0), (summed, 1), (kept, 0))
            )
            # An adapter is communication in one direction and may be a copy in the other.
            for kind, seconds, num_bytes in (
                (_FORWARD.get(step.kind), runs * time.forward_s, runs * forward_bytes),
                (_BACKWARD.get((step.kind, step.backward)), time.backward_s, backward_bytes),
                (step.kind, again_s, again_bytes),
            ):
                if kind is None:
                    compute_s += seconds
                elif seconds:
                    name = f"{'+'.join(step.axes)} {kind}"
                    comm[name] = comm.get(name, 0.0) + seconds
                    volumes[name] = volumes.get(name, 0.0) + num_bytes
        else:
            time = op_time(
                instruction.original, instruction.assignment, mesh, hardware, times, ranks=ranks
            )
            time = time if trains else OpTime(time.forward_s)
            compute_s += runs * time.forward_s + time.backward_s
            for sent in exchanges_in(
                instruction.original, instruction.assignment, mesh, hardware, ranks=ranks
            ):
                seconds = runs * sent.time.forward_s + (sent.time.backward_s if trains else 0.0)
                sent_bytes = runs * sent.forward_bytes + (sent.backward_bytes if trains else 0.0)
                # The operator's own time has the exchange in it, which is counted as communication.
                name = f"{sent.axis} all_to_all"
                compute_s -= seconds
                comm[name] = comm.get(name, 0.0) + seconds
                volumes[name] = volumes.get(name, 0.0) + sent_bytes
        recomputed_s += (runs - 1) * time.forward_s
        instructions.append((instruction, time))
    return BodyTime(
        tuple(instructions),
        compute_s,
        dict(sorted(comm.items())),
        recomputed_s,
        bool(again),
        volumes,
    )


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


def _recomputed(program: Program) -> set[int]:
    """The instructions that the backward runs again, by identity."""
    if not any(region_of(instruction) is not None for instruction in program.body):
        return set()
    runs = (item for item in group_blocks(program) if isinstance(item, Run) and item.recompute)
    return {id(instruction) for run in runs for instruction in run.instructions}
