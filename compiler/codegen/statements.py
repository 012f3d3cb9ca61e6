"""Write the statements of a program, one for each operator, adapter and buffer update.

Names are made of the user's own, and adapters are named by what they do. A trailing comment tells
the layout of the result and the user's line:

    up = F.linear(x_tp_in, self.up.weight, self.up.bias)  # [batch, hidden/tp]  my_project.py:9
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from shardwright.compiler.codegen.comments import describe
from shardwright.compiler.codegen.drawing_calls import drawing_source, drawn_by, without_draw
from shardwright.compiler.codegen.file_names import FileNames
from shardwright.compiler.codegen.literals import named, source, tuple_text
from shardwright.compiler.codegen.local_sizes import renamed, size_names, sizes_in, spelled
from shardwright.compiler.codegen.names import (
    Scope,
)
from shardwright.compiler.codegen.text import (
    Line,
    names_read,
)
from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.quote import comment, quoted
from shardwright.compiler.ir.size import LocalSize, Size, to_python
from shardwright.compiler.ir.time_steps import TIME_STEPS, TimeSteps
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.render import (
    Source,
    argument_source,
    call_source,
    imports_of,
    imports_of_literal,
    imports_of_steps,
    step_source,
)
from shardwright.compiler.plan.conversion import AdapterStep, CutSizes
from shardwright.compiler.plan.program import (
    Adapt,
    Compute,
    Loop,
    Program,
    gathers_at,
)
from shardwright.compiler.plan.repeated_blocks import (
    Item,
    Run,
    Update,
    weight_path,
)
from shardwright.runtime.layout import Mesh


@dataclass
class StatementWriter(FileNames):
    """Writes single statements, and knows what all of them together import."""

    _container: str = ""  # the path of the module whose method is being written
    _train_only: set[str] = field(default_factory=set)  # values that exist in training only
    # Statements that wait for messages, each with the items that it goes between, and the position
    # of that in front of it.
    _waits: list[tuple[Sequence[Item], int, Line]] = field(default_factory=list)

    def _drop(self, weights: Iterable[IRValue], scope: Scope) -> list[Line]:
        """The statements that let go of what is gathered again: ``del weight_tp_whole``."""
        lines = []
        for value in weights:
            guards = ("if self.training",) if value.name in self._train_only else ()
            lines.append(Line(f"del {scope.name(value)}", guards=guards))
        return lines

    def _update(self, update: Update, scope: Scope) -> Line:
        """The statement that gives a buffer its new value."""
        before, after = update
        name = source(named(before.fqn, scope.block))
        guards = ("if self.training",) if after.name in self._train_only else ()
        return Line(f"self.update_buffer({name}, {scope.name(after)})", guards=guards)

    def _lines_at(
        self, items: Sequence[Item], position: int, scope: Scope, program: Program
    ) -> list[Line]:
        """The statement of the instruction at a position, and of those that go in one collective
        with it, which have none of their own; and statements that wait for messages, if it is the
        last one that runs while they are under way.
        """
        lines = self._lines_of(items, position, scope, program)
        due = [w for w in self._waits if w[0] is items and w[1] == position]
        self._waits = [w for w in self._waits if w not in due]
        return lines + [line for _, _, line in due]

    def _lines_of(
        self, items: Sequence[Item], position: int, scope: Scope, program: Program
    ) -> list[Line]:
        instruction = items[position]
        assert not isinstance(instruction, Run)
        if isinstance(instruction, Loop):
            return self._loop_lines(instruction, scope, program)
        if isinstance(instruction, Compute):
            if isinstance(steps := instruction.op.arg("steps"), TimeSteps):
                return self._step_lines(instruction, steps, scope, program)
            line = self._compute_line(instruction, scope, program)
            return self._early(line, items, position, scope)
        if instruction.joins:
            return []
        together = gathers_at(items, position)
        if len(together) > 1:
            return [self._gathers_line(together, scope, program)]
        line = self._adapter_line(instruction, scope, program)
        return self._early(line, items, position, scope)

    def _early(self, line: Line, items: Sequence[Item], position: int, scope: Scope) -> list[Line]:
        """The line of an instruction, or those that start its message and wait for it, where
        something runs meanwhile. What waits is written behind the last of these.

            rows_coming = start(dispatch, x, chosen, num_experts=8)
            ...
            rows, routing = arrived(rows_coming)
        """
        instruction = items[position]
        assert isinstance(instruction, Compute | Adapt)
        weights = instruction.beside if isinstance(instruction, Adapt) else ()
        if not weights and not instruction.meanwhile:
            return [line]
        self.need("start", "arrived")
        targets, _, call = line.code.partition(" = ")
        function, _, arguments = call.partition("(")
        started = f"start({function}, {arguments}"
        # In backward the message starts, the gradients of these weights are computed, and then it
        # is waited for.
        beside = f", beside={tuple_text(map(scope.name, weights))}" if weights else ""
        if not instruction.meanwhile:
            return [replace(line, code=f"{targets} = arrived({started}{beside})")]
        coming = scope.unused(f"{targets.partition(',')[0]}_coming")
        scope.reserve(coming)
        waits = replace(line, code=f"{targets} = arrived({coming}{beside})")
        self._waits.append((items, position + instruction.meanwhile, waits))
        return [replace(line, code=f"{coming} = {started}", comment="")]

    def _loop_lines(self, loop: Loop, scope: Scope, program: Program) -> list[Line]:
        """A loop as a function of one piece, and its call:

            def loss_piece(loss, hidden_piece, weight, labels_piece):
                ...
                return total

            loss = self.in_pieces(loss_piece, "loss", 4, (piece_of(hidden, 1), ...), (TOTAL,), ...)

        Whatever may take a gradient is an argument of the function. It reads all else, such as
        sizes and groups, from around it.
        """
        function = scope.unused(f"{identifier(loop.axis)}_piece")
        scope.reserve(function)
        outside, words, arguments = [], [], []
        taken = {take.value.name: take for take in loop.takes}
        # What all pieces share keeps the name by which a whole value goes inside of the function.
        for take in loop.takes:
            outside.append(scope.name(take.value))
            gather = loop.ahead.get(take.result.name)
            words.append(self._door_text(take, outside[-1], program, gather=gather))
        for value in loop.operands:
            # Naming a value that has no variable yet defines one. It must be done out here, or the
            # function of a piece would take the name for itself.
            if value.name not in taken and value.kind is ValueKind.ACTIVATION:
                scope.name(value)
        for take in loop.takes:
            name = weight_path(take.of, scope.block) or take.of.fqn or take.of.name
            wish = "" if take.step.kind == "narrow" else identifier(name)
            # The function gets what is gathered of a piece, not this rank's part of it.
            gather = loop.ahead.get(take.result.name)
            argument = take.result if gather is None else gather.result
            scope.define(argument, wish)
            arguments.append(scope.name(argument))
        piece = self._axis_variables(program)[loop.axis,]
        header = f"def {function}({', '.join([piece, *arguments])})"
        lines: list[Line] = []
        inside = [step for step in loop.body if step not in loop.ahead.values()]
        for position in range(len(inside)):
            lines += self._lines_at(inside, position, scope, program)
        returned = ", ".join(scope.name(give.value) for give in loop.gives)
        lines.append(Line(f"return {returned}"))
        # A function is written like a ``with`` block around its lines: a guard that they all share.
        lines = [replace(line, guards=(header, *line.guards)) for line in lines]
        results = [self._door_text(give, "", program, late=loop.late) for give in loop.gives]
        for give in loop.gives:
            scope.define(give.result)
        targets = ", ".join(scope.name(give.result) for give in loop.gives)
        given = [
            function,
            quoted(loop.axis),
            str(loop.count),
            tuple_text(words),
            tuple_text(results),
        ]
        call = f"self.in_pieces({', '.join(given)})"
        return [*lines, Line(f"{targets} = {call}", module=lines[-2].module)]

    def _door_text(
        self,
        door: Adapt,
        name: str,
        program: Program,
        late: Collection[str] = (),
        gather: Adapt | None = None,
    ) -> str:
        """What a loop takes or gives, as an argument of its call. ``gather``: of what it takes."""
        step, sizes = door.step, self._source_of(program)
        # What the pieces share is passed as it is: in_pieces adds up its gradient.
        if step.kind == "grad_all_reduce":
            return name
        if step.kind == "keep_one":
            self.need("Once")
            return f"Once({name})"
        if step.kind == "all_reduce":
            self.need("TOTAL")
            return "TOTAL"
        assert step.cut is not None
        if step.kind == "narrow":
            self.need("piece_of")
            plain = _is_plain(step.cut, program.plan.computing_mesh, step)
            cut = "" if plain else f", {self._cut(step.cut, sizes)}"
            ahead = "" if gather is None else f", gather={self._gather_text(gather, program)}"
            return f"piece_of({name}, {step.dim}{cut}{ahead})"
        self.need("Joined")
        wanted = ", wanted=not self.trains" if door.result.name in late else ""
        return f"Joined({step.dim}, {self._cut(step.cut, sizes)}{wanted})"

    def _gather_text(self, gather: Adapt, program: Program) -> str:
        """What ranks gather of a piece that a loop takes."""
        self.need("Gather")
        step = gather.step
        words = [self._axis_variables(program)[step.axes], str(step.dim), f'"{step.backward}"']
        assert step.cut is not None
        if not _is_plain(step.cut, program.plan.storage_mesh, step):
            words.append(self._cut(step.cut, self._source_of(program)))
        return f"Gather({', '.join(words)})"

    def _gathers_line(self, gathers: Sequence[Adapt], scope: Scope, program: Program) -> Line:
        """Several weights or activations gathered in one collective."""
        step = gathers[0].step
        values = ", ".join(scope.name(gather.value) for gather in gathers)
        words = [f"[{values}]", self._axis_variables(program)[step.axes]]
        function = "all_gather_together"
        if gathers[0].gathers_weight:
            function = "self.gathered_together"
        else:
            self.need(function)
            words += self._joined_dim(step, program)
        # The usual backward of a gathered weight is not spelled out.
        if step.backward != "reduce_scatter" or not gathers[0].gathers_weight:
            words.append(f'backward="{step.backward}"')
        for gather in gathers:
            scope.define(gather.result)
        targets = ", ".join(scope.name(gather.result) for gather in gathers)
        call = f"{function}({', '.join(words)})"
        return Line(f"{targets} = {call}", f"{step.axis}: {step.transition}")

    def _joined_dim(self, step: AdapterStep, program: Program) -> list[str]:
        """The dim that an adapter joins or cuts, and how it is cut, as arguments."""
        words = [f"dim={step.dim}"]
        if step.cut is not None and not _is_plain(step.cut, program.plan.storage_mesh, step):
            words.append(f"cut={self._cut(step.cut, self._source_of(program))}")
        return words

    def _step_lines(
        self, instruction: Compute, steps: TimeSteps, scope: Scope, program: Program
    ) -> list[Line]:
        """A loop over time steps as a function, and its call:

        def time_steps(h, x):
            h_steps = []
            for t in range(512):
                ...
            return torch.stack(h_steps, 1)

        y = time_steps(zeros, x)
        """
        name = scope.unused(TIME_STEPS)
        scope.reserve(name)
        self.imports |= imports_of_steps(steps)
        steps = steps.map_args(self._with_axes(program))
        function = step_source(steps, to_python, self._reserved(program))
        header = f"def {name}({', '.join(function.parameters)})"
        lines = [Line(code, guards=(header,)) for code in function.before]
        for code, op in function.body:
            source = op.source if op is not None else None
            told = f"{PurePath(source.file).name}:{source.line}" if source else ""
            lines.append(Line(code, comment(told), (header, function.loop)))
        lines.append(Line(f"return {function.returned}", guards=(header,)))
        called = replace(instruction, op=instruction.op.with_args(steps=Source(name)))
        call = self._compute_line(called, scope, program)
        return [*(replace(line, module=call.module) for line in lines), call]

    def _compute_line(self, instruction: Compute, scope: Scope, program: Program) -> Line:
        op = spelled(instruction, program.plan.computing_mesh)
        self.imports |= imports_of(op)
        variables = self._size_variables(op, instruction, scope, program)
        replaced = self._with_axes(program)

        def written(leaf: Any) -> Any:
            return named(replaced(renamed(leaf, variables)), scope.block, identifier)

        draw = drawn_by(op)
        plain = op if draw is None else without_draw(op)
        code = call_source(plain.map_args(written), scope.name, to_python)
        if draw is not None:
            function = self._random_functions()[id(program)][draw.name]
            code = drawing_source(code, function, draw, scope.block)
        # Results get their names after the call was written, so that it reads the old ones.
        for value in op.results:
            scope.define(value)
        targets = ", ".join(scope.name(value) for value in op.results)
        guards = []
        if op.only_in == "train":
            # Such as the counter of batches of a batch norm: nothing may read it in evaluation.
            self._train_only |= {value.name for value in op.results}
            guards.append("if self.training")
        if not op.grad_enabled:
            guards.append("with torch.no_grad()")
        if op.autocast is not None:
            guards.append(f"with torch.autocast(self.device.type, dtype={op.autocast})")
        module = op_path(instruction, self._container)
        return Line(
            f"{targets} = {code}", self._comment(instruction, program), tuple(guards), module
        )

    def _size_variables(
        self, op: IROp, instruction: Compute, scope: Scope, program: Program
    ) -> dict[LocalSize, str]:
        """The variables for sizes of pieces that a call speaks of."""
        wishes = (
            size_names(
                instruction, program.plan.computing_mesh, program.graph.dims, program.plan.loops
            )
            if (sizes := sizes_in(op))
            else {}
        )
        return {size: scope.size_variable(size, wishes[size]) for size in wishes if size in sizes}

    def _comment(self, instruction: Compute, program: Program) -> str:
        original = instruction.original
        texts = [
            describe(v, l, program.graph.dims)
            for v, l in zip(original.results, instruction.layouts, strict=True)
        ]
        # ``topk`` gives two tensors of one layout: it is said once.
        alike = len(texts) > 1 and len(set(texts)) == 1
        layout = f"each {texts[0]}" if alike else " ".join(texts)
        source = (
            f"{PurePath(original.source.file).name}:{original.source.line}"
            if original.source
            else ""
        )
        return comment("  ".join(word for word in (layout, source) if word))

    def _adapter_line(self, instruction: Adapt, scope: Scope, program: Program) -> Line:
        step = instruction.step
        function, default = step.kind, _DEFAULT_BACKWARD.get(step.kind)
        # A method, not the plain adapter: the module may gather early, join gathers and free the
        # whole weight after its last use.
        if instruction.gathers_weight or instruction.gathers_again:
            function, default = "self.gathered", "reduce_scatter"
        else:
            self.imports.add(f"from shardwright.runtime.adapters import {step.kind}")
        words = [scope.name(instruction.value), self._axis_variables(program)[step.axes]]
        if step.kind == "all_to_all":
            assert step.cut is not None and step.to_cut is not None
            cut, to_cut = (self._cut(c, self._source_of(program)) for c in (step.cut, step.to_cut))
            words += [str(step.dim), cut, str(step.to_dim), to_cut]
        elif step.dim is not None:
            words += self._joined_dim(step, program)
        # A backward is written only where it is not the one that the adapter has by itself.
        if step.backward not in (None, default):
            words.append(f'backward="{step.backward}"')
        if instruction.choice is not None and function == "self.gathered":
            words.append(f'then="{instruction.choice}"')
        call = f"{function}({', '.join(words)})"
        scope.define_adapted(instruction.result, instruction.value)
        note = f"{', '.join(step.axes)}: {step.transition}"
        guards: tuple[str, ...] = ()
        # What is made in training only is moved in training only.
        if instruction.value.name in self._train_only:
            self._train_only.add(instruction.result.name)
            guards = ("if self.training",)
        return Line(f"{scope.name(instruction.result)} = {call}", note, guards)

    def _cut(self, cut: CutSizes, sizes: Callable[[Size], str]) -> str:
        self.need("Cut")
        words = [tuple_text(map(sizes, cut.segments))]
        if cut.outer != 1 or cut.inner != 1:
            words.append(sizes(cut.outer))
        if cut.inner != 1:
            words.append(sizes(cut.inner))
        if cut.element:
            words.append(f"element={tuple_text(map(sizes, cut.element))}")
        return f"Cut({', '.join(words)})"

    # results

    def _output(self, tree: Tree, scope: Scope) -> str:
        if tree.kind == "leaf":
            return self._literal(tree.value, scope)
        parts = [self._output(child, scope) for _, child in tree.children]
        if tree.kind == "tuple":
            return tuple_text(parts)
        if tree.kind == "list":
            return f"[{', '.join(parts)}]"
        keys = [self._literal(key, scope) for key, _ in tree.children]
        fields = ", ".join(f"{key}: {text}" for key, text in zip(keys, parts, strict=True))
        if tree.kind == "dict":
            return f"{{{fields}}}"
        self.need("rebuild")
        return f"rebuild({self._class(tree.type_path or '')}, {{{fields}}})"

    def _literal(self, arg: Any, scope: Scope) -> str:
        """The source of a leaf or a key of the result, with what it imports."""
        for leaf in leaves(arg):
            self.imports |= imports_of_literal(leaf)
        return argument_source(arg, scope.name, to_python)

    def _axis_lines(self, lines: Iterable[Line], scope: Scope, program: Program) -> list[Line]:
        """The lines that bind the variables of axes which ``lines`` use: ``tp = self.axis("tp")``,
        ``tp_tp2 = self.axis("tp", "tp2")``; and those of the sizes of pieces that the scope has
        variables for: ``local_heads = tp.local_size(4)``.
        """
        text = self._source_of(program)
        sizes = [Line(f"{name} = {text(size)}") for (size, _), name in scope.sizes.items()]
        lines = [*sizes, *lines]
        variables = self._axis_variables(program)
        # Looking for a name in a text is quick, parsing it is not; most lines name no axis.
        speaking = (
            line.code for line in lines if any(name in line.code for name in variables.values())
        )
        used = {name for code in speaking for name in names_read(code)}
        groups = {
            name: ", ".join(map(quoted, axes))
            for axes, name in variables.items()
            if name in used and axes[0] not in program.plan.loops
        }
        return [*(Line(f"{name} = self.axis({axes})") for name, axes in groups.items()), *sizes]


_DEFAULT_BACKWARD = {"all_reduce": "identity", "keep_one": "identity"}


def op_path(instruction: Compute, container: str) -> str:
    """The path of the module to which an operator belongs, below the ``container`` whose method is
    being written.
    """
    path = instruction.original.module_path
    inside = not container or path == container or path.startswith(f"{container}.")
    return path.removeprefix(container).lstrip(".") if inside else path


def _is_plain(cut: CutSizes, mesh: Mesh, step: AdapterStep) -> bool:
    """Whether the adapter finds this cut by itself, so that it need not be written: even contiguous
    pieces, or one whole segment that is still to be cut.
    """
    if cut.outer != 1 or len(cut.segments) != 1 or cut.element:
        return False
    # In zigzag an axis deals elements that are ``inner`` long as they are, and not their parts.
    if mesh.turns_of(step.axis) and cut.inner != 1:
        return False
    # The dim of a gathered piece tells its whole length only if all pieces are equal: one element
    # for each rank, ``inner`` long. A dim that is still whole tells it in any case.
    return cut.segments[0] == mesh.axis_size(step.axis) or (
        step.kind in ("narrow", "reduce_scatter") and cut.inner == 1
    )
