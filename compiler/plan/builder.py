"""Make a plan by hand: the verbs of custom policies.

A policy receives a :class:`PlannableGraph`, takes a builder of it, and returns what ``build()``
gives::

    def my_policy(graph, config):
        b = graph.builder(mesh={"tp": config.plan_ngpus})
        b.split("ffn", "tp")                                   # every operator that has this dim
        b.partition("transformer_h_0_attn_c_attn", "n.1", "tp")  # one operator
        return b.build()
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from shardwright.compiler.ir.dims import DimClass
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.ops.strategy import (
    MOST_PLACES,
    allowed,
    exchange_strategy,
    factor_axes,
    split_factor,
    split_strategy,
)
from shardwright.compiler.plan.check import (
    check_assignment,
    check_gathers,
    check_layout,
    check_loops,
    ops_of,
    output_paths,
    suggestion,
)
from shardwright.compiler.plan.plan import Note, Plan, PlannedLoop
from shardwright.runtime.arguments import checked, checked_late
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class PlannableGraph(IRGraph):
    """A graph with rules and dims, and the plan being made for it."""

    plan: Plan | None = None

    @property
    def decided(self) -> Plan:
        """The plan, after a policy has made it."""
        assert self.plan is not None, f"there is no plan for {self.name} yet"
        return self.plan

    def __str__(self) -> str:
        """One line per operator, with the names of its dims and its rule."""
        return print_graph(self)

    @classmethod
    def of(cls, graph: IRGraph) -> PlannableGraph:
        return cls(**{f.name: getattr(graph, f.name) for f in fields(IRGraph)})

    @checked
    def builder(self, mesh: Mapping[str, int] | Mesh, order: str | None = None) -> PlanBuilder:
        """A builder of a plan on ``mesh``. ``order``: the axes major to minor, as in ``"dp-tp"``;
        default as written.
        """
        mesh = Mesh.of(mesh)
        if order is not None:
            names = order.split("-")
            if sorted(names) != sorted(mesh.names):
                raise PlanError(
                    f"order {order!r} does not name the axes of the mesh", why=f"axes {mesh.names}"
                )
            mesh = mesh.of_axes((name, mesh.axis_size(name)) for name in names)
        return PlanBuilder(self, mesh)


def classes_in(body: IRGraph, graph: IRGraph, indices: set[int]) -> set[int]:
    """The dim classes of ``body`` that are the classes ``indices`` of ``graph``: those that inputs
    and weights have in the same places.
    """
    if body is graph:
        return indices
    assert graph.dims is not None and body.dims is not None
    here, there = graph.dims, body.dims
    found = set()
    # Each body numbers its classes for itself. What bodies have in common are inputs and weights.
    for value in (*graph.inputs, *graph.parameters, *graph.buffers):
        for mine, theirs in zip(
            here.values[value.name], there.values.get(value.name, ()), strict=False
        ):
            pairs = zip(mine, theirs, strict=False)
            found |= {
                b
                for a, b in pairs
                if a in indices and here.classes[a].segments == there.classes[b].segments
            }
    return found


def _dim_text(dim: str | DimClass) -> str:
    return repr(dim if isinstance(dim, str) else dim.name)


def _check_place(place: int) -> None:
    if not 0 <= place < MOST_PLACES:
        raise PlanError(
            f"place {place} is none",
            why="axes that cut one dim are told apart by it, outermost first",
            hint=f"a number from 0 to {MOST_PLACES - 1}",
        )


class PlanBuilder:
    """Collects decisions and checks each one at once; every verb returns the builder. Nothing
    changes the graph.
    """

    def __init__(self, graph: PlannableGraph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self._ops = ops_of(graph)
        self._strategies: dict[str, dict[str, str]] = {}
        # By operator and axis the exchanges that splits by name have asked for.
        self._exchanges: dict[str, dict[str, str]] = {}
        self._stored: dict[str, Layout] = {}
        self._outputs: dict[str, Layout | str | None] = {}
        self._gathers: dict[str, str] = {}
        self._notes: list[Note] = []
        self._loops: dict[str, PlannedLoop] = {}

    @checked
    def strategy(self, op: str | IROp, axis: str, strategy: str) -> PlanBuilder:
        """Give an operator a strategy (``R``, ``G``, ``split:<factor>``, ``linear:<i>``) along an
        axis.
        """
        return self.strategies(axis, {self._op(op).name: strategy})

    @checked
    def strategies(self, axis: str, of_ops: Mapping[str, str]) -> PlanBuilder:
        """Give operators, by name, their strategies along an axis."""
        self._check_axis(axis)
        for name, strategy in of_ops.items():
            found = self._op(name)
            assignment = {**self._strategies.get(name, {}), axis: strategy}
            check_assignment(found, assignment, self.mesh, self.graph.dims)
            self._strategies.setdefault(name, {})[axis] = strategy
            self._exchanges.get(name, {}).pop(axis, None)
        return self

    @checked
    def partition(self, op: str | IROp, factor: str, axis: str, *, place: int = 0) -> PlanBuilder:
        """Split a factor of an operator over an axis. ``factor`` is its name in the rule, or the
        name of its dim class.

        ``place``: where several axes cut the factor, those in place 0 cut it first, in mesh order,
        those in place 1 their pieces, and so on.
        """
        found = self._op(op)
        _check_place(place)
        assert found.rule is not None
        dims = {f.name: self._dim_name(found, f.name) for f in found.rule.factors}
        if factor not in dims:
            named = [name for name, dim in dims.items() if dim == factor]
            if not named:
                known = (f"{name!r} ({dim})" if dim else repr(name) for name, dim in dims.items())
                raise PlanError(
                    f"operator {found.name} ({found.target}) has no dim {factor!r}",
                    where=found.place,
                    why=f"its rule is {found.rule.annotation!r}",
                    hint=f"one of {', '.join(known)}",
                )
            factor = named[0]
        return self.strategy(found, axis, split_strategy(factor, place))

    def _dim_name(self, op: IROp, factor: str) -> str | None:
        """The name of the dim class of a factor."""
        for body in self.graph.bodies:
            found = body.dims.of_factor(op.name, factor) if body.dims is not None else None
            if found is not None:
                return found.name
        return None

    @checked
    def replicate(
        self, op: str | IROp, axis: str, *, partial_gradient: bool = False
    ) -> PlanBuilder:
        """Compute an operator on every rank of an axis; with ``partial_gradient`` its gradients
        stay summands (``G``).
        """
        return self.strategy(op, axis, "G" if partial_gradient else "R")

    @checked
    def split(
        self,
        dim: str | DimClass,
        axis: str,
        where: Callable[[IROp], bool] | None = None,
        *,
        place: int = 0,
    ) -> PlanBuilder:
        """Split a dim of the model, by name or class, in every operator that has it and may split
        it. ``place``: as of :meth:`partition`.
        """
        self._check_axis(axis)
        _check_place(place)
        found = False
        for body in self.graph.bodies:
            # Each body numbers its dims for itself, so the dim is looked up in each.
            dims = body.dims
            assert dims is not None
            indices = (
                {c.index for c in dims.named(dim)}
                if isinstance(dim, str)
                else classes_in(body, self.graph, {dim.index})
            )
            found = found or bool(indices)
            for op in body.ops:
                if where is None or where(op):
                    # An operator may have the dim more than once, as attention has heads.
                    factors = [
                        factor
                        for (name, factor), index in dims.factors.items()
                        if name == op.name and index in indices
                    ]
                    self._split_op(op, factors, axis, place)
        if not found:
            # Dims of the evaluation body alone can be meant, too.
            names = {c.name for body in self.graph.bodies if body.dims for c in body.dims.classes}
            raise PlanError(
                f"the model has no dim {str(dim)!r}", hint=suggestion(str(dim), sorted(names))
            )
        return self

    def _split_op(self, op: IROp, factors: list[str], axis: str, place: int) -> None:
        """Split the first of the factors that can be. Where the axis cuts another factor by now,
        and the operator can exchange the two, it does.
        """
        assert op.rule is not None
        now = split_factor(self._strategies.get(op.name, {}).get(axis, "R"))
        # Between dispatch and combine rows stay cut by experts, whatever else the axis splits.
        if not op.rule.exchanges and (op.name, now) in self._expert_factors:
            return
        for exchange in op.rule.exchanges:
            if now in exchange.pair and set(exchange.pair) - {now} <= set(factors):
                asked = self._exchanges.setdefault(op.name, {})
                asked[axis] = exchange_strategy(exchange.pair)
                # Axes that cut the batch one within the other exchange together, or the inner one
                # does: the outer one is tried again when the inner one is asked to.
                for exchanged in (asked, {axis: asked[axis]}):
                    assignment = {**self._strategies.get(op.name, {}), **exchanged}
                    if allowed(op.rule, assignment, self.mesh):
                        self._strategies[op.name] = assignment
                        return
        # An operator that has the dim twice, as x @ x.T, can have one of the two split over an
        # axis.
        for factor in factors:
            strategy = split_strategy(factor, place)
            assignment = {**self._strategies.get(op.name, {}), axis: strategy}
            if allowed(op.rule, assignment, self.mesh):
                self._strategies[op.name] = assignment
                return

    @functools.cached_property
    def _expert_factors(self) -> frozenset[tuple[str, str]]:
        """The factors of operators on rows of chosen experts that count experts, with the names of
        the operators.
        """
        found: set[tuple[str, str]] = set()
        for body in self.graph.bodies:
            assert body.dims is not None
            factors = body.dims.factors
            on_rows = {op.name: op.rule for op in body.ops if op.rule and op.rule.densities}
            classes = set()
            for name, rule in on_rows.items():
                for exchange in rule.exchanges:
                    # Dispatch exchanges tokens for experts, combine experts for tokens.
                    dispatches = rule.densities is not None and not any(rule.densities[0])
                    experts = exchange.target if dispatches else exchange.source
                    classes.add(factors.get((name, experts)))
            found |= {
                key for key, index in factors.items() if key[0] in on_rows and index in classes
            }
        return frozenset(found)

    @checked
    def store(self, fqn: str, layout: Layout | str) -> PlanBuilder:
        """Say how a parameter or buffer is held, e.g. ``"[50257/tp, 768]"``."""
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        values = {v.fqn: v for v in (*self.graph.parameters, *self.graph.buffers) if v.fqn}
        if fqn not in values:
            raise PlanError(
                f"the model has no parameter or buffer {fqn!r}", hint=suggestion(fqn, values)
            )
        check_layout(fqn, layout, values[fqn], self.mesh)
        self._stored[fqn] = layout
        return self

    @checked
    def gather(self, value: str, then: str) -> PlanBuilder:
        """Say what happens to a value that is gathered for an operator which needs it in backward,
        too: it is kept whole (``"keep"``), or its piece is kept and gathered again (``"again"``).
        ``value``: the FQN of a parameter, or the name of an activation. Of itself a parameter is
        gathered again, an activation kept.
        """
        check_gathers(self.graph, {value: then})
        self._gathers[value] = then
        return self

    @checked
    def in_pieces(
        self,
        ops: Iterable[str | IROp],
        count: int,
        dim: str | DimClass,
        name: str = "pieces",
    ) -> PlanBuilder:
        """Let operators run in ``count`` pieces along a dim of the model, one after the other: what
        they hand to each other is never whole, and backward computes each piece again. ``name``: of
        the loop. Those that hand nothing to each other, as those of two layers, run in loops of
        their own.

        Raises :class:`PlanError` for operators that do not have the dim.
        """
        along = self._loops.setdefault(name, PlannedLoop(count, {}))
        strategies = dict(along.strategies)
        for given in ops:
            op = self._op(given)
            assert op.rule is not None
            factors = [f.name for f in op.rule.factors if self._is_dim(op, f.name, dim)]
            if not factors:
                raise PlanError(
                    f"operator {op.name} ({op.target}) has no dim {_dim_text(dim)} to run along",
                    where=op.place,
                    why=f"its rule is {op.rule.annotation!r}",
                    hint="leave it out of the loop, or run along another dim",
                )
            strategies[op.name] = f"split:{factors[0]}"
        self._loops[name] = PlannedLoop(count, strategies)
        plan = self.plan()
        check_loops(self.graph, plan)
        return self

    def _is_dim(self, op: IROp, factor: str, dim: str | DimClass) -> bool:
        for body in self.graph.bodies:
            found = body.dims.of_factor(op.name, factor) if body.dims is not None else None
            if found is not None and op.name in {o.name for o in body.ops}:
                return found.name == dim if isinstance(dim, str) else found.index == dim.index
        return False

    @checked
    def output(self, path: str, wish: Layout | str | None) -> PlanBuilder:
        """``"whole"``, ``"eval"`` (whole but for training steps), ``"sharded"``, a layout, or
        ``None``: not needed. Outputs of which nothing is said are as ``ComputeConfig.outputs`` has
        them.
        """
        paths = output_paths(self.graph)
        if path not in paths:
            raise PlanError(f"the model has no output {path!r}", hint=suggestion(path, paths))
        if not (wish is None or wish in ("whole", "eval", "sharded") or isinstance(wish, Layout)):
            raise PlanError(
                f"output {path!r} cannot be {wish!r}",
                hint="'whole', 'eval', 'sharded', a Layout, or None to drop it",
            )
        self._outputs[path] = wish
        return self

    @checked_late
    def pieces(self, op: IROp) -> dict[str, int]:
        """The number of pieces into which an operator's strategies so far cut each factor."""
        strategies = self._strategies.get(op.name)
        found = factor_axes(strategies, self.mesh) if strategies else {}
        return {factor: math.prod(map(self.mesh.axis_size, axes)) for factor, axes in found.items()}

    @checked
    def allows(self, op: IROp, axis: str, strategy: str) -> bool:
        """Whether an operator may have a strategy along an axis, beside those it has by now."""
        assert op.rule is not None
        return allowed(op.rule, {**self._strategies.get(op.name, {}), axis: strategy}, self.mesh)

    @checked
    def note(self, op: IROp, axis: str, reason: str) -> PlanBuilder:
        """Leave a note that ``shardwright inspect`` prints."""
        self._notes.append(
            Note(op.name, op.module_path, op.source.portable if op.source else "", axis, reason)
        )
        return self

    @checked
    def plan(self, policy: str = "custom") -> Plan:
        return Plan(
            self.mesh,
            self._strategies,
            self._stored,
            {},
            self._outputs,
            policy,
            tuple(self._notes),
            gathers=self._gathers,
            loops=dict(self._loops),
        )

    @checked
    def build(self, policy: str = "custom") -> PlannableGraph:
        """The graph with the plan applied."""
        return replace(self.graph, plan=self.plan(policy))

    def _op(self, op: str | IROp) -> IROp:
        name = op if isinstance(op, str) else op.name
        if name not in self._ops:
            raise PlanError(f"the graph has no operator {name!r}", hint=suggestion(name, self._ops))
        return self._ops[name]

    def _check_axis(self, axis: str) -> None:
        if axis not in self.mesh.names:
            raise PlanError(
                f"the mesh has no axis {axis!r}",
                why=f"mesh {self.mesh}",
                hint=did_you_mean(axis, self.mesh.names),
            )
