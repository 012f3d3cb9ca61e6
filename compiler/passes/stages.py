"""Cut a planned graph into pipeline stages.

Every operator belongs to the stage that its place in the graph gives it. The exception are
operators that make values out of nothing (positions, masks, rotary tables): each stage that needs
such a value makes its own. Inputs of the graph are read where they are needed. Any other value that
a later stage needs is sent there once, directly from the stage that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.pipeline import StageGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.errors import PlanError


def stage_of_ops(graph: IRGraph, plan: Plan) -> dict[str, int]:
    """The stage of each operator, by its name, as its place in the graph says. Raises
    :class:`PlanError` for boundaries out of order or inside a recompute region.
    """
    # A stage begins at its first operator, and ends where the next one begins.
    positions = {op.name: index for index, op in enumerate(graph.ops)}
    starts = [0]
    for number, stage in enumerate(plan.stages[1:], start=1):
        if stage.first_op not in positions:
            raise PlanError(
                f"stage {number} begins at operator {stage.first_op!r}, which the graph does "
                "not have"
            )
        start = positions[stage.first_op]
        if start <= starts[-1]:
            before = graph.ops[starts[-1]].name
            raise PlanError(
                f"stage {number} begins at operator {stage.first_op!r}, not after stage "
                f"{number - 1} begins",
                why=f"stage {number - 1} begins at {before!r}; values would have to flow backwards",
                hint="list the stages in the order of the graph",
            )
        # A region is computed again as one, on one rank.
        op = graph.ops[start]
        if op.region is not None and graph.ops[start - 1].region == op.region:
            raise PlanError(
                f"stage {number} begins at operator {stage.first_op!r}, inside a recompute region",
                where=op.place,
                why="a region is recomputed as a whole, on the ranks of one stage",
                hint="begin the stage before or after the region",
            )
        starts.append(start)
    # Operators in order: the stage goes up by one at each start.
    current, result = 0, {}
    for index, op in enumerate(graph.ops):
        while current + 1 < len(starts) and index >= starts[current + 1]:
            current += 1
        result[op.name] = current
    return result


def from_nothing(graph: IRGraph, updated: Set[str] = frozenset()) -> set[str]:
    """The operators that every stage may compute for itself. Their values come from sizes,
    constants and buffers that nobody updates; they need no gradient and no random numbers.
    ``updated``: buffers that another body of the model updates.
    """
    updated = updated | names_of_updated(graph)
    # Grows operator by operator: what is made of free values alone is free, too.
    free = {value.name for value in graph.buffers if value.name not in updated} | {
        value.name for value, _ in graph.constants
    }
    found: set[str] = set()
    for op in graph.ops:
        if any(v.requires_grad for v in op.results):  # most operators
            continue
        random = op.rule is not None and (op.rule.random or op.rule.updates)
        if not random and all(v.name in free for v in op.operands):
            found.add(op.name)
            free |= {value.name for value in op.results}
    return found


def names_of_updated(graph: IRGraph) -> set[str]:
    """The names of the buffers that get new values in training or evaluation, those included that
    an operator changes in place.
    """
    in_place = (
        op.operands[i].name for op in graph.ops if op.rule is not None for i in op.rule.updates
    )
    found = {*(before.name for before, _ in graph.buffer_updates), *in_place}
    return found if graph.eval_graph is None else found | names_of_updated(graph.eval_graph)


def uses_of(updated: Set[str], graph: IRGraph, at: Mapping[str, int]) -> dict[str, set[int]]:
    """Where each ``updated`` buffer is read as it was before the call, and where its new value is
    made, by its name.

    ``at`` says where each operator is: its stage, or its place in the graph. All these uses belong
    in one stage: a stage sends the new value to any other that reads it, but nobody sends the old
    one.
    """
    free = from_nothing(graph, updated)
    # A value that every stage can make is made nowhere in particular.
    made = {
        value.name: at[op.name] for op in graph.ops if op.name not in free for value in op.results
    }
    found: dict[str, set[int]] = {name: set() for name in updated}
    for op in graph.ops:
        for value in op.operands:
            if value.name in found:
                found[value.name].add(at[op.name])
    for before, after in graph.buffer_updates:
        if after.name in made:
            found[before.name].add(made[after.name])
        elif not found[before.name]:  # a new value that any stage can make: the first one does
            found[before.name].add(0)
    return found


def split_stages(
    graph: IRGraph, stages: Mapping[str, int], num_stages: int, updated: Set[str] = frozenset()
) -> tuple[StageGraph, ...]:
    """The graph cut into stages, where ``stages`` has the stage of every operator. Outputs that
    nobody needs have been dropped before.

    ``updated``: buffers that another body of the model updates.
    """
    updated = updated | names_of_updated(graph)
    free = from_nothing(graph, updated)
    made_in = {
        value.name: stages[op.name]
        for op in graph.ops
        if op.name not in free
        for value in op.results
    }
    outputs = _outputs(graph, made_in, num_stages)
    updates = _buffer_updates(graph, uses_of(updated, graph, stages), made_in)
    needed_in: dict[tuple[str, int], IRValue] = {}  # (value, stage) where it is read but not made
    for op in graph.ops:
        for value in op.operands:
            home = made_in.get(value.name)
            if op.name not in free and home is not None and home != stages[op.name]:
                needed_in.setdefault((value.name, stages[op.name]), value)
    result = []
    for index in range(num_stages):
        own = [op for op in graph.ops if stages[op.name] == index and op.name not in free]
        wanted = {v.name for op in own for v in op.operands} | {v.name for _, v in outputs[index]}
        wanted |= {after.name for _, after in updates.get(index, ())}
        found = _with_free(graph, own, free, wanted)
        # A recompute region belongs to one stage. A free operator of it that another stage computes
        # too is outside of any region there.
        ops = tuple(op if stages[op.name] == index else replace(op, region=None) for op in found)
        receives = tuple(
            (value, made_in[name]) for (name, stage), value in needed_in.items() if stage == index
        )
        sends = tuple(
            (value, stage) for (name, stage), value in needed_in.items() if made_in[name] == index
        )
        result.append(
            _stage_graph(graph, index, ops, receives, sends, outputs[index], updates.get(index, ()))
        )
    return tuple(result)


def _outputs(
    graph: IRGraph, made_in: dict[str, int], num_stages: int
) -> dict[int, list[tuple[str, IRValue]]]:
    """The leaves of the result by the stage that makes them. A leaf that no operator makes comes
    from the last stage.
    """
    outputs: dict[int, list[tuple[str, IRValue]]] = {index: [] for index in range(num_stages)}
    for path, value in graph.output.leaves():
        if isinstance(value, IRValue):
            outputs[made_in.get(value.name, num_stages - 1)].append((path, value))
    return outputs


def _buffer_updates(
    graph: IRGraph, uses: Mapping[str, Set[int]], made_in: Mapping[str, int]
) -> dict[int, tuple[tuple[IRValue, IRValue], ...]]:
    """The buffers that each stage updates. It is the stage that makes the new value, or else one
    that reads the old one.
    """
    updates: dict[int, tuple[tuple[IRValue, IRValue], ...]] = {}
    for before, after in graph.buffer_updates:
        index = made_in.get(after.name, min(uses[before.name]))
        updates[index] = (*updates.get(index, ()), (before, after))
    return updates


def _with_free(
    graph: IRGraph, own: list[IROp], free: set[str], wanted: set[str]
) -> tuple[IROp, ...]:
    """The stage's own operators, and the free ones that they need, in the order of the graph."""
    kept = {op.name for op in own}
    wanted = set(wanted)
    for op in reversed(graph.ops):
        if op.name in free and any(value.name in wanted for value in op.results):
            kept.add(op.name)
            wanted |= {value.name for value in op.operands}
    return tuple(op for op in graph.ops if op.name in kept)


