"""The lanes of a loop over experts.

While forward is traced, a loop that asks for the tokens of one expert after the other gets rows for
each (``calls/chosen_experts.py``). What is computed of the rows of one expert is its **lane**:

    token, choice = rows_of_expert(chosen == 0)         the same for 1, 2, ...
    rows = x[token]
    rows = linear(silu(linear(rows, up_0)), down_0)
    y_1 = index_add(y_0, 0, token, rows * weights[token, choice, None])

Eight experts make eight lanes, each of which adds to the sum of the lane before it. ``merge_lanes``
writes one dispatch in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace.calls.chosen_experts import (
    ROWS,
    Question,
    num_choices,
    question_of,
)
from shardwright.runtime.errors import TraceError

_HINT = (
    "write the experts with dispatch, grouped_linear and combine of shardwright.experts; "
    "docs/experts.md shows how"
)


@dataclass(eq=False)
class Lane:
    """What is computed of the rows of one expert. ``question``: that its rows are the answer of,
    ``asked`` by an operator. ``body``: the operators between the rows and their sum, in order.
    ``end``: the operator that adds them to the result, ``before``: what it adds them to.
    """

    question: Question
    asked: IROp
    body: list[IROp] = field(default_factory=list)
    end: IROp | None = None
    before: IRValue | None = None

    @property
    def rows(self) -> tuple[IRValue | None, IRValue | None]:
        """The token of each row, and its choice."""
        by_dim = dict(zip(self.question.dims, self.asked.results, strict=True))
        return by_dim.get(0), by_dim.get(1)


def find_lanes(graph: IRGraph, made_by: dict[str, IROp]) -> list[list[Lane]]:
    """The lanes of each loop over experts, in the order in which they are added up. ``made_by``:
    the operator that makes each value, by name.

    Raises :class:`TraceError` for a loop whose lanes are not a sum over all experts.
    """
    loops: dict[Hashable, list[Lane]] = {}
    for op in graph.ops:
        if op.target != ROWS:
            continue
        question = question_of(op.operands[0], made_by)
        assert question is not None
        loops.setdefault(_identity(question.chosen, made_by), []).append(Lane(question, op))
    for lanes in loops.values():
        _find_bodies(graph.ops, lanes)
    return [_in_order(lanes, graph, made_by) for lanes in loops.values()]


_VIEWS = {"getitem", "select", "squeeze", "view", "reshape", "flatten", "to"}


def _identity(value: IRValue, made_by: dict[str, IROp]) -> Hashable:
    """What is equal for a value and for the same view of it, taken anew for each expert."""
    op = made_by.get(value.name)
    if op is None or op.target not in _VIEWS or len(op.operands) != 1:
        return value.name
    # Views are equal if what they view is, and all else that they are told.
    literals = tuple(
        (key, None if isinstance(leaf, IRValue) else repr(leaf))
        for key, arg in op.args
        for leaf in leaves(arg)
    )
    return op.target, literals, _identity(op.operands[0], made_by)


def _find_bodies(ops: Sequence[IROp], lanes: Sequence[Lane]) -> None:
    """Fill in what is computed of the rows of each lane, up to where they are added up."""
    lane_of = {value.name: lane for lane in lanes for value in lane.asked.results}
    for op in ops:
        read = [lane_of[value.name] for value in op.operands if value.name in lane_of]
        if not read:
            continue
        lane = read[0]
        if any(other is not lane for other in read):
            refuse(op, "it reads the rows of several experts")
        if lane.end is not None:
            refuse(op, "it reads the rows of an expert after they were added to the result")
        before = _sum_into(op, lane)
        if before is not None:
            lane.end, lane.before = op, before
            continue
        lane.body.append(op)
        # What is computed of a lane's rows belongs to the lane.
        lane_of.update({value.name: lane for value in op.results})


def _sum_into(op: IROp, lane: Lane) -> IRValue | None:
    """What an operator adds the rows of a lane to, if it does."""
    token = lane.rows[0]
    if op.target == "index_add" and op.arg("dim") == 0 and op.arg("index") is token:
        plain = op.arg("alpha", 1) == 1
        return op.arg("input") if plain and op.arg("source") is not token else None
    if op.target == "index_put" and op.arg("indices") == (token,):
        before: IRValue = op.arg("input")
        return before
    return None


def _in_order(lanes: list[Lane], graph: IRGraph, made_by: dict[str, IROp]) -> list[Lane]:
    """The lanes in the order in which they are added up, all experts once, each to the sum of those
    before it.
    """
    first = lanes[0].asked
    # A model that leaves out an expert, or asks one twice, is no sum over all of them.
    experts = sorted(lane.question.expert for lane in lanes)
    if experts != list(range(len(lanes))):
        shown = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        refuse(first, f"it runs the experts {shown}, not each of them once")
    choices = num_choices(lanes[0].question.chosen, made_by)
    if choices is not None and choices > len(lanes):
        refuse(first, f"it runs {len(lanes)} experts, and {choices} may be chosen")
    readers: dict[str, list[IROp]] = {}
    for op in graph.ops:
        for value in op.operands:
            readers.setdefault(value.name, []).append(op)
    returned = {value.name for _, value in graph.output.leaves() if isinstance(value, IRValue)}
    returned |= {after.name for _, after in graph.buffer_updates}
    for lane in lanes:
        if lane.end is None:
            refuse(lane.asked, "the rows of an expert are not added to a result")
        for value in (r for op in (lane.asked, *lane.body) for r in op.results):
            if value.name in returned:
                refuse(lane.asked, f"forward returns {value.name}, which has rows of one expert")
    # Each lane must add to the sum of the lane before it, and nobody else may look at a partial
    # sum: it does not exist once all experts run at once.
    position = {op.name: index for index, op in enumerate(graph.ops)}
    ordered = sorted(lanes, key=lambda lane: position[lane.end.name])  # type: ignore[union-attr]
    for lane, following in itertools.pairwise(ordered):
        assert lane.end is not None and following.end is not None
        (made,) = lane.end.results
        own = [following.end, *following.body]
        if following.before is not made or made.name in returned:
            refuse(following.end, "it does not add to the sum of the experts before it")
        if any(reader not in own for reader in readers.get(made.name, ())):
            refuse(lane.end, "the sum of some of the experts is read by other operators")
    return ordered


def refuse(op: IROp, why: str, hint: str = _HINT) -> NoReturn:
    """Raise the :class:`TraceError` of a loop over experts that stays a loop because of ``op``."""
    raise TraceError(
        "a loop over experts cannot be run for all experts at once",
        where=op.place,
        why=why,
        hint=hint,
    )
