"""The compile itself: from a traced graph to the files of all ranks. Nothing here touches weights,
disks or processes.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.codegen.emit import Origin, class_name, emit
from shardwright.compiler.codegen.emit_pipeline import emit_pipeline
from shardwright.compiler.cost.work_share import WorkShare, work_share
from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.proof import unproved
from shardwright.compiler.ops.render import imports_of, names_bound
from shardwright.compiler.pass_manager import CompileReport, FunctionPass, PassManager
from shardwright.compiler.passes.draws import draw_pieces
from shardwright.compiler.passes.identities import without_identities
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages, verify_pipeline
from shardwright.compiler.passes.print_program import print_program
from shardwright.compiler.passes.proved_schedule import schedule_of
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.passes.unify_dims import infer_dims, warn_of_lost_batch
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import check_batch, check_names
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import settled_wishes
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.compiler.plan.zero import settled_config, units_of_storage
from shardwright.compiler.schedule.planned import inference_like
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, on_lines
from shardwright.runtime.layout import ZERO

PolicyFunction = Callable[[Any, ComputeConfig], Any]


@dataclass(frozen=True)
class Compiled:
    """What a compile makes. ``files``: ``gencode<rank>.py`` for every plan rank, and ``plan.json``.
    ``config``: what it was asked for, with what that leaves to the plan. ``work``: which part of
    one device's arithmetic each of several ranks does.
    """

    program: Program | PipelineProgram
    files: dict[str, str]
    config: ComputeConfig
    report: CompileReport = field(default_factory=CompileReport)
    work: WorkShare | None = None

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def declarations(self) -> list[Declaration]:
        """Every tensor of the module once, in the order of the original; those only the evaluation
        body has come last.
        """
        programs = [self.program]
        if isinstance(self.program, Program) and self.program.eval_program is not None:
            programs.append(self.program.eval_program)
        found: dict[str, Declaration] = {}
        for program in programs:
            for declaration in program.declarations:
                found.setdefault(declaration.value.name, declaration)
        return list(found.values())


def pass_manager(**options: Any) -> PassManager:
    """A pass manager that knows how to verify and print every form of this compiler."""
    return PassManager(
        verifiers={
            IRGraph: verify,
            PlannableGraph: verify,
            Program: verify_program,
            PipelineProgram: verify_pipeline,
        },
        printers={
            IRGraph: print_graph,
            PlannableGraph: print_graph,
            Program: print_program,
            PipelineProgram: lambda program: "\n\n".join(
                print_program(p) for body in program.bodies for p in body.programs
            ),
        },
        **options,
    )


def annotate(graph: IRGraph, manager: PassManager) -> PlannableGraph:
    """The graph with rules and dims, and without identities: what policies see. One that has them
    is returned as it is.
    """
    if isinstance(graph, PlannableGraph):
        return graph
    graph = manager.run(FunctionPass("identities", _both(without_identities)), graph)
    graph = manager.run(FunctionPass("rules", _both(attach_rules)), graph)
    graph = manager.run(FunctionPass("dims", _both(infer_dims)), graph)
    return PlannableGraph.of(graph)


def compile_graph(
    graph: IRGraph,
    policy: PolicyFunction,
    config: ComputeConfig,
    *,
    policy_name: str = "custom",
    digest: str = "",
    version: str = "",
    plan: Plan | None = None,
    manager: PassManager | None = None,
) -> Compiled:
    """Plan, lower, prove and emit a traced graph, or one that is annotated already. ``plan`` skips
    the policy.

    Raises :class:`PlanError` for a policy that returns something else than a plan, or a plan that
    does not fit.
    """
    manager = manager or pass_manager()
    ops = (op for body in graph.bodies for op in body.ops)
    imported = names_bound(statement for op in ops for statement in imports_of(op))
    graph = replace(graph, name=class_name(graph.name, imported))
    if config.inference_only:
        graph = manager.run(FunctionPass("inference", without_gradients), graph)
    planned: IRGraph = annotate(graph, manager)
    if config.plan_ngpus > 1:
        warn_of_lost_batch(planned)
    if plan is None:
        with manager.measure("policy"):
            plan = plan_of(policy(planned, config), policy_name)
    check_mesh(plan, config)
    config = settled_config(plan, config)
    plan = replace(plan, zero=units_of_storage(config))
    plan = replace(
        plan,
        outputs=settled_wishes(graph, config, plan.outputs),
        dims=split_dim_names(planned, plan),
    )
    check_names(planned, plan)
    check_batch(planned, plan)
    if plan.recompute:
        stages = stage_of_ops(planned, plan) if plan.stages else {}
        planned = manager.run(
            FunctionPass("recompute", lambda g: mark_recompute(g, plan.recompute, stages)), planned
        )
    program: Program | PipelineProgram
    if plan.stages:
        check_end2end(graph)
        program = manager.run(FunctionPass("lower", lambda g: lower_stages(g, plan)), planned)
    else:
        program = manager.run(FunctionPass("lower", lambda g: lower(g, plan)), planned)
    if config.rng == "fast":
        program = manager.run(FunctionPass("draws", draw_pieces), program)
    work = work_share(program) if config.plan_ngpus > 1 else None
    if work is not None and work.is_uneven:
        warn_of_work(graph.name, work)
    with manager.measure("emit"):
        origin = Origin(version, graph.name, plan.policy, digest, unproved(graph))
        files = _emit(program, origin, config)
        files["plan.json"] = plan.dumps()
    return Compiled(program, files, config, manager.report, work)


def warn_of_work(name: str, work: WorkShare) -> None:
    """Say that ranks do much more than their part, and where."""
    warnings.warn(
        f"each rank of {name} does much more than its part: {work}\n"
        f"  why:   {on_lines(work.reasons)}\n"
        "  try:   another policy or mesh; `shardwright inspect` says why operators are not split",
        stacklevel=3,
    )


def _emit(
    program: Program | PipelineProgram, origin: Origin, config: ComputeConfig
) -> dict[str, str]:
    if isinstance(program, Program):
        return emit(
            program,
            origin,
            config.plan_ngpus,
            seed=config.seed,
            rng=config.rng,
            end2end=config.use_end2end,
        )
    train = schedule_of(program)
    infer = inference_like(train)
    return emit_pipeline(
        program, train, infer, origin, config.plan_ngpus, seed=config.seed, rng=config.rng
    )


def check_end2end(graph: IRGraph) -> None:
    """The first result of a pipelined module is its loss, a scalar."""
    first = next((value for _, value in graph.output.leaves() if isinstance(value, IRValue)), None)
    if first is None or first.shape != ():
        raise PlanError(
            "the first result of the model is not a scalar loss",
            why=f"its shape is {tuple(first.shape)}"
            if first is not None
            else "it returns no tensor",
            hint="end2end modules return the loss first, as transformers models do when they are "
            "given labels",
        )


def plan_of(returned: Any, policy_name: str) -> Plan:
    """The plan in what a policy returned."""
    plan = returned.plan if isinstance(returned, PlannableGraph) else returned
    if not isinstance(plan, Plan):
        raise PlanError(
            f"policy {policy_name!r} returned no plan",
            why=f"it returned {type(returned).__name__}",
            hint="return what builder.build() gives, or a Plan",
        )
    return plan


def check_mesh(plan: Plan, config: ComputeConfig) -> None:
    """Refuse a plan for another number of ranks, or with an axis called ``zero`` or by what is no
    name. Raises :class:`PlanError`.
    """
    if plan.mesh.size != config.plan_ngpus:
        raise PlanError(
            "the plan's mesh has another number of ranks than plan_ngpus",
            why=f"mesh {plan.mesh} has {plan.mesh.size}, plan_ngpus={config.plan_ngpus}",
            hint="make the product of the axes equal to plan_ngpus",
        )
    axes = dict.fromkeys(
        axis for mesh in (plan.mesh, *(stage.mesh for stage in plan.stages)) for axis in mesh.names
    )
    for axis in axes:
        if not axis.isidentifier() or unicodedata.normalize("NFKC", axis) != axis:
            raise PlanError(
                f"the plan's mesh has an axis called {axis!r}",
                why="layouts and generated code write the names of axes, so they are identifiers "
                "(in the normal form NFKC)",
                hint="give the axis another name",
            )
    if ZERO in axes:
        raise PlanError(
            f"no axis of a plan's mesh is called {ZERO!r}",
            why="the axis of that name runs over units: along it ZeRO-3 stores parameters in "
            "pieces",
            hint="give the axis another name",
        )


def without_gradients(graph: IRGraph) -> IRGraph:
    """The graph for inference: nothing requires a gradient, so R and G are one and no backward is
    planned.
    """

    def frozen(value: Any) -> Any:
        return (
            replace(value, requires_grad=False, takes_gradient=False)
            if isinstance(value, IRValue)
            else value
        )

    def tree(node: Tree) -> Tree:
        return replace(
            node,
            value=frozen(node.value),
            children=tuple((key, tree(child)) for key, child in node.children),
        )

    return replace(
        graph,
        inputs=tuple(map(frozen, graph.inputs)),
        parameters=tuple(map(frozen, graph.parameters)),
        ops=tuple(
            replace(op.map_args(frozen), results=tuple(map(frozen, op.results))) for op in graph.ops
        ),
        output=tree(graph.output),
        signature=tuple((name, tree(node)) for name, node in graph.signature),
        eval_graph=graph.eval_graph and without_gradients(graph.eval_graph),
    )


def _both(function: Callable[[IRGraph], IRGraph]) -> Callable[[IRGraph], IRGraph]:
    """Apply a pass to the training body and to the evaluation body."""

    def apply(graph: IRGraph) -> IRGraph:
        done = function(graph)
        return replace(done, eval_graph=function(graph.eval_graph)) if graph.eval_graph else done

    return apply