def _stage_graph(
    graph: IRGraph,
    index: int,
    ops: tuple[IROp, ...],
    receives: tuple[tuple[IRValue, int], ...],
    sends: tuple[tuple[IRValue, int], ...],
    outputs: list[tuple[str, IRValue]],
    updates: tuple[tuple[IRValue, IRValue], ...],
) -> StageGraph:
    used = {value.name for op in ops for value in op.operands} | {
        value.name for _, value in outputs
    }
    used |= {value.name for pair in updates for value in pair}
    # A stage takes the inputs of the model that it uses, and what other stages send to it.
    reads = tuple(value for value in graph.inputs if value.name in used)
    arrived = tuple(replace(value, kind=ValueKind.INPUT) for value, _ in receives)
    # It gives what it sends, then what the model returns: :func:`lower_stages` counts on this
    # order.
    leaves = [value for value, _ in sends] + [value for _, value in outputs]
    sub = replace(
        graph,
        inputs=(*reads, *arrived),
        parameters=tuple(value for value in graph.parameters if value.name in used),
        buffers=tuple(value for value in graph.buffers if value.name in used),
        constants=tuple((value, tensor) for value, tensor in graph.constants if value.name in used),
        ops=ops,
        output=Tree(
            "tuple", children=tuple((i, Tree("leaf", value)) for i, value in enumerate(leaves))
        ),
        buffer_updates=updates,
        eval_graph=None,
    )
    return StageGraph(index, sub, reads, receives, sends, tuple(outputs))


def weights_used(stages: Iterable[StageGraph]) -> set[str]:
    """The names of the parameters and buffers that these stages hold."""
    return {
        value.name for stage in stages for value in (*stage.graph.parameters, *stage.graph.buffers)
    }


def place_unused(
    graph: IRGraph, stages: tuple[StageGraph, ...], used: Set[str]
) -> tuple[StageGraph, ...]:
    """Put weights that are not ``used`` into the first stage, so that every checkpoint is
    complete.
    """
    first = stages[0].graph
    own = {value.name for value in (*first.parameters, *first.buffers)}
    parameters = tuple(v for v in graph.parameters if v.name not in used or v.name in own)
    buffers = tuple(v for v in graph.buffers if v.name not in used or v.name in own)
    return (
        replace(stages[0], graph=replace(first, parameters=parameters, buffers=buffers)),
        *stages[1:],
    )
