"""Which values hold rows of chosen experts, from where tokens are dispatched to where their rows
are combined.

Such a value has a row for every pair of an expert and a token, and only the chosen ones are stored
(``Density``). Whatever is computed between must treat each row by itself; else it would see rows
that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, leaves
from shardwright.compiler.ops.rule import Densities, FactorKind, LocalSizes, OpRule, TensorRefs
from shardwright.compiler.ops.strategy import has_factor
from shardwright.compiler.passes.expert_groups import groups_of
from shardwright.compiler.plan.imbalance import Imbalance, of_layer
from shardwright.runtime.errors import PlanError, TraceError, did_you_mean
from shardwright.runtime.layout import Density

_VIEWS = ("view", "reshape")

_ELEMENTWISE = frozenset(("dropout", "alpha_dropout"))
"""Operators that draw a number for every element of their result."""


KnownRules = dict[tuple[int, Densities, bool], OpRule]
"""Rules that are told of rows: by the rule without them, what is stored, and whether how many rows
there are is left to torch. Layers share their rules, and share these, too.
"""


def follow_chosen_rows(graph: IRGraph) -> IRGraph:
    """The graph with ``densities`` in the rules of all operators that read chosen rows.

    Raises :class:`TraceError` for an operator that does not treat rows one by one.
    """
    known: dict[str, Density] = {}
    rules: KnownRules = {}
    ops = []
    makers: dict[str, IROp] = {}
    for op in graph.ops:
        makers |= {value.name: op for value in op.results}
        if op.target == "dispatch":
            op = _in_groups(op, makers, rules)
        assert op.rule is not None, f"{op.name} has no rule"
        if any(value.name in known for value in op.operands):
            operands = tuple(known.get(value.name) for value in op.operands)
            op = _on_rows(op, op.rule, operands, rules)
        ops.append(op)
        if op.rule is not None and op.rule.densities is not None:
            stored = zip(op.results, op.rule.densities[1], strict=True)
            known |= {value.name: density for value, density in stored if density is not None}
    return graph.with_ops(tuple(ops)) if known else graph


def _in_groups(op: IROp, makers: Mapping[str, IROp], rules: KnownRules) -> IROp:
    """A dispatch that knows the groups of experts which its tokens have chosen first."""
    groups = groups_of(op.arg("chosen"), op.arg("num_experts"), makers)
    rule = op.rule
    assert rule is not None and rule.densities is not None
    stored = next(density for density in rule.densities[1] if density is not None)
    if groups == stored.groups:
        return op
    densities = _chosen(rule.densities, replace(stored, groups=groups))
    return op.changed(rule=_with_rows(rule, densities, rules))


def stored_shares(graph: IRGraph) -> dict[str, float]:
    """The share of its rows that is stored of every value of which not all are, by name."""
    found: dict[str, float] = {}
    for op in graph.ops:
        if op.rule is not None and op.rule.densities is not None:
            stored = zip(op.results, op.rule.densities[1], strict=True)
            found |= {value.name: density.share for value, density in stored if density is not None}
    return found


def imbalance_of(graph: IRGraph) -> Imbalance | None:
    """How many times its even share of rows the busiest rank is assumed to get, by module where
    layers differ; ``None`` for a model without experts.
    """
    by_layer: dict[str, float] = {}
    for op in graph.ops:
        if _dispatches(op):
            assert op.rule is not None and op.rule.densities is not None
            # Of the results of a dispatch; all of them are of one routing.
            stored = (density for density in op.rule.densities[1] if density is not None)
            by_layer[op.module_path] = next(stored).imbalance
    if len(set(by_layer.values())) > 1:
        return by_layer
    return next(iter(by_layer.values()), None)


def _dispatches(op: IROp) -> bool:
    """Whether an operator makes rows of chosen experts of tensors that have none."""
    if op.rule is None or op.rule.densities is None:
        return False
    operands, results = op.rule.densities
    return not any(operands) and any(results)


Graph = TypeVar("Graph", bound=IRGraph)


def with_imbalance(graph: Graph, imbalance: Imbalance | None) -> Graph:
    """The graph with another assumption of how unevenly rows are chosen; ``None``: the same. Layers
    that it does not name keep theirs.
    """
    now = imbalance_of(graph)
    if imbalance is None or now is None or imbalance == now:
        return graph
    ops = []
    of_value: dict[str, float] = {}  # the imbalance of each value that has rows
    # Layers share their rules, and share those with the other assumption, too.
    rules: dict[tuple[int, float], OpRule] = {}
    for op in graph.ops:
        if op.rule is not None and op.rule.densities is not None:
            known = [of_value[value.name] for value in op.operands if value.name in of_value]
            here = known[0] if known else of_layer(op.module_path, imbalance)
            if here is not None:
                stored = zip(op.results, op.rule.densities[1], strict=True)
                key = id(op.rule), here
                if key not in rules:
                    rules[key] = op.rule.with_imbalance(here)
                op = op.changed(rule=rules[key])
                of_value.update({value.name: here for value, density in stored if density})
        ops.append(op)
    # Evaluation runs other operators on the same experts.
    other = graph.eval_graph and with_imbalance(graph.eval_graph, imbalance)
    assumed: Graph = replace(graph, ops=tuple(ops), eval_graph=other)
    return assumed


def check_imbalance(graph: IRGraph, imbalance: Imbalance | None) -> None:
    """Raise :class:`PlanError` for an imbalance of modules that have no experts."""
    if not isinstance(imbalance, Mapping):
        return
    layers = [op.module_path for op in graph.ops if _dispatches(op)]
    for name in imbalance:
        if all(of_layer(path, {name: 1.0}) is None for path in layers):
            raise PlanError(
                f"an imbalance is given for {name!r}, which has no experts",
                why=f"tokens are dispatched in {', '.join(layers) or 'no module'}",
                hint=did_you_mean(name, layers) if layers else "leave it out",
            )


def check_has_experts(graph: IRGraph, option: str) -> None:
    """Raise :class:`PlanError` for an option about experts that the model does not have."""
    if not any(_dispatches(op) for op in graph.ops):
        raise PlanError(
            f"{option} is about experts, and {graph.name} has none",
            why="no tokens are dispatched to experts in it",
            hint=f"leave out {option}; docs/experts.md says which forms of experts are known",
        )


def _on_rows(
    op: IROp, rule: OpRule, operands: tuple[Density | None, ...], rules: KnownRules
) -> IROp:
    """The operator with what is stored of its operands and results, and without the number of rows
    among its arguments.
    """
    position, density = next((i, d) for i, d in enumerate(operands) if d is not None)
    pairs = rule.operands[position][: density.dims]
    names = {ref.factor for dim in pairs for ref in dim}
    if rule.densities is not None:  # it knows rows, but not yet how many are chosen
        return op.changed(rule=_with_rows(rule, _chosen(rule.densities, density), rules))
    # The batch of a batch norm is free, too, but its operator reduces over what ranks have of it.
    joined = set(rule.parallel.factors) if rule.parallel and not rule.random else set()
    one_by_one = (
        rule.known
        and (not rule.random or op.target in _ELEMENTWISE)
        and not names & joined
        and all(rule.factor(name).kind is FactorKind.FREE for name in names)
        and all(_has_rows(refs, names) for refs in rule.results)
        and all(
            _has_rows(refs, names) if stored else not any(has_factor(refs, n) for n in names)
            for refs, stored in zip(rule.operands, operands, strict=True)
        )
    )
    if not one_by_one:
        raise _refusal(op)
    rows = replace(density, dims=1)
    densities = (operands, (rows,) * len(op.results))
    return _without_row_counts(op, rule, densities, rules)


def _with_rows(
    rule: OpRule, densities: Densities, rules: KnownRules, *, leaves_open: bool = False
) -> OpRule:
    """The rule with what is stored of its operands and results. ``leaves_open``: how many rows
    there are.
    """
    key = id(rule), densities, leaves_open
    if key not in rules:
        localise = _row_counts_open if leaves_open else rule.localise
        rules[key] = replace(rule, densities=densities, localise=localise)
    return rules[key]


def _chosen(densities: Densities, density: Density) -> Densities:
    """The densities of a rule, each with the share and the imbalance of one."""

    def one(stored: Density | None) -> Density | None:
        return stored and replace(density, dims=stored.dims)

    operands, results = (tuple(map(one, side)) for side in densities)
    return operands, results


def _has_rows(refs: TensorRefs, names: set[str]) -> bool:
    """Whether a tensor has a row for every pair of an expert and a token, in its first dim."""
    return bool(refs) and names == {ref.factor for ref in refs[0]}


def _row_counts_open(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    return {"shape": (-1, *local.shape(rule.results[0])[1:])}


def _without_row_counts(op: IROp, rule: OpRule, densities: Densities, rules: KnownRules) -> IROp:
    """The call without the number of rows among its arguments, as it is known at run time only."""
    if op.target in _VIEWS:
        # How many rows there are is up to the router: torch works it out.
        shape = (-1, *op.results[0].shape[1:])
        open_rule = _with_rows(rule, densities, rules, leaves_open=True)
        return op.with_args(shape=shape).changed(rule=open_rule)
    sizes = (leaf for _, arg in op.args for leaf in leaves(arg) if type(leaf) is int)
    if op.results[0].shape[0] in sizes:
        raise _refusal(op)
    return op.changed(rule=_with_rows(rule, densities, rules))


def _refusal(op: IROp) -> TraceError:
    return TraceError(
        f"{op.target} between the dispatch of tokens to experts and the sum of their rows",
        where=f"{op.source} ({op.module_path or 'top-level forward'})",
        why="there is a row for each choice of an expert only, and this does not treat every row "
        "by itself",
        hint="compute it before tokens are dispatched, or after their rows are combined",
    )
