"""Write the body of a program: its statements in order, with repeated layers as methods.

Twelve layers that are alike become one method and a loop:

    x = embedding
    for layer in range(12):
        x = self._h_block(self.h[layer], x)
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.codegen.layer_loops import LayerLoop, loop_at, readers_of
from shardwright.compiler.codegen.literals import range_text
from shardwright.compiler.codegen.names import MODULE_ATTRIBUTES, Scope, attribute_path
from shardwright.compiler.codegen.statements import StatementWriter
from shardwright.compiler.codegen.text import WIDTH, Line, layout_lines, with_headings, wrap
from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.quote import docstring
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.repeated_blocks import (
    Run,
    container_path,
    gathered_until,
    group_blocks,
    reads,
)

LEAVES_OUT = "a training step: see ComputeConfig.outputs"
"""The comment of the statement with which a training step returns early."""


@dataclass
class _Method:
    """A repeated block as a method: its name, and its source."""

    name: str
    lines: list[str]
    takes_block: bool  # it reads tensors of a layer
    takes_layer: bool  # it finds what draws random numbers by the number of the layer


@dataclass
class BodyWriter(StatementWriter):
    """Writes what the files of plans with and without pipeline stages have in common.

    ``methods``: the methods of repeated blocks, by :attr:`Run.key`.
    """

    methods: dict[Any, _Method] = field(default_factory=dict)

    def _statements(self, program: Program, scope: Scope) -> list[Line]:
        """The operators, adapters and buffer updates of a program; repeated blocks become
        methods.
        """
        body: list[Line] = []
        items = group_blocks(program)
        # Runs that are alike share a method, so each is written with all its instances at hand.
        instances: dict[Any, list[Run]] = {}
        for item in items:
            if isinstance(item, Run):
                instances.setdefault(item.key, []).append(item)
        # When the last reader of a gathered weight has run, it is let go.
        kept = _held_at_the_end(program)
        over, readers = gathered_until(items, kept), readers_of(items, kept)
        # An item is a loop over several runs, a single run, or one instruction.
        position = 0
        while position < len(items):
            item, loop = items[position], loop_at(items, position, readers, over)
            if loop is not None:
                body += self._call_loop(loop, instances[loop.runs[0].key], scope, program)
                position += len(loop.runs) - 1
            elif isinstance(item, Run):
                body += self._call_block(item, instances[item.key], scope, program)
            else:
                body += self._lines_at(items, position, scope, program)
            body += self._drop(over.get(position, ()), scope)
            position += 1
        body = with_headings(body, program.graph.name)
        # Methods of blocks update their own buffers; the others are updated here.
        done = {
            before.name for item in items if isinstance(item, Run) for before, _ in item.updates
        }
        return body + [
            self._update(pair, scope) for pair in program.buffer_updates if pair[0].name not in done
        ]

    def _tail(self, program: Program, scope: Scope) -> list[Line]:
        """The statements behind the return of a training step: they make the outputs that it leaves
        out.
        """
        over = gathered_until(program.tail, program.results())
        lines: list[Line] = []
        for position in range(len(program.tail)):
            lines += self._lines_at(program.tail, position, scope, program)
            lines += self._drop(over.get(position, ()), scope)
        return lines

    def _call_block(
        self, run: Run, instances: list[Run], scope: Scope, program: Program
    ) -> list[Line]:
        number = str(run.container[1]) if run.container else ""
        block = attribute_path(container_path(run.container)) if run.container else ""
        call = self._call(
            run, instances, (block, number, [scope.name(value) for value in run.inputs]), program
        )
        for value in run.outputs:
            scope.define(value)
        targets = ", ".join(scope.name(value) for value in run.outputs)
        module = run.container[0] if run.container else None
        return [Line(f"{targets} = {call}" if targets else call, module=module)]

    def _call_loop(
        self, loop: LayerLoop, instances: list[Run], scope: Scope, program: Program
    ) -> list[Line]:
        """Layers one after another as a loop: first the variables that each layer hands to the next
        get their values, then comes the call of one layer.

            x = embedding
            for layer in range(12):
                x = self._h_block(self.h[layer], x)
        """
        # The first run says what comes in, the last one what goes out.
        first, last = loop.runs[0], loop.runs[-1]
        assert first.container is not None and last.container is not None
        prefix, start = first.container
        inputs = [scope.name(value) for value in first.inputs]
        # Variables lose the number of their layer: ``h_11_add`` is ``h_add``.
        for value in last.outputs:
            name = value.name.removeprefix(f"{identifier(container_path(last.container))}_")
            scope.define(
                value, re.sub(r"_\d+$", "", f"{identifier(prefix)}_{name}" if prefix else name)
            )
        targets = [scope.name(value) for value in last.outputs]
        # Before the loop: what the first layer reads, under the name that each layer hands on.
        begins = dict(sorted((output, inputs[at]) for at, output in loop.carried.items()))
        inputs = [
            targets[loop.carried[at]] if at in loop.carried else name
            for at, name in enumerate(inputs)
        ]
        block = f"{attribute_path(prefix) if prefix else 'self'}[layer]"
        call = self._call(first, instances, (block, "layer", inputs), program)
        header = f"for layer in {range_text(start, len(loop.runs))}"
        return [
            Line(f"{', '.join(targets)} = {', '.join(begins.values())}", module=prefix),
            Line(f"{', '.join(targets)} = {call}", module=prefix, guards=(header,)),
        ]

    def _call(
        self, run: Run, instances: list[Run], words: tuple[str, str, list[str]], program: Program
    ) -> str:
        """The call of a block's method. ``words``: the sources of the container, of its number, and
        of the inputs.
        """
        method = self.methods.get(run.key) or self._write_method(instances, program)
        block, number, inputs = words
        arguments = [
            *([block] if method.takes_block else []),
            *([number] if run.container and method.takes_layer else []),
        ]
        arguments += [*inputs, *run.symbols]
        if not run.recompute:
            return f"self.{method.name}({', '.join(arguments)})"
        return f"self.recompute({', '.join([f'self.{method.name}', *arguments])})"

    def _write_method(self, instances: list[Run], program: Program) -> _Method:
        """The method for runs that are alike, written from the first of them."""
        # All runs of one key have the same statements but for names, so any of them would do.
        run = instances[0]
        container = container_path(run.container)
        outer = identifier(run.container[0]) if run.container and run.container[0] else "inner"
        base = f"{outer}_block"
        # Methods, tensors and attributes share one namespace.
        taken = {method.name for method in self.methods.values()} | MODULE_ATTRIBUTES
        taken |= {
            (d.value.fqn or d.value.name).partition(".")[0]
            for p in self._programs()
            for d in p.declarations
        }
        name = next(
            n
            for n in itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
            if n not in taken
        )
        # Inside of the method names are those of the block: ``block.attn.weight``.
        scope = Scope(self._reserved(program) | set(run.symbols))
        scope.strip = f"{identifier(container)}_" if container else ""
        scope.block = run.container
        for value, wish in zip(run.inputs, _input_names(instances), strict=True):
            scope.define(value, wish)
            scope.given.add(value.name)
        inputs = [scope.name(value) for value in run.inputs]
        # Comments and headings name modules relative to the block, as it is written once for all
        # layers.
        self._container = container
        over = gathered_until(run.instructions, run.outputs)
        lines = []
        for position in range(len(run.instructions)):
            lines += self._lines_at(run.instructions, position, scope, program)
            lines += self._drop(over.get(position, ()), scope)
        lines += [self._update(update, scope) for update in run.updates]
        self._container = ""
        lines = with_headings(lines, "block")
        outputs = []
        for value in run.outputs:
            read = scope.name(value)
            # A value of training alone is ``None`` in evaluation.
            if value.name in self._train_only:
                read = f"{read} if self.training else None"
            outputs.append(read)
        lines.append(Line(f"return {', '.join(outputs)}"))
        # What draws random numbers is found by the number of the layer.
        takes_layer = any("{layer}" in line.code or "[layer]" in line.code for line in lines)
        # Layers without tensors are no part of the parallel module: nothing could be handed over.
        takes_block = run.container is not None and any(
            re.search(r"\bblock[.\[]", line.code) for line in lines
        )
        words = [
            "self",
            *(["block"] if takes_block else []),
            *(["layer"] if takes_layer else []),
            *inputs,
            *run.symbols,
        ]
        text = [f"    {line}" for line in wrap(f"def {name}({', '.join(words)}):", WIDTH - 4)]
        if run.container:
            number = ", number ``layer``" if takes_layer else ""
            subject = "``block`` is" if takes_block else "What is computed by"
            text.append(
                f'        """{subject} one of '
                f'``{docstring(run.container[0]) or "self"}``{number}."""'
            )
        text += layout_lines([*self._axis_lines(lines, scope, program), *lines], 8)
        self.methods[run.key] = _Method(name, text, takes_block, takes_layer)
        return self.methods[run.key]


def _input_names(instances: list[Run]) -> list[str]:
    """The names of a method's inputs.

    An input that all runs share has its own name. An input that one run makes for the next has the
    name that a later run reads it by, as the first run's input comes from before the layers.
    """
    names = []
    for values in zip(*(run.inputs for run in instances), strict=True):
        name = values[-1].name
        container = instances[-2].container if len(instances) > 1 else None
        if container is not None and values[0].name != name:
            name = re.sub(
                r"_\d+$", "", name.removeprefix(f"{identifier(container_path(container))}_")
            )
            # The name of an operator means that the user gave the value no name.
            name = name if registry.get(name) is None else "x"
        names.append(name)
    return names


def _held_at_the_end(program: Program) -> list[IRValue]:
    """The values that a body still needs after its last instruction."""
    later = [value for instruction in program.tail for value in reads(instruction)]
    return [*program.results(), *later, *(after for _, after in program.buffer_updates)]
