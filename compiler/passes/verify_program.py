"""Prove a program right before any code is written.

The invariant that prevents wrong gradients: every operator's operand and result placements match
one of its strategies on every axis, and every edge between them is a chain of adapters from the
table. Then the placement of every parameter's gradient is known, and each axis on which it is G
gets exactly one reduction. This pass walks the program with layouts in place of tensors and
re-derives all of it independently of the pass that made it.

Placements say nothing of numbers inside a call: by how many elements of all ranks a mean divides,
from which class a rank's logits start, who draws which mask. So each local call is derived again
too, from the operator as it was traced and its strategies; the rule prover shows that such calls
are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise

from shardwright.compiler.cost.time.adapter_time import end_to_end
from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.op import AxisRef, IROp, LeftOut, RankDraw
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.strategy import allowed, layouts
from shardwright.compiler.passes.verify_overlap import check_overlap
from shardwright.compiler.plan.conversion import GATHERS, SLICES, AdapterStep, canonical, cut_sizes
from shardwright.compiler.plan.outputs import wished_layout
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Loop, Program
from shardwright.compiler.plan.repeated_blocks import reads
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Layout
from shardwright.runtime.mesh import ZERO

# (kind, backward) -> the placement letters it may go between
TABLE = {
    ("all_gather", "slice"): ("S", "R"),
    ("all_gather", "reduce_scatter"): ("S", "G"),
    ("pad", None): ("S", "P"),
    ("all_to_all", None): ("S", "S"),
    ("narrow", "all_gather"): ("R", "S"),
    ("narrow", "pad"): ("G", "S"),
    ("reduce_scatter", None): ("P", "S"),
    ("all_reduce", "identity"): ("P", "R"),
    ("all_reduce", "all_reduce"): ("P", "G"),
    ("grad_all_reduce", None): ("R", "G"),
    ("keep_one", "identity"): ("R", "P"),
    ("keep_one", "keep_one"): ("G", "P"),
    ("grad_keep_one", None): ("G", "R"),
}

TAKES, GIVES = ("narrow", "grad_all_reduce", "keep_one"), ("all_gather", "all_reduce")
"""What a loop does along its axis with what it takes, and with what it gives."""

_FIELDS = tuple(field.name for field in fields(IRValue))


def verify_program(program: Program) -> None:
    """Raise :class:`InternalError` where the program breaks the invariant."""
    _Walk(program).run()
    if program.eval_program is not None:
        verify_program(program.eval_program)


class _Walk:
    """A run of the program with layouts in the place of tensors. ``held``: the layout of each value
    made so far. ``origin``: the traced value of which it is a version.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        plan = program.plan
        self.mesh, self.storage_mesh = plan.computing_mesh, plan.with_loops(plan.storage_mesh)
        # The axis of the loop that the walk is in. No other loop may be spoken of meanwhile.
        self.loop: str | None = None
        # Units run the program on batches of their own. A parameter that they store together is
        # whole where it is used, and its gradient is a summand: G over the units.
        self.over_units = {d.value.name for d in program.declarations if ZERO in d.layout.cut_axes}
        self.held: dict[str, Layout] = {}
        self.origin: dict[str, str] = {}

    def run(self) -> None:
        program = self.program
        # Sources first: what is stored, and what a call brings.
        for declaration in program.declarations:
            if declaration.layout.partial:
                raise InternalError(
                    f"{declaration.value.name} is stored partial: {declaration.layout}"
                )
            if (
                ZERO in declaration.layout.cut_axes
                and declaration.value.kind is not ValueKind.PARAMETER
            ):
                raise InternalError(
                    f"{declaration.value.name} is no parameter and stored over units: "
                    f"{declaration.layout}"
                )
            self.define(declaration.value, declaration.layout)
        self.check_sources()
        for value in program.graph.inputs:
            layout = program.input_layouts[value.name]
            if layout != program.plan.inputs.get(value.name, Layout.whole(value.shape)):
                raise InternalError(f"the input {value.name} is taken as {layout}")
            self.define(value, layout)
        # Then the instructions in order. Each finds its operands in the layouts that ``define``
        # noted.
        self.walk(program.body)
        self.check_late()
        self.check_outputs(program.output)
        self.check_updates()
        self.walk(program.tail)
        self.check_outputs(program.whole_output or program.output, in_training=False)
        check_overlap(program)

    def check_sources(self) -> None:
        """Check that the program holds the parameters, buffers and constants of its graph."""
        graph = self.program.graph
        constants = (value for value, _ in graph.constants)
        known = {v.name: v for v in (*graph.parameters, *graph.buffers, *constants)}
        declared = [declaration.value for declaration in self.program.declarations]
        if missing := known.keys() - {value.name for value in declared}:
            raise InternalError(f"{', '.join(sorted(missing))} of the graph is not declared")
        for declaration in self.program.declarations:
            value = declaration.value
            if value.name not in known or declaration.layout.shape != value.shape:
                raise InternalError(
                    f"{value.name} of shape {list(value.shape)} is declared as {declaration.layout}"
                )
            self.check_same(value, known[value.name], "declared")

    def check_same(self, value: IRValue, known: IRValue, what: str) -> None:
        """Check that a value of the program is what it was in the graph, but for its place there.
        One that has lost its gradient would train nothing above it.
        """
        if value is known:
            return
        for name in _FIELDS:
            here, there = getattr(value, name), getattr(known, name)
            if here != there:
                raise InternalError(
                    f"{value.name} is {what} with {name} = {here}, the graph has {there}"
                )

    def walk(self, instructions: tuple[Instruction, ...]) -> None:
        """Check instructions one after the other."""
        for instruction in instructions:
            if isinstance(instruction, Loop):
                self.check_loop(instruction)
            elif isinstance(instruction, Adapt):
                self.check_adapter(instruction)
            else:
                self.check_compute(instruction)
        for before, after in pairwise((None, *instructions)):
            if isinstance(after, Adapt) and after.joins:
                self.check_joins(after, before)

    def define(self, value: IRValue, layout: Layout, origin: str | None = None) -> None:
        if value.name in self.held:
            raise InternalError(f"{value.name} is made twice")
        self.held[value.name], self.origin[value.name] = layout, origin or value.name

    def now(self, value: IRValue) -> Layout:
        """The layout in which a value is held, in canonical form."""
        if value.name not in self.held:
            raise InternalError(f"{value.name} is used before it is made")
        return self.canonical(self.held[value.name], value)

    def canonical(self, layout: Layout, value: IRValue) -> Layout:
        return canonical(layout, self.storage_mesh, differentiable=value.requires_grad)

    def require(
        self,
        value: IRValue,
        original: IRValue,
        needed: Layout,
        reader: str,
        where: str | None = None,
    ) -> None:
        """Check that ``reader`` gets a version of ``original``, in the layout that it needs."""
        held = self.now(value)
        if original.name in self.over_units:
            needed = replace(needed, grad_partial=(*needed.grad_partial, ZERO))
        if self.origin[value.name] != original.name:
            raise InternalError(
                f"{reader} needs {original.name} and gets {self.origin[value.name]}", where=where
            )
        if held != self.canonical(needed, original):
            raise InternalError(
                f"{reader} needs {original.name} as {needed} and gets {held}", where=where
            )

    def check_loop(self, loop: Loop) -> None:
        """Check that a loop takes pieces, or what all pieces share, at its beginning, gives joined
        pieces or totals at its end, and that nothing goes along its axis in between. Nothing
        outside reads what is of one piece.
        """
        planned = self.program.plan.loops.get(loop.axis)
        if planned is None or planned.count != loop.count or self.loop is not None:
            raise InternalError(f"the plan has no loop {loop.axis} of {loop.count} pieces here")
        outside = dict(self.held)
        # Only doors may go along the axis of the loop, each in its own direction: pieces in, whole
        # or summed results out.
        for doors, kinds in ((loop.takes, TAKES), (loop.gives, GIVES)):
            for door in doors:
                if door.step.axes != (loop.axis,) or door.step.kind not in kinds:
                    raise InternalError(
                        f"loop {loop.axis} cannot {door.step.kind} {door.of.name} along "
                        f"{_axes_text(door.step.axes)}"
                    )
        self.loop = loop.axis
        self.walk(loop.takes)
        for step in loop.body:
            if isinstance(step, Adapt) and (
                loop.axis in step.step.axes or step.gathers_again or step.joins or not step.in_loop
            ):
                raise InternalError(f"the adapter of {step.of.name} cannot be in loop {loop.axis}")
        self.walk(loop.body)
        if any(give.value.name in outside for give in loop.gives):
            raise InternalError(f"loop {loop.axis} gives what it did not make")
        self.walk(loop.gives)
        given = {value.name for value in loop.results}
        if not loop.late <= given:
            raise InternalError(f"loop {loop.axis} gives no {_names(sorted(loop.late - given))}")
        self.held = {
            name: layout for name, layout in self.held.items() if name in outside or name in given
        }
        self.loop = None

    def check_compute(self, instruction: Compute) -> None:
        op, where = instruction.original, str(instruction.original.source)
        assert op.rule is not None
        # Inside of a loop an operator is cut by its axis, and by that of no other loop.
        loops = self.program.plan.loops
        if loops and (
            (loops.keys() - {self.loop}) & instruction.assignment.keys()
            or (self.loop is not None and self.loop not in instruction.assignment)
        ):
            raise InternalError(f"{op.name} is in the wrong loop", where=where)
        if not allowed(op.rule, instruction.assignment, self.mesh):
            raise InternalError(
                f"{op.name} cannot follow {dict(instruction.assignment)}", where=where
            )
        operands, results = layouts(op.rule, instruction.assignment, self.mesh)
        # The operands come as the strategies need them, and are those that the graph has.
        for value, original, needed in zip(
            instruction.op.operands, op.operands, operands, strict=True
        ):
            self.require(value, original, needed, op.name, where)
        if results != instruction.layouts:
            raise InternalError(
                f"{op.name} gives {_listed(results)}, not {_listed(instruction.layouts)}",
                where=where,
            )
        self.check_call(instruction)
        for value, known in zip(instruction.op.results, op.results, strict=True):
            self.check_same(value, known, "computed")
        for value, layout in zip(op.results, instruction.layouts, strict=True):
            self.define(value, layout)

    def check_call(self, instruction: Compute) -> None:
        """Check that a rank calls the operator as its pieces ask for: the function, and arguments
        such as sizes, offsets, counts and the axes over which it communicates.
        """
        original = instruction.original
        assert original.rule is not None
        whole = original.with_operands(instruction.op.operands)
        expected = localise(whole, original.rule, instruction.assignment, self.mesh)
        if not any(instruction.op is form or instruction.op == form for form in _forms(expected)):
            found = min((_differences(instruction.op, form) for form in _forms(expected)), key=len)
            here, there = found[0] if found else ("other arguments", "those of the graph")
            raise InternalError(
                f"{original.name} is computed with {here}, its strategies ask for {there}",
                where=str(original.source),
            )

    def check_adapter(self, instruction: Adapt) -> None:
        step, value, name = (
            instruction.step,
            instruction.value,
            f"adapter {instruction.step.kind} of {instruction.of.name}",
        )
        # The layout that the adapter starts from is the one that the value has here.
        if self.now(value) != self.canonical(step.before, value):
            raise InternalError(f"{name} expects {step.before} and gets {self.now(value)}")
        if self.origin[value.name] != instruction.of.name:
            raise InternalError(f"{name} gets {self.origin[value.name]}")
        # The table says of each adapter and backward between which placements it goes.
        known = TABLE.get((step.kind, step.backward), ("", ""))
        # Without a gradient R and G are the same.
        blur = str.maketrans("G", "R") if not value.requires_grad else {}
        if len(set(step.axes)) != max(1, len(step.axes)) or ("S" in known and len(step.axes) > 1):
            raise InternalError(f"{name} cannot go over {_axes_text(step.axes)}")
        # On its own axes it does what the table says, on all others nothing.
        for axis in step.axes:
            letters = step.before.placement(axis)[0], step.after.placement(axis)[0]
            if [x.translate(blur) for x in known] != [x.translate(blur) for x in letters]:
                raise InternalError(
                    f"{name} (backward {step.backward}) goes from {letters[0]} to "
                    f"{letters[1]} on {axis}"
                )
        for axis in self.storage_mesh.names:
            if axis not in step.axes and step.before.placement(axis) != step.after.placement(axis):
                raise InternalError(f"{name} on {_axes_text(step.axes)} changes {axis}")
        if step.before == step.after:
            raise InternalError(f"{name} changes nothing")
        # What it joins and cuts has the sizes that the layouts say.
        self.check_cut(step, name)
        result = instruction.result
        made = replace(instruction.of, name=result.name, kind=ValueKind.ACTIVATION, fqn=None)
        self.check_same(result, made, "adapted")
        self.define(result, step.after, instruction.of.name)

    def check_joins(self, gather: Adapt, before: Instruction | None) -> None:
        """Check that a gather can go in one collective with the one before it: values of one dtype,
        over one axis, with one backward; either stored parameters with pieces of one length along
        the first dim, or activations that are cut alike.
        """
        step = gather.step

        def fits(one: Instruction | None) -> bool:
            if not isinstance(one, Adapt) or one.step.kind != "all_gather":
                return False
            alike = (one.step.axes, one.step.backward) == (step.axes, step.backward)
            if not alike or one.of.dtype != gather.of.dtype or one.choice is not None:
                return False
            if one.gathers_weight != gather.gathers_weight:
                return False
            if one.gathers_weight:
                is_stored = one.value.kind is ValueKind.PARAMETER and one.step.dim == 0
                return is_stored and end_to_end(one.step, self.storage_mesh)
            # What one of them sends back, all do.
            takes_gradient = one.of.takes_gradient == gather.of.takes_gradient
            return takes_gradient and (one.step.dim, one.step.cut) == (step.dim, step.cut)

        if not (fits(before) and fits(gather)):
            raise InternalError(f"the gather of {gather.of.name} cannot join what stands before it")

    def check_cut(self, step: AdapterStep, name: str) -> None:
        """Check that an adapter is told of the dims it joins and cuts what their layouts say."""
        # What was cut before is joined, what is cut behind is cut.
        joined = (
            [(step.before, step.dim, step.cut)] if step.kind in (*GATHERS, "all_to_all") else []
        )
        cut = [(step.after, step.to_dim, step.to_cut)] if step.kind == "all_to_all" else []
        if step.kind in SLICES:
            cut = [(step.after, step.dim, step.cut)]
        # Worked out anew from the layouts, not taken from what lowering has noted.
        for layout, dim, sizes in joined + cut:
            if (
                dim is None
                or step.axis not in layout.dim_axes(dim)
                or sizes != cut_sizes(layout, dim, step.axis, self.storage_mesh)
            ):
                raise InternalError(f"{name} cuts dim {dim} as {sizes}, its layout is {layout}")

    def check_late(self) -> None:
        """Check that a training step reads no result of a loop that it leaves out."""
        body, plan_output = self.program.body, self.program.output
        late = {name for step in body if isinstance(step, Loop) for name in step.late}
        read = {v.name for _, v in plan_output.leaves() if isinstance(v, IRValue)}
        read |= {after.name for _, after in self.program.buffer_updates}
        read |= {value.name for instruction in body for value in reads(instruction)}
        if late & read or (late and self.program.whole_output is None):
            raise InternalError(f"a training step leaves out {_names(sorted(late))}, and reads it")

    def check_outputs(self, output: Tree, *, in_training: bool = True) -> None:
        """Results are as the plan wishes them. Only those may be left out, and of training only,
        that it gives up there.
        """
        originals = dict(self.program.graph.output.leaves())
        for path, value in output.leaves():
            if isinstance(value, LeftOut):
                # A left-out dict stands for all tensors below it.
                below = [
                    known for known in originals if known == path or known.startswith(f"{path}.")
                ]
                wishes = {
                    self.program.plan.outputs.get(known)
                    for known in below
                    if isinstance(originals[known], IRValue)
                }
                if not in_training or wishes != {"eval"}:
                    raise InternalError(f"output {path!r} is left out")
            if not isinstance(value, IRValue):
                continue
            original, wish = originals[path], self.program.plan.outputs.get(path, "whole")
            assert isinstance(original, IRValue)
            # A result that no operator makes is refused below, in words.
            made = self.held.get(value.name, Layout.whole(original.shape))
            wanted = wished_layout(wish, original.shape, made)
            self.require(value, original, wanted, f"output {path!r}")

    def check_updates(self) -> None:
        """Check that buffers get new values in their own layouts."""
        stored = {
            declaration.value.name: declaration.layout for declaration in self.program.declarations
        }
        graph_updates = {before.name: after for before, after in self.program.graph.buffer_updates}
        updated = [before.name for before, _ in self.program.buffer_updates]
        # In the same order, too: a buffer that is left out or written twice has other values.
        if updated != list(graph_updates):
            raise InternalError(
                f"the program updates the buffers {_names(updated)}, the graph "
                f"{_names(list(graph_updates))}"
            )
        for before, after in self.program.buffer_updates:
            self.require(
                after, graph_updates[before.name], stored[before.name], f"buffer {before.fqn}"
            )


