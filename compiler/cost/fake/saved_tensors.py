"""What autograd keeps of an operator for its backward, taken from autograd itself.

The call of a rank runs on fake tensors, and hooks note every tensor that is saved: an operand or a
result, or a view of one (they share its storage), or something made inside (the log-sum-exp of
flash attention, the mask of a dropout).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.cost.fake.fake_rank import REFUSALS, FakeRank, sizes_read
from shardwright.compiler.cost.local_calls import Alike, LocalCall, local_call
from shardwright.compiler.cost.step_calls import SHORT, extrapolated, is_long, shortened
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.ops.strategy import KNOWN, Assignment, Strategy
from shardwright.compiler.ops.tables.stepped import steps_of
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Mesh

REAL_BYTES = 2**26
"""A call that looks at the numbers runs on real zeros, unless its tensors are larger than this."""


ONE_RANK = Mesh()


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of one call.

    - ``operands``, ``results``: the positions of those that are kept.
    - ``internal``: the bytes of each kept tensor that is neither.
    - ``views``: for each result, the position of the operand whose memory it shares.
    - ``exact``: false for a call that ran neither on fake tensors nor on zeros. Then everything is
      taken to be kept.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    internal: tuple[int, ...] = ()
    views: tuple[int | None, ...] = ()
    exact: bool = True

    @property
    def internal_bytes(self) -> int:
        return sum(self.internal)


def saved_for_backward(
    op: IROp,
    assignment: Assignment | None = None,
    mesh: Mesh = ONE_RANK,
    rng: RngMode = "fast",
) -> Saved:
    """What the rank at index 0 of every axis keeps of one call under the strategies of
    ``assignment``.

    ``op`` is the call as traced. Without an assignment it is the unsplit call: splitting changes
    which tensors are kept only where another function takes its place (a loss over a split
    vocabulary). ``rng``: how the call draws, which decides what is kept of a mask.
    """
    chosen = tuple(
        (axis, strategy)
        for axis, strategy in (assignment or {}).items()
        if mesh.axis_size(axis) > 1
    )
    return _saved_by(Alike(op), chosen, mesh, rng)


@lru_cache(maxsize=KNOWN)
def _saved_by(
    asked: Alike, strategies: tuple[tuple[str, Strategy], ...], mesh: Mesh, rng: RngMode
) -> Saved:
    """:func:`saved_for_backward` with a key: ``strategies`` are pairs of axis and strategy."""
    op, rule, chosen = asked.op, asked.op.rule, dict(strategies)
    assert rule is not None
    call = local_call(op, chosen, mesh)
    local = localise(op, rule, chosen, mesh)
    names = {value.name: f"x{index}" for index, value in enumerate(local.operands)}
    source = call_source(local, lambda value: names[value.name], to_python)
    return _saved(_Question(source, local, call, mesh, rng))


class _Question:
    """A call, known by its source, its operands, and how it runs."""

    def __init__(self, source: str, op: IROp, call: LocalCall, mesh: Mesh, rng: RngMode) -> None:
        self.op, self.call, self.mesh, self.rng = op, call, mesh, rng
        self.key = (
            source,
            sizes_read(op),
            op.target,
            call.operands,
            call.results,
            op.autocast,
            op.grad_enabled,
            mesh,
            rng,
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.key == other.key


@lru_cache(maxsize=16384)
def _saved(question: _Question) -> Saved:
    call, op = question.call, question.op
    if is_long(op):
        few, more = (
            _saved(
                _Question(
                    f"{question.key[0]} {n}", shortened(op, n), call, question.mesh, question.rng
                )
            )
            for n in SHORT
        )
        inside = extrapolated((few.internal_bytes, more.internal_bytes), steps_of(op).count)
        return replace(more, internal=(inside,) if inside else ())
    # Some operators look at values. Zeros are tried for small calls.
    small = sum(x.num_bytes for x in (*call.operands, *call.results)) <= REAL_BYTES
    for zeros in (False, True) if small else (False,):
        rank = FakeRank(question.mesh, question.rng, zeros=zeros)
        operands = [
            rank.tensor(x.shape, x.dtype, requires_grad=x.requires_grad) for x in call.operands
        ]
        kept: list[Tensor] = []
        try:
            with saving_to(kept), torch.enable_grad():
                results = rank.run(question.op, operands)
        except REFUSALS:
            continue
        return attributed(kept, operands, results)
    # An operator that refuses fake tensors is taken to keep everything.
    return _everything(call)


@contextlib.contextmanager
def saving_to(kept: list[Tensor]) -> Any:
    """Append every tensor that autograd saves inside the ``with`` block."""

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def attributed(
    kept: Sequence[Tensor], operands: Sequence[Tensor], results: Sequence[Tensor]
) -> Saved:
    """Whether each saved tensor lies in the memory of an operand, of a result, or of neither. A
    result that is a view of an operand counts as that operand.
    """
    # Tensors are told apart by the address of their memory.
    of_operand = _positions(operands)
    # Storages are told apart by address. An in-place result is its operand, so operands come first.
    of_result = {key: index for key, index in _positions(results).items() if key not in of_operand}
    found: tuple[set[int], set[int]] = (set(), set())
    internal: dict[int, int] = {}
    for tensor in kept:
        storage = tensor.untyped_storage()
        for positions, where in ((of_operand, found[0]), (of_result, found[1])):
            if storage._cdata in positions:
                where.add(positions[storage._cdata])
                break
        else:
            # Neither: a tensor that the operator made for its backward alone, such as a softmax's
            # sums.
            internal[storage._cdata] = storage.nbytes()
    views = tuple(of_operand.get(result.untyped_storage()._cdata) for result in results)
    return Saved(tuple(sorted(found[0])), tuple(sorted(found[1])), tuple(internal.values()), views)


def _positions(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The position of the first tensor that lies in each storage."""
    positions: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        positions.setdefault(tensor.untyped_storage()._cdata, index)
    return positions


def _everything(call: LocalCall) -> Saved:
    if not call.differentiated:
        return Saved(views=(None,) * len(call.results), exact=False)
    return Saved(
        # What cannot be asked is taken to keep everything: an estimate from above.
        tuple(range(len(call.operands))),
        tuple(range(len(call.results))),
        (),
        (None,) * len(call.results),
        False,
    )
