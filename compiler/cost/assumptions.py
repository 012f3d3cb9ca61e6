"""What a prediction takes for granted of data that is there at run time only.

Example: lengths of documents that are packed into a row decide how many pairs of a query and a key
there are, and how many queries a rank computes for others. A row of one document has most pairs;
a rank computes at most half as many queries of others as it has itself. Both are priced.
"""

from __future__ import annotations

from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.ops.seen_keys import is_told_late
from shardwright.compiler.ops.strategy import split_factor
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Compute, Program, steps
from shardwright.runtime.visible_keys import MOST_GUESTS

ONE_DOCUMENT = "a row is one document without padding"
"""The words for attention whose mask is known at run time only."""

HANDED_ON = (
    f"ranks compute queries of others, {MOST_GUESTS:.0%} of their own, the most there may be"
)
"""The words for it where its queries are cut, in which case ranks even out their work."""


def assumptions(program: Program | PipelineProgram) -> tuple[str, ...]:
    """What the cost of a program takes for granted, in words."""
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    calls = [
        call
        for part in programs
        for call in steps(part.body)
        if isinstance(call, Compute)
        and call.original.target in ATTENTION
        and is_told_late(call.original)
    ]
    if not calls:
        return ()
    is_cut = any(_cuts_queries(call) for call in calls)
    return (ONE_DOCUMENT, HANDED_ON) if is_cut else (ONE_DOCUMENT,)


def _cuts_queries(call: Compute) -> bool:
    """Whether a rank has some of the queries of an attention operator."""
    rule = call.original.rule
    assert rule is not None
    queries = {ref.factor for ref in rule.operands[0][-2]}
    return any(split_factor(strategy) in queries for strategy in call.assignment.values())
