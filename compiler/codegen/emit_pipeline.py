"""Emit the files of a pipelined program: one class per rank, with a method for each of its stages
and its schedule as data.

The file of rank 1 of two stages has these parts, in short:

    class GPT(PipelineModule):
        stages = (Stage(Mesh(()), (0,)), Stage(Mesh(()), (1,)))
        actions = {"train": "1F0 1B0 1F1 1B1", "infer": "1F0 1F1"}
        segments = {1: Segment(reads=("labels",), receives=(Transfer("blocks_1_add", ...),), ...)}

        def stage1(self, labels, blocks_1_add): ...

Names: a *body* is one form of the program, for training or for evaluation (``_eval`` behind names).
A *crossing* is a value that goes from one stage to another. A *symbol* is a size that varies
between samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.codegen.bodies import LEAVES_OUT, BodyWriter
from shardwright.compiler.codegen.comments import describe, legend
from shardwright.compiler.codegen.compared_inputs import input_lines, known_buffer_lines
from shardwright.compiler.codegen.declare import declaration_lines
from shardwright.compiler.codegen.emit import (
    Origin,
    assigned,
    gathering_lines,
    mesh_text,
    random_lines,
    sample_arguments,
    template_named,
)
from shardwright.compiler.codegen.imports import sorted_imports
from shardwright.compiler.codegen.literals import joined_text, names_text, tuple_text
from shardwright.compiler.codegen.names import Scope
from shardwright.compiler.codegen.symbols_used import output_symbols, used_symbols
from shardwright.compiler.codegen.text import WIDTH, Line, layout_lines, wrap
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import LeftOut
from shardwright.compiler.ir.quote import docstring, quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.pipeline import Crossing, PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.activity import tell
from shardwright.runtime.atoms import Atom, merge_atoms
from shardwright.runtime.layout import Layout
from shardwright.runtime.structure import join
from shardwright.runtime.transfer import Box, end_of

PIPELINE_IMPORTS = (
    "from shardwright.runtime.layout import Mesh",
    "from shardwright.runtime.pipeline.module import PipelineModule",
    "from shardwright.runtime.pipeline.segment import Segment, Stage, Transfer",
)


def emit_pipeline(
    program: PipelineProgram,
    train: Schedule,
    infer: Schedule,
    origin: Origin,
    num_ranks: int,
    *,
    seed: int = 0,
    rng: str = "fast",
) -> list[str]:
    """The sources of all ranks of the unit.

    ``train``, ``infer``: the schedules of both modes. Ranks with the same stages share their code.
    What they send to whom differs, and is written for each of them.
    """
    template = template_named("pipeline.py.jinja")
    positions = pipeline_positions(program)
    # The parts of a file that do not depend on the rank, by the stages that it runs.
    writers: dict[tuple[int, ...], dict[str, Any]] = {}
    # The varying sizes that each stage needs, which asks all its statements.
    symbols = {
        body: [_symbols_of(p, index) for index in range(len(p.stages))]
        for body, p in _named_bodies(program)
    }
    sources = []
    for rank in range(num_ranks):
        own = program.stages_of(rank)
        if own not in writers:
            writers[own] = _PipelineWriter(
                program.programs[own[0]], pipeline=program, own=own
            ).fields(origin)
            writers[own]["attributes"] += random_lines(seed, rng)
        # The first stage says where on its mesh the rank is.
        first = program.plan.stages[own[0]]
        coords = first.mesh.coords(first.ranks.index(rank))
        where = [
            f"stage {', '.join(map(str, own))}",
            *(f"{axis}={index}" for axis, index in coords.items()),
        ]
        source = template.render(
            **writers[own],
            rank=rank,
            coords=docstring(", ".join(where)),
            actions={
                name: wrap_actions(schedule.texts[positions[rank]])
                for name, schedule in (("train", train), ("infer", infer))
            },
            segments={
                body: [_segment(p, index, rank, symbols[body][index]) for index in own]
                for body, p in _named_bodies(program)
            },
        )
        sources.append(source)
        tell(f"emit rank {rank}", (rank + 1) / num_ranks)
    return sources


def pipeline_positions(program: PipelineProgram) -> dict[int, int]:
    """The position of each unit rank in the pipeline. Ranks with the same stages are one position,
    which has one line of the schedule.
    """
    order: dict[tuple[int, ...], int] = {}
    for stage in program.plan.stages:
        order.setdefault(stage.ranks, len(order))
    return {rank: position for ranks, position in order.items() for rank in ranks}


def wrap_actions(text: str, width: int = 104, longest: int = 108) -> list[str]:
    """A rank's actions in lines of at most ``width`` columns, as parts of one string literal.

    A text of at most ``longest`` columns is one line, which needs no brackets around it.
    """
    if len(text) <= longest:
        return [text]
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) + 1 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    # Literals that stand one under the other are one text, so each ends with a blank.
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


@dataclass
class _PipelineWriter(BodyWriter):
    """Writes the parts of a file that ranks with the stages ``own`` share."""

    pipeline: PipelineProgram | None = None
    own: tuple[int, ...] = ()

    def _programs(self) -> list[Program]:
        assert self.pipeline is not None
        return [body.programs[index] for body in self.pipeline.bodies for index in self.own]

    def fields(self, origin: Origin) -> dict[str, Any]:
        """The fields of the template, without those that :func:`emit_pipeline` adds for a rank."""
        assert self.pipeline is not None
        program, plan = self.pipeline, self.pipeline.plan
        named = _named_bodies(program)
        # Bodies first: writing them finds out which imports and helper methods they need, which are
        # read below.
        bodies = [
            self._stage_lines(p, index, f"stage{index}{body}")
            for body, p in named
            for index in self.own
        ]
        outputs = {
            f"output{body}": (_output_sizes(p), self._result_lines(p.graph.output))
            for body, p in named
        }
        output_sizes: list[str] = []
        for body, p in named:
            if found := _output_sizes(p):
                output_sizes += assigned(f"output_sizes{body}", names_text(found))
        size_methods: list[list[str]] = []
        for body, p in named:
            size_methods += self._size_methods(p, body)
        self.imports |= set(PIPELINE_IMPORTS)
        dims = program.graph.dims
        meshes = (stage.mesh.over_units(plan.zero) for stage in plan.stages)
        # Only an example for the file's head, so any axis of any stage will do.
        axes = (axis for mesh in meshes for axis in mesh.names)
        return {
            "origin": origin,
            "mesh": (
                f"{len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches"
            ),
            "axis": next(axes, ""),
            "stages": [
                line for index in range(len(plan.stages)) for line in _stage_lines(program, index)
            ],
            "attributes": gathering_lines(plan.zero, gathers=self._gathers_weights()),
            "schedule": assigned("schedule", quoted(plan.schedule)),
            "num_microbatches": plan.num_microbatches,
            "class_name": program.graph.name,
            "inputs": input_lines(self, program.graph),
            "arguments": _argument_lines(program.graph, _symbols(program)),
            "known_buffers": known_buffer_lines(self, program.graph),
            "training_only": program.graph.training_only,
            "size_methods": size_methods,
            "output_stages": {body: _output_lines(p) for body, p in named},
            "left_out": _left_out(program),
            "by_parameter": {
                "shared": _entries(
                    (fqn, str(stages)) for fqn, stages in sorted(program.shared.items())
                ),
                "owned": _entries(
                    (fqn, _owned_text(layouts)) for fqn, layouts in sorted(program.owned.items())
                ),
            },
            "declarations": self._declarations(),
            "bodies": bodies,
            "outputs": outputs,
            "output_sizes": output_sizes,
            "methods": [method.lines for method in self.methods.values()],
            "imports": sorted_imports(self.imports | {"import torch"}),
            "dims": legend(dims, self.program) if dims else "",
            "zero": plan.zero,
            "autocast": program.graph.autocast,
        }

    def _stage_lines(self, pipeline: PipelineProgram, index: int, name: str) -> list[str]:
        """The method of one stage: what it reads and receives comes in, what it sends goes out."""
        program, stage = pipeline.programs[index], pipeline.stages[index]
        scope = Scope(self._reserved(program))
        symbols = _symbols_of(pipeline, index)
        for symbol in symbols:
            scope.reserve(symbol)
        arguments = []
        for value in (*stage.reads, *(value for value, _ in stage.receives)):
            scope.define(value)
            arguments.append(scope.name(value))
        body = self._statements(program, scope)
        if program.whole_output is not None:
            # A training step returns here, without what only dropped outputs need; the rest of the
            # method is for evaluation.
            step = Line(self._returned(program.output, scope), LEAVES_OUT, ("if self.trains",))
            body += [step, *self._tail(program, scope)]
        body.append(Line(self._returned(program.whole_output or program.output, scope)))
        words = ["self", *arguments, *(["*", *symbols] if symbols else [])]
        head = [f"    {line}" for line in wrap(f"def {name}({', '.join(words)}):", 124)]
        # What comes from other stages has no statement that says how it lies.
        arriving = {c.value.name: c for c in pipeline.crossings if c.target == index}
        for value, _ in stage.receives:
            held = arriving[value.name].received.layout
            said = describe(value, held, pipeline.graph.dims)
            head.append(f"        # {scope.name(value)}: {said}")
        return [*head, *layout_lines([*self._axis_lines(body, scope, program), *body], 8)]

    def _returned(self, output: Tree, scope: Scope) -> str:
        """The return statement of a stage, with ``None`` for results that a training step leaves
        out. A stage returns a tuple, also of one result.
        """
        leaves = [None if isinstance(value, LeftOut) else value for _, value in output.leaves()]
        results = ", ".join(self._output(Tree("leaf", value), scope) for value in leaves)
        return f"return ({results}{',' if len(leaves) == 1 else ''})"

    def _size_methods(self, program: PipelineProgram, ending: str) -> list[list[str]]:
        """The methods ``layouts`` and ``output_shapes``, which say what depends on the sizes of a
        sample. There are none if no size varies.
        """
        symbols = _symbols(program)
        if not symbols:
            return []
        arguments = ", ".join(["self", *symbols])
        layouts = [f"    def layouts{ending}({arguments}):"]
        # Every sample is checked against the conditions under which the program was made.
        for text in map(to_python, program.graph.conditions):
            layouts += layout_lines([Line(f"self.require({text}, {quoted(text)})")], 8)
            self.imports |= {"import math"} if "math." in text else set()
        layouts.append("        return {")
        for crossing in program.crossings:
            # A rank needs the layouts of what its own stages send and receive.
            if {crossing.source, crossing.target} & set(self.own):
                ends = (
                    f"({_layout_source(crossing.sent.layout)}, "
                    f"{_layout_source(crossing.received.layout)})"
                )
                key = f"({quoted(crossing.value.name)}, {crossing.source}, {crossing.target})"
                layouts += [f"            {line}" for line in wrap(f"{key}: {ends},", WIDTH - 12)]
        shapes = [f"    def output_shapes{ending}({arguments}):", "        return {"]
        for path, _, shape, _ in _output_stages(program):
            shapes += [
                f"            {line}"
                for line in _entries([(path, tuple_text(map(to_python, shape)))], 12)
            ]
        return [[*layouts, "        }"], [*shapes, "        }"]]

    def _result_lines(self, tree: Tree) -> list[str]:
        """The body of the method ``output``, which puts the leaves of the result together again."""
        text = self._output(_by_path(tree, ""), _Leaves(set()))
        self.imports |= {"import math"} if "math." in text else set()
        return layout_lines([Line(f"return {text}")], 8)

    def _declarations(self) -> list[str]:
        assert self.pipeline is not None
        declarations = self.pipeline.declarations_of(self.own)
        return declaration_lines([*declarations, *self._drawing()], self._read())


def _named_bodies(program: PipelineProgram) -> list[tuple[str, PipelineProgram]]:
    """The bodies with the ending of their names: ``""`` for training, and ``"_eval"`` for
    evaluation, if that runs something else.
    """
    return list(zip(("", "_eval"), program.bodies, strict=False))


def _symbols(program: PipelineProgram) -> tuple[str, ...]:
    """The names of the sizes that vary between samples, in a fixed order."""
    return tuple(dict.fromkeys(dim.symbol for dim in program.graph.dynamic_dims))


def _output_sizes(program: PipelineProgram) -> tuple[str, ...]:
    """The varying sizes that the module returns itself, as ``return loss, x.shape[0]`` does."""
    used = output_symbols(program.graph.output)
    return tuple(symbol for symbol in _symbols(program) if symbol in used)


def _symbols_of(program: PipelineProgram, stage: int) -> tuple[str, ...]:
    """The varying sizes that the code of a stage needs."""
    used = used_symbols(program.programs[stage])
    return tuple(symbol for symbol in _symbols(program) if symbol in used)


def _layout_source(layout: Layout) -> str:
    """The source of a layout's text: ``"[8, 64/tp]"``, or ``f"[{b}, 64/tp]"`` if a size varies."""

    def atom_text(atom: Atom) -> str:
        if atom.element:
            return str(atom)
        sizes = (
            str(size) if isinstance(size, int) else f"{{{to_python(size)}}}"
            for size in atom.segments
        )
        return "/".join(["+".join(sizes), *atom.axes])

    dims = ", ".join(" * ".join(map(atom_text, merge_atoms(dim))) for dim in layout.dims)
    return f'f"[{dims}]"' if "{" in dims else f'"[{dims}]"'


