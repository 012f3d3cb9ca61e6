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

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp, LeftOut
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.strategy import Assignment, layouts
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.copy_trees import Route, routes
from shardwright.compiler.passes.loops import (
    LoopOps,
    before_gathers,
    find_loops,
    side_by_side,
    with_sums,
)
from shardwright.compiler.passes.place_sources import place_sources
from shardwright.compiler.passes.strides import without_strided_views
from shardwright.compiler.passes.unused_outputs import drop_outputs, in_training
from shardwright.compiler.plan.check import check_strategies
from shardwright.compiler.plan.conversion import REGROUP, AdapterStep, canonical, convert
from shardwright.compiler.plan.outputs import wished_layout
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import (
    Adapt,
    Compute,
    Instruction,
    Loop,
    Program,
)
from shardwright.compiler.plan.repeated_blocks import reads
from shardwright.compiler.plan.zero import over_units
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO
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
    looped = with_sums(drop_outputs(with_imbalance(graph, plan.imbalance), plan.outputs), plan)
    lowering = _Lowering(looped.graph, plan, whole_in_units, delivers, looped.assignments)
    program = without_strided_views(lowering.run())
    if graph.eval_graph is None:
        return program
    # Both bodies run on one set of weights, so evaluation takes the layouts of training.
    stored = {d.value.fqn: d.layout for d in program.declarations if d.value.fqn}
    given = {path: "whole" if wish == "eval" else wish for path, wish in plan.outputs.items()}
    own = replace(plan, stored={**plan.stored, **stored}, outputs=given, loops={})
    return replace(program, eval_program=lower(graph.eval_graph, own, whole_in_units))


