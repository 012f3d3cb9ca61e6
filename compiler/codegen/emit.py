"""Emit the source files of a program: one per rank, alike but for what says which rank it is.

The body reads like a model a person wrote (``body.py``). Layers that repeat are emitted once as a method.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2

from shardwright.compiler.codegen.body import RESERVED, BodyWriter, axis_lines, used_symbols
from shardwright.compiler.codegen.comments import legend
from shardwright.compiler.codegen.imports import sorted_imports
from shardwright.compiler.codegen.literals import joined_text, source
from shardwright.compiler.codegen.names import Scope
from shardwright.compiler.codegen.text import WIDTH, Line, layout_lines, wrap
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.terms import RUNTIME
from shardwright.compiler.passes.verify_program import TABLE
from shardwright.compiler.plan.program import Program


def class_name(name: str) -> str:
    """What the class made of a user's class is called: the same, unless generated code reads something else by that name."""
    registry.load_tables()
    functions = {op.rpartition(".")[2] for op in registry.OPS if op.startswith(RUNTIME)}
    return f"{name}Module" if name in RESERVED | functions | {kind for kind, _ in TABLE} else name


@dataclass(frozen=True)
class Origin:
    """What a file's header says of where it comes from."""

    version: str
    model: str
    policy: str
    digest: str


def emit(
    program: Program, origin: Origin, num_ranks: int, *, seed: int = 0, rng: str = "fast", end2end: bool = False
) -> dict[str, str]:
    """``gencode<rank>.py`` for every rank of the unit: file name to text, identical for identical input.

    ``seed`` and ``rng`` are those of the config: where random operators start, and whether plans share their draws.
    """
    writer = Writer(program)
    fields = {**writer.fields(origin), "seed": seed, "rng": rng, "end2end": end2end}
    template = template_named("module.py.jinja")
    mesh = program.plan.mesh
    files = {}
    for rank in range(num_ranks):
        coords = ", ".join(f"{axis}={index}" for axis, index in mesh.coords(rank).items())
        files[f"gencode{rank}.py"] = template.render(**fields, rank=rank, coords=coords or "the only rank")
    return files


@functools.cache
def _templates() -> jinja2.Environment:
    folder = resources.files("shardwright.codegen_templates")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )


def template_named(name: str) -> jinja2.Template:
    """A template of ``codegen_templates/``."""
    return _templates().get_template(name)


