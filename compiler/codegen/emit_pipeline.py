"""Emit the files of a pipelined program: one class per rank, with a method for each of its stages
and its schedule as data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.codegen.comments import legend
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
from shardwright.compiler.codegen.statements import (
    LEAVES_OUT,
    BodyWriter,
    output_symbols,
    used_symbols,
)
from shardwright.compiler.codegen.text import WIDTH, Line, layout_lines, wrap
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import LeftOut
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.pipeline import Crossing, PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.layout import Atom, Layout, merge_atoms
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
) -> dict[str, str]:
    """``gencode<rank>.py`` for every rank of the unit. Ranks with the same stages share their code;
    what they send to whom differs.
    """
    template = template_named("pipeline.py.jinja")
    positions = pipeline_positions(program)
    writers: dict[tuple[int, ...], dict[str, Any]] = {}
    files = {}
    for rank in range(num_ranks):
        own = program.stages_of(rank)
        if own not in writers:
            writers[own] = _PipelineWriter(
                program.programs[own[0]], pipeline=program, own=own
            ).fields(origin)
            writers[own]["attributes"] += random_lines(seed, rng)
        first = program.plan.stages[own[0]]
        coords = first.mesh.coords(first.ranks.index(rank))
        where = [
            f"stage {', '.join(map(str, own))}",
            *(f"{axis}={index}" for axis, index in coords.items()),
        ]
        files[f"gencode{rank}.py"] = template.render(
            **writers[own],
            rank=rank,
            coords=", ".join(where),
            actions={
                name: wrap_actions(schedule.texts[positions[rank]])
                for name, schedule in (("train", train), ("infer", infer))
            },
            segments={
                body: [_segment(p, index, rank) for index in own]
                for body, p in _named_bodies(program)
            },
        )
    return files


def pipeline_positions(program: PipelineProgram) -> dict[int, int]:
    """Unit rank to its position in the pipeline: ranks with the same stages are one position of the
    schedule.
    """
    order: dict[tuple[int, ...], int] = {}
    for stage in program.plan.stages:
        order.setdefault(stage.ranks, len(order))
    return {rank: position for ranks, position in order.items() for rank in ranks}


def wrap_actions(text: str, width: int = 104, longest: int = 108) -> list[str]:
    """Actions in lines, as the parts of one string literal; in one of ``longest``, which has no
    brackets around it.
    """
    if len(text) <= longest:
        return [text]
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) + 1 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


@dataclass
class _PipelineWriter(BodyWriter):
    pipeline: PipelineProgram | None = None
    own: tuple[int, ...] = ()

    def _programs(self) -> list[Program]:
        assert self.pipeline is not None
        return [body.programs[index] for body in self.pipeline.bodies for index in self.own]

    def fields(self, origin: Origin) -> dict[str, Any]:
        assert self.pipeline is not None
        program, plan = self.pipeline, self.pipeline.plan
        named = _named_bodies(program)
        bodies = [
            self._stage_lines(p, index, f"stage{index}{body}")
            for body, p in named
            for index in self.own
        ]
        outputs = {
            f"output{body}": (_output_sizes(p), self._result_lines(p.graph.output))
            for body, p in named
        }
        sizes = {f"output_sizes{body}": _output_sizes(p) for body, p in named}
        self.imports |= set(PIPELINE_IMPORTS)
        dims = program.graph.dims
        return {
            "origin": origin,
            "mesh": (
                f"{len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches"
            ),
            "axis": next(
                (axis for stage in plan.stages for axis in stage.mesh.over_units(plan.zero).names),
                "",
            ),
            "stages": [
                line for index in range(len(plan.stages)) for line in _stage_lines(program, index)
            ],
            "attributes": gathering_lines(plan.zero, gathers=self._gathers_weights()),
            "schedule": assigned("schedule", quoted(plan.schedule)),
            "num_microbatches": plan.num_microbatches,
            "class_name": program.graph.name,
            "inputs": self._input_lines(program.graph),
            "arguments": _argument_lines(program.graph, _symbols(program)),
            "training_only": program.graph.training_only,
            "size_methods": [lines for body, p in named for lines in self._size_methods(p, body)],
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
            "output_sizes": [
                line
                for name, found in sizes.items()
                if found
                for line in assigned(name, names_text(found))
            ],
            "methods": [method.lines for method in self.methods.values()],
            "imports": sorted_imports(self.imports | {"import torch"}),
            "dims": legend(dims, self.program) if dims else "",
            "zero": plan.zero,
            "autocast": program.graph.autocast,
        }

    def _stage_lines(self, pipeline: PipelineProgram, index: int, name: str) -> list[str]:
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
            step = Line(self._returned(program.output, scope), LEAVES_OUT, ("if self.trains",))
            body += [step, *self._tail(program, scope)]
        body.append(Line(self._returned(program.whole_output or program.output, scope)))
        words = ["self", *arguments, *(["*", *symbols] if symbols else [])]
        head = [f"    {line}" for line in wrap(f"def {name}({', '.join(words)}):", 124)]
        return [*head, *layout_lines([*self._axis_lines(body, scope, program), *body], 8)]

    def _returned(self, output: Tree, scope: Scope) -> str:
        """What a stage returns; ``None`` for what a training step leaves out."""
        leaves = [None if isinstance(value, LeftOut) else value for _, value in output.leaves()]
        results = ", ".join(self._output(Tree("leaf", value), scope) for value in leaves)
        return f"return ({results}{',' if len(leaves) == 1 else ''})"

    def _size_methods(self, program: PipelineProgram, ending: str) -> list[list[str]]:
        """``layouts`` and ``output_shapes``: what depends on the sizes of a sample, where these
        vary.
        """
        symbols = _symbols(program)
        if not symbols:
            return []
        arguments = ", ".join(["self", *symbols])
        layouts = [f"    def layouts{ending}({arguments}):"]
        for text in map(to_python, program.graph.conditions):
            layouts += layout_lines([Line(f"self.require({text}, {quoted(text)})")], 8)
            self.imports |= {"import math"} if "math." in text else set()
        layouts.append("        return {")
        for crossing in program.crossings:
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
        """The body of ``output``: the result structure over its leaves by path."""
        text = self._output(_by_path(tree, ""), _Leaves(set()))
        self.imports |= {"import math"} if "math." in text else set()
        return layout_lines([Line(f"return {text}")], 8)

    def _declarations(self) -> list[str]:
        assert self.pipeline is not None
        return declaration_lines(self.pipeline.declarations_of(self.own))


def _named_bodies(program: PipelineProgram) -> list[tuple[str, PipelineProgram]]:
    """What is run in training, and in evaluation if that is something else, with the ending of its
    names.
    """
    return list(zip(("", "_eval"), program.bodies, strict=False))


def _symbols(program: PipelineProgram) -> tuple[str, ...]:
    """The names of the sizes that vary between samples."""
    return tuple(dict.fromkeys(dim.symbol for dim in program.graph.dynamic_dims))


def _output_sizes(program: PipelineProgram) -> tuple[str, ...]:
    """The dynamic sizes that the result of the whole module speaks of."""
    used = output_symbols(program.graph.output)
    return tuple(symbol for symbol in _symbols(program) if symbol in used)


def _symbols_of(program: PipelineProgram, stage: int) -> tuple[str, ...]:
    """Those of them that the code of a stage speaks of."""
    used = used_symbols(program.programs[stage])
    return tuple(symbol for symbol in _symbols(program) if symbol in used)


def _layout_source(layout: Layout) -> str:
    """The text of a layout as source, with expressions for sizes that vary."""

    def atom_text(atom: Atom) -> str:
        sizes = (
            str(size) if isinstance(size, int) else f"{{{to_python(size)}}}"
            for size in atom.segments
        )
        return "/".join(["+".join(sizes), *atom.axes])

    dims = ", ".join(" * ".join(map(atom_text, merge_atoms(dim))) for dim in layout.dims)
    return f'f"[{dims}]"' if "{" in dims else f'"[{dims}]"'


def _output_stages(program: PipelineProgram) -> list[tuple[str, int, tuple[Any, ...], str]]:
    """The results that all ranks get: path, stage that makes it, shape and dtype. A sharded one
    stays where it is made.
    """
    rows = []
    for stage in program.stages:
        for path, value in stage.outputs:
            if program.plan.outputs.get(path, "whole") in ("whole", "eval"):
                rows.append((path, stage.index, tuple(value.shape), str(value.dtype)))
    order = {path: i for i, (path, _) in enumerate(program.graph.output.leaves())}
    return sorted(rows, key=lambda row: order[row[0]])


def _left_out(program: PipelineProgram) -> list[str]:
    """The lines that name the results which a training step leaves out; none where it leaves out
    nothing.
    """
    paths = [
        path
        for path, _, _, _ in _output_stages(program)
        if program.plan.outputs.get(path) == "eval"
    ]
    return assigned("left_out_of_training", names_text(paths)) if paths else []


class _Leaves(Scope):
    """In ``output``, a leaf is read by its path."""

    def name(self, value: IRValue) -> str:
        return value.name


def _by_path(tree: Tree, path: str) -> Tree:
    if tree.kind == "leaf":
        if isinstance(tree.value, IRValue):
            return Tree("leaf", IRValue(f"leaves[{quoted(path)}]", (), torch.float32))
        return tree
    children = tuple((key, _by_path(child, join(path, key))) for key, child in tree.children)
    return Tree(tree.kind, tree.value, children, tree.type_path)


def _owned_text(layouts: Mapping[int, Layout]) -> str:
    """The layouts of a parameter by stage."""
    return (
        "{" + ", ".join(f'{stage}: "{layout}"' for stage, layout in sorted(layouts.items())) + "}"
    )


def _joined_axes(program: PipelineProgram, stage: int) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that adapters of a stage go over, in all its bodies."""
    return tuple(
        dict.fromkeys(axes for body in program.bodies for axes in body.programs[stage].joined_axes)
    )