LOOP_WORDS = {
    "narrow": "piece",
    "grad_all_reduce": "shared",
    "keep_one": "once",
    "all_gather": "joined",
    "all_reduce": "total",
}
"""What the values at the door of a loop are called, by the step along it."""

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
    - ``assignments``: the strategies that are not the plan's: along loops, and of operators that
      these made necessary.
    - ``names``: all names of values, so that new ones are different.
    """

    graph: IRGraph
    plan: Plan
    whole_in_units: Set[str] = frozenset()
    delivers: bool = False
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    operand_layouts: dict[str, tuple[Layout, ...]] = field(default_factory=dict)
    produced: dict[str, Layout] = field(default_factory=dict)
    wanted: dict[str, list[Layout]] = field(default_factory=dict)
    routes: dict[str, Mapping[Layout, Route]] = field(default_factory=dict)
    versions: dict[str, dict[tuple[Layout, Place | None], IRValue]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    # The names of the parameters that are stored in pieces over the units.
    _over_units: set[str] = field(default_factory=set)
    # The loop in which each operator is that is in one.
    _loops: dict[str, LoopOps] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh over which operators are split, loops included."""
        return self.plan.computing_mesh

    @cached_property
    def storage_mesh(self) -> Mesh:
        """The mesh on which adapters work: with ZeRO-3 it has one more axis, over units."""
        return self.plan.with_loops(self.plan.storage_mesh)

    def assignment(self, op: IROp) -> Assignment:
        """The strategies of an operator."""
        return self.assignments.get(op.name, self.plan.assignment(op.name))

    def run(self) -> Program:
        """Lower the graph. A training step runs ``early`` operators alone. The ``late`` ones, which
        serve only outputs that it leaves out, come behind them as the program's tail.
        """
        needed = in_training(self.graph, self.plan.outputs)
        early = [op for op in self.graph.ops if op.name in needed]
        late = [op for op in self.graph.ops if op.name not in needed]
        early = self._with_loops(early)
        graph = self.graph = self.graph.with_ops((*early, *late))
        plan = self.plan
        self.names = {value.name for value in graph.sources} | {
            r.name for op in graph.ops for r in op.results
        }
        # Every value gets the layout in which its producer makes it, and every operator says in
        # which it reads.
        for op in graph.ops:
            self.operand_layouts[op.name], results = layouts(
                _rule(op), self.assignment(op), self.mesh
            )
            loop = self._loops.get(op.name)
            for value, layout in zip(op.results, results, strict=True):
                # Outside of its loop a value is whole along it.
                self.produced[value.name] = without_axis(layout, loop.axis) if loop else layout
        # ``wanted`` has the uses of training alone while these are lowered, so that what only the
        # tail reads makes no training step dearer. Storage suits training first of all.
        self.wanted = self._wanted_by(early)
        sources = place_sources(
            self.graph,
            plan,
            self.produced,
            {**self._wanted_by(late), **self.wanted},
            self._updated(),
            self.whole_in_units,
        )
        self.produced |= sources.layouts
        self._over_units |= sources.over_units
        if any(loop.blocks for loop in plan.loops.values()):
            # What a loop gathers it reads as it is stored, which is known by now.
            self.wanted = self._wanted_by(early)
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
        left_out = set()
        for path, value in leaves:
            if plan.outputs.get(path) != "eval":
                continue
            if self.delivers or value.name in made or not self._is_there(value, path):
                left_out.add(path)
        # ``output`` of a training step has holes, marked ``LeftOut``, at the outputs that it leaves
        # out.
        output = self._output(graph.output, "", left_out)
        updates = tuple(
            (before, self._adapted(after, self.produced[before.name], None))
            for before, after in graph.buffer_updates
        )
        inputs = {value.name: self.produced[value.name] for value in graph.inputs}
        program = Program(
            graph, plan, sources.declarations, inputs, tuple(self.body), output, updates
        )
        if not left_out:
            return program
        program = _with_late_results(program)
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

    def _updated(self) -> dict[str, Layout]:
        """The layouts of the buffers that operators update in place, such as running statistics:
        the operator of ``rule.updates`` writes them as it has them.
        """
        return {
            op.operands[i].name: layouts(_rule(op), self.assignment(op), self.mesh)[0][i]
            for op in self.graph.ops
            for i in _rule(op).updates
        }

    def _with_loops(self, ops: list[IROp]) -> list[IROp]:
        """The operators with those of each loop side by side."""
        along = {name: axis for axis, loop in self.plan.loops.items() for name in loop.strategies}
        if not along:
            return ops
        apart = [axis for axis, loop in self.plan.loops.items() if loop.blocks]
        loops = find_loops(ops, along, apart)
        # An operator that a training step does not need is in no loop.
        inside = {op.name for loop in loops for op in loop.ops}
        assignments = dict(self.assignments)
        for name, assignment in self.assignments.items():
            if name not in inside:
                on_mesh = {a: s for a, s in assignment.items() if a not in self.plan.loops}
                assignments[name] = on_mesh
        self.assignments = assignments
        self._loops = {op.name: loop for loop in loops for op in loop.ops}
        return list(side_by_side(ops, loops))

    def _wanted_by(self, ops: list[IROp]) -> dict[str, list[Layout]]:
        """The layouts in which these operators need each value, outside of loops."""
        wanted: dict[str, list[Layout]] = {}
        for op in ops:
            loop = self._loops.get(op.name)
            made = {r.name for other in loop.ops for r in other.results} if loop else set()
            for value, layout in zip(op.operands, self.operand_layouts[op.name], strict=True):
                if value.name not in made:
                    # A loop cuts what it takes itself, piece by piece: outside of it the value is
                    # whole.
                    whole = layout
                    if loop is not None:
                        whole = without_axis(self._at_door(value, layout, loop.axis), loop.axis)
                    wanted.setdefault(value.name, []).append(whole)
        return wanted

    def _compute(self, ops: list[IROp]) -> None:
        """Append the local calls of operators, and adapters in front of them."""
        for op in ops:
            loop = self._loops.get(op.name)
            if loop is not None:
                if op is loop.ops[0]:
                    self.body.append(self._loop(loop))
                continue
            targets = zip(op.operands, self.operand_layouts[op.name], strict=True)
            # Adapters are appended in front of the call, as ``_adapted`` makes each operand.
            operands = [self._adapted(value, target, op) for value, target in targets]
            assignment = self.assignment(op)
            local = localise(op.with_operands(operands), _rule(op), assignment, self.mesh)
            results = tuple(self.produced[value.name] for value in op.results)
            self.body.append(Compute(local, op, assignment, results))

    @property
    def _loop_ops(self) -> Iterable[IROp]:
        return (op for op in self.graph.ops if op.name in self._loops)

    def _loop(self, loop: LoopOps) -> Loop:
        """The operators of a loop as one instruction, with the adapters that it needs in front of
        it appended.

        What it reads is adapted outside as far as the mesh goes. The step along the loop itself
        stands at its door: a piece is taken, or a value is shared by all pieces.
        """
        axis = loop.axis
        # The body is lowered like a program of its own, in which values of a piece are values.
        inner = _Lowering(
            self.graph, self.plan, self.whole_in_units, self.delivers, self.assignments
        )
        inner.names, inner._over_units = self.names, self._over_units
        inner.operand_layouts = self.operand_layouts
        made: dict[str, tuple[IRValue, Layout]] = {}
        for op in loop.ops:
            results = layouts(_rule(op), self.assignment(op), self.mesh)[1]
            for value, layout in zip(op.results, results, strict=True):
                made[value.name] = value, layout
                inner.produced[value.name] = layout
        takes: list[Adapt] = []
        for op in loop.ops:
            for value, target in zip(op.operands, self.operand_layouts[op.name], strict=True):
                if value.name in made:
                    inner.wanted.setdefault(value.name, []).append(target)
                    continue
                goal = self._canonical(value, self._needed(value, target))
                door = self._at_door(value, target, axis)
                copies = inner.versions.setdefault(value.name, {})
                inner.routes.setdefault(value.name, {})
                # What comes in. Where it is to be gathered in the loop, it becomes the goal there.
                taken = self._canonical(value, self._needed(value, door))
                if (taken, None) not in copies:
                    whole = self._adapted(value, without_axis(door, axis), op)
                    step = self._along_loop(value, without_axis(taken, axis), taken)
                    copies[taken, None] = whole
                    if step is not None:
                        takes.append(self._step(whole, value, step, op))
                        copies[taken, None] = takes[-1].result
                inside = convert(taken, goal, self.storage_mesh, differentiable=value.requires_grad)
                inner.routes[value.name] = {
                    **inner.routes[value.name], goal: Route(taken, inside)
                }  # fmt: skip
        inner._compute(list(loop.ops))
        gives: list[Adapt] = []
        # What somebody outside reads leaves through a door, whole along the loop's axis.
        for value, made_as in made.values():
            if value.name in self._read_outside(loop):
                outside = without_axis(made_as, axis)
                step = self._along_loop(value, made_as, outside)
                if step is None:
                    raise _same_in_all_pieces(value, loop)
                gives.append(self._step(value, value, step, None))
                # Readers outside begin with what the loop gives.
                self.versions[value.name] = {
                    (self._canonical(value, outside), None): gives[-1].result
                }
                self.routes[value.name] = self._routes(value)
        # Backward has what is gathered inside of a loop from the piece that it computes again.
        body = tuple(
            replace(step, choice=None, in_loop=True) if isinstance(step, Adapt) else step
            for step in inner.body
            if not isinstance(step, Loop)
        )
        return Loop(axis, self.plan.loops[axis].count, tuple(takes), body, tuple(gives))

    def _at_door(self, value: IRValue, target: Layout, axis: str) -> Layout:
        """The layout in which a loop takes its part of a value that is needed as ``target`` inside:
        before it is gathered there, if the loop gathers.
        """
        produced = self.produced.get(value.name)
        if not self.plan.loops[axis].blocks or produced is None:
            return target
        if value.name in self._over_units:  # units give their pieces before the loop begins
            produced = without_axis(produced, ZERO)
        differentiable = value.requires_grad
        found = before_gathers(produced, target, axis, self.mesh, differentiable=differentiable)
        return found or target

    def _along_loop(self, value: IRValue, before: Layout, after: Layout) -> AdapterStep | None:
        """The step between two layouts that differ along one loop; ``None`` if they are one."""
        found = convert(before, after, self.storage_mesh, differentiable=value.requires_grad)
        assert len(found) < 2, f"{value.name} goes from {before} to {after} in several steps"
        return found[0] if found else None

    def _step(self, value: IRValue, of: IRValue, step: AdapterStep, op: IROp | None) -> Adapt:
        """A step of a value at the door of a loop."""
        name = self._unused_name(f"{of.name}_{LOOP_WORDS[step.kind]}")
        result = replace(of, name=name, kind=ValueKind.ACTIVATION, fqn=None)
        return Adapt(value, result, of, step, op.region if op else None)

    def _read_outside(self, loop: LoopOps) -> set[str]:
        """The names of the values that anything but a loop reads: operators, outputs, buffers."""
        inside = {op.name for op in loop.ops}
        read = {v.name for op in self.graph.ops if op.name not in inside for v in op.operands}
        read |= {v.name for v in self.graph.outputs}
        return read | {after.name for _, after in self.graph.buffer_updates}

    # ---------------------------------------------------------------------------------------------
    # adapters

    def _adapted(self, value: IRValue, target: Layout, op: IROp | None) -> IRValue:
        """The value in the layout that a use needs. Adapters that make it are appended now, unless
        the program has it already.
        """
        goal = self._canonical(value, self._needed(value, target))
        if value.name not in self.versions:
            produced = self._canonical(value, self.produced[value.name])
            if goal == produced:  # nothing to adapt
                return value
            # The value itself is the first copy: every route begins at it.
            self.versions[value.name] = {(produced, None): value}
            self.routes[value.name] = self._routes(value)
        # The tail wants another layout. The routes of training stay as they are.
        if (goal, None) not in self.versions[value.name] and goal not in self.routes[value.name]:
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
        if any(value in op.results for op in self._loop_ops):
            return False  # it would have to be joined of its pieces
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
            # Pieces of a loop run one after the other, so nothing is exchanged among them.
            if any(axis in self.plan.loops for axis in step.axes):
                raise _cannot_deal_again(value, step, op)
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
        return self._unused_name(f"{value.name}_{'_'.join(step.axes)}_{words[step.kind]}")

    def _unused_name(self, base: str) -> str:
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
        return wished_layout(wish, value.shape, self.produced[value.name])

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


