"""How long adapters and gradient reductions take: the collective, and the copies around it.

Example: the all-gather of a dim on ``tp=4`` takes the time of the collective. It also copies the
gathered result once, unless the pieces lie one after the other in the whole, as they do when the
first dim is gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwright.compiler.cost.local_calls import local_bytes, local_shape
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.collectives import (
    axes_collective_s,
    group_rows,
    rows_line,
)
from shardwright.compiler.plan.conversion import GATHERS, REGROUP, AdapterStep
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.zero.settings import DEFAULT_BUCKET_CAP_MB

DEFAULT_BUCKET_BYTES = DEFAULT_BUCKET_CAP_MB * 2**20
"""The bytes that a bucket of gradients holds over few units, where nobody says how many."""


def step_time(
    step: AdapterStep,
    dtype: torch.dtype,
    mesh: Mesh,
    ranks: Sequence[int],
    hardware: Hardware,
    *,
    differentiable: bool = True,
) -> OpTime:
    """Seconds of one adapter step on the slowest rank: the collective, and the memory traffic of
    the local copies.

    ``ranks``: the global ranks the mesh lies on, in its order.
    """
    return _step_time(step, dtype, mesh, tuple(ranks), hardware, differentiable)


def together_time(
    steps: Sequence[tuple[AdapterStep, torch.dtype]],
    mesh: Mesh,
    ranks: Sequence[int],
    hardware: Hardware,
    *,
    differentiable: bool = True,
) -> OpTime:
    """Seconds of adapters that go in one collective: all bytes, and one latency. Several are
    gathers of weights, each of which arrives in its place. None takes no time.
    """
    if not steps:
        return OpTime(0.0)
    if len(steps) == 1:
        return step_time(*steps[0], mesh, ranks, hardware, differentiable=differentiable)
    first = steps[0][0]
    movement = Movement(
        first.kind,
        first.backward,
        first.axes,
        sum(local_bytes(step.before, dtype, mesh) for step, dtype in steps),
        sum(local_bytes(step.after, dtype, mesh) for step, dtype in steps),
        all(end_to_end(step, mesh) for step, _ in steps),
    )
    return movement_time(movement, mesh, tuple(ranks), hardware, differentiable=differentiable)


def joining_s(
    steps: Sequence[tuple[AdapterStep, torch.dtype]], mesh: Mesh, hardware: Hardware
) -> float:
    """Seconds of :func:`together_time` of gathers in which arrived pieces are put in their places:
    work of the device, which comes after the message.
    """
    if not steps or all(end_to_end(step, mesh) for step, _ in steps):
        return 0.0
    num_bytes = sum(
        local_bytes(step.before, dtype, mesh) * mesh.num_ranks(step.axes) for step, dtype in steps
    )
    return _copy_s(num_bytes, hardware)


def message_s(movement: Movement, mesh: Mesh, ranks: tuple[int, ...], hardware: Hardware) -> float:
    """Seconds of the message of a gather alone, without putting what arrived in its place. Steps of
    other kinds have none that could be started ahead.
    """
    if movement.kind != "all_gather":
        return 0.0
    whole_s = movement_time(movement, mesh, ranks, hardware).forward_s
    if movement.end_to_end:
        return whole_s
    return whole_s - _copy_s(movement.before * mesh.num_ranks(movement.axes), hardware)


@functools.lru_cache(maxsize=65536)
def _step_time(
    step: AdapterStep,
    dtype: torch.dtype,
    mesh: Mesh,
    ranks: tuple[int, ...],
    hardware: Hardware,
    differentiable: bool,
) -> OpTime:
    if step.kind == REGROUP:
        return OpTime(math.inf, 0.0)
    movement = movement_of(step, dtype, mesh)
    return movement_time(movement, mesh, ranks, hardware, differentiable=differentiable)


def movement_of(step: AdapterStep, dtype: torch.dtype, mesh: Mesh) -> Movement:
    """What the time of a step depends on."""
    return Movement(
        step.kind,
        step.backward,
        step.axes,
        local_bytes(step.before, dtype, mesh),
        local_bytes(step.after, dtype, mesh),
        end_to_end(step, mesh),
    )


@dataclass(frozen=True, slots=True)
class Movement:
    """Everything that the time of a step depends on.

    ``before`` and ``after`` are the bytes of the largest piece. ``end_to_end``: the pieces have one
    size and lie one after the other in the whole, so that a gather writes them where they belong.
    """

    kind: str
    backward: str | None
    axes: tuple[str, ...]
    before: int
    after: int
    end_to_end: bool


@functools.lru_cache(maxsize=65536)
def movement_time(
    movement: Movement,
    mesh: Mesh,
    ranks: tuple[int, ...],
    hardware: Hardware,
    *,
    differentiable: bool = True,
) -> OpTime:
    """Seconds of one adapter step, from its numbers alone."""
    seconds = _Seconds(movement, mesh, ranks, hardware)
    return OpTime(seconds.forward_s(), seconds.backward_s() if differentiable else 0.0)


def end_to_end(step: AdapterStep, mesh: Mesh) -> bool:
    """Whether pieces along the dim of the step lie one after the other in the whole, as large as
    each other.
    """
    dim, cut = step.dim, step.cut
    if dim is None or cut is None or len(cut.segments) > 1 or cut.outer != 1:
        return False
    if mesh.turns_of(step.axis):
        return False
    whole = step.after if step.kind in GATHERS else step.before
    # A piece is contiguous in the whole only if all dims before the cut one have size 1.
    even = isinstance(cut.segments[0], int) and cut.segments[0] % mesh.axis_size(step.axis) == 0
    return even and math.prod(local_shape(whole, mesh)[:dim]) == 1


def reduction_s(
    layout: Layout,
    dtype: torch.dtype,
    mesh: Mesh,
    ranks: Sequence[int],
    hardware: Hardware,
    *,
    num_units: int = 1,
    unit_size: int | None = None,
    bucket_bytes: float = DEFAULT_BUCKET_BYTES,
    latency_share: float | None = None,
    collective: str = "all_reduce",
    elsewhere: Sequence[Sequence[int]] = (),
    num_groups: int = 1,
    across: bool = False,
) -> float:
    """Seconds of summing the gradient of one parameter over the axes on which its layout is G, and
    over the units.

    The result is the parameter's share of messages of ``bucket_bytes``. So the seconds of all
    parameters add up, but for the last message of several, which is not full.

    - ``ranks``: the unit ranks that the mesh lies on. Unit ``u`` begins at global rank
      ``u * unit_size`` (default: the size of the mesh).
    - ``latency_share``: the part of a message's latency that the parameter pays (default: as large
      a part as of its bytes).
    - ``collective``: ``all_reduce``; with ZeRO also ``reduce_scatter`` of gradients and
      ``all_gather`` of updated parameters.
    - ``elsewhere``: the unit ranks of other stages that hold the parameter, on a mesh like this.
    - ``num_groups``: the ranks that hold copies are dealt into that many groups of consecutive
      ranks, and each group runs a collective of its own.
    - ``across``: the collective is that among the ranks of all groups that have the same slice, and
      it covers this slice only.
    """
    num_bytes = local_bytes(layout, dtype, mesh)
    axes = tuple(
        axis for axis in mesh.names if axis in layout.grad_partial and mesh.axis_size(axis) > 1
    )
    if (num_units == 1 and not axes and not elsewhere) or num_bytes == 0:
        return 0.0
    unit = mesh.size if unit_size is None else unit_size
    stages = (tuple(ranks), *map(tuple, elsewhere))
    # The line is the same for all parameters of one kind, and kept.
    latency_s, per_byte = _line(
        axes, mesh, stages, num_units, unit, bucket_bytes, collective, num_groups, across, hardware
    )
    share = num_bytes / bucket_bytes if latency_share is None else latency_share
    return share * latency_s + num_bytes * per_byte


@functools.lru_cache(maxsize=4096)
def _line(
    axes: tuple[str, ...],
    mesh: Mesh,
    stages: tuple[tuple[int, ...], ...],
    num_units: int,
    unit_size: int,
    bucket_bytes: float,
    collective: str,
    num_groups: int,
    across: bool,
    hardware: Hardware,
) -> tuple[float, float]:
    """The latency of the collective of a full bucket, and the seconds that each byte of gradient
    adds: in the collective, and moving it into the bucket.
    """
    # The ranks of all units and stages that sum one piece of the parameter, a piece in a row.
    everyone = np.concatenate(
        [
            unit * unit_size + group_rows(mesh, axes, ranks)
            for unit in range(num_units)
            for ranks in stages
        ],
        axis=1,
    )
    # Each of the ``num_groups`` has every so many of them.
    num_pieces, num_copies = everyone.shape
    size = num_copies // num_groups
    if size == 1 and not across:
        return 0.0, 0.0
    groups = np.sort(everyone, axis=1).reshape(num_pieces, num_groups, size)
    # Between the groups: the ranks that have the same slice of it.
    if across:
        between = groups.transpose(0, 2, 1).reshape(-1, num_groups)
        latency_s, per_byte = rows_line(hardware, collective, bucket_bytes / size, between)
        return latency_s, per_byte / size
    # Within a group: neighbours.
    within = groups.reshape(-1, size)
    latency_s, per_byte = rows_line(hardware, collective, bucket_bytes, within)
    # The second term is the copy into the bucket, which reads and writes each byte.
    return latency_s, per_byte + 2 / hardware.device.bytes_per_s


class _Seconds:
    """The seconds of one step, forward and backward.

    Each direction is what the adapter of this name does in ``runtime/adapters.py``: a collective,
    and the copies and fills with zeros around it.
    """

    def __init__(
        self, movement: Movement, mesh: Mesh, ranks: tuple[int, ...], hardware: Hardware
    ) -> None:
        self.movement, self.mesh, self.ranks, self.hardware = movement, mesh, ranks, hardware
        self.before, self.after = movement.before, movement.after
        self.num_ranks = mesh.num_ranks(movement.axes)

    def forward_s(self) -> float:
        # The collective of each adapter, and the copies around it.
        match self.movement.kind:
            case "all_gather":
                return self._gather(self.before)
            case "narrow":
                return self._copy(self.after)
            case "reduce_scatter":
                return self._scatter(self.after)
            case "all_reduce":
                return self._reduce(self.before)
            case "keep_one":
                return self._fill(self.before)
            case "pad":
                return self._fill(self.after) + self._copy(self.before)
            case "all_to_all":
                return self._exchange(self.before, self.after)
        return 0.0  # grad_all_reduce, grad_keep_one: views

    def backward_s(self) -> float:
        # By how the gradient comes back: see the table of adapters in ARCHITECTURE.md.
        match self.movement.kind, self.movement.backward:
            case "all_gather", "reduce_scatter":
                return self._scatter(self.before)
            case "all_gather", _:
                return self._copy(self.before)
            case "narrow", "pad":
                return self._fill(self.before) + self._copy(self.after)
            case "narrow", _:
                return self._gather(self.after)
            case "reduce_scatter", _:
                return self._gather(self.after)
            case "all_reduce", "all_reduce":
                return self._reduce(self.after)
            case "grad_all_reduce", _:
                return self._reduce(self.after)
            case "keep_one", "keep_one":
                return self._fill(self.before)
            case "grad_keep_one", _:
                return self._fill(self.before)
            case "pad", _:
                return self._copy(self.before)
            case "all_to_all", _:
                return self._exchange(self.after, self.before)
        return 0.0

    def _collective(self, kind: str, num_bytes: float) -> float:
        return axes_collective_s(
            self.hardware, kind, num_bytes, self.mesh, self.movement.axes, self.ranks
        )

    def _gather(self, piece: int) -> float:
        """The pieces arrive end to end; unless they lie so in the result, they are joined once
        more.
        """
        total = piece * self.num_ranks
        joined = 0.0 if self.movement.end_to_end else self._copy(total)
        return self._collective("all_gather", total) + joined

    def _scatter(self, piece: int) -> float:
        total = piece * self.num_ranks
        staged = 0.0 if self.movement.end_to_end else self._copy(total)
        return self._collective("reduce_scatter", total) + staged

    def _reduce(self, num_bytes: int) -> float:
        return self._copy(num_bytes) + self._collective("all_reduce", num_bytes)

    def _exchange(self, held: int, received: int) -> float:
        return self._copy(held) + self._collective("all_to_all", held) + self._copy(received)

    def _copy(self, num_bytes: int) -> float:
        return _copy_s(num_bytes, self.hardware)

    def _fill(self, num_bytes: int) -> float:
        return max(self.hardware.device.memory_s(num_bytes), self.hardware.device.launch_s)


def _copy_s(num_bytes: int, hardware: Hardware) -> float:
    return max(hardware.device.memory_s(2 * num_bytes), hardware.device.launch_s)
