"""Which part of one device's arithmetic each rank of a plan does, and which operators no plan axis
divides.

Example: an even plan for 4 ranks has a share of 0.25. Let attention be half of the work, computed
whole on all 4 ranks, and the rest be divided: then each rank does 0.5 + 0.5 / 4 = 0.625 of what one
device would do. The products of matrices, convolutions and attention count, forward and backward.
Each operator counts once: recomputation does not count. Ranks that divide a dim unevenly count
with their mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.cost.local_calls import local_call, signature
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.arithmetic import arithmetic_s, may_multiply
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Compute, Program, steps
from shardwright.runtime.layout import Mesh

UNEVEN = 1.3
"""Users are told of a share that is more than this many times the even one."""

MOST_LISTED = 3
"""The number of reasons that users are shown."""

_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_COUNTING = Device("counter", 1, dict.fromkeys(_DTYPES, 1.0), 1.0, 0.0)
"""A device of one operation per second: seconds on it are numbers of operations."""


@dataclass(frozen=True)
class WorkShare:
    """How the arithmetic of one device is shared among ``num_ranks`` ranks.

    - ``share``: the part of it that each rank does on average.
    - ``whole``: the operators that cause more than an even share, largest first. Each is a text of
      module path and operator, with the part of one device's arithmetic that it makes up. Layers
      that are alike count together.
    - ``experts``: whether experts of a mixture are among the first of these.
    """

    num_ranks: int
    share: float
    whole: tuple[tuple[str, float], ...] = ()
    experts: bool = False

    @property
    def is_uneven(self) -> bool:
        return self.is_uneven_on(self.num_ranks)

    def is_uneven_on(self, num_ranks: int) -> bool:
        """Whether the share would be uneven on so many ranks."""
        return self.share > UNEVEN / num_ranks

    def __str__(self) -> str:
        """The share in a few words for people: ``62.5% of the arithmetic of one device on each of
        4 ranks, 25% would be even``.
        """
        return (
            f"{100 * self.share:.3g}% of the arithmetic of one device on each of {self.num_ranks} "
            f"ranks, {100 / self.num_ranks:.3g}% would be even"
        )

    @property
    def reasons(self) -> list[str]:
        """What is not divided, a line each."""
        lines = [
            f"{where}: {share:.0%} of one device's, on every rank"
            for where, share in self.whole[:MOST_LISTED]
        ]
        return lines + (["every rank computes all experts for all tokens"] if self.experts else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "share": self.share,
            "whole": [list(item) for item in self.whole],
            "experts": self.experts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkShare:
        whole = tuple((str(where), float(share)) for where, share in data["whole"])
        return cls(int(data["num_ranks"]), float(data["share"]), whole, bool(data["experts"]))


def work_share(program: Program | PipelineProgram) -> WorkShare | None:
    """The share of each rank; ``None`` for a model without products."""
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    num_ranks = program.plan.mesh.size
    one = total = 0.0  # operations on one device, and of all ranks together
    excess: dict[str, float] = {}
    # Layers make the same calls, so each of them is counted once.
    known: dict[Hashable, tuple[float, float]] = {}
    for stage in programs:
        mesh = stage.plan.mesh
        for op, assignment in _calls(stage):
            if not may_multiply(op):
                continue
            key = signature(op), tuple(assignment.items()), mesh
            if key not in known:
                known[key] = _counted(op, assignment, mesh)
            operations, copies = known[key]
            if not operations:
                continue
            one, total = one + operations, total + copies * operations
            if copies > UNEVEN:
                where = f"{_alike(op.module_path)} ({op.target})"
                excess[where] = excess.get(where, 0.0) + operations
    if not one:
        return None
    ordered = sorted(excess.items(), key=lambda item: (-item[1], item[0]))
    whole = tuple((where, operations / one) for where, operations in ordered)
    experts = any("expert" in where.lower() for where, share in whole[:MOST_LISTED])
    return WorkShare(num_ranks, total / one / num_ranks, whole, experts)


def _counted(op: IROp, assignment: Assignment, mesh: Mesh) -> tuple[float, float]:
    """The operations of a call on one device, and how many times the ranks do them together."""
    operations = operations_of(op, {}, mesh)
    if not operations:
        return 0.0, 0.0
    # 4 ranks that share an operator in 2 pieces do it twice.
    return operations, mesh.size / _num_pieces(op, assignment, mesh, operations)


def share_left_uneven(program: Program, is_meant: Callable[[IROp], bool]) -> float:
    """The part of one device's arithmetic in those of the operators meant of which some rank does
    much more than an even part: all of it, or 2 of 3 colours on 2 ranks.
    """
    mesh = program.plan.mesh
    one = left = 0.0
    for op, assignment in _calls(program):
        operations = operations_of(op, {}, mesh) if may_multiply(op) else 0.0
        one += operations
        if operations and is_meant(op):
            most = operations_of(op, assignment, mesh)
            left += operations if most * mesh.size > UNEVEN * operations else 0.0
    return left / one if one else 0.0


def _calls(program: Program) -> Iterable[tuple[IROp, Assignment]]:
    # A rank does all pieces of a loop, so these divide nothing.
    loops = program.plan.loops
    return (
        (call.original, {a: s for a, s in call.assignment.items() if a not in loops})
        for call in steps(program.body)
        if isinstance(call, Compute)
    )


def operations_of(op: IROp, assignment: Assignment, mesh: Mesh) -> float:
    """The operations of the rank with the largest pieces, forward and backward; experts count with
    even shares of tokens, whatever the plan assumes.
    """
    assert op.rule is not None
    even = replace(op, rule=op.rule.with_imbalance(1.0))
    call = local_call(even, assignment, mesh)
    return sum(arithmetic_s(call, call.differentiated, _COUNTING))


def _num_pieces(op: IROp, assignment: Assignment, mesh: Mesh, operations: float) -> int:
    """Into how many parts the axes divide the products of an operator."""
    pieces = 1
    # An axis divides the work if its strategy alone makes it less. One axis at a time, as a product
    # of axes says nothing of which of them divides.
    for axis, strategy in assignment.items():
        if operations_of(op, {axis: strategy}, mesh) < operations:
            pieces *= mesh.axis_size(axis)
    return pieces


def _alike(module_path: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_path) or "top-level forward"


def one_device_operations(program: Program) -> float:
    """The operations of the products of one sample on one device, forward and backward, each
    operator once.
    """
    return sum(operations_of(op, {}, program.plan.mesh) for op, _ in _calls(program))