def _with_late_results(program: Program) -> Program:
    """The program with those results of loops marked as late that its training step leaves out."""
    read = {value.name for value in program.results()}
    read |= {after.name for _, after in program.buffer_updates}
    read |= {value.name for instruction in program.body for value in reads(instruction)}

    def marked(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Loop):
            return instruction
        late = frozenset(value.name for value in instruction.results if value.name not in read)
        return replace(instruction, late=late)

    return replace(program, body=tuple(map(marked, program.body)))


def without_axis(layout: Layout, axis: str) -> Layout:
    """The layout of a tensor that lies the same all along an axis."""
    return replace(
        layout,
        dims=tuple(
            tuple(replace(atom, axes=tuple(a for a in atom.axes if a != axis)) for atom in dim)
            for dim in layout.dims
        ),
        partial=tuple(a for a in layout.partial if a != axis),
        grad_partial=tuple(a for a in layout.grad_partial if a != axis),
    )


def _same_in_all_pieces(value: IRValue, loop: LoopOps) -> PlanError:
    op = next(op for op in loop.ops if value in op.results)
    return PlanError(
        f"loop {loop.axis!r} would compute {value.name} anew in each of its pieces",
        where=op.place,
        why=f"operator {op.name} ({op.target}) makes it of nothing that the loop cuts",
        hint="leave the operator out of the loop",
    )


def _cannot_regroup(value: IRValue, step: AdapterStep, op: IROp | None) -> PlanError:
    """Rows of chosen experts are asked for on other ranks than those that have them."""
    return PlanError(
        f"the rows of {value.name} cannot be converted from {step.before} to {step.after}",
        where=f"{op.source} ({op.module_path or 'top-level forward'})" if op else None,
        why="which rank has which of them follows from what the router chose, and only dispatch "
        "and combine move them",
        hint="let all operators between dispatch and combine split experts, or all of them tokens",
    )


def _cannot_deal_again(value: IRValue, step: AdapterStep, op: IROp | None) -> PlanError:
    loop = step.axes[0]
    return PlanError(
        f"loop {loop!r} needs {value.name} in other pieces than it is made in",
        where=op.place if op else None,
        why=f"one operator cuts it as {step.before}, and the next as {step.after}",
        hint="split the operators of the loop on the same axes of the mesh, or cut another dim in "
        "pieces",
    )


def _rule(op: IROp) -> OpRule:
    assert op.rule is not None, f"{op.name} has no rule"
    return op.rule