def _output_stages(program: PipelineProgram) -> list[tuple[str, int, tuple[Any, ...], str]]:
    """The results that all ranks get, in the order of the output: ``(path, stage that makes it,
    shape, dtype)``. A sharded result stays where it is made.
    """
    rows = []
    for stage in program.stages:
        for path, value in stage.outputs:
            if program.plan.outputs.get(path, "whole") in ("whole", "eval"):
                rows.append((path, stage.index, tuple(value.shape), str(value.dtype)))
    order = {path: i for i, (path, _) in enumerate(program.graph.output.leaves())}
    return sorted(rows, key=lambda row: order[row[0]])


def _left_out(program: PipelineProgram) -> list[str]:
    """The lines that name the results which a training step leaves out; none if there are none."""
    paths = [
        path
        for path, _, _, _ in _output_stages(program)
        if program.plan.outputs.get(path) == "eval"
    ]
    return assigned("left_out_of_training", names_text(paths)) if paths else []


class _Leaves(Scope):
    """The scope of the method ``output``, where the name of a leaf is how it is read by its path:
    ``leaves["1"]``.
    """

    def name(self, value: IRValue) -> str:
        return value.name


def _by_path(tree: Tree, path: str) -> Tree:
    """The tree with values that :class:`_Leaves` writes, in the place of the program's own."""
    if tree.kind == "leaf":
        if isinstance(tree.value, IRValue):
            # Shape and dtype are never looked at: the value is there for its name.
            return Tree("leaf", IRValue(f"leaves[{quoted(path)}]", (), torch.float32))
        return tree
    children = tuple((key, _by_path(child, join(path, key))) for key, child in tree.children)
    return Tree(tree.kind, tree.value, children, tree.type_path)


