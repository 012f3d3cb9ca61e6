"""Lower a plan with stages: each stage on its own mesh, and what crosses between them.

A value crosses as slices or copies, never as partial sums. So its gradient is whole on every rank
that holds a copy, and each rank can send back exactly what its counterpart needs.

Example: stage 0 on ``tp=2`` makes ``h`` as [8/tp, 16], and stage 1 on ``tp=4`` reads it whole. Each
rank of stage 0 sends its half to all four ranks of stage 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import Size, dynamic_sizes
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.stopped_gradients import reached_operands
from shardwright.compiler.ops.strategy import layouts
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.eval_stages import stage_of_eval_ops
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.stages import (
    names_of_updated,
    place_unused,
    split_stages,
    stage_of_ops,
    weights_used,
)
from shardwright.compiler.passes.unused_outputs import drop_outputs
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.check import check_strategies
from shardwright.compiler.plan.pipeline import Crossing, PipelineProgram, StageGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.runtime.errors import InternalError, PlanError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.transfer import Holding, pieces


def lower_stages(graph: IRGraph, plan: Plan) -> PipelineProgram:
    """The programs of all stages. Raises :class:`PlanError` for a plan whose stages do not fit the
    graph.
    """
    check_stages(graph, plan)
    num_stages = len(plan.stages)
    graph = with_imbalance(drop_outputs(graph, plan.outputs), plan.imbalance)
    stages = stage_of_ops(graph, plan)
    cut = split_stages(graph, stages, num_stages)
    body = None if graph.eval_graph is None else drop_outputs(graph.eval_graph, plan.outputs)
    eval_cut = (
        ()
        if body is None
        else split_stages(
            body, stage_of_eval_ops(graph, stages, body), num_stages, names_of_updated(graph)
        )
    )
    cut = place_unused(graph, cut, weights_used((*cut, *eval_cut)))
    _check_updated_buffers((*cut, *eval_cut))
    # A parameter of several stages is *shared* if their meshes are equal: then every stage holds it
    # in one layout, and gradients are summed rank by rank. Otherwise it is *copied*: its first
    # stage owns it, and the others get copies in layouts of their own.
    holders = _holders((*cut, *eval_cut))
    stored = _stored_by_mesh(plan, holders)
    several = {
        fqn: {plan.stages[index].mesh for index in found}
        for fqn, found in holders.items()
        if len(found) > 1
    }
    shared = {fqn: holders[fqn] for fqn, meshes in several.items() if len(meshes) == 1}
    copied = several.keys() - shared.keys()
    program = _lower_body(graph, plan, cut, stored, copied)
    if body is not None:
        given = {path: "whole" if wish == "eval" else wish for path, wish in plan.outputs.items()}
        program = replace(
            program,
            eval_program=_lower_body(body, replace(plan, outputs=given), eval_cut, stored, copied),
        )
    owned = {
        fqn: {index: stored[plan.stages[index].mesh][fqn] for index in holders[fqn]}
        for fqn in copied
    }
    return replace(program, shared=shared, owned=owned)


def _holders(stages: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, ascending, by its FQN."""
    found: dict[str, set[int]] = {}
    for stage in stages:
        for value in stage.graph.parameters:
            assert value.fqn is not None
            found.setdefault(value.fqn, set()).add(stage.index)
    return {fqn: tuple(sorted(indices)) for fqn, indices in found.items()}


Stored = dict[Mesh, dict[str, Layout]]
"""The layouts of tensors by FQN, for each mesh of a stage."""


def _stored_by_mesh(plan: Plan, holders: Mapping[str, tuple[int, ...]]) -> Stored:
    """The layouts that the plan names. Each is a layout on the mesh of the first stage that holds
    the tensor.
    """
    meshes = dict.fromkeys(stage.mesh for stage in plan.stages)
    found: dict[Mesh, dict[str, Layout]] = {mesh: {} for mesh in meshes}
    for fqn, layout in plan.stored.items():
        # What no stage holds may be written in the axes of any of them.
        homes = [plan.stages[holders[fqn][0]].mesh] if fqn in holders else meshes
        for mesh in homes:
            found[mesh][fqn] = layout
    return found


