"""Let no ``view`` depend on strides that a plan does not keep.

``x.transpose(1, 2).sigmoid().transpose(1, 2).view(...)`` works on one device, as the second
transpose gives back the order in which the elements lie. An adapter makes a tensor in the order of
its dims: put one between the two transposes, and ``view`` would raise. ``reshape`` is the same view
where a view can be had, and copies otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Compute, Instruction, Loop, Program, Step

KEEPS_STRIDES = frozenset(("grad_all_reduce", "grad_keep_one"))
"""Adapters that hand on the tensor that they get, strides included."""

MAKES_STRIDES = frozenset(
    ("linear", "bmm", "addmm", "embedding", "layer_norm", "contiguous", "combine")
)
"""Operators whose results lie in the order of their dims, whatever the strides of their
operands.
"""


def without_strided_views(program: Program) -> Program:
    """``program`` with ``reshape`` in the place of every ``view`` that reads what an adapter, a
    parallel form or another stage made.
    """
    given = {
        leaf.name
        for _, tree in program.graph.signature
        for _, leaf in tree.leaves()
        if isinstance(leaf, IRValue)
    }
    # What lies in memory otherwise than in the model: it grows along the program.
    moved = {value.name for value in program.graph.inputs} - given  # from another stage
    body = [_followed(instruction, moved) for instruction in program.instructions]
    count = len(program.body)
    return replace(program, body=tuple(body[:count]), tail=tuple(body[count:]))


def _followed(instruction: Instruction, moved: set[str]) -> Instruction:
    """The instruction with reshapes; what it moves joins ``moved``."""
    if not isinstance(instruction, Loop):
        return _followed_step(instruction, moved)
    for take in instruction.takes:
        _followed_step(take, moved)
    body = tuple(_followed_step(step, moved) for step in instruction.body)
    moved |= {value.name for value in instruction.results}
    return replace(instruction, body=body)


def _followed_step(instruction: Step, moved: set[str]) -> Step:
    if isinstance(instruction, Compute):
        return _computed(instruction, moved)
    if instruction.step.kind not in KEEPS_STRIDES or instruction.value.name in moved:
        moved.add(instruction.result.name)
    return instruction


def _computed(instruction: Compute, moved: set[str]) -> Compute:
    """The operator, as a ``reshape`` if it must be one. Its results join ``moved`` if their strides
    may differ from those on one device.
    """
    op = instruction.op
    reads_moved = any(value.name in moved for value in op.operands)
    if op.target != instruction.original.target or (reads_moved and op.target not in MAKES_STRIDES):
        moved |= {value.name for value in op.results}
    if op.target == "view" and reads_moved and not _is_bitcast(op):
        return replace(instruction, op=op.retarget("reshape"))
    return instruction


def _is_bitcast(op: IROp) -> bool:
    return any(isinstance(leaf, torch.dtype) for leaf in leaves(op.arg("shape")))