def _owned_text(layouts: Mapping[int, Layout]) -> str:
    """The layouts of a parameter by stage, as source: ``{0: "[64, 8/tp]", 3: "[64, 8]"}``."""
    entries = ", ".join(f'{stage}: "{layout}"' for stage, layout in sorted(layouts.items()))
    return f"{{{entries}}}"


def _joined_axes(program: PipelineProgram, stage: int) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that single collectives of a stage go over, in all its bodies."""
    return tuple(
        dict.fromkeys(axes for body in program.bodies for axes in body.programs[stage].joined_axes)
    )


def _stage_lines(program: PipelineProgram, index: int) -> list[str]:
    """The source of a :class:`Stage`: its mesh and ranks."""
    stage, joined = program.plan.stages[index], _joined_axes(program, index)
    words = [mesh_text(stage.mesh), tuple_text(map(str, stage.ranks))]
    words += [f"joined_axes={joined_text(joined)}"] if joined else []
    return wrap(f"Stage({', '.join(words)}),", WIDTH - 8)


def _argument_lines(graph: IRGraph, symbols: tuple[str, ...]) -> list[str]:
    """The class attributes that name a sample's arguments, and the sizes that vary."""
    lines = assigned("arguments", names_text(sample_arguments(graph)))
    return lines + (assigned("sizes", names_text(symbols)) if symbols else [])


