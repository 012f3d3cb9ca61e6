"""The compile itself: the list of passes from a traced graph to the files of all ranks. It touches
neither weights nor disks nor processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.codegen.emit import class_name
from shardwright.compiler.codegen.emit_files import Emit, EmittedFiles, print_files, verify_files
from shardwright.compiler.cost.gathered_outputs import GatheredOutputs, gathered_outputs
from shardwright.compiler.cost.work_share import WorkShare, work_share
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.ops.proof import unproved
from shardwright.compiler.ops.render import imports_of, names_bound
from shardwright.compiler.pass_manager import AnyPass, CompileReport, FunctionPass, PassManager
from shardwright.compiler.passes.attention_marks import with_marks
from shardwright.compiler.passes.decide import Decide, PolicyFunction
from shardwright.compiler.passes.finish import finishing
from shardwright.compiler.passes.identities import without_identities
from shardwright.compiler.passes.lower_planned import lower_planned
from shardwright.compiler.passes.lower_stages import verify_pipeline
from shardwright.compiler.passes.print_program import print_pipeline, print_program
from shardwright.compiler.passes.recompute_regions import mark_planned
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.passes.settle import SettleInputs, SettleOutputs, SettleZero
from shardwright.compiler.passes.summed_gradients import mark_summed_gradients
from shardwright.compiler.passes.unify_dims import infer_dims
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.passes.without_gradients import without_gradients
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import check_batch, check_names
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.compiler.plan.zero import settled_config
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import format_error, on_lines


@dataclass(frozen=True)
class Compiled:
    """What a compile makes. ``files``: ``gencode<rank>.py`` for every plan rank, and ``plan.json``.
    ``config``: what it was asked for, with what that leaves to the plan. ``work``: which part of
    one device's arithmetic each of several ranks does.
    """

    program: Program | PipelineProgram
    files: Mapping[str, str]
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
            PlannableGraph: _verify_planned,
            Program: verify_program,
            PipelineProgram: verify_pipeline,
            EmittedFiles: verify_files,
        },
        printers={
            IRGraph: print_graph,
            PlannableGraph: _print_planned,
            Program: print_program,
            PipelineProgram: print_pipeline,
            EmittedFiles: print_files,
        },
        **options,
    )


def _verify_planned(graph: PlannableGraph) -> None:
    # Of the passes that know a plan, only recompute changes the graph beside it.
    if graph.plan is None or graph.plan.recompute:
        verify(graph)
    if graph.plan is not None:
        check_names(graph, graph.plan)
        check_batch(graph, graph.plan)


def _print_planned(graph: PlannableGraph) -> str:
    plan = "" if graph.plan is None else f"plan {graph.plan.dumps()}"
    return print_graph(graph) + plan


def _in_both_modes(function: Callable[[IRGraph], IRGraph]) -> Callable[[IRGraph], IRGraph]:
    """Apply a pass to the training body and to the evaluation body."""

    def apply(graph: IRGraph) -> IRGraph:
        done = function(graph)
        return replace(done, eval_graph=function(graph.eval_graph)) if graph.eval_graph else done

    return apply


ANNOTATE: tuple[AnyPass, ...] = (
    FunctionPass("identities", _in_both_modes(without_identities)),
    FunctionPass("attention", _in_both_modes(with_marks)),
    FunctionPass("rules", _in_both_modes(lambda graph: mark_summed_gradients(attach_rules(graph)))),
    FunctionPass("dims", lambda graph: PlannableGraph.of(_in_both_modes(infer_dims)(graph))),
)
"""The passes that leave out what computes nothing, read masks of attention, and say of every
operator what its dims are: what policies see.
"""


def annotate(graph: IRGraph, manager: PassManager) -> PlannableGraph:
    """The graph with rules and dims, and without identities: what policies see. One that has them
    is returned as it is.
    """
    if isinstance(graph, PlannableGraph):
        return graph
    annotated = manager.run_all(ANNOTATE, graph)
    assert isinstance(annotated, PlannableGraph)
    return annotated


def passes(graph: IRGraph, decide: Decide, emit: Emit) -> tuple[AnyPass, ...]:
    """The passes of a compile, in order. Each is verified, timed and, with ``dump=DIR``, written
    down.

    A graph that policies can read already (:class:`PlannableGraph`) has its rules and dims.
    """
    config = decide.config
    inference: tuple[AnyPass, ...] = (FunctionPass("inference", without_gradients),)
    return (
        FunctionPass("name", _with_class_name),
        *(inference if config.inference_only else ()),
        # Who searched for a plan has annotated the graph already.
        *(() if isinstance(graph, PlannableGraph) else ANNOTATE),
        decide,
        SettleZero(config),
        SettleInputs(config),
        SettleOutputs(config),
        FunctionPass("recompute", mark_planned),
        FunctionPass("lower", lower_planned),
        *finishing(config),
        emit,
    )


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
    decide = Decide(policy, policy_name, config, plan)
    emit = Emit(config, version, digest, unproved(graph))
    emitted: EmittedFiles = manager.run_all(passes(graph, decide, emit), graph)
    program = emitted.program
    work = work_share(program) if config.plan_ngpus > 1 else None
    if work is not None and work.is_uneven:
        warn_of_work(program.graph.name, work)
    outputs = gathered_outputs(program, config) if config.plan_ngpus > 1 else None
    if outputs is not None and outputs.is_worth_saying:
        warn_of_outputs(program.graph.name, outputs)
    settled = settled_config(program.plan, config)
    return Compiled(program, emitted.files, settled, manager.report, work)


MUCH_MORE = "does much more than its part"
"""What is said of a rank with more than an even share of the work."""


def warn_of_work(name: str, work: WorkShare) -> None:
    """Say that ranks do much more than their part, and where."""
    warnings.warn(uneven_work(name, work), stacklevel=3)


def uneven_work(name: str, work: WorkShare) -> str:
    """What is said of a model whose ranks do much more than their part, and where they do."""
    return format_error(
        f"each rank of {name} {MUCH_MORE}: {work}",
        why=on_lines(work.reasons),
        hint="another policy or mesh; `shardwright inspect` says why operators are not split",
    )


def warn_of_outputs(name: str, outputs: GatheredOutputs) -> None:
    """Say what it costs that a model without a loss gives its outputs whole."""
    path = max(outputs.of, key=lambda path: outputs.of[path])
    warnings.warn(
        f"to make the outputs of {name} whole, each rank receives in every step {outputs}\n"
        "  why:   no output is a loss, so a loss outside of the model may need all of them\n"
        f"  try:   ComputeConfig(outputs={{{path!r}: 'sharded'}}) leaves it in pieces, 'whole' "
        "asks for this, and a model that returns its loss gathers nothing",
        stacklevel=3,
    )


def _with_class_name(graph: IRGraph) -> IRGraph:
    """The graph under the name of the class that is generated, which no import may hide."""
    imported = names_bound(
        statement for body in graph.bodies for op in body.ops for statement in imports_of(op)
    )
    name = class_name(graph.name, imported)
    return graph if name == graph.name else replace(graph, name=name)