def _lower_body(
    graph: IRGraph, plan: Plan, stages: tuple[StageGraph, ...], stored: Stored, copied: Set[str]
) -> PipelineProgram:
    """The programs of the stages of training, or of evaluation. What they hold is added to
    ``stored``.

    ``copied``: the parameters of which stages with unequal meshes hold copies. They are sent
    between the ranks of a unit, so ZeRO-3 leaves them whole in each unit.
    """
    # The layout of each value that crosses, in the stage that makes it.
    crossing = {value.name for stage in stages for value, _ in stage.receives}
    made: dict[str, Layout] = {}
    for stage in stages:
        check_strategies(stage.graph, replace(plan, mesh=plan.stages[stage.index].mesh))
        for op in stage.graph.ops:
            if not any(value.name in crossing for value in op.results):
                continue
            assert op.rule is not None
            found = layouts(op.rule, plan.assignment(op.name), plan.stages[stage.index].mesh)[1]
            made.update(
                {
                    value.name: _whole_gradients(layout)
                    for value, layout in zip(op.results, found, strict=True)
                }
            )
    leading = _leading_to_loss(graph)
    crossings = [
        _crossing(value, _sends_gradient(value, stage, leading), source, stage, made, plan)
        for stage in stages
        for value, source in stage.receives
    ]
    programs = []
    for stage in stages:
        # ``own`` is shared by stages of equal meshes: the second one stores a parameter as the
        # first.
        own = stored[plan.stages[stage.index].mesh]
        program = _lower_stage(stage, replace(plan, stored=own), crossings, copied)
        programs.append(program)
        for declaration in program.declarations:
            if declaration.value.fqn is not None:
                own.setdefault(declaration.value.fqn, declaration.layout)
    return PipelineProgram(graph, plan, stages, tuple(programs), tuple(crossings))


def check_stages(graph: IRGraph, plan: Plan) -> None:
    """Refuse stages that cannot be: more stages than operators, or ranks and meshes that do not
    fit.
    """
    if len(plan.stages) > len(graph.ops):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but the graph has only "
            f"{len(graph.ops)} operators",
            hint="ask for fewer stages",
        )
    # Ranks may run several stages, but then each rank has one mesh and one set of companions.
    meshes: dict[tuple[int, ...], int] = {}
    taken: dict[int, tuple[int, ...]] = {}
    for number, stage in enumerate(plan.stages):
        if stage.mesh.size != len(stage.ranks):
            raise PlanError(f"stage {number} has mesh {stage.mesh} but {len(stage.ranks)} ranks")
        first = meshes.setdefault(stage.ranks, number)
        if plan.stages[first].mesh != stage.mesh:
            raise PlanError(f"stages {first} and {number} share their ranks but not their mesh")
        for rank in stage.ranks:
            if taken.setdefault(rank, stage.ranks) != stage.ranks:
                raise PlanError(
                    f"rank {rank} is in stages with different ranks",
                    why=f"{taken[rank]} and {stage.ranks}",
                )


def verify_pipeline(program: PipelineProgram) -> None:
    """Prove a pipeline. Every stage keeps the invariant. What a stage receives crosses to it once,
    in the layouts that both ends have. A crossing delivers each element of each piece exactly once,
    in both directions. The copies of a parameter in several stages are known to be copies.
    """
    for body in program.bodies:
        for stage in body.programs:
            verify_program(stage)
        _check_ends(body)
        _check_crossings(body)
    _check_copies(program)