def _output_lines(program: PipelineProgram) -> list[str]:
    """The entries of ``output_stages``: ``(stage, shape, dtype)`` by path. If sizes vary, the shape
    is ``None``, but for a scalar, and the method ``output_shapes`` has it.
    """
    varies = bool(_symbols(program))
    rows = _output_stages(program)
    shapes = [
        None if varies and shape else tuple_text(map(to_python, shape)) for _, _, shape, _ in rows
    ]
    texts = [
        f"({stage}, {shape}, {dtype})"
        for (_, stage, _, dtype), shape in zip(rows, shapes, strict=True)
    ]
    return _entries((path, text) for (path, *_), text in zip(rows, texts, strict=True))


def _entries(items: Iterable[tuple[str, str]], indent: int = 8) -> list[str]:
    """The lines of a dict's entries. ``items``: names, and the source of what belongs to them."""
    return [
        line for name, text in items for line in wrap(f"{quoted(name)}: {text},", WIDTH - indent)
    ]


def _segment(
    program: PipelineProgram, index: int, rank: int, symbols: tuple[str, ...]
) -> dict[str, Any]:
    """One stage of a rank as the template writes it. ``symbols``: the varying sizes it needs."""
    stage = program.stages[index]
    # A stage reads inputs of forward by path (``batch.labels``), whatever the graph calls them.
    names = {value.name: path for path, value in _input_paths(program)}
    varies = bool(_symbols(program))
    receives: list[str] = []
    for value, source in stage.receives:
        crossing = _crossing(program, value, source, index)
        receives.append(_transfer(crossing, rank, arriving=True, varies=varies))
    sends: list[str] = []
    for value, target in stage.sends:
        crossing = _crossing(program, value, index, target)
        sends.append(_transfer(crossing, rank, arriving=False, varies=varies))
    return {
        "stage": index,
        "reads": _named_tuple("reads", (names[value.name] for value in stage.reads)),
        "receives": _transfers("receives", receives),
        "sends": _transfers("sends", sends),
        "outputs": [
            *_named_tuple("outputs", (path for path, _ in stage.outputs)),
            *(_named_tuple("sizes", symbols) if symbols else []),
        ],
    }


