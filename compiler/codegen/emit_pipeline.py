"""Emit the files of a pipelined program: one class per rank, with a method for each of its stages and its schedule as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.codegen.comments import legend
from shardwright.compiler.codegen.emit import Origin, Writer, axis_lines, sample_arguments, template_named
from shardwright.compiler.codegen.imports import sorted_imports
from shardwright.compiler.codegen.names import Scope
from shardwright.compiler.codegen.text import Line, layout_lines, wrap
from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.pipeline import Crossing, PipelineProgram
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.compiler.plan.transfer import Box, pieces
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.layout import Mesh

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
    """``gencode<rank>.py`` for every rank of the unit. Ranks with the same stages share their code; what they send to whom
    differs.
    """
    template = template_named("pipeline.py.jinja")
    positions = pipeline_positions(program)
    writers: dict[tuple[int, ...], dict[str, Any]] = {}
    files = {}
    for rank in range(num_ranks):
        own = program.stages_of(rank)
        if own not in writers:
            writers[own] = _PipelineWriter(program.programs[own[0]], pipeline=program, own=own).fields(origin)
        first = program.plan.stages[own[0]]
        coords = first.mesh.coords(first.ranks.index(rank))
        where = [f"stage {', '.join(map(str, own))}", *(f"{axis}={index}" for axis, index in coords.items())]
        files[f"gencode{rank}.py"] = template.render(
            **writers[own],
            rank=rank,
            coords=", ".join(where),
            actions={
                name: wrap_actions(" ".join(map(str, schedule.actions[positions[rank]])))
                for name, schedule in (("train", train), ("infer", infer))
            },
            segments=[_segment(program, index, rank) for index in own],
            seed=seed,
            rng=rng,
        )
    return files


def pipeline_positions(program: PipelineProgram) -> dict[int, int]:
    """Unit rank to its position in the pipeline: ranks with the same stages are one position of the schedule."""
    order: dict[tuple[int, ...], int] = {}
    for stage in program.plan.stages:
        order.setdefault(stage.ranks, len(order))
    return {rank: position for ranks, position in order.items() for rank in ranks}


def wrap_actions(text: str, width: int = 104) -> list[str]:
    """Actions in lines, as the parts of one string literal."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) + 1 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


@dataclass
class _PipelineWriter(Writer):
    pipeline: PipelineProgram | None = None
    own: tuple[int, ...] = ()

    def _programs(self) -> list[Program]:
        assert self.pipeline is not None
        return [self.pipeline.programs[index] for index in self.own]

    def fields(self, origin: Origin) -> dict[str, Any]:
        assert self.pipeline is not None
        program, plan = self.pipeline, self.pipeline.plan
        bodies = [self._stage_lines(index) for index in self.own]
        output = self._output_lines(program.graph.output)
        self.imports |= set(PIPELINE_IMPORTS)
        dims = program.graph.dims
        return {
            "origin": origin,
            "mesh": f"{len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches",
            "stages": [_stage_text(stage.mesh, stage.ranks) for stage in plan.stages],
            "schedule": plan.schedule,
            "num_microbatches": plan.num_microbatches,
            "class_name": program.graph.name,
            "inputs": self._whole_inputs(),
            "arguments": tuple_text(f'"{name}"' for name in sample_arguments(program.graph)),
            "output_stages": self._output_stages(),
            "shared": sorted(program.shared.items()),
            "declarations": self._declarations(),
            "bodies": bodies,
            "output": output,
            "methods": [method.lines for method in self.methods.values()],
            "imports": sorted_imports(self.imports | {"import torch"}),
            "dims": legend(dims, self.program) if dims else "",
        }

    def _whole_inputs(self) -> list[tuple[str, str]]:
        """The table of all inputs of a sample, those of other stages too: every rank checks what it is given."""
        assert self.pipeline is not None
        return self._inputs_of(self.pipeline.graph)

    def _stage_lines(self, index: int) -> list[str]:
        assert self.pipeline is not None
        program, stage = self.pipeline.programs[index], self.pipeline.stages[index]
        scope = Scope(self._reserved(program))
        arguments = []
        for value in (*stage.reads, *(value for value, _ in stage.receives)):
            scope.define(value)
            arguments.append(scope.name(value))
        body = self._statements(program, scope)
        leaves = [value for _, value in program.output.leaves()]
        results = ", ".join(self._output(Tree("leaf", value), scope) for value in leaves)
        body.append(Line(f"return ({results}{',' if len(leaves) == 1 else ''})"))
        head = [f"    {line}" for line in wrap(f"def stage{index}({', '.join(['self', *arguments])}):", 124)]
        return [*head, *layout_lines([*axis_lines(body, program.plan.mesh.names), *body], 8)]

    def _output_lines(self, tree: Tree) -> list[str]:
        """The body of ``output``: the result structure over its leaves by path."""
        text = self._output(_by_path(tree, ""), _Leaves(set()))
        return layout_lines([Line(f"return {text}")], 8)

    def _output_stages(self) -> list[tuple[str, int, tuple[Any, ...], str]]:
        assert self.pipeline is not None
        rows = []
        for stage in self.pipeline.stages:
            for path, value in stage.outputs:
                rows.append((path, stage.index, tuple(value.shape), str(value.dtype)))
        order = {path: i for i, (path, _) in enumerate(self.pipeline.graph.output.leaves())}
        return sorted(rows, key=lambda row: order[row[0]])

    def _declarations(self) -> list[str]:
        assert self.pipeline is not None
        held: dict[str, Declaration] = {}
        for index in self.own:
            for declaration in self.pipeline.programs[index].declarations:
                held.setdefault(declaration.value.name, declaration)
        order = {value.name: i for i, value in enumerate(self.pipeline.graph.sources)}
        return self._declaration_lines(sorted(held.values(), key=lambda d: order[d.value.name]))


