"""Lower a planned graph to the program of its ranks: local calls, and the adapters between them.

Every value has the layout that its producer gives it. Each use asks for the layout that its
operator's strategy needs. Uses that ask for the same layout share one adapter, so their gradients
are summed before the one backward collective. A layout that is cheaper to reach from another copy
(S -> G -> R) is reached from there (``copy_trees.py``). A weight that is stored in pieces is the
exception: each module that uses it gathers it for itself, as nothing holds it whole in between.

Example, on ``tp=2``: ``up`` is split by its columns, and reads ``x`` [8, 16] as G. ``x`` is made as
R. So the program is ``x_tp_in = grad_all_reduce(x, tp)``, then ``up = linear(x_tp_in, weight)``
with a result of [8, 64/tp].
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

from shardwright.compiler.cost.communication import local_elements, steps_elements
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp, LeftOut
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.strategy import KNOWN, layouts
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.copy_trees import Route, routes
from shardwright.compiler.passes.strides import without_strided_views
from shardwright.compiler.passes.unused_outputs import drop_outputs, in_training
from shardwright.compiler.plan.check import check_strategies
from shardwright.compiler.plan.conversion import REGROUP, AdapterStep, canonical, convert
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Adapt, Compute, Declaration, Instruction, Program
from shardwright.compiler.plan.zero import in_pieces, is_large, over_units
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.structure import join


def lower(
    graph: IRGraph, plan: Plan, whole_in_units: Set[str] = frozenset(), *, delivers: bool = False
) -> Program:
    """The program of ``graph`` under ``plan``.

    ``whole_in_units``: parameters that ZeRO-3 does not cut. ``delivers``: whether outputs go to
    other ranks than those that run the program, so that even an output that is whole already has a
    price.

    Raises :class:`PlanError` for strategies that its operators do not have.
    """
    check_strategies(graph, plan)
    graph = drop_outputs(with_imbalance(graph, plan.imbalance), plan.outputs)
    program = without_strided_views(_Lowering(graph, plan, whole_in_units, delivers).run())
    if graph.eval_graph is None:
        return program
    # Both bodies run on one set of weights, so evaluation takes the layouts of training.
    stored = {d.value.fqn: d.layout for d in program.declarations if d.value.fqn}
    given = {path: "whole" if wish == "eval" else wish for path, wish in plan.outputs.items()}
    own = replace(plan, stored={**plan.stored, **stored}, outputs=given)
    return replace(program, eval_program=lower(graph.eval_graph, own, whole_in_units))


Place = tuple[str, str | None]
"""Module path and recompute region of the operators that share a gathered weight."""


@dataclass
class _Lowering:
    """The state of one lowering.

    - ``body``: the instructions so far.
    - ``operand_layouts``: the layouts that each operator needs its operands in.
    - ``produced``: the layout in which each value is made or stored.
    - ``wanted``: the layouts in which each value is read.
    - ``routes``: how each of these is made of the value, as a tree of copies.
    - ``versions``: the copies of each value that the program has made so far. A gathered weight is
      a copy for one :data:`Place` only; any other copy is there for all, under ``None``.
    - ``names``: all names of values, so that new ones are different.
    """

    graph: IRGraph
    plan: Plan
    whole_in_units: Set[str] = frozenset()
    delivers: bool = False
    body: list[Instruction] = field(default_factory=list)
    operand_layouts: dict[str, tuple[Layout, ...]] = field(default_factory=dict)
    produced: dict[str, Layout] = field(default_factory=dict)
    wanted: dict[str, list[Layout]] = field(default_factory=dict)
    routes: dict[str, Mapping[Layout, Route]] = field(default_factory=dict)
    versions: dict[str, dict[tuple[Layout, Place | None], IRValue]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    # The names of the parameters that are stored in pieces over the units.
    _over_units: set[str] = field(default_factory=set)

    @property
    def mesh(self) -> Mesh:
        """The mesh over which operators are split."""
        return self.plan.mesh

    @property
    def storage_mesh(self) -> Mesh:
        """The mesh on which adapters work: with ZeRO-3 it has one more axis, over units."""
        return self.plan.storage_mesh

    def run(self) -> Program:
        """Lower the graph. A training step runs ``early`` operators alone. The ``late`` ones, which
        serve only outputs that it leaves out, come behind them as the program's tail.
        """
        needed = in_training(self.graph, self.plan.outputs)
        early = [op for op in self.graph.ops if op.name in needed]
        late = [op for op in self.graph.ops if op.name not in needed]
        graph = self.graph = self.graph.with_ops((*early, *late))
        plan = self.plan
        self.names = {value.name for value in graph.sources} | {
            r.name for op in graph.ops for r in op.results
        }
        # Every value gets the layout in which its producer makes it, and every operator says in
        # which it reads.
        for op in graph.ops:
            self.operand_layouts[op.name], results = layouts(
                _rule(op), plan.assignment(op.name), self.mesh
            )
            for value, layout in zip(op.results, results, strict=True):
                self.produced[value.name] = layout
        # ``wanted`` has the uses of training alone while these are lowered, so that what only the
        # tail reads makes no training step dearer. Storage suits training first of all.
        self.wanted = self._wanted_by(early)
        declarations = self._place_sources({**self._wanted_by(late), **self.wanted})
        leaves = [
            (path, value) for path, value in graph.output.leaves() if isinstance(value, IRValue)
        ]
        # An output and the new value of a buffer are uses like any other: they ask for a layout.
        for path, value in leaves:
            if plan.outputs.get(path) != "eval":
                self.wanted.setdefault(value.name, []).append(self._output_layout(path, value))
        for before, after in graph.buffer_updates:
            self.wanted.setdefault(after.name, []).append(self.produced[before.name])
        self._compute(early)
        # An output of evaluation that is there anyway costs nothing, so it is not left out.
        made = {result.name for op in late for result in op.results}
        left_out = {
            path
            for path, value in leaves
            if plan.outputs.get(path) == "eval"
            and (self.delivers or value.name in made or not self._is_there(value, path))
        }
        # ``output`` of a training step has holes, marked ``LeftOut``, at the outputs that it leaves
        # out.
        output = self._output(graph.output, "", left_out)
        updates = tuple(
            (before, self._adapted(after, self.produced[before.name], None))
            for before, after in graph.buffer_updates
        )
        inputs = {value.name: self.produced[value.name] for value in graph.inputs}
        program = Program(graph, plan, declarations, inputs, tuple(self.body), output, updates)
        if not left_out:
            return program
        # The tail: what only evaluation needs is lowered behind the body of a training step, on its
        # copies.
        for name, layouts_wanted in self._wanted_by(late).items():
            self.wanted.setdefault(name, []).extend(layouts_wanted)
        for path, value in leaves:
            self.wanted.setdefault(value.name, []).append(self._output_layout(path, value))
        self._compute(late)
        # The same output without holes, which evaluation returns.
        whole = self._output(graph.output, "", set())
        return replace(program, tail=tuple(self.body[len(program.body) :]), whole_output=whole)

    def _wanted_by(self, ops: list[IROp]) -> dict[str, list[Layout]]:
        """The layouts in which these operators need each value."""
        wanted: dict[str, list[Layout]] = {}
        for op in ops:
            for value, layout in zip(op.operands, self.operand_layouts[op.name], strict=True):
                wanted.setdefault(value.name, []).append(layout)
        return wanted

    def _compute(self, ops: list[IROp]) -> None:
        """Append the local calls of operators, and adapters in front of them."""
        for op in ops:
            targets = zip(op.operands, self.operand_layouts[op.name], strict=True)
            # Adapters are appended in front of the call, as ``_adapted`` makes each operand.
            operands = [self._adapted(value, target, op) for value, target in targets]
            assignment = self.plan.assignment(op.name)
            local = localise(op.with_operands(operands), _rule(op), assignment, self.mesh)
            results = tuple(self.produced[value.name] for value in op.results)
            self.body.append(Compute(local, op, assignment, results))

    # ---------------------------------------------------------------------------------------------
    # sources

    def _place_sources(self, wanted: Mapping[str, list[Layout]]) -> tuple[Declaration, ...]:
        """Decide how inputs, parameters, buffers and constants are held.

        A plan's own layout comes first. Otherwise a parameter is stored as its uses need it, and a
        buffer that an operator updates in place as that operator writes it.
        """
        # Running statistics and the like: the operator of ``rule.updates`` writes them as it has
        # them.
        updated = {
            op.operands[i].name: layouts(_rule(op), self.plan.assignment(op.name), self.mesh)[0][i]
            for op in self.graph.ops
            for i in _rule(op).updates
        }
        declarations = []
        for value in self.graph.inputs:
            self.produced[value.name] = self.plan.inputs.get(value.name, Layout.whole(value.shape))
        for value in (
            *self.graph.parameters,
            *self.graph.buffers,
            *(value for value, _ in self.graph.constants),
        ):
            stored = self.plan.stored.get(value.fqn or "")
            if stored is None and value.kind is ValueKind.PARAMETER:
                stored = self.best_storage(value, wanted.get(value.name, []))
            layout = stored or updated.get(value.name) or Layout.whole(value.shape)
            if self._is_stored_in_pieces(value):
                layout = self._in_pieces(value, layout, wanted.get(value.name, []))
            # A frozen weight is G to its operators, but nobody sums a gradient of it.
            if not value.requires_grad:
                layout = replace(layout, grad_partial=())
            self.produced[value.name] = layout
            declarations.append(Declaration(value, layout))
        return tuple(declarations)

    def _is_stored_in_pieces(self, value: IRValue) -> bool:
        """Whether ZeRO-3 cuts this tensor."""
        if (
            not self.plan.zero
            or value.kind is not ValueKind.PARAMETER
            or value.fqn in self.whole_in_units
        ):
            return False
        return is_large(value)

    def _in_pieces(self, value: IRValue, layout: Layout, uses: list[Layout]) -> Layout:
        """The layout of a parameter under ZeRO-3: cut along the axes on which it is whole and its
        gradient is a summand.

        A frozen parameter has no gradient that says so. It is cut along the axes on which all its
        uses are G.
        """
        summed = layout.grad_partial if value.requires_grad else self.mesh.names
        axes = (
            [axis for axis in summed if all(use.placement(axis) == "G" for use in uses)]
            if uses
            else []
        )
        # An axis on which the plan stores it S already cuts it there; along P there is no whole
        # value.
        axes = [
            axis
            for axis in axes
            if self.mesh.axis_size(axis) > 1 and layout.placement(axis) in ("R", "G")
        ]
        if self.plan.zero > 1:
            self._over_units.add(value.name)
        return in_pieces(layout, axes, self.mesh, self.plan.zero)

    def best_storage(self, value: IRValue, uses: list[Layout]) -> Layout:
        """The layout of a parameter that costs its uses the least. Reductions of its gradient
        count, and of two equal layouts the one with smaller pieces is taken.
        """
        whole = Layout.whole(value.shape)
        return _best_storage(
            whole, tuple(uses), self.mesh, value.requires_grad, value.takes_gradient
        )

    # ---------------------------------------------------------------------------------------------
    # adapters

    def _adapted(self, value: IRValue, target: Layout, op: IROp | None) -> IRValue:
        """The value in the layout that a use needs. Adapters that make it are appended now, unless
        the program has it already.
        """
        goal = self._canonical(value, self._needed(value, target))
        if value.name not in self.versions:
            self.versions[value.name] = {
                # The value itself is the first copy: every route begins at it.
                (self._canonical(value, self.produced[value.name]), None): value
            }
            self.routes[value.name] = self._routes(value)
        # The tail wants another layout. The routes of training stay as they are.
        if goal not in self.routes[value.name]:
            self.routes[value.name] = {**self._routes(value), **self.routes[value.name]}
        return self._version(value, goal, op)

    def _routes(self, value: IRValue) -> Mapping[Layout, Route]:
        """The routes to all layouts in which a value is wanted."""
        return routes(
            self.produced[value.name],
            [self._needed(value, layout) for layout in self.wanted.get(value.name, [])],
            self.storage_mesh,
            differentiable=value.requires_grad,
            takes_gradient=value.takes_gradient,
        )

    def _is_there(self, value: IRValue, path: str) -> bool:
        """Whether an output is held as it is wanted, without another adapter."""
        goal = self._canonical(value, self._output_layout(path, value))
        made = self._canonical(value, self.produced[value.name])
        return goal == made or (goal, None) in self.versions.get(value.name, {})

    def _version(self, value: IRValue, goal: Layout, op: IROp | None) -> IRValue:
        """The copy of a value in a layout in canonical form, for ``op`` or for the program's end.

        The copy from which it is made comes first, by recursion.
        """
        versions = self.versions[value.name]
        place = (op.module_path, op.region) if op else ("", None)
        found = versions.get((goal, None), versions.get((goal, place)))
        # First what everybody may read, then what was gathered for this module.
        if found is not None:
            return found
        route = self.routes[value.name][goal]
        start = self._version(value, route.start, op)
        # A copy is there for all readers, unless a weight was gathered on the way to it.
        is_everywhere = (route.start, None) in versions
        # One adapter for each step, such as S -> G -> R: each result is a value of its own.
        for step in route.steps:
            if step.kind == REGROUP:
                raise _cannot_regroup(value, step, op)
            result = replace(
                value, name=self._fresh_name(value, step), kind=ValueKind.ACTIVATION, fqn=None
            )
            adapter = Adapt(
                start,
                result,
                value,
                step,
                op.region if op else None,
                op.module_path if op else "",
                self.plan.gathers.get(value.fqn or value.name),
            )
            self.body.append(adapter)
            held_for_a_moment = adapter.gathers_weight and adapter.gathers_again
            is_everywhere = is_everywhere and not held_for_a_moment
            start = result
        versions[goal, None if is_everywhere else place] = start
        return start

    def _needed(self, value: IRValue, target: Layout) -> Layout:
        """The layout that a use needs, on the mesh on which adapters work."""
        return over_units(target) if value.name in self._over_units else target

    def _canonical(self, value: IRValue, layout: Layout) -> Layout:
        return canonical(layout, self.storage_mesh, differentiable=value.requires_grad)

    def _fresh_name(self, value: IRValue, step: AdapterStep) -> str:
        """A new name that says what an adapter makes: ``x_tp_whole``, ``y_tp_sum_2``."""
        words = {
            "all_gather": "whole", "narrow": "shard", "reduce_scatter": "shard",
            "all_reduce": "sum", "grad_all_reduce": "in",
            "keep_one": "once", "grad_keep_one": "out", "pad": "padded", "all_to_all": "swapped",
        }  # fmt: skip
        base = f"{value.name}_{'_'.join(step.axes)}_{words[step.kind]}"
        name, count = base, 1
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name

    # ---------------------------------------------------------------------------------------------
    # outputs

    def _output_layout(self, path: str, value: IRValue) -> Layout:
        """The layout in which an output leaves the program."""
        wish = self.plan.outputs.get(path, "whole")
        if wish == "sharded":
            return self.produced[value.name]
        return wish if isinstance(wish, Layout) else Layout.whole(value.shape)

    def _output(self, tree: Tree, path: str, left_out: Set[str]) -> Tree:
        """The result structure over the program's values. A part is left out as a whole if all its
        tensors are.
        """
        if tree.kind == "leaf":
            if not isinstance(tree.value, IRValue):
                return tree
            if path in left_out:
                return replace(tree, value=LeftOut(path))
            return replace(
                tree, value=self._adapted(tree.value, self._output_layout(path, tree.value), None)
            )
        tensors = {leaf for leaf, value in tree.leaves(path) if isinstance(value, IRValue)}
        # A dict of which every tensor is left out is left out as one.
        if path and tensors and left_out >= tensors:
            return Tree("leaf", LeftOut(path))
        children = (
            (key, self._output(child, join(path, key), left_out)) for key, child in tree.children
        )
        return replace(tree, children=tuple(children))


def _cannot_regroup(value: IRValue, step: AdapterStep, op: IROp | None) -> PlanError:
    """Rows of chosen experts are asked for on other ranks than those that have them."""
    return PlanError(
        f"the rows of {value.name} cannot be converted from {step.before} to {step.after}",
        where=f"{op.source} ({op.module_path or 'top-level forward'})" if op else None,
        why="which rank has which of them follows from what the router chose, and only dispatch "
        "and combine move them",
        hint="let all operators between dispatch and combine split experts, or all of them tokens",
    )


@lru_cache(maxsize=KNOWN)
def _best_storage(
    whole: Layout, uses: tuple[Layout, ...], mesh: Mesh, requires_grad: bool, takes_gradient: bool
) -> Layout:
    # By text, so that equal layouts count once and the order is the same in every process.
    # Candidates are what some use asks for, and all of it everywhere. Nobody stores summands.
    candidates = {str(layout): replace(layout, partial=()) for layout in [whole, *uses]}
    targets = {str(use): use for use in uses}.values()

    def cost(layout: Layout) -> tuple[float, float, str]:
        paths = (convert(layout, t, mesh, differentiable=requires_grad) for t in targets)
        moved = sum(steps_elements(path, mesh, differentiable=takes_gradient) for path in paths)
        elements = local_elements(layout, mesh)
        # Summed over the ranks of all axes at once: a ring all-reduce over ``n`` ranks sends
        # each element ``2 (n - 1) / n`` times.
        summed_over = mesh.num_ranks(layout.grad_partial)
        reduced = 2 * elements * (1 - 1 / summed_over) if takes_gradient else 0.0
        # At equal size a reduction is cheaper than an adapter, as the reducer puts many into one
        # bucket.
        return moved + 0.99 * reduced, elements, str(layout)

    return min(candidates.values(), key=cost)


def _rule(op: IROp) -> OpRule:
    assert op.rule is not None, f"{op.name} has no rule"
    return op.rule