def _check_ends(program: PipelineProgram) -> None:
    """Check that each value that a stage receives has one crossing, and that this one says of both
    ends what their programs say.
    """
    # By name and both ends: one value may go to several stages.
    found = {(c.value.name, c.source, c.target): c for c in program.crossings}
    needed = {(v.name, source, s.index) for s in program.stages for v, source in s.receives}
    if found.keys() != needed or len(found) != len(program.crossings):
        listed = ", ".join(f"{n} from stage {s} to {t}" for n, s, t in sorted(needed - set(found)))
        raise InternalError(f"what crosses is not what stages receive; missing: {listed or 'none'}")
    leading = _leading_to_loss(program.graph)
    given = {v.name: v for stage in program.stages for v, _ in stage.receives}
    for (name, source, target), crossing in found.items():
        where = f"{name} crosses from stage {source} to stage {target}"
        # The outputs of a stage are what it sends, by position.
        sends = program.stages[source].sends
        position = next(i for i, (v, to) in enumerate(sends) if (v.name, to) == (name, target))
        left = program.programs[source].plan.outputs[str(position)]
        arrived = program.programs[target].input_layouts[name]
        for end, layout, stage in (
            (crossing.sent, left, source),
            (crossing.received, arrived, target),
        ):
            planned = program.plan.stages[stage]
            if (end.layout, end.mesh, end.ranks) != (layout, planned.mesh, planned.ranks):
                raise InternalError(f"{where} as {end.layout}, stage {stage} has it as {layout}")
        takes_gradient = _sends_gradient(given[name], program.stages[target], leading)
        if crossing.value.takes_gradient != takes_gradient:
            raise InternalError(f"{where} {'without its' if takes_gradient else 'with a'} gradient")


def _check_copies(program: PipelineProgram) -> None:
    """Check that a parameter of several stages is shared or copied, in the layouts that they have.

    A shared one has its gradients summed, piece by piece, so that all stages hold it alike.
    """
    # The layout of each parameter in each stage that holds it.
    held: dict[str, dict[int, Layout]] = {}
    for body in program.bodies:
        for index, stage in enumerate(body.programs):
            for declaration in stage.declarations:
                if declaration.value.kind is ValueKind.PARAMETER and declaration.value.fqn:
                    held.setdefault(declaration.value.fqn, {})[index] = declaration.layout
    for fqn, layouts_by_stage in held.items():
        if len(layouts_by_stage) == 1:
            continue
        stages = tuple(sorted(layouts_by_stage))
        listed = ", ".join(f"{layouts_by_stage[index]} in stage {index}" for index in stages)
        if len({program.plan.stages[index].mesh for index in stages}) > 1:
            if program.owned.get(fqn) != layouts_by_stage:
                raise InternalError(f"{fqn} is not copied between its stages: {listed}")
        elif program.shared.get(fqn) != stages:
            raise InternalError(f"the gradients of {fqn} are not summed over its stages: {listed}")
        elif len(set(layouts_by_stage.values())) > 1:
            raise InternalError(f"{fqn} is shared by stages that hold other pieces: {listed}")


def _check_crossings(program: PipelineProgram) -> None:
    """Check that a crossing delivers each element of each piece exactly once, in both
    directions.
    """
    # Dynamic sizes are tried with a few different numbers, odd ones among them.
    symbols = sorted({dim.symbol for dim in program.graph.dynamic_dims})
    examples = [
        dict(zip(symbols, itertools.count(first), strict=False))
        for first in ((2, 5, 12) if symbols else (0,))
    ]
    for crossing, sizes in itertools.product(program.crossings, examples):
        sent, received = (
            replace(end, layout=_at(end.layout, sizes))
            for end in (crossing.sent, crossing.received)
        )
        # Forward the value goes from left to right, backward its gradient comes the other way.
        for source, target in ((sent, received), (received, sent)):
            if source.layout.partial or source.layout.grad_partial:
                raise InternalError(f"{crossing.value.name} crosses stages as {source.layout}")
            arrived = dict.fromkeys(target.ranks, 0)
            # Volumes are enough: that boxes of one piece do not overlap is a property of
            # ``pieces``.
            for (_, receiver), boxes in pieces(source, target).items():
                arrived[receiver] += sum(_volume(box) for _, box in boxes)
            for index, rank in enumerate(target.ranks):
                wanted = target.layout.local_shape(target.mesh, target.mesh.coords(index))
                if arrived[rank] != _volume(tuple((0, n) for n in wanted)):
                    raise InternalError(f"rank {rank} does not get all of {crossing.value.name}")