class _Leaves(Scope):
    """In ``output``, a leaf is read by its path."""

    def name(self, value: IRValue) -> str:
        return value.name


def _by_path(tree: Tree, path: str) -> Tree:
    if tree.kind == "leaf":
        if isinstance(tree.value, IRValue):
            return Tree("leaf", IRValue(f'leaves["{path}"]', (), torch.float32))
        return tree
    children = tuple((key, _by_path(child, f"{path}.{key}".lstrip("."))) for key, child in tree.children)
    return Tree(tree.kind, tree.value, children, tree.type_path)


def _stage_text(mesh: Mesh, ranks: tuple[int, ...]) -> str:
    axes = tuple_text([f'("{axis}", {size})' for axis, size in mesh.axes])
    return f"Stage(Mesh({axes}), {tuple_text(map(str, ranks))})"


def tuple_text(items: Iterable[str]) -> str:
    """The source of a tuple of sources."""
    words = list(items)
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _segment(program: PipelineProgram, index: int, rank: int) -> dict[str, Any]:
    """One stage of a rank as the template writes it."""
    stage = program.stages[index]
    names = {value.name: path for path, value in _input_paths(program)}
    return {
        "stage": index,
        "reads": tuple_text(f'"{names[value.name]}"' for value in stage.reads),
        "receives": [_transfer(_crossing(program, v, s, index), rank, arriving=True) for v, s in stage.receives],
        "sends": [_transfer(_crossing(program, v, index, t), rank, arriving=False) for v, t in stage.sends],
        "outputs": tuple_text(f'"{path}"' for path, _ in stage.outputs),
    }


def _input_paths(program: PipelineProgram) -> list[tuple[str, IRValue]]:
    found = []
    for name, tree in program.graph.signature:
        for path, leaf in tree.leaves():
            if isinstance(leaf, IRValue):
                found.append((f"{name}.{path}".rstrip("."), leaf))
    return found


def _crossing(program: PipelineProgram, value: IRValue, source: int, target: int) -> Crossing:
    return next(c for c in program.crossings if c.value.name == value.name and c.source == source and c.target == target)


def _transfer(crossing: Crossing, rank: int, *, arriving: bool) -> list[str]:
    """The source of a :class:`Transfer` as one rank sees it."""
    forward, backward = pieces(crossing.sent, crossing.received), pieces(crossing.received, crossing.sent)
    mine = crossing.received if arriving else crossing.sent
    local = mine.layout.local_shape(mine.mesh, mine.mesh.coords(mine.ranks.index(rank)))
    if arriving:
        incoming = [(sender, there) for (sender, receiver), boxes in forward.items() if receiver == rank for _, there in boxes]
        outgoing = [(receiver, here) for (sender, receiver), boxes in backward.items() if sender == rank for here, _ in boxes]
    else:
        incoming = [(receiver, here) for (sender, receiver), boxes in forward.items() if sender == rank for here, _ in boxes]
        outgoing = [(sender, there) for (sender, receiver), boxes in backward.items() if receiver == rank for _, there in boxes]
    words = [
        f'"{crossing.value.name}"',
        f"stage={crossing.source if arriving else crossing.target}",
        f"shape={local}",
        f"dtype={crossing.value.dtype}",
        f"differentiable={crossing.value.requires_grad}",
        f"pieces={_boxes(incoming)}",
        f"grad_pieces={_boxes(outgoing if crossing.value.requires_grad else [])}",
    ]
    return wrap(f"Transfer({', '.join(words)}),", 104)


def _boxes(items: list[tuple[int, Box]]) -> str:
    return tuple_text(f"({peer}, {box})" for peer, box in items)
