"""Measuring single operators: the calls that ranks make, forward and backward, on tensors with
numbers.

Every call gets several copies of its operands, which take turns: in a program too other work comes
between two calls, and what a call reads is seldom in a cache. Integers are zero, which every index
and class allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.compiler.cost.fake.fake_rank import REFUSALS, FakeRank
from shardwright.compiler.cost.local_calls import LocalCall, LocalTensor, local_call
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime, call_key
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.plan.program import Compute, Program, steps
from shardwright.frontend.calibrate.timing import seconds_per_call
from shardwright.runtime.layout import Mesh

MOST_BYTES = 2**27
"""What all copies of the operands of a call may take; more than caches hold."""

MOST_COPIES = 32


@dataclass(frozen=True)
class Profile:
    """The times measured, by call. ``failed``: the reasons why calls could not run by themselves,
    by operator.
    """

    times: OperatorTimes
    failed: dict[str, str]


def profile(
    programs: Iterable[Program],
    device: torch.device,
    *,
    known: OperatorTimes | None = None,
    point_s: float = 0.03,
    sample_s: float = 2e-4,
) -> Profile:
    """The times of every operator of the programs on the rank at index 0 of every axis, each
    different call once.

    ``known``: what was measured before and is kept. Operators that communicate run without their
    messages, of which the cost model knows the time.
    """
    entries = dict((known or OperatorTimes()).entries)
    failed: dict[str, str] = {}
    for program in programs:
        mesh = program.plan.computing_mesh
        for instruction in steps(program.body):
            if not isinstance(instruction, Compute):
                continue
            call = local_call(instruction.original, instruction.assignment, mesh)
            key = call_key(call)
            # Layers repeat, so most calls are known by now.
            if key in entries:
                continue
            try:
                entries[key] = profile_call(instruction.op, call, mesh, device, point_s, sample_s)
            except REFUSALS as error:
                failed.setdefault(instruction.original.name, str(error).partition("\n")[0])
    return Profile(OperatorTimes(entries), failed)


def profile_call(
    op: IROp,
    call: LocalCall,
    mesh: Mesh,
    device: torch.device,
    point_s: float,
    sample_s: float,
    most_copies: int = MOST_COPIES,
) -> OpTime:
    """Seconds of one call on this machine. ``op``: as the rank makes it.

    Raises whatever torch raises for a call that these numbers do not suit.
    """
    rank = FakeRank(mesh, zeros=True, device=str(device))
    size = max(1, sum(x.num_bytes for x in (*call.operands, *call.results)))
    # Several copies in turn, so that none is in the cache when its turn comes.
    copies = max(1, min(most_copies, MOST_BYTES // size))
    operands = [[_tensor(x, device) for x in call.operands] for _ in range(copies)]
    prepared = [rank.prepare(op, tensors) for tensors in operands]
    forward_s = seconds_per_call(_in_turn(prepared), device, point_s, sample_s)
    wanted = call.differentiated
    if not wanted:
        return OpTime(forward_s)
    backwards = [
        _backward(run(), [tensors[i] for i in wanted])
        for run, tensors in zip(prepared, operands, strict=True)
    ]
    return OpTime(forward_s, seconds_per_call(_in_turn(backwards), device, point_s, sample_s))


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _tensor(form: LocalTensor, device: torch.device) -> Tensor:
    if form.dtype.is_floating_point or form.dtype.is_complex:
        return torch.randn(
            form.shape, dtype=form.dtype, device=device, requires_grad=form.requires_grad
        )
    return torch.zeros(form.shape, dtype=form.dtype, device=device)


def _backward(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> Callable[[], object]:
    outputs = [y for y in results if y.requires_grad]
    gradients = [torch.ones_like(y) for y in outputs]

    def run() -> object:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)

    return run
