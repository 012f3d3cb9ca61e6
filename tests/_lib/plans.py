"""Run a plan of a model on ranks that are threads, from the files a compile writes, and hold it to
one device.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layouts
import torch
import zoo
from parity import Reference, assert_close_tree, reference_run, tensors_of
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_trace

from shardwright.compiler.compile import Compiled, annotate, compile_graph, pass_manager
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ops.strategy import allowed, strategies
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.files.module_files import declared
from shardwright.frontend.files.weight_files import initial_values
from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.atoms import Atom
from shardwright.runtime.checkpoint.tensor_files import write_tensors
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest, sha256
from shardwright.runtime.module.weights import CONSTANTS_FILE, WEIGHTS_FILE
from shardwright.runtime.ranks.counters import CommunicationKey, CommunicationVolume
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication


def traced(module: nn.Module, inputs: Mapping[str, Any], **options: Any) -> IRGraph:
    """The graph, with casts to float32 recorded as float64."""
    with float64_casts():
        return trace(module, dict(inputs), **options)


def annotated(graph: IRGraph) -> PlannableGraph:
    return annotate(graph, pass_manager())


@functools.cache
def zoo_traced(name: str, **sizes: int) -> IRGraph:
    """The graph of a model of the zoo on inputs of these sizes. Graphs are immutable: all tests of
    a process share it.
    """
    entry = zoo.get(name)
    with float64_casts():
        return shared_trace(name, entry.build(), entry.inputs(**sizes))


@functools.cache
def zoo_graph(name: str, **sizes: int) -> PlannableGraph:
    """The graph with rules and dims."""
    return annotated(zoo_traced(name, **sizes))


def write(directory: Path, compiled: Compiled, module: nn.Module) -> None:
    """What a compile leaves in a folder, without the rest of ``parallelize``."""
    directory.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, text in compiled.files.items():
        (directory / name).write_text(text)
        digests[name] = sha256(text.encode())
    weights, constants = initial_values(compiled.program.graph, module)
    for name, tensors in ((WEIGHTS_FILE, weights), (CONSTANTS_FILE, constants)):
        digests[name] = write_tensors(directory / name, tensors, flushes=False).sha256
    plan, graph = compiled.plan, compiled.program.graph
    use_order = tuple(value.fqn or value.name for value in graph.used_parameters)
    Manifest(
        "test", graph.name, plan.mesh, plan.policy, digests, declared(compiled), use_order=use_order
    ).write(directory)


@dataclass
class Outcome:
    """What the ranks computed in one step. ``pieces``: by parameter, the gradient of each rank and
    the layout of all.
    """

    loss: Tensor
    pieces: dict[str, tuple[list[Tensor | None], Layout]]
    traffic: list[dict[CommunicationKey, CommunicationVolume]]
    mesh: Mesh

    @functools.cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients put together, as their layouts say. Asserts that ranks that should hold
        copies do.
        """
        return {name: self._whole(*found) for name, found in self.pieces.items()}

    def _whole(self, pieces: list[Tensor | None], layout: Layout) -> Tensor | None:
        if all(piece is None for piece in pieces):
            return None
        shapes = [layout.local_shape(self.mesh, coords) for coords in self.mesh.all_coords()]
        found = [
            torch.zeros(shape, dtype=torch.float64) if p is None else p
            for p, shape in zip(pieces, shapes, strict=True)
        ]
        return layouts.decode(found, Layout(layout.dims, layout.grad_partial, ()), self.mesh)


def run_once(directory: Path, compiled: Compiled, inputs: Mapping[str, Any]) -> Outcome:
    """One forward and backward on all ranks, without the reducer."""
    mesh = compiled.plan.mesh

    def rank(
        index: int,
    ) -> tuple[Tensor, dict[str, Tensor | None], dict[CommunicationKey, CommunicationVolume]]:
        module = load_class(directory)()
        with count_communication() as volume:
            loss = zoo.loss_of(module(**inputs))
            loss.backward()
        grads = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in module.named_parameters()
        }
        return (
            loss.detach(),
            grads,
            {key: total for key, total in volume.items() if key.phase != "setup"},
        )

    with float64_casts():
        results = run_ranks(mesh.size, rank)
    for loss, _, _ in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-12, atol=1e-12)
    declared = {
        d.value.fqn: d.layout for d in compiled.program.declarations if d.value.fqn in results[0][1]
    }
    pieces = {
        str(fqn): ([grads[fqn] for _, grads, _ in results], layout)
        for fqn, layout in declared.items()
    }
    return Outcome(results[0][0], pieces, [traffic for _, _, traffic in results], mesh)