def _named_tuple(name: str, texts: Iterable[str]) -> list[str]:
    """The source of a :class:`Segment`'s argument that is a tuple of names."""
    return wrap(f"{name}={names_text(texts)},", WIDTH - 12)


def _input_paths(program: PipelineProgram) -> list[tuple[str, IRValue]]:
    """The inputs of the module, each with its path in the arguments."""
    leaves = (leaf for name, tree in program.graph.signature for leaf in tree.leaves(name))
    return [(path, value) for path, value in leaves if isinstance(value, IRValue)]


def _crossing(program: PipelineProgram, value: IRValue, source: int, target: int) -> Crossing:
    return next(
        c
        for c in program.crossings
        if c.value.name == value.name and c.source == source and c.target == target
    )


def _transfers(name: str, texts: list[str]) -> list[str]:
    """An argument of a :class:`Segment` that is a tuple of transfers: a line each, or all in one
    line if there is one.
    """
    if not texts:
        return []
    short = f"{name}=({texts[0]},),"
    if len(texts) == 1 and len(short) <= WIDTH - 12:
        return [short]
    lines = [line for text in texts for line in wrap(f"{text},", WIDTH - 16)]
    return [f"{name}=(", *(f"    {line}" for line in lines), "),"]


def _transfer(crossing: Crossing, rank: int, *, arriving: bool, varies: bool) -> str:
    """The source of a :class:`Transfer` as one rank sees it.

    It says which boxes of the value this rank exchanges with which peers. If sizes vary, these are
    left out: the runtime computes them for each sample from the method ``layouts``.
    """
    words = [
        quoted(crossing.value.name),
        f"stage={crossing.source if arriving else crossing.target}",
        f"dtype={crossing.value.dtype}",
        f"differentiable={crossing.value.takes_gradient}",
    ]
    if not varies:
        gradient = crossing.value.takes_gradient
        end = end_of(
            crossing.sent, crossing.received, rank, arriving=arriving, differentiable=gradient
        )
        # Shapes and pieces are written down where they never vary; else a method works them out.
        words[2:2] = [f"shape={end.shape}"]
        words += [f"pieces={_boxes(end.pieces)}", f"grad_pieces={_boxes(end.grad_pieces)}"]
    return f"Transfer({', '.join(words)})"


def _boxes(items: Iterable[tuple[int, Box]]) -> str:
    return tuple_text(f"({peer}, {box})" for peer, box in items)
