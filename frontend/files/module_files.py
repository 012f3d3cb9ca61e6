"""Make the files of one module, or find them made: what :func:`shardwright.parallelize` does on one
process.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import __version__
from shardwright.compiler.collector import only_new_objects
from shardwright.compiler.compile import Compiled, compile_graph, pass_manager
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.serialize import digest
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.fingerprint import operator_digests
from shardwright.compiler.ops.proof import prove_operators
from shardwright.compiler.pass_manager import CompileReport, FunctionPass, PassManager
from shardwright.compiler.passes.decide import plan_of
from shardwright.compiler.passes.fold import fold_constants
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import input_paths
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.compiler.trace import trace
from shardwright.compiler.trace.context.autocast_regions import no_autocast
from shardwright.frontend.files.cache import (
    PLAN_FILE,
    Request,
    Stored,
    describe_inputs,
    read_plan,
    read_proofs,
    store,
    store_proofs,
    store_weights,
    weights_match,
)
from shardwright.frontend.files.locks import directory_lock
from shardwright.frontend.files.module_source import ModuleSource, in_dtype
from shardwright.frontend.files.weight_files import Tensors, initial_values
from shardwright.policies.policy import Policy, PolicyFunction
from shardwright.runtime.activity import activity
from shardwright.runtime.config import ComputeConfig, ReuseType
from shardwright.runtime.errors import ConfigError, PlanError, format_error
from shardwright.runtime.input_readers import InputReader, plain_sizes
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.manifest import Manifest, sha256
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.declarations import Declaration, Kind
from shardwright.runtime.module.weights import CONSTANTS_FILE, WEIGHTS_FILE


@dataclass(frozen=True)
class Order:
    """What is to be made. ``dump``: a folder for the forms of the program between the passes.
    ``like``: the folder of a program on whose tensors this one will run. It stores them as that one
    does, and has no initial weights of its own. ``path``: of the submodule of that one's module
    which is compiled.
    """

    source: ModuleSource
    dummy_args: Mapping[str, Any]
    policy: Policy
    config: ComputeConfig
    directory: Path
    reuse: ReuseType = ReuseType.MATCH
    module_dtype: torch.dtype | None = None
    dump: Path | None = None
    like: Path | None = None
    path: str = ""

    def trace(self, module: nn.Module) -> IRGraph:
        """The graph of a module on the dummy arguments."""
        return trace(
            module,
            self.dummy_args,
            dynamic_dims=self.config.dim_symbols(),
            constants=self.config.constants,
        )


@dataclass(frozen=True)
class Generated:
    """The result of making files. ``made``: what was written: ``"code"`` (and weights that differ),
    ``"weights"``, or ``"nothing"``.
    """

    directory: Path
    manifest: Manifest
    made: str
    report: CompileReport


def generate(order: Order) -> Generated:
    """Trace the module and make its files, or find that they are there.

    Raises :class:`ConfigError` if ``reuse`` is MATCH and the directory holds something else, and
    whatever the compile raises; the directory is then as it was.
    """
    with only_new_objects(), activity(f"compiling {order.source.cls.__name__}"):
        return _generated(order)


def _generated(order: Order) -> Generated:
    manager = pass_manager(dump=order.dump)
    # The module is made, cast and traced; from then on only the graph counts.
    module = order.source.make()
    with in_dtype(module, order.module_dtype):
        graph = manager.run(FunctionPass("trace", order.trace), module)
    # The graph has its regions; what is computed from here on is no part of the model.
    with no_autocast():
        # Weights and constants as they are now; their digests are compared below.
        if order.config.constant_folding:
            graph = manager.run(FunctionPass("fold", fold_constants), graph)
        weights, constants = initial_values(graph, module)
        if order.like is not None:
            weights = type(weights)()
        tensors = {WEIGHTS_FILE: weights, CONSTANTS_FILE: constants}
        files = {str(path): sha256(path.read_bytes()) for path in order.policy.files(order.config)}
        if order.like is not None:
            files["the first program"] = Manifest.read(order.like).key
        operators = operator_digests(graph)
        name, config = order.policy.name, order.config
        request = Request(
            digest(graph),
            config,
            name,
            __version__,
            inputs=describe_inputs(graph),
            files=files,
            operators=operators,
        )
        # One process at a time looks, proves and writes.
        with directory_lock(order.directory):
            proofs = _prove(graph, order, request, manager)
            generated = _make_or_find(order, module, graph, request, tensors, manager)
            store_proofs(order.directory, proofs)
        return generated


def _prove(graph: IRGraph, order: Order, request: Request, manager: PassManager) -> list[str]:
    """Prove what ``register_op`` was told, as far as it was not proved before. One rank alone
    splits nothing.
    """
    if not request.operators or order.config.plan_ngpus == 1:
        return []
    with manager.measure("prove"):
        return prove_operators(graph, read_proofs(order.directory), request.source)


def _make_or_find(
    order: Order,
    module: nn.Module,
    graph: IRGraph,
    request: Request,
    tensors: Mapping[str, Tensors],
    manager: PassManager,
) -> Generated:
    stored = Stored.read(order.directory)
    # ``match`` and ``moo`` look for files; ``override`` and ``graph`` do not.
    may_reuse = order.reuse in (ReuseType.MATCH, ReuseType.MOO)
    if order.reuse is ReuseType.MATCH and stored.problem:
        raise stored.problem
    found = may_reuse and stored.matches(request)
    if order.reuse is ReuseType.MATCH and not found and not stored.is_empty:
        raise _different(
            order, request.differences(stored.manifest.request if stored.manifest else {})
        )
    compiled = None
    if found and not order.policy.built_in:  # the user's function may decide differently this time
        compiled = _compile(order, module, graph, request, manager)
        assert stored.manifest is not None
        found = sha256(compiled.files[PLAN_FILE].encode()) == stored.manifest.files.get(PLAN_FILE)
        if not found and order.reuse is ReuseType.MATCH:
            raise _different(order, f"policy {order.policy.name} made another plan")
    # The code is right; only the initial values may differ.
    if found:
        assert stored.manifest is not None
        if order.dump is not None and compiled is None:
            warnings.warn(
                format_error(
                    f"{order.dump} has the traced graph alone",
                    why=f"{order.directory} has the files already, so no other form was made",
                    hint="reuse='override' (--reuse override) compiles again and writes every form",
                ),
                stacklevel=2,
            )
        if compiled is None and order.like is None:
            order.policy.reused(order.config, read_plan(order.directory))
        with manager.measure("weights"):
            if weights_match(stored, tensors):
                return Generated(order.directory, stored.manifest, "nothing", manager.report)
            manifest = store_weights(stored, tensors)
        return Generated(order.directory, manifest, "weights", manager.report)
    compiled = compiled or _compile(order, module, graph, request, manager)
    if order.reuse is ReuseType.OVERRIDE:
        # Without its manifest nothing of the folder counts as known, so weights are written anew
        # too.
        stored = replace(stored, manifest=None)
    with manager.measure("write"):
        manifest = store(stored, _manifest(compiled, request), compiled.files, tensors)
    return Generated(order.directory, manifest, "code", manager.report)


def _compile(
    order: Order, module: nn.Module, graph: IRGraph, request: Request, manager: PassManager
) -> Compiled:
    plan = None
    if order.like is None and order.policy.takes_traces(order.config):
        # Imported for those that search: solvers take longer to import than a small model takes to
        # compile.
        search = import_module("shardwright.frontend.search_plan")
        with manager.measure("policy"):
            plan = search.search_plan(
                module, order.dummy_args, order.config, module_dtype=order.module_dtype
            ).plan
    apply = order.policy.apply
    if order.like is not None:
        apply = _deciding_like(order.policy, order.like, order.path)
    compiled = compile_graph(
        graph,
        apply,
        order.config,
        policy_name=order.policy.name,
        digest=request.key(),
        version=request.shardwright_version,
        plan=plan,
        manager=manager,
    )
    _check_rank_order(compiled.plan.mesh, order.config.rank_order)
    return compiled


def _deciding_like(policy: Policy, like: Path, path: str) -> PolicyFunction:
    """The policy, with parameters and buffers stored as another program has them."""

    def decide(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        first, names = read_plan(like), {v.fqn for v in (*graph.parameters, *graph.buffers)}
        stored = {n: one for n, one in _stored_in(like, path).items() if n in names}
        own = config if first.stages else policy.following(config, first, stored)
        plan = plan_of(policy.apply(graph, own), policy.name)
        _check_like(plan, first)
        return replace(plan, stored={**plan.stored, **stored})

    return decide


def _check_like(plan: Plan, first: Plan) -> None:
    """Raise :class:`PlanError` for pipelines, and for a plan on another mesh than the first one."""
    if plan.stages or first.stages:
        raise PlanError(
            "a pipeline has one program, and several sets of dummy arguments were given",
            why="every program would have stages of its own, with other parameters on a rank",
            hint="name the sizes that vary in ComputeConfig(dynamic_dims=...), compile each set "
            "under an instance_name of its own, or take a policy without stages",
        )
    if plan.mesh != first.mesh:
        raise PlanError(
            "several programs of one module need plans on one mesh",
            why=f"the plan for these dummy arguments is on {plan.mesh}, the first one's on "
            f"{first.mesh}",
            hint="name the mesh in pas_config, or take another policy",
        )


def _stored_in(like: Path, path: str) -> dict[str, Layout]:
    """How another program stores its tensors, or those of its submodule at ``path``, by name."""
    tensors = Manifest.read(like).tensors
    prefix = f"{path}." if path else ""
    # ZeRO-3 cuts over the units once more, as it did for the first program.
    stored = {}
    for tensor in tensors.values():
        if tensor.kind == "constant":
            continue
        for name in tensor.names:
            if name.startswith(prefix):
                stored[name.removeprefix(prefix)] = _inside_units(tensor.layout)
    return stored


def _inside_units(layout: Layout) -> Layout:
    """The layout without the cut over units."""
    dims = (
        tuple(replace(atom, axes=tuple(a for a in atom.axes if a != ZERO)) for atom in atoms)
        for atoms in layout.dims
    )
    return replace(layout, dims=tuple(dims))


def _check_rank_order(mesh: Mesh, rank_order: str | None) -> None:
    """Axes that the order names and the mesh lacks have one rank."""
    if rank_order is None:
        return
    asked = tuple(name for name in rank_order.split("-") if name in mesh.names)
    if asked != mesh.names:
        raise PlanError(
            "the plan's mesh does not follow rank_order",
            why=f"rank_order is {rank_order!r}, the axes of the mesh are "
            f"{'-'.join(mesh.names)!r}, major to minor",
            hint="leave rank_order out, or use a policy that builds its mesh in this order",
        )


def _different(order: Order, why: str) -> ConfigError:
    return ConfigError(
        f"{order.directory} holds files of another compile",
        why=why,
        hint="reuse='moo' compiles again whenever something changed, reuse='override' always; "
        "another instance_name keeps both",
    )


def _manifest(compiled: Compiled, request: Request) -> Manifest:
    plan = compiled.plan
    return Manifest(
        key=request.key(),
        class_name=compiled.program.graph.name,
        mesh=plan.mesh,
        policy=plan.policy,
        files={},
        tensors=declared(compiled),
        request=request.to_json(),
        use_order=tuple(
            value.fqn or value.name for value in compiled.program.graph.used_parameters
        ),
        zero_stage=plan.zero_stage if request.config.leaves_zero_to_plan else None,
        work=None if compiled.work is None else compiled.work.to_json(),
        inputs=input_readers(compiled.program),
    )


def input_readers(program: Program | PipelineProgram) -> tuple[InputReader, ...]:
    """Which ranks of a unit read which tensor of a sample, in the order of the arguments, then of
    the stages.
    """
    if isinstance(program, Program):
        mesh, everyone = program.plan.mesh, tuple(range(program.plan.mesh.size))
        return tuple(
            InputReader(path, everyone, mesh, plain_sizes(program.input_layouts[value.name]))
            for path, value in input_paths(program.graph).items()
        )
    found: dict[tuple[str, int], InputReader] = {}
    for body in program.bodies:
        for path, value in input_paths(body.graph).items():
            for stage, own, plan in zip(body.stages, body.programs, body.plan.stages, strict=True):
                if value.name in {read.name for read in stage.reads}:
                    layout = plain_sizes(own.input_layouts[value.name])
                    reader = InputReader(path, plan.ranks, plan.mesh, layout)
                    # Training and evaluation read alike; the training body comes first.
                    found.setdefault((path, stage.index), reader)
    return tuple(found.values())


def declared(compiled: Compiled) -> dict[str, Declaration]:
    """The tensors of all ranks together, by name, as a manifest lists them."""
    made = (
        _declaration(declaration.value, declaration.layout) for declaration in compiled.declarations
    )
    return {declaration.name: declaration for declaration in made}


def _declaration(value: IRValue, layout: Layout) -> Declaration:
    kinds: dict[ValueKind, Kind] = {ValueKind.PARAMETER: "parameter", ValueKind.BUFFER: "buffer"}
    kind = kinds.get(value.kind, "constant")
    return Declaration(
        name=value.fqn or value.name,
        kind=kind,
        layout=layout,
        dtype=value.dtype,
        aliases=value.aliases,
        persistent=value.persistent and kind != "constant",
        requires_grad=value.requires_grad and kind == "parameter",
    )