def _at(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout with numbers for its dynamic sizes."""

    def number(size: Size) -> int:
        return (
            size
            if isinstance(size, int)
            else int(size.subs({symbol: sizes[symbol.name] for symbol in dynamic_sizes(size)}))
        )

    # Every segment of every atom of every dim: ``[b/dp, 16]`` becomes ``[12/dp, 16]``.
    return replace(
        layout,
        dims=tuple(
            tuple(replace(atom, segments=tuple(map(number, atom.segments))) for atom in dim)
            for dim in layout.dims
        ),
    )


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    volume = 1
    for start, stop in box:
        volume *= stop - start
    return volume


def _lower_stage(
    stage: StageGraph, plan: Plan, crossings: list[Crossing], copied: Set[str]
) -> Program:
    received = {c.value.name: c.received.layout for c in crossings if c.target == stage.index}
    sent = {c.value.name: c.sent.layout for c in crossings if c.source == stage.index}
    outputs: dict[str, Layout | str | None] = {
        str(i): sent[value.name] for i, (value, _) in enumerate(stage.sends)
    }
    # A stage returns what it sends, then its part of the model's outputs.
    for i, (path, _) in enumerate(stage.outputs, start=len(stage.sends)):
        outputs[str(i)] = plan.outputs.get(path, "whole")
    own = replace(
        plan, mesh=plan.stages[stage.index].mesh, inputs=received, outputs=outputs, stages=()
    )
    return lower(stage.graph, own, copied, delivers=True)


def _leading_to_loss(graph: IRGraph) -> set[str]:
    """The names of the values to which a gradient of the loss, the first result, may come back.

    It comes to no value that was rounded to integers on the way, to none that only other results
    are made of, and to none that an operator of the user's gives no gradient. On one device
    parameters before such a value have no gradient. Sent back to them, zeros would be one, by which
    weight decay and momentum change them.
    """
    results = (value for _, value in graph.output.leaves() if isinstance(value, IRValue))
    leading = {value.name for value in itertools.islice(results, 1) if value.requires_grad}
    for op in reversed(graph.ops):
        if any(value.name in leading for value in op.results):
            leading |= {value.name for value in reached_operands(op)}
    return leading


def _sends_gradient(value: IRValue, stage: StageGraph, leading: Set[str]) -> bool:
    """Whether the stage, which receives ``value``, sends a gradient back: it makes something of it
    that leads to the loss.
    """
    return value.takes_gradient and any(
        value in reached_operands(op) and any(result.name in leading for result in op.results)
        for op in stage.graph.ops
    )


def _crossing(
    value: IRValue,
    takes_gradient: bool,
    source: int,
    stage: StageGraph,
    made: dict[str, Layout],
    plan: Plan,
) -> Crossing:
    """How a value crosses to a stage. It keeps its layout if both stages have the same mesh;
    otherwise it arrives as its first reader needs it.
    """
    here, there = plan.stages[source], plan.stages[stage.index]
    sent = made[value.name]
    received = sent
    # On another mesh the old layout means nothing.
    if here.mesh != there.mesh:
        # Later readers convert it from there.
        reader = next(op for op in stage.graph.ops if value in op.operands)
        assert reader.rule is not None
        needed = layouts(reader.rule, plan.assignment(reader.name), there.mesh)[0][
            reader.operands.index(value)
        ]
        received = _whole_gradients(needed)
    value = replace(value, takes_gradient=takes_gradient)
    return Crossing(
        value,
        source,
        stage.index,
        Holding(sent, here.mesh, here.ranks),
        Holding(received, there.mesh, there.ranks),
    )


def _whole_gradients(layout: Layout) -> Layout:
    return replace(layout, partial=(), grad_partial=())


def _check_updated_buffers(stages: Sequence[StageGraph]) -> None:
    """Refuse a buffer that changes and that several stages hold: the copies in other stages would
    keep their old values.
    """
    holders: dict[str, set[int]] = {}
    updated: dict[str, int] = {}
    for stage in stages:
        for value in stage.graph.buffers:
            holders.setdefault(value.name, set()).add(stage.index)
        updated |= dict.fromkeys(names_of_updated(stage.graph), stage.index)
    for stage in stages:
        for value in stage.graph.buffers:
            if value.name in updated and len(holders[value.name]) > 1:
                raise PlanError(
                    f"buffer {value.fqn} is updated in stage {updated[value.name]} "
                    f"and used in stages {', '.join(map(str, sorted(holders[value.name])))}",
                    why="stages run several microbatches at a time, so that no stage would see "
                    "the values in their order",
                    hint="begin the stages where all uses of the module are in one",
                )