def _stage_lines(program: PipelineProgram, index: int) -> list[str]:
    stage, joined = program.plan.stages[index], _joined_axes(program, index)
    words = [mesh_text(stage.mesh), tuple_text(map(str, stage.ranks))]
    words += [f"joined_axes={joined_text(joined)}"] if joined else []
    return wrap(f"Stage({', '.join(words)}),", WIDTH - 8)


def _argument_lines(graph: IRGraph, symbols: tuple[str, ...]) -> list[str]:
    """Class attributes: what a sample gives, and the sizes that vary between samples."""
    lines = assigned("arguments", names_text(sample_arguments(graph)))
    return lines + (assigned("sizes", names_text(symbols)) if symbols else [])


def _output_lines(program: PipelineProgram) -> list[str]:
    """The entries of ``output_stages``. Where sizes vary, ``output_shapes`` has those that are not
    of a scalar.
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
    """Entries of a dict: names, and the source of what belongs to them."""
    return [
        line for name, text in items for line in wrap(f"{quoted(name)}: {text},", WIDTH - indent)
    ]


def _segment(program: PipelineProgram, index: int, rank: int) -> dict[str, Any]:
    """One stage of a rank as the template writes it."""
    stage = program.stages[index]
    names = {value.name: path for path, value in _input_paths(program)}
    symbols = _symbols_of(program, index)
    varies = bool(_symbols(program))
    return {
        "stage": index,
        "reads": _named_tuple("reads", (names[value.name] for value in stage.reads)),
        "receives": _transfers(
            "receives",
            [
                _transfer(
                    _crossing(program, value, source, index), rank, arriving=True, varies=varies
                )
                for value, source in stage.receives
            ],
        ),
        "sends": _transfers(
            "sends",
            [
                _transfer(
                    _crossing(program, value, index, target), rank, arriving=False, varies=varies
                )
                for value, target in stage.sends
            ],
        ),
        "outputs": [
            *_named_tuple("outputs", (path for path, _ in stage.outputs)),
            *(_named_tuple("sizes", symbols) if symbols else []),
        ],
    }


def _named_tuple(name: str, texts: Iterable[str]) -> list[str]:
    """An argument of a :class:`Segment` that is a tuple of names."""
    return wrap(f"{name}={names_text(texts)},", WIDTH - 12)


def _input_paths(program: PipelineProgram) -> list[tuple[str, IRValue]]:
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
    """The source of a :class:`Transfer` as one rank sees it; where sizes vary, ``layouts`` has the
    rest.
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
        words[2:2] = [f"shape={end.shape}"]
        words += [f"pieces={_boxes(end.pieces)}", f"grad_pieces={_boxes(end.grad_pieces)}"]
    return f"Transfer({', '.join(words)})"


def _boxes(items: Iterable[tuple[int, Box]]) -> str:
    return tuple_text(f"({peer}, {box})" for peer, box in items)