@dataclass
class Writer(BodyWriter):
    """The file of a plan without pipeline stages: its class, and the bodies of ``forward``."""

    _arguments: dict[str, str] = field(default_factory=dict)  # what each argument is called in the bodies

    def fields(self, origin: Origin) -> dict[str, Any]:
        """Everything the template needs that is the same on all ranks."""
        program, graph = self.program, self.program.graph
        self._need("Mesh", "ParallelModule")
        return {
            "origin": origin,
            "mesh": program.plan.mesh,
            "axis": next(iter(program.plan.storage_mesh.names), ""),
            "axes": "".join(f'("{axis}", {size}), ' for axis, size in program.plan.mesh.axes).rstrip(" "),
            "joined_axes": joined_text(program.joined_axes) if program.joined_axes else "",
            "class_name": graph.name,
            "inputs": input_rows(graph),
            "arguments": sample_arguments(graph),
            "declarations": self._declarations(),
            "bodies": self._bodies(),
            "methods": [method.lines for method in self.methods.values()],
            "imports": sorted_imports(self.imports | {"import torch"}),
            "dims": graph.dims and legend(graph.dims, program),
            "gathers_weights": self._gathers_weights(),
            "zero": program.plan.zero,
            "autocast": graph.autocast,
        }

    def _declarations(self) -> list[str]:
        declarations = {d.value.name: d for program in self._programs() for d in program.declarations}
        return self._declaration_lines(declarations.values())

    # ---------------------------------------------------------------------------------------------------- signature

    def _signature(self) -> str:
        """The arguments of forward in the order of the original. Tensors must be given; ABSENT stands for what tracing did not
        see, and for a tensor that comes after an argument with a default. Other arguments default to what was traced.
        """
        graph = self.program.graph
        given = dict(graph.signature)
        words, defaults = ["self"], False
        for name in graph.argument_order:
            tree = given.get(name)
            literal = tree is not None and tree.kind == "leaf" and isinstance(tree.value, bool | int | float | str | None)
            if literal and tree is not None:
                words.append(f"{name}={source(tree.value)}")
            else:
                words.append(f"{name}=ABSENT" if defaults or tree is None else name)
            defaults = defaults or "=" in words[-1]
        if any(word.endswith("=ABSENT") for word in words):
            self._need("ABSENT")
        return ", ".join(words)

    def _unpack(self, scope: Scope, used: set[str]) -> list[Line]:
        """Check the arguments and name their tensors."""
        graph = self.program.graph
        lines, leaves, pairs = [], [], []
        for name, tree in graph.signature:
            local = self._arguments[name]
            if tree.kind == "leaf":
                if isinstance(tree.value, IRValue):
                    scope.bind(tree.value, local)
                pairs.append(f'"{name}": {local}')
                continue
            self._need("flatten")
            lines.append(Line(f'{local}_leaves = flatten({local}, "{name}")'))
            pairs.append(f"**{local}_leaves")
            tensors = [(path, value) for path, value in tree.leaves() if isinstance(value, IRValue)]
            leaves += [(value, f'{local}_leaves["{name}.{path}"]') for path, value in tensors]
        given = {name for name, _ in graph.signature}
        absent = [f'"{name}": {self._arguments[name]}' for name in graph.argument_order if name not in given]
        check = f"self.check_inputs({{{', '.join(pairs)}}}"
        lines.append(Line(f"{check}, {{{', '.join(absent)}}})" if absent else f"{check})"))
        lines += [Line(f"{scope.name(value)} = {source}") for value, source in leaves]
        for symbol, (value, dim) in graph.symbols().items():
            scope.reserve(symbol)
            if symbol in used | {str(s) for condition in graph.conditions for s in condition.free_symbols}:
                lines.append(Line(f"{symbol} = {scope.name(value)}.size({dim})"))
        for condition in graph.conditions:
            text = to_python(condition)
            lines.append(Line(f'self.require({text}, "{text}")'))
            if "math." in text:
                self.imports.add("import math")
        return lines

    # ------------------------------------------------------------------------------------------------------- bodies

    def _bodies(self) -> list[list[str]]:
        """``forward`` and what it may be divided into: a body for evaluation, and one with other names for arguments where
        those of the user are taken by axes or imports.
        """
        program = self.program
        names = program.graph.argument_order
        self._name_arguments()
        local = ", ".join(["self", *(self._arguments[name] for name in names)])
        head = wrap(f"def forward({self._signature()}):", WIDTH - 4)
        body, others = self._body(program), []
        if program.eval_program is not None:
            call = wrap(f"return self.forward_eval({', '.join(names)})", WIDTH - 12)
            head += ["    if not self.training:", *(f"        {line}" for line in call)]
            others.append([*wrap(f"def forward_eval({local}):", WIDTH - 4), *self._body(program.eval_program)])
        if any(name != local_name for name, local_name in self._arguments.items()):
            others.append([*wrap(f"def forward_renamed({local}):", WIDTH - 4), *body])
            body = [f"    {line}" for line in wrap(f"return self.forward_renamed({', '.join(names)})", WIDTH - 8)]
        return [[f"    {line}" if line else line for line in lines] for lines in ([*head, *body], *others)]

    def _name_arguments(self) -> None:
        """Choose what each argument is called in the bodies."""
        symbols = set(self.program.graph.symbols())
        taken = (self._reserved(self.program) | symbols) - {"block", "layer"}
        scope = Scope(taken | set(self.program.graph.argument_order))
        for name in self.program.graph.argument_order:
            self._arguments[name] = scope.unused(name) if name in taken else name

    def _body(self, program: Program) -> list[str]:
        """The lines of one forward body, indented below its header."""
        scope = Scope(self._reserved(program))
        for argument in self._arguments.values():
            scope.reserve(argument)
            scope.reserve(f"{argument}_leaves")
        head = self._unpack(scope, used_symbols(program))
        body = self._statements(program, scope)
        body.append(Line(f"return {self._output(program.output, scope)}"))
        lines = layout_lines([*head, *axis_lines(body, program), *body], 8)
        return [line.removeprefix("    ") for line in lines]


def input_rows(graph: IRGraph) -> list[tuple[str, str]]:
    """Path and source text of every leaf of the arguments that calls are checked against."""
    rows: list[tuple[str, str]] = []
    for name, tree in graph.signature:
        for path, leaf in tree.leaves():
            path = f"{name}.{path}".rstrip(".")
            if isinstance(leaf, IRValue):
                rows.append((path, f'("{_shape_text(leaf)}", {leaf.dtype})'))
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                rows.append((path, source(leaf)))
    return rows


def _shape_text(value: IRValue) -> str:
    return "[" + ", ".join(to_python(size) for size in value.shape) + "]"


def sample_arguments(graph: IRGraph) -> list[str]:
    """The arguments of forward that hold tensors: what a sample of ``train_step`` gives."""
    return [name for name, tree in graph.signature if any(isinstance(leaf, IRValue) for _, leaf in tree.leaves())]