def random_plan(
    graph: PlannableGraph, mesh: Mesh, rng: random.Random, *, in_places: bool = False
) -> Plan:
    """A random strategy for every operator, a random storage for every parameter; ``in_places``:
    axes that cut one dim do so in random orders, which no search tries.
    """
    assignments = {}
    for op in graph.ops:
        assert op.rule is not None
        every = [
            s for s in strategies(op.rule) if allowed(op.rule, dict.fromkeys(mesh.names, s), mesh)
        ]
        found = [s for s in every if s not in ("R", "G")] or every
        assignments[op.name] = {
            axis: rng.choice(found if rng.random() < 0.8 else every) for axis in mesh.names
        }
    stored = {}
    for value in graph.parameters:
        assert value.fqn is not None
        if rng.random() < 0.7:
            stored[value.fqn] = random_storage(value.shape, mesh, rng, value.requires_grad)
    places = random.Random(repr(assignments))  # other draws stay as they are
    for op in graph.ops if in_places else ():
        assert op.rule is not None
        turned = in_random_places(assignments[op.name], places)
        if allowed(op.rule, turned, mesh):
            assignments[op.name] = turned
    return Plan(mesh, assignments, stored, policy="random")


def in_random_places(assignment: Mapping[str, str], rng: random.Random) -> dict[str, str]:
    """Give axes that cut one factor places of their own, now and then."""
    splits = [strategy for strategy in assignment.values() if strategy.startswith("split:")]
    return {
        axis: f"{strategy}@1" if splits.count(strategy) > 1 and rng.random() < 0.3 else strategy
        for axis, strategy in assignment.items()
    }


def random_storage(shape: tuple[int, ...], mesh: Mesh, rng: random.Random, trained: bool) -> Layout:
    dims: list[list[str]] = [[] for _ in shape]
    grad_partial = []
    for axis in rng.sample(mesh.names, len(mesh.names)):
        kind = rng.choice("RGSS")
        if kind == "S" and shape:
            rng.choice(dims).append(axis)
        elif kind == "G" and trained:
            grad_partial.append(axis)
    return Layout(
        tuple((Atom((size,), tuple(axes)),) for size, axes in zip(shape, dims, strict=True)),
        (),
        tuple(sorted(grad_partial)),
    )


def check(
    module: nn.Module,
    inputs: Mapping[str, Any],
    compiled: Compiled,
    directory: Path,
    reference: Reference,
) -> Outcome:
    """Loss and every gradient against one device."""
    write(directory, compiled, module)
    outcome = run_once(directory, compiled, inputs)
    assert_close_tree({"loss": outcome.loss}, {"loss": reference.losses[0][0]})
    ours, wanted = outcome.gradients, reference.gradients
    assert_close_tree(without_none(ours, wanted), without_none(wanted, ours))
    return outcome


def without_none(
    gradients: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Zeros for a gradient that is missing here and not in ``others``: a rank may hold an empty
    piece.
    """
    return {
        name: torch.zeros_like(other)
        if grad is None and (other := others.get(name)) is not None
        else grad
        for name, grad in gradients.items()
    }


def compile_plan(graph: IRGraph, plan: Plan) -> Compiled:
    """Compile with a given plan."""
    config = ComputeConfig(plan_ngpus=plan.mesh.size, runtime_ngpus=plan.mesh.size)
    return compile_graph(graph, lambda g, c: plan, config, policy_name=plan.policy)


def compile_with(
    graph: IRGraph, policy: str | PolicyFunction, num_ranks: int, **options: Any
) -> Compiled:
    """Compile with a policy; ``options`` are further fields of the config."""
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, **options)
    found = find_policy(policy)
    return compile_graph(graph, found.apply, config, policy_name=found.name)


def check_policy(
    module: nn.Module,
    inputs: Mapping[str, Any],
    policy: str | PolicyFunction,
    num_ranks: int,
    directory: Path,
    **options: Any,
) -> tuple[Compiled, Outcome]:
    """Trace, compile with a policy, run all ranks, and hold loss and gradients to one device."""
    compiled = compile_with(traced(module, inputs), policy, num_ranks, **options)
    reference = reference_run(module, [inputs], steps=1)
    return compiled, check(module, inputs, compiled, directory, reference)


__all__ = [
    "Callable",
    "annotated",
    "check",
    "check_policy",
    "compile_plan",
    "compile_with",
    "random_plan",
    "reference_run",
    "run_once",
    "tensors_of",
    "traced",
    "without_none",
    "write",
]
