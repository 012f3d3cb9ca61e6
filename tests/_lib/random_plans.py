"""Random good plans, compiled and so verified: on one mesh, in pieces over units, or in stages on
meshes of different sizes. Those on one mesh can be run, and held to one device.
"""

from __future__ import annotations

import functools
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import zoo
from layouts import in_random_turns
from museum_models import CASES

from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

FLAT = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3})
MUSEUM = ("tp", "experts", "norm", "pipeline")
"""Cases of the museum, one for each of its models."""
MODELS = (
    *(f"museum {name}" for name in MUSEUM),
    *("gpt2", "llama", "mlp", "gpt2-uneven", "resnet", "llama-uneven", "encoder-decoder", "unet"),
)
KINDS = ("flat", "flat", "zero", "stages")


@functools.cache
def graph_of(name: str) -> PlannableGraph:
    """The annotated graph of a model of the zoo, or of the museum."""
    if not name.startswith("museum "):
        return plans.zoo_graph(name)
    module, inputs = CASES[name.removeprefix("museum ")].model()
    return plans.annotated(plans.traced(module.double(), inputs))


def compile_random(name: str, seed: int) -> Compiled:
    """Compile and verify the random plan of that seed.

    Raises :class:`PlanError` for stages that cannot be cut there, such as through a buffer that
    changes.
    """
    rng, graph = random.Random(f"{name} {seed}"), graph_of(name)
    kind = KINDS[seed % len(KINDS)]
    units = 2 if kind == "zero" else 1
    plan = _in_stages(graph, rng) if kind == "stages" else _flat(graph, rng)
    config = ComputeConfig(
        plan_ngpus=plan.mesh.size,
        runtime_ngpus=plan.mesh.size * units,
        use_zero=3 if kind == "zero" else 0,
        use_end2end=kind == "stages",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random plans leave much work undivided
        return compile_graph(graph, lambda g, c: plan, config, policy_name="random")


def _flat(graph: PlannableGraph, rng: random.Random) -> Plan:
    mesh = in_random_turns(Mesh.of(rng.choice(FLAT)), rng)
    return plans.random_plan(graph, mesh, rng, in_places=True)


def _in_stages(graph: PlannableGraph, rng: random.Random) -> Plan:
    """Two or three stages of one to three ranks each, beginning at random operators."""
    sizes = [rng.choice((1, 2, 2, 3)) for _ in range(rng.choice((2, 2, 3)))]
    names = [op.name for op in graph.ops]
    starts = sorted(rng.sample(range(1, len(names)), len(sizes) - 1))
    stages, strategies, begin = [], {}, 0
    for first, end, size in zip([0, *starts], [*starts, len(names)], sizes, strict=True):
        mesh = Mesh.of({"a": size})
        chosen = plans.random_plan(graph, mesh, rng).strategies
        strategies |= {name: chosen[name] for name in names[first:end]}
        ranks = tuple(range(begin, begin + size))
        stages.append(StagePlan(names[first] if first else "", mesh, ranks))
        begin += size
    plan = Plan(Mesh.of({"rank": begin}), strategies, stages=tuple(stages), policy="random")
    return replace(plan, schedule="1f1b", num_microbatches=len(sizes))


def refused(name: str, seed: int) -> str | None:
    """The reason why the plan of that seed is none, or nothing once it is compiled and verified."""
    try:
        compile_random(name, seed)
    except PlanError as error:
        return error.what
    return None


@functools.cache
def _prepared(name: str) -> tuple[Any, ...]:
    """A model of the zoo, its inputs, its graph, and what one device computes."""
    entry = zoo.get(name)
    model, inputs = entry.build(), entry.inputs()
    return model, inputs, plans.zoo_graph(name), plans.reference_run(model, [inputs], steps=1)


def run_random(name: str, seed: int, directory: Path) -> None:
    """Hold the loss and all gradients under the random plan of that seed, on one mesh, to those of
    one device.

    Raises :class:`AssertionError` that names model, mesh and seed.
    """
    model, inputs, graph, reference = _prepared(name)
    plan = _flat(graph, random.Random(f"{name} {seed}"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = plans.compile_plan(graph, plan)
            plans.check(model, inputs, compiled, directory / f"{name}-{seed}", reference)
    except Exception as error:
        raise AssertionError(f"random plan of {name} on {plan.mesh}, seed {seed}") from error
