"""Write the files of all ranks: the last pass of a compile."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardwright.compiler.codegen.emit import Origin, emit
from shardwright.compiler.codegen.emit_pipeline import emit_pipeline
from shardwright.compiler.codegen.unit_files import UnitFiles
from shardwright.compiler.passes.proved_schedule import schedule_of
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.planned import inference_like
from shardwright.runtime.config import ComputeConfig


@dataclass(frozen=True)
class EmittedFiles:
    """A program, and the files it became, by name: ``gencode<rank>.py`` for every plan rank, and
    ``plan.json``.
    """

    program: Program | PipelineProgram
    files: Mapping[str, str]


@dataclass(frozen=True)
class Emit:
    """The pass ``emit``: the program as Python source for every rank, and its plan as JSON.

    ``digest`` and ``version`` stand in the header of each file: what it was compiled from, and by
    what. ``unproved``: the operators whose rules nobody has proved, which the header names too.
    """

    name: ClassVar[str] = "emit"
    config: ComputeConfig
    version: str = ""
    digest: str = ""
    unproved: tuple[str, ...] = ()

    def __call__(self, program: Program | PipelineProgram) -> EmittedFiles:
        plan, name = program.plan, program.graph.name
        origin = Origin(self.version, name, plan.policy, self.digest, self.unproved)
        source = self._source_of_ranks(program, origin)
        return EmittedFiles(program, UnitFiles(self.config.plan_ngpus, source, plan.dumps()))

    def _source_of_ranks(
        self, program: Program | PipelineProgram, origin: Origin
    ) -> Callable[[int], str]:
        config = self.config
        num_ranks, seed, rng = config.plan_ngpus, config.seed, config.rng
        if isinstance(program, Program):
            return emit(program, origin, seed=seed, rng=rng, end2end=config.use_end2end)
        train = schedule_of(program)
        infer = inference_like(train)
        # What a rank of a pipeline sends to whom is its own.
        return emit_pipeline(
            program, train, infer, origin, num_ranks, seed=seed, rng=rng
        ).__getitem__


def verify_files(emitted: EmittedFiles) -> None:
    """Raise what Python says of a generated file that is no Python. Ranks that run one program have
    the same file but for their coordinates: then the first one is read.
    """
    names = [name for name in emitted.files if name.endswith(".py")]
    for name in names[:1] if isinstance(emitted.program, Program) else names:
        ast.parse(emitted.files[name], name)


def print_files(emitted: EmittedFiles) -> str:
    """All files, one below the other, each under its name."""
    return "\n".join(f"==== {name}\n{text.rstrip()}\n" for name, text in emitted.files.items())
