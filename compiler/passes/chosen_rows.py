"""Which values hold rows of chosen experts, from where tokens are dispatched to where their rows
are combined.

Such a value has a row for every pair of an expert and a token, and only the chosen ones are stored
(``Density``). Whatever is computed between must treat each row by itself; else it would see rows
that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, leaves
from shardwright.compiler.ops.rule import FactorKind, LocalSizes, OpRule, TensorRefs
from shardwright.runtime.errors import TraceError
from shardwright.runtime.layout import Density

_ENDS = ("combine",)
"""The operators that make values with all their rows of such values."""
_VIEWS = ("view", "reshape")


def follow_chosen_rows(graph: IRGraph) -> IRGraph:
    """The graph with ``densities`` in the rules of all operators that read chosen rows.

    Raises :class:`TraceError` for an operator that does not treat rows one by one.
    """
    known: dict[str, Density] = {}
    ops = []
    for op in graph.ops:
        assert op.rule is not None, f"{op.name} has no rule"
        if any(value.name in known for value in op.operands):
            op = _with_densities(op, op.rule, known)
        ops.append(op)
        rule = op.rule
        if rule is not None and rule.densities is not None:
            for value, density in zip(op.results, rule.densities[1], strict=True):
                if density is not None:
                    known[value.name] = density
    return graph.with_ops(tuple(ops)) if known else graph


def _with_densities(op: IROp, rule: OpRule, known: Mapping[str, Density]) -> IROp:
    """The operator with what is stored of its operands and results."""
    operands = tuple(known.get(value.name) for value in op.operands)
    index, density = next((i, d) for i, d in enumerate(operands) if d is not None and d.dims == 1) \
        if any(d is not None and d.dims == 1 for d in operands) else (0, operands[0])
    if density is None:
        raise _refusal(op)
    rows = rule.operands[index][: density.dims]
    results: list[Density | None] = []
    for refs in rule.results:
        if refs[: density.dims] == rows:
            results.append(density)
        elif op.target in _ENDS:
            results.append(None)
        else:
            raise _refusal(op)
    for refs, stored in zip(rule.operands, operands, strict=True):
        if (stored is None) == _has(refs, rows):
            raise _refusal(op)
    kinds = {rule.factor(ref.factor).kind for dim in rows for ref in dim}
    if op.target not in _ENDS and (kinds != {FactorKind.FREE} or not rule.known):
        raise _refusal(op)
    op = _without_row_counts(op, rule)
    assert op.rule is not None
    return replace(op, rule=replace(op.rule, densities=(operands, tuple(results))))


def _has(refs: TensorRefs, rows: TensorRefs) -> bool:
    """Whether a tensor has a row for every pair."""
    return {ref for dim in rows for ref in dim} <= {ref for dim in refs for ref in dim}


def _without_row_counts(op: IROp, rule: OpRule) -> IROp:
    """The call without the number of rows among its arguments, as it is known at run time only."""
    count = op.operands[0].shape[0]
    if op.target in _VIEWS:

        def localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
            return {"shape": (-1, *local.shape(rule.results[0])[1:])}

        shape = (-1, *op.results[0].shape[1:])
        return replace(op.with_args(shape=shape), rule=replace(rule, localise=localise))
    if any(leaf is count or leaf == count for _, arg in op.args for leaf in leaves(arg)
           if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | str)) and rule.localise:
        raise _refusal(op)
    return op


def _refusal(op: IROp) -> TraceError:
    return TraceError(
        f"{op.target} between the dispatch of tokens to experts and their sum",
        where=f"{op.source} ({op.module_path or 'top-level forward'})",
        why="there is a row for each choice of an expert only, and this does not treat every row "
        "by itself",
        hint="compute it before tokens are dispatched, or after their rows are combined",
    )
