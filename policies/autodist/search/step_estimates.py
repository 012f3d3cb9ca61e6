"""Estimates of what the plans of the simple policies take on every mesh, from one program: they say
which meshes are likely the best.

The model is placed once by their rules, on a mesh of two axes of two: one splits the batch, the
other the inner dims. What every instruction of the lowered program takes is then asked for the same
axes at other sizes, once for all that are alike. Where a rule would split other dims at another
size, as there are fewer heads than ranks, that is wrong: it says in which order to look, no more.

Where attention is causal and most of the work, a second program has an axis more, along which
positions are dealt in zigzag and keys go round: it says which such meshes are likely the best.

Example: of 200 instructions 12 differ. On ``x=8`` and on ``x=2 x y=4`` the times of these 12 are
added up as often as each comes, for the batch over 8 ranks, or over 2 and the inner dims over 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import replace

from shardwright.compiler.cost.local_calls import signature
from shardwright.compiler.cost.time.after_backward import parameter_s
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.program import Compute, Declaration, Step
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import choose_dims
from shardwright.policies.context_axes import ContextAxis, split_context
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

BATCH, INNER, SEQUENCE = "batch", "inner", "sequence"
"""The axes of the programs that are asked."""


class StepEstimates:
    """The estimates for one model, on meshes that give each rank one piece, or on those with an
    axis ``in_zigzag``. Raises :class:`PlanError` if the model has no batch, nothing inside that
    could be split, or attention that has no ring.
    """

    def __init__(
        self, graph: PlannableGraph, config: ComputeConfig, *, in_zigzag: bool = False
    ) -> None:
        # One program on 2 x 2 ranks, whose work and messages are then scaled to every mesh. Making
        # it once is what makes estimates cheap.
        classes: dict[str, set[int]] = {}
        with contextlib.suppress(PlanError) if in_zigzag else contextlib.nullcontext():
            classes[BATCH] = batch_classes(graph)
        classes[INNER] = choose_dims(graph, 2)
        names = [SEQUENCE, *classes] if in_zigzag else list(classes)
        turns = ((SEQUENCE, 1),) if in_zigzag else ()
        builder = graph.builder(mesh=Mesh(tuple((name, 2) for name in names), turns))
        for name, own in classes.items():
            split_dims(builder, name, own)
        if in_zigzag:
            split_context(builder, [ContextAxis(SEQUENCE, 2, "ring")], {})
        plan = replace(
            builder.plan("estimate"),
            zero=units_of_storage(config),
            outputs=training_wishes(graph, config),
        )
        self._program = lower(graph, plan)
        self._instructions: list[tuple[Step, int]] = self._alike_instructions()
        self._parameters: list[tuple[Declaration, int]] = self._alike_parameters()

    def step_s(self, mesh: Mesh, num_positions: int, pp_place: int, setting: Setting) -> float:
        """An estimate of the seconds of a step, with the axes of the mesh dealt out as is best.

        The positions share all work evenly and never wait. It is infinite where no simple policy
        has such a mesh.
        """
        ranks = position_ranks(mesh, num_positions, pp_place)[0]
        return min(
            (
                self._step_s(way, num_positions, replace(setting, ranks=ranks))
                for way in _ways(mesh)
            ),
            default=float("inf"),
        )

    def _step_s(self, mesh: Mesh, num_positions: int, setting: Setting) -> float:
        walk = Walk(replace(self._program, plan=replace(self._program.plan, mesh=mesh)), setting)
        work_s = sum(count * _time_of(item, walk) for item, count in self._instructions)
        once_s = sum(count * _once_s(declaration, walk) for declaration, count in self._parameters)
        return (setting.num_microbatches * work_s + once_s) / num_positions

    def _alike_instructions(self) -> list[tuple[Step, int]]:
        """One of every kind, and how many there are."""
        free = from_nothing(self._program.graph)  # every stage makes these for itself
        found: dict[Hashable, list[Step]] = {}
        for item in self._program.steps:
            if isinstance(item, Compute):
                if item.original.name not in free:
                    found.setdefault(
                        (signature(item.original), tuple(sorted(item.assignment.items()))), []
                    ).append(item)
            else:
                found.setdefault(
                    (item.step, item.of.dtype, item.of.requires_grad, item.gathers_weight), []
                ).append(item)
        return [(alike[0], len(alike)) for alike in found.values()]

    def _alike_parameters(self) -> list[tuple[Declaration, int]]:
        """One of every kind of trained parameters, and how many there are."""
        found: dict[Hashable, list[Declaration]] = {}
        for declaration in self._program.declarations:
            value = declaration.value
            if value.requires_grad and value.kind is ValueKind.PARAMETER:
                found.setdefault((value.shape, value.dtype, declaration.layout), []).append(
                    declaration
                )
        return [(alike[0], len(alike)) for alike in found.values()]


def _ways(mesh: Mesh) -> Iterator[Mesh]:
    """The sizes of the program's axes, as the simple policies use the axes of a mesh."""
    sizes = [size for _, size in mesh.axes]
    if mesh.turns:
        ((along, turns),) = mesh.turns
        for other in (BATCH, INNER):
            named = [(SEQUENCE if axis == along else other, size) for axis, size in mesh.axes]
            ones = [(name, 1) for name in (BATCH, INNER) if name not in dict(named)]
            yield Mesh((*named, *ones), ((SEQUENCE, turns),))
        return
    if not sizes:
        pairs = [(1, 1)]
    elif len(sizes) == 1:
        pairs = [(sizes[0], 1), (1, sizes[0])]
    else:
        pairs = [(sizes[0], sizes[1])] if len(sizes) == 2 else []
    for batch, inner in pairs:
        yield Mesh(((BATCH, batch), (INNER, inner)))


def _time_of(item: Step, walk: Walk) -> float:
    """The seconds of one instruction, forward and backward; an adapter along axes of one rank takes
    none.
    """
    if not isinstance(item, Compute) and walk.storage_mesh.num_ranks(item.step.axes) == 1:
        return 0.0
    return walk.time_of(item).total_s


def _once_s(declaration: Declaration, walk: Walk) -> float:
    """The seconds per step of the reduction and update of a parameter."""
    setting = walk.setting
    each_s, once_s = parameter_s(
        declaration, walk.storage_mesh, setting.config, setting.hardware, setting.optimizer,
        setting.ranks, setting.num_microbatches, walk.gradients_bytes,
    )  # fmt: skip
    return setting.num_microbatches * each_s + once_s
