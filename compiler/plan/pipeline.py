"""The program of a pipeline: one program for each stage, and what crosses between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.runtime.layout import Layout
from shardwright.runtime.transfer import Holding


@dataclass(frozen=True)
class StageGraph:
    """One stage as a graph of its own. Its inputs are ``reads`` (inputs of the whole graph), then
    ``receives``; its output is the tuple of ``sends``, then the values of ``outputs``.

    ``receives``: (value, stage that makes it). ``sends``: (value, stage that needs it); a value
    that several stages need occurs several times. ``outputs``: (path in the result of the whole
    graph, value).
    """

    index: int
    graph: IRGraph
    reads: tuple[IRValue, ...]
    receives: tuple[tuple[IRValue, int], ...]
    sends: tuple[tuple[IRValue, int], ...]
    outputs: tuple[tuple[str, IRValue], ...]


@dataclass(frozen=True)
class Crossing:
    """A value that goes from the stage that makes it to a stage that needs it, and its gradient
    that comes back.
    """

    value: IRValue
    source: int
    target: int
    sent: Holding
    received: Holding


@dataclass(frozen=True)
class PipelineProgram:
    """The programs of all stages.

    - ``programs[k]`` is the program of ``stages[k]``.
    - ``crossings``: the values that go from one stage to another.
    - ``shared``: the stages that hold a parameter, by FQN, if several stages do and their meshes
      have one shape.
    - ``owned``: the layout of a parameter in each stage that holds it, by FQN, if the shapes of
      their meshes differ. The first of these stages owns it.
    - ``eval_program``: the program of evaluation, if the model runs other operators there. Its
      stages lie on the ranks of the training ones; ``shared`` and ``owned`` hold for both.
    """

    graph: IRGraph
    plan: Plan
    stages: tuple[StageGraph, ...]
    programs: tuple[Program, ...]
    crossings: tuple[Crossing, ...]
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    owned: dict[str, dict[int, Layout]] = field(default_factory=dict)
    eval_program: PipelineProgram | None = None

    @property
    def bodies(self) -> tuple[PipelineProgram, ...]:
        """The program of training, and that of evaluation if it is another one."""
        return (self,) if self.eval_program is None else (self, self.eval_program)

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """Every tensor once, by the first stage that holds it, in the order of the graph."""
        return self.declarations_of(range(len(self.stages)))

    def declarations_of(self, stages: Iterable[int]) -> tuple[Declaration, ...]:
        """The tensors of some stages, each once, in the order of the graph; those only evaluation
        has come last.
        """
        found: dict[str, Declaration] = {}
        for body, stage in itertools.product(self.bodies, stages):
            for declaration in body.programs[stage].declarations:
                found.setdefault(declaration.value.name, declaration)
        sources = dict.fromkeys(value.name for body in self.bodies for value in body.graph.sources)
        order = {name: index for index, name in enumerate(sources)}
        return tuple(sorted(found.values(), key=lambda d: order[d.value.name]))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a unit rank runs."""
        return tuple(index for index, stage in enumerate(self.plan.stages) if rank in stage.ranks)

    def holders_elsewhere(self, ranks: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The ranks of other stages that hold parameters of the stages on ``ranks``, by FQN."""
        found = {}
        for fqn, holders in self.shared.items():
            on = dict.fromkeys(self.plan.stages[index].ranks for index in holders)
            if ranks in on and len(on) > 1:
                found[fqn] = tuple(other for other in on if other != ranks)
        return found
