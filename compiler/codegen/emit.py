"""Emit the source files of a program: one per rank, alike but for what says which rank it is.

The body reads like a model that a person wrote (``bodies.py``). Layers that repeat are emitted
once, as a method.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2

from shardwright.compiler.codegen.bodies import LEAVES_OUT, BodyWriter
from shardwright.compiler.codegen.comments import legend
from shardwright.compiler.codegen.compared_inputs import input_lines, known_buffer_lines
from shardwright.compiler.codegen.declare import declaration_lines
from shardwright.compiler.codegen.file_names import RESERVED
from shardwright.compiler.codegen.imports import sorted_imports
from shardwright.compiler.codegen.literals import joined_text, names_text, source, tuple_text
from shardwright.compiler.codegen.names import Scope
from shardwright.compiler.codegen.symbols_used import used_symbols
from shardwright.compiler.codegen.text import WIDTH, Line, layout_lines, wrap, wrap_statement
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.identifier import identifier, is_name
from shardwright.compiler.ir.quote import docstring, quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.terms import RUNTIME
from shardwright.compiler.passes.verify_program import TABLE
from shardwright.compiler.plan.input_layouts import size_sources
from shardwright.compiler.plan.program import Program
from shardwright.runtime.layout import Mesh

PIPELINE_NAMES = {"PipelineModule", "Segment", "Stage", "Transfer"}
"""The names that the files of pipelines import."""


def class_name(name: str, imported: Collection[str] = ()) -> str:
    """The name of the class that is made of a user's class. It is the user's name, unless that is
    no identifier, or generated code reads something else by it, such as what it has ``imported``.
    """
    functions = {op.rpartition(".")[2] for op in registry.OPS if op.startswith(RUNTIME)}
    taken = (
        RESERVED
        | PIPELINE_NAMES
        | functions
        | {kind for kind, _ in TABLE}
        | set(dir(builtins))
        | set(imported)
    )
    name = name if is_name(name) else identifier(name)
    return name if is_name(name) and name not in taken else f"{name}Module"


@dataclass(frozen=True)
class Origin:
    """The origin of a file, as its header tells it. ``unproved``: operators whose annotations are
    taken on trust.
    """

    version: str
    model: str
    policy: str
    digest: str
    unproved: tuple[str, ...] = ()


_RANK, _COORDS = "\ue000", "\ue001"
"""Where the rank and its place in the mesh go. They do not print, so ``ir/quote.py`` lets neither
into a file, whatever names a model has.
"""


def emit(
    program: Program,
    origin: Origin,
    *,
    seed: int = 0,
    rng: str = "fast",
    end2end: bool = False,
) -> Callable[[int], str]:
    """The source of each rank of the unit. It is identical for identical input.

    ``seed`` and ``rng`` are those of the config: where random operators start, and whether plans
    share their draws.
    """
    fields = Writer(program).fields(origin)
    fields["attributes"] += end2end_lines(program.graph) if end2end else []
    fields["attributes"] += random_lines(seed, rng)
    mesh = program.plan.mesh
    # The rank and its place in the mesh are all that differs between the files of a unit.
    shared = template_named("module.py.jinja").render(**fields, rank=_RANK, coords=_COORDS)

    def source_of(rank: int) -> str:
        coords = ", ".join(f"{axis}={index}" for axis, index in mesh.coords(rank).items())
        place = docstring(coords or "the only rank")
        return shared.replace(_RANK, str(rank)).replace(_COORDS, place)

    return source_of


def assigned(name: str, value: str) -> list[str]:
    """The lines of a class attribute."""
    return wrap_statement(f"{name} = {value}", WIDTH - 4)


def mesh_text(mesh: Mesh) -> str:
    """The source of a mesh."""
    axes = tuple_text(f"({quoted(axis)}, {size})" for axis, size in mesh.axes)
    if not mesh.turns:
        return f"Mesh({axes})"
    turns = tuple_text(f"({quoted(axis)}, {count})" for axis, count in mesh.turns)
    return f"Mesh({axes}, turns={turns})"


def gathering_lines(zero: int, *, gathers: bool) -> list[str]:
    """Class attributes of a module that stores parameters in pieces and uses them whole."""
    if not gathers:
        return []
    return ["gathers_weights = True", *([f"zero = {zero}"] if zero > 1 else [])]


def random_lines(seed: int, rng: str) -> list[str]:
    """Class attributes that say how random numbers are drawn, where that is not the default."""
    return [
        *([f"seed = {seed}"] if seed else []),
        *([f"rng_mode = {quoted(rng)}"] if rng != "fast" else []),
    ]


def end2end_lines(graph: IRGraph) -> list[str]:
    """Class attributes of a module that is called by its steps only."""
    return ["end2end = True", *assigned("arguments", names_text(sample_arguments(graph)))]


@functools.cache
def _templates() -> jinja2.Environment:
    folder = resources.files("shardwright.codegen_templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(
            lambda name: folder.joinpath(name).read_text(encoding="utf-8")
        ),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A field that a template misspells is an error, not an empty string.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["docstring"] = lambda text: docstring(str(text))
    return environment


def template_named(name: str) -> jinja2.Template:
    """A template of ``codegen_templates/``."""
    return _templates().get_template(name)


@dataclass
class Writer(BodyWriter):
    """The file of a plan without pipeline stages: its class, and the bodies of ``forward``."""

    # What each argument is called in the bodies.
    _arguments: dict[str, str] = field(default_factory=dict)

    def fields(self, origin: Origin) -> dict[str, Any]:
        """Everything the template needs that is the same on all ranks."""
        program, graph = self.program, self.program.graph
        self.need("Mesh", "ParallelModule")
        return {
            "origin": origin,
            "mesh": program.plan.mesh,
            "axis": next(iter(program.plan.storage_mesh.names), ""),
            "mesh_lines": assigned("mesh", mesh_text(program.plan.mesh)),
            "attributes": [
                *(
                    assigned("joined_axes", joined_text(program.joined_axes))
                    if program.joined_axes
                    else []
                ),
                *gathering_lines(program.plan.zero, gathers=self._gathers_weights()),
            ],
            "class_name": graph.name,
            "inputs": input_lines(self, graph, program.input_layouts),
            "known_buffers": known_buffer_lines(self, graph),
            "training_only": graph.training_only,
            "declarations": self._declarations(),
            "bodies": self._bodies(),
            "methods": [method.lines for method in self.methods.values()],
            "imports": sorted_imports(self.imports | {"import torch"}),
            "dims": graph.dims and legend(graph.dims, program),
            "zero": program.plan.zero,
            "autocast": graph.autocast,
        }

    def _declarations(self) -> list[str]:
        declarations = {
            d.value.name: d for program in self._programs() for d in program.declarations
        }
        return declaration_lines([*declarations.values(), *self._drawing()], self._read())

    # ---------------------------------------------------------------------------------------------
    # signature

    def _signature(self) -> str:
        """The arguments of forward in the order of the original. Tensors must be given; ABSENT
        stands for what tracing did not see, and for a tensor that comes after an argument with a
        default. Other arguments default to what was traced.
        """
        graph = self.program.graph
        # What was traced is given; behind an argument with a default, all others need one too.
        given = dict(graph.signature)
        words, defaults = ["self"], False
        for name in graph.argument_order:
            tree = given.get(name)
            literal = (
                tree is not None
                and tree.kind == "leaf"
                and isinstance(tree.value, bool | int | float | str | None)
            )
            if literal and tree is not None:
                words.append(f"{name}={source(tree.value)}")
            else:
                words.append(f"{name}=ABSENT" if defaults or tree is None else name)
            defaults = defaults or "=" in words[-1]
        if any(word.endswith("=ABSENT") for word in words):
            self.need("ABSENT")
        return ", ".join(words)

    def _unpack(self, scope: Scope, used: set[str]) -> list[Line]:
        """Check the arguments and name their tensors."""
        graph = self.program.graph
        lines, leaves, pairs = [], [], []
        # A tensor is an argument itself; a nested structure is flattened into its leaves.
        for name, tree in graph.signature:
            local = self._arguments[name]
            if tree.kind == "leaf":
                if isinstance(tree.value, IRValue):
                    scope.bind(tree.value, local)
                pairs.append(f"{quoted(name)}: {local}")
                continue
            self.need("flatten")
            lines.append(Line(f"{local}_leaves = flatten({local}, {quoted(name)})"))
            pairs.append(f"**{local}_leaves")
            tensors = [
                (path, value) for path, value in tree.leaves(name) if isinstance(value, IRValue)
            ]
            leaves += [(value, f"{local}_leaves[{quoted(path)}]") for path, value in tensors]
        given = {name for name, _ in graph.signature}
        absent = [
            f"{quoted(name)}: {self._arguments[name]}"
            for name in graph.argument_order
            if name not in given
        ]
        check = f"self.check_inputs({{{', '.join(pairs)}}}"
        lines.append(Line(f"{check}, {{{', '.join(absent)}}})" if absent else f"{check})"))
        lines += [Line(f"{scope.name(value)} = {source}") for value, source in leaves]
        # Dynamic sizes are read off a tensor that has them, if anything uses them.
        for symbol, place in size_sources(graph, self.program.input_layouts).items():
            assert place is not None, f"{symbol} is known from no input"
            value, dim = place
            scope.reserve(symbol)
            if symbol in used | {
                str(s) for condition in graph.conditions for s in condition.free_symbols
            }:
                lines.append(Line(f"{symbol} = {scope.name(value)}.size({dim})"))
        # Conditions under which the graph was traced hold for every call, or it is refused.
        for condition in graph.conditions:
            text = to_python(condition)
            lines.append(Line(f"self.require({text}, {quoted(text)})"))
            if "math." in text:
                self.imports.add("import math")
        return lines

    # ---------------------------------------------------------------------------------------------
    # bodies

    def _bodies(self) -> list[list[str]]:
        """``forward`` and what it may be divided into: a body for evaluation, and one with other
        names for arguments where those of the user are taken by axes or imports.
        """
        program = self.program
        names = program.graph.argument_order
        self._name_arguments()
        local = ", ".join(["self", *(self._arguments[name] for name in names)])
        head = wrap(f"def forward({self._signature()}):", WIDTH - 4)
        body, others = self._body(program), []
        # Evaluation has a body of its own where the model does something else in it.
        if program.eval_program is not None:
            call = wrap(f"return self.forward_eval({', '.join(names)})", WIDTH - 12)
            head += ["    if not self.training:", *(f"        {line}" for line in call)]
            others.append(
                [*wrap(f"def forward_eval({local}):", WIDTH - 4), *self._body(program.eval_program)]
            )
        # Names that generated code needs itself: ``forward`` keeps them, and hands on to a body
        # without.
        if any(name != local_name for name, local_name in self._arguments.items()):
            others.append([*wrap(f"def forward_renamed({local}):", WIDTH - 4), *body])
            body = [
                f"    {line}"
                for line in wrap(f"return self.forward_renamed({', '.join(names)})", WIDTH - 8)
            ]
        return [
            [f"    {line}" if line else line for line in lines]
            for lines in ([*head, *body], *others)
        ]

    def _name_arguments(self) -> None:
        """Choose what each argument is called in the bodies."""
        symbols = set(self.program.graph.symbols())
        taken = (self._reserved(self.program) | symbols) - {"block"}
        scope = Scope(taken | set(self.program.graph.argument_order))
        for name in self.program.graph.argument_order:
            self._arguments[name] = scope.unused(name) if name in taken else name

    def _body(self, program: Program) -> list[str]:
        """The lines of one forward body, indented below its header."""
        scope = Scope(self._reserved(program))
        for argument in self._arguments.values():
            scope.reserve(argument)
            # The leaves of a container among the arguments get a variable of this name.
            scope.reserve(f"{argument}_leaves")
        head = self._unpack(scope, used_symbols(program))
        body = self._statements(program, scope)
        if program.whole_output is not None:
            step = Line(self._return(program.output, scope), LEAVES_OUT, ("if self.trains",))
            body += [step, *self._tail(program, scope)]
        body.append(Line(self._return(program.whole_output or program.output, scope)))
        lines = layout_lines([*head, *self._axis_lines(body, scope, program), *body], 8)
        return [line.removeprefix("    ") for line in lines]

    def _return(self, output: Tree, scope: Scope) -> str:
        result = self._output(output, scope)
        self.imports |= {"import math"} if "math." in result else set()
        return f"return {result}"


def sample_arguments(graph: IRGraph) -> list[str]:
    """The arguments of forward that hold tensors: what a sample of ``train_step`` gives."""
    return [
        name
        for name, tree in graph.signature
        if any(isinstance(leaf, IRValue) for _, leaf in tree.leaves())
    ]
