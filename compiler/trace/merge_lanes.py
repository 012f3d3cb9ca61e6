"""One dispatch in the place of a loop over experts.

If the lanes of all experts (``expert_lanes.py``) are alike but for the weights, they compute what
one lane computes of the rows of all experts, sorted by expert:

    rows, gains, routing = dispatch(x, chosen, weights, num_experts=8)
    rows = grouped_linear(silu(grouped_linear(rows, up, routing)), down, routing)
    y_8 = y_0 + combine(rows * gains[:, None], routing)

where ``up`` stacks the weights of all experts. That is shown operator by operator; a loop of which
it cannot be shown is refused, and the refusal says what stands in the way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, leaves, map_leaves
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.stand_ins import combine, dispatch, grouped_linear
from shardwright.compiler.trace.calls.chosen_experts import NUM_ROWS, ROWS
from shardwright.compiler.trace.calls.normalise import bind
from shardwright.compiler.trace.expert_lanes import Lane, find_lanes, refuse
from shardwright.compiler.trace.naming import Namer


def merge_expert_lanes(graph: IRGraph) -> IRGraph:
    """The graph with one dispatch for each loop over experts.

    Raises :class:`TraceError` for a loop that is not known to be the same.
    """
    if not any(op.target == ROWS for op in graph.ops):
        return graph
    made_by = {value.name: op for op in graph.ops for value in op.results}
    ops = list(graph.ops)
    # New values must not take a name that the graph has.
    names = Namer()
    for value in (*graph.sources, *(r for op in ops for r in op.results)):
        names.unique(value.name)
    for lanes in find_lanes(graph, made_by):
        ops = _Merge(graph, ops, lanes, made_by, names).run()
    return replace(graph, ops=tuple(ops))


class _Merge:
    """One loop, from its lanes to operators on the rows of all experts."""

    def __init__(
        self,
        graph: IRGraph,
        ops: list[IROp],
        lanes: list[Lane],
        made_by: dict[str, IROp],
        names: Namer,
    ) -> None:
        self.graph, self.ops, self.lanes, self.made_by = graph, ops, lanes, made_by
        self.names = names
        self.first = lanes[0]
        self.question = self.first.question
        chosen = self.question.chosen
        self.num_rows = product((len(lanes), chosen.shape[0]))
        # What the values of the first lane are in each of the others.
        self.same: list[dict[str, IRValue]] = []
        self.merged: list[IROp] = []
        # Values of the first lane by what stands in their place; weights that are stacked already.
        self.now: dict[str, IRValue] = {}
        self.stacks: dict[tuple[str, ...], IRValue] = {}
        self.taken: set[str] = set()  # the operators that take rows of tokens
        self.rows: IRValue | None = None
        self.gains: IRValue | None = None
        self.routing: IRValue | None = None

    def run(self) -> list[IROp]:
        """The operators of the graph with those of the loop replaced."""
        for lane in self.lanes:
            self.same.append(self._matched(lane))
        self._dispatch()
        for position, op in enumerate(self.first.body):
            self._merge(op, position)
        self._combine()
        gone = {op.name for lane in self.lanes for op in (lane.asked, *lane.body)}
        last = self.lanes[-1].end
        assert last is not None
        gone |= {lane.end.name for lane in self.lanes if lane.end is not None}
        found: list[IROp] = []
        for op in self.ops:
            # All that the loop reads was made before its end, and nobody else reads inside of it.
            if op is last:
                found += self.merged
            if op.name not in gone:
                found.append(op)
        return found

    # -- showing that lanes are alike

    def _matched(self, lane: Lane) -> dict[str, IRValue]:
        """What the values of the first lane are in another one.

        Raises :class:`TraceError` where the two compute something else.
        """
        first, same = self.first, {}
        assert first.end is not None and lane.end is not None
        if lane.question.dims != first.question.dims or len(lane.body) != len(first.body):
            refuse(lane.asked, "what it computes for this expert is not what it does for others")
        for ours, theirs in zip(first.asked.results, lane.asked.results, strict=True):
            same[ours.name] = theirs
        assert first.before is not None and lane.before is not None
        # The result so far: the lanes add to it one after the other.
        same[first.before.name] = lane.before
        for op, other in zip((*first.body, first.end), (*lane.body, lane.end), strict=True):
            self._compare(op, other, same)
            for ours, theirs in zip(op.results, other.results, strict=True):
                same[ours.name] = theirs
        return same

    def _compare(self, op: IROp, other: IROp, same: dict[str, IRValue]) -> None:
        facts = ("target", "autocast", "grad_enabled", "region")
        alike = [key for key, _ in op.args] == [key for key, _ in other.args]
        if not alike or any(getattr(op, name) != getattr(other, name) for name in facts):
            refuse(other, f"{other.target} stands where it has {op.target} for the first expert")
        # ``same``: what stands for each value of the first lane in this one.
        own = {value.name for value in same.values()}
        for (_, ours), (_, theirs) in zip(op.args, other.args, strict=True):
            for a, b in itertools.zip_longest(leaves(ours), leaves(theirs)):
                if not isinstance(a, IRValue):
                    if a != b or type(a) is not type(b):
                        refuse(other, f"{other.target} gets {b} here, {a} for the first expert")
                elif a.name in same:
                    if same[a.name] is not b:
                        refuse(other, f"{other.target} reads {b.name}, not its own rows")
                elif not isinstance(b, IRValue) or b.name in own:
                    refuse(other, f"{other.target} reads its own rows, not {a.name}")

    # -- writing the operators for all

    def _emit(
        self, function: Any, like: Sequence[IRValue], at: IROp, *args: Arg, **kwargs: Arg
    ) -> None:
        """Append a call that makes values ``like`` these."""
        bound = bind(function, args, kwargs, where=lambda: at.place)
        self.merged.append(
            replace(
                at,
                name=self.names.unique(like[0].name + "_"),
                target=bound.target,
                args=bound.args,
                results=tuple(like),
            )
        )

    def _value(self, name: str, like: IRValue, shape: tuple[Any, ...]) -> IRValue:
        return replace(
            like,
            name=self.names.unique(name),
            shape=shape,
            kind=ValueKind.ACTIVATION,
            fqn=None,
        )

    def _dispatch(self) -> None:
        """Find what the rows are made of, and dispatch it."""
        token, choice = self.first.rows
        assert token is not None
        chosen = self.question.chosen
        tokens: dict[str, IRValue] = {}
        weights: dict[str, IRValue] = {}
        for op in self.first.body:
            index = _row_index(op, token, choice)
            # Rows taken from the result, to be added to, are no rows of tokens.
            if index is None or op.arg("input") is self.first.before:
                continue
            source: IRValue = op.arg("input")
            is_row = index == "token" and source.ndim == 2
            # Where a token has one choice, [tokens, 1] are its weights.
            is_row &= choice is not None or source.shape[1] != 1
            (tokens if is_row else weights)[source.name] = source
            if is_row:
                self.taken.add(op.name)
        if len(tokens) != 1 or len(weights) > 1:
            refuse(
                self.first.asked,
                f"its rows are made of {len(tokens)} tensors [tokens, hidden], and of "
                f"{len(weights)} weights [tokens, top_k]; one of each is known",
            )
        (x,) = tokens.values()
        at = self.first.asked
        if chosen.ndim == 1:
            chosen = self._column(chosen, at)
        given = next(iter(weights.values()), None)
        if given is not None and given.ndim == 1:
            given = self._column(given, at)
        if given is not None and given.shape != chosen.shape:
            refuse(at, f"the weights have the shape {given.shape}, the choices {chosen.shape}")
        if x.shape[0] != chosen.shape[0]:
            refuse(at, f"{x.name} has {x.shape[0]} rows for {chosen.shape[0]} tokens")
        rows = self._value(f"{at.module_path}.rows", x, (self.num_rows, *x.shape[1:]))
        routing = self._value(
            f"{at.module_path}.routing", chosen, (len(self.lanes), chosen.shape[0])
        )
        self.rows, self.routing = rows, routing
        made = [rows, routing]
        if given is not None:
            gains = self._value(f"{at.module_path}.gains", given, (self.num_rows,))
            self.gains = gains
            made.insert(1, gains)
        self._emit(dispatch, made, at, x, chosen, given, num_experts=len(self.lanes))

    def _column(self, value: IRValue, at: IROp) -> IRValue:
        made = self._value(value.name, value, (*value.shape, 1))
        self._emit(torch.unsqueeze, [made], at, value, -1)
        return made

    def _merge(self, op: IROp, position: int) -> None:
        """Write one operator of the first lane for the rows of all experts."""
        index = _row_index(op, *self.first.rows)
        # Reading rows of the running sum belongs to adding a result to it, which is done once at
        # the end; reading rows of tokens is what the dispatch does.
        if index is not None:
            if op.arg("input") is not self.first.before:
                self._take_rows(op)
            return
        if op is self._added() or self._drops_a_dim(op):
            return
        # What differs from lane to lane and is not a row is a weight of the expert.
        varying = [
            (leaf, self._others(position, number))
            for number, leaf in enumerate(op.operands)
            if leaf.name not in self.now and not self._is_shared(position, number)
        ]
        if varying:
            self._grouped(op, varying)
            return
        shape_args = op.target in ("view", "reshape")

        def now(leaf: Arg) -> Arg:
            if isinstance(leaf, IRValue):
                return self.now.get(leaf.name, leaf)
            if shape_args and leaf == NUM_ROWS and type(leaf) is int:
                return self.num_rows
            if _tells_rows(leaf):
                refuse(op, f"{op.target} gets the number of tokens of an expert")
            return leaf

        args = tuple((key, map_leaves(value, now)) for key, value in op.args)
        results = tuple(self._resized(value, op) for value in op.results)
        self.merged.append(replace(op, args=args, results=results))

    def _drops_a_dim(self, op: IROp) -> bool:
        """Whether an operator gives back rows that were taken as ``x[None, token]``."""
        source = op.operands[0]
        if source.shape[:1] != (1,) or source.name not in self.now:
            return False
        if op.target not in ("view", "reshape", "squeeze") or op.results[0].ndim != source.ndim - 1:
            refuse(op, f"{op.target} makes {op.results[0].name} of rows with another dim in front")
        self.now[op.results[0].name] = self.now[source.name]
        return True

    def _resized(self, value: IRValue, op: IROp) -> IRValue:
        if not value.shape or value.shape[0] != NUM_ROWS or NUM_ROWS in value.shape[1:]:
            refuse(op, f"{op.target} makes {value.name}, which has no row for each token")
        self.now[value.name] = replace(value, shape=(self.num_rows, *value.shape[1:]))
        return self.now[value.name]

    def _take_rows(self, op: IROp) -> None:
        """The rows of tokens, or their weights, for what the loop takes of them by index."""
        (taken,) = op.results
        if op.name in self.taken:
            assert self.rows is not None
            self.now[taken.name] = self.rows
            return
        assert self.gains is not None
        made = self.gains
        # ``weights[token, choice, None]``: a dim more, to multiply rows with.
        if taken.ndim > 1:
            made = replace(taken, shape=(self.num_rows, *taken.shape[1:]))
            self._emit(torch.Tensor.view, [made], op, self.gains, self.num_rows, *taken.shape[1:])
        self.now[taken.name] = made

    def _others(self, position: int, number: int) -> list[IRValue]:
        """An operand of an operator in the lanes of all experts, by expert."""
        by_expert = sorted(self.lanes, key=lambda lane: lane.question.expert)
        return [lane.body[position].operands[number] for lane in by_expert]

    def _is_shared(self, position: int, number: int) -> bool:
        return len({value.name for value in self._others(position, number)}) == 1

    def _grouped(self, op: IROp, varying: list[tuple[IRValue, list[IRValue]]]) -> None:
        """A product with weights of the experts, as one of groups."""
        name = {"linear": "weight", "matmul": "other", "mm": "other"}.get(op.target)
        rows = op.arg("input")
        mine = {value.name for value, _ in varying}
        bias = op.arg("bias") if op.target == "linear" else None
        fits = (
            name is not None
            and isinstance(rows, IRValue)
            and rows.name in self.now
            and op.arg(name).name in mine
            and (bias is None or bias.name in mine)
            and len(varying) == (1 if bias is None else 2)
        )
        if not fits:
            refuse(
                op,
                f"{op.target} has weights of its own for each expert; this is known of linear "
                "layers and of matmul",
            )
        assert name is not None
        by_name = {value.name: others for value, others in varying}
        weight, turned = self._stacked(by_name[op.arg(name).name], op)
        stacked_bias = None if bias is None else self._stacked(by_name[bias.name], op)[0]
        # ``linear`` multiplies by the weight turned around, ``matmul`` by the weight as it is.
        transposed = turned if op.target == "linear" else not turned
        (result,) = op.results
        self._emit(
            grouped_linear,
            [self._resized(result, op)],
            op,
            self.now[rows.name],
            weight,
            self.routing,
            stacked_bias,
            transposed=transposed,
            autocast=True,
        )

    def _stacked(self, weights: list[IRValue], op: IROp) -> tuple[IRValue, bool]:
        """The weights of all experts as one tensor, and whether its last two dims are turned."""
        if all(value.kind is ValueKind.PARAMETER for value in weights):
            key = tuple(value.name for value in weights)
            if key not in self.stacks:
                first = weights[0]
                made = self._value(f"{first.name}_of_all", first, (len(weights), *first.shape))
                made = replace(made, takes_gradient=any(w.takes_gradient for w in weights))
                self._emit(torch.stack, [made], op, tuple(weights))
                self.stacks[key] = made
            return self.stacks[key], False
        makers = [self.made_by.get(value.name) for value in weights]
        known = [maker for maker in makers if maker is not None]
        if len(known) == len(weights):
            # ``w.t()`` of each: the stack of the matrices, turned.
            if all(_turns(maker) for maker in known):
                whole, turned = self._stacked([maker.operands[0] for maker in known], op)
                return whole, not turned
            # ``w[0]``, ``w[1]``, ...: all parts of one parameter, in order, are that parameter.
            whole_of = {maker.operands[0].name for maker in known}
            indices = [_only_index(maker) for maker in known]
            if len(whole_of) == 1 and indices == list(range(len(weights))):
                whole = known[0].operands[0]
                if whole.shape[0] == len(weights):
                    return whole, False
        refuse(op, f"the weights {weights[0].name}, ... are neither parameters nor parts of one")

    def _combine(self) -> None:
        """Add up the rows, and add them to what the loop adds them to."""
        first, last = self.first, self.lanes[-1]
        end, before = first.end, first.before
        assert end is not None and before is not None and last.end is not None
        rows = self._summed_rows(end)
        result = last.end.results[0]
        made = rows
        zeros = self.made_by.get(before.name)
        plain = zeros is not None and zeros.target in ("zeros", "zeros_like", "new_zeros")
        same_type = rows.dtype == result.dtype
        overwritten = self._overwrites(end)
        # A cast and a sum stand behind the combination only where they are needed. The last of the
        # operators makes the value that the graph reads, under its name.
        steps = [not same_type, not plain and not overwritten]
        made = result if not any(steps) else self._value(result.name, rows, result.shape)
        self._emit(combine, [made], end, rows, self.routing)
        if not same_type:
            cast = result if not steps[1] else self._value(result.name, result, result.shape)
            self._emit(torch.Tensor.to, [cast], end, made, result.dtype)
            made = cast
        if steps[1]:
            self._emit(torch.add, [result], end, before, made)

    def _summed_rows(self, end: IROp) -> IRValue:
        """The rows that the end of the first lane adds up, of all experts."""
        if end.target == "index_add":
            return self.now[end.arg("source").name]
        values: IRValue = end.arg("values")
        if self._overwrites(end):
            # With one choice per token no two experts write one row, so overwriting is adding.
            if self.question.chosen.ndim == 2 and self.question.chosen.shape[1] != 1:
                refuse(
                    end,
                    "each expert overwrites what others made of a token",
                    "add to the result: y[token] += rows, or y.index_add_(0, token, rows)",
                )
            return self.now[values.name]
        added = self._added()
        assert added is not None
        if not self._chosen_once():
            refuse(
                end,
                "a token that chose an expert twice would be counted once, and that the choices "
                "of a token differ is known of topk only",
                "y.index_add_(0, token, rows) counts each choice",
            )
        return next(self.now[v.name] for v in added.operands if v.name in self.now)

    def _overwrites(self, end: IROp) -> bool:
        """Whether rows are written to the result, not added to what it holds."""
        return end.target == "index_put" and self._added() is None

    def _added(self) -> IROp | None:
        """The operator that adds rows to what the result holds: of ``y[token] += rows`` it makes
        what is written to ``y``.
        """
        end = self.first.end
        assert end is not None
        if end.target != "index_put":
            return None
        values: IRValue = end.arg("values")
        added = next((op for op in self.first.body if values in op.results), None)
        token = self.first.rows[0]
        # The rows of the result as they were: ``y[token]``.
        taken = [
            op.results[0].name
            for op in self.first.body
            if op.target == "getitem"
            and op.arg("input") is self.first.before
            and op.arg("index") == (token,)
        ]
        if added is None or added.target != "add" or added.has_arg("alpha"):
            return None
        return added if any(value.name in taken for value in added.operands) else None

    def _chosen_once(self) -> bool:
        chosen = self.question.chosen
        if chosen.ndim == 1 or chosen.shape[1] == 1:
            return True
        op = self.made_by.get(chosen.name)
        return op is not None and op.target == "topk" and chosen is op.results[1]


def _row_index(op: IROp, token: IRValue | None, choice: IRValue | None) -> str | None:
    """What of a tensor an operator takes by rows: ``"token"``, or ``"choice"`` of a token."""
    if op.target == "index_select":
        return "token" if op.arg("dim") == 0 and op.arg("index") is token else None
    index = op.arg("index")
    if op.target != "getitem" or not isinstance(index, tuple):
        return None
    kept = tuple(item for item in index if item is not None)
    # A new dim behind the rows makes them a column.
    if index[: len(kept)] != kept and index != (None, token):
        return None
    if kept == (token,):
        return "token"
    return "choice" if choice is not None and kept == (token, choice) else None


def _turns(op: IROp) -> bool:
    """Whether an operator turns the two dims of a matrix."""
    if op.results[0].ndim != 2:
        return False
    if op.target == "transpose":
        return bool((op.arg("dim0") - op.arg("dim1")) % 2 == 1)
    return op.target == "t" or bool(op.target == "permute" and op.arg("dims")[0] % 2 == 1)


def _only_index(op: IROp) -> int | None:
    """The index in the first dim that an operator takes of a tensor."""
    index = op.arg("index")
    if op.target == "select" and op.arg("dim") == 0:
        return index if type(index) is int else None
    if op.target != "getitem" or not isinstance(index, tuple) or len(index) != 1:
        return None
    return index[0] if type(index[0]) is int else None


def _tells_rows(leaf: Arg) -> bool:
    """Whether a number was computed from the number of rows."""
    if type(leaf) is int:
        return leaf != 0 and leaf % NUM_ROWS == 0
    # One divided by the number of rows, or a small multiple of that.
    if type(leaf) is float and math.isfinite(leaf) and leaf and not leaf.is_integer():
        scaled = leaf * NUM_ROWS
        return abs(scaled - round(scaled)) < 1e-9 * abs(scaled) and abs(scaled) < NUM_ROWS / 2
    return type(leaf) is float and leaf != 0 and leaf % NUM_ROWS == 0