def _forms(expected: IROp) -> Iterator[IROp]:
    """The ways to write a local call that later passes may choose: a ``reshape`` for a ``view``, a
    product that leaves the gradient of its weight to a sum, and numbers that are drawn for the
    piece at hand, by the axes that cut it.
    """
    yield expected
    if expected.target == "view":
        yield expected.retarget("reshape")
    if expected.target in ("linear", "addmm"):
        yield expected.retarget(f"shardwright.runtime.ops.{expected.target}_beside")
    if expected.draws:
        yield expected.drawing_pieces


def _differences(op: IROp, expected: IROp) -> list[tuple[str, str]]:
    """The differences of two calls in words, for messages: ``("count = 2", "count = 8")``."""
    if op.target != expected.target:
        return [(f"the function {op.target}", f"the function {expected.target}")]
    keys = dict.fromkeys(key for key, _ in (*op.args, *expected.args))
    arguments = [(_argument(op, key), _argument(expected, key)) for key in keys]
    differing = [(here, there) for here, there in arguments if here != there]
    named = ((f.name, getattr(op, f.name), getattr(expected, f.name)) for f in fields(IROp))
    others = [(f"{n} = {a}", f"{n} = {b}") for n, a, b in named if n != "args" and a != b]
    return [*differing, *others]


def _argument(op: IROp, key: str) -> str:
    return f"{key} = {_argument_text(op.arg(key))}" if op.has_arg(key) else f"no {key}"


def _argument_text(arg: object) -> str:
    if isinstance(arg, tuple):
        return f"({', '.join(map(_argument_text, arg))})"
    if isinstance(arg, RankDraw):
        return f"{arg.name} along {_axes_text(arg.axes)}"
    return arg.name if isinstance(arg, IRValue | AxisRef) else str(arg)


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _axes_text(axes: tuple[str, ...]) -> str:
    """Axes in words, for messages: ``tp and tp2``."""
    return " and ".join(axes) or "no axis"


def _listed(found: tuple[Layout, ...]) -> str:
    return ", ".join(map(str, found))
