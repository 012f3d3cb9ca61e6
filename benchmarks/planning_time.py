"""How long autodist takes to plan, and how far from optimal its plan can be: a Llama of the 8B
shape on one mesh, and searched.

    python benchmarks/planning_time.py [--quick] [--search] [--three-axes]
    python benchmarks/planning_time.py --short [LAYERS-RANKS-LIMIT ...]

The model is traced on meta, bfloat16, one sequence of 4096 tokens for every rank along the first
axis; the machine is A100-80GB nodes of eight. Times are CPU seconds of this process; tracing is not
counted, everything from the traced graph to the plan is. Without ``--search`` a placement on each
mesh, all axes at once. With it the whole search with pipelines, 64 microbatches.
``--three-axes``: of eight layers, the meshes of up to three axes instead, or the search with
``max_axes=3`` beside that with 2.
``--short``: whole searches, most with limits of a few seconds, each in a process of its own. Their
limits are counted in CPU seconds of that process, too, so that what else runs on the machine
changes little. Some cases may be named, as ``32-8-2``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.trace import trace
from shardwright.policies.autodist.autodist_policy import search, settled
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.placement.place import place
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

logging.set_verbosity_error()  # random weights are meant

CASES = ((2, (8,)), (32, (8,)), (32, (8, 8)), (32, (128, 8)), (126, (8, 8)), (126, (512, 8)))
"""Layers, and sizes of the mesh's axes."""

SEARCHES = ((32, 8, 2), (32, 64, 2))
"""Layers, ranks of a unit, and the most axes of a mesh."""

THREE_AXES = ((8, (2, 4)), (8, (2, 2, 2)), (8, (4, 16)), (8, (4, 4, 4)), (8, (2, 4, 8)))
THREE_AXES_SEARCHES = ((8, 8, 2), (8, 8, 3))

SHORT = (
    *itertools.product((2, 8, 32), (8, 64), (2.0, 5.0, 10.0)),
    *((layers, 64, 20.0) for layers in (8, 32)),
    (32, 64, 120.0),
    (32, 64, 300.0),
)
"""Layers, ranks of a unit, and the limit."""


def llama(num_layers: int) -> nn.Module:
    """A Llama 3 8B with another number of layers, without memory behind its weights."""
    with torch.device("meta"):
        fields = {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        config = LlamaConfig(
            num_hidden_layers=num_layers, vocab_size=128256, use_cache=False, **fields
        )
        return LlamaForCausalLM(config).bfloat16()


def planned_graph(num_layers: int, batch_size: int) -> PlannableGraph:
    ids = torch.zeros(batch_size, 4096, dtype=torch.long)
    return annotate(trace(llama(num_layers), {"input_ids": ids, "labels": ids}), pass_manager())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest two cases only")
    parser.add_argument("--search", action="store_true", help="the whole search, with pipelines")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each case")
    parser.add_argument("--three-axes", action="store_true", help="meshes of up to three axes")
    parser.add_argument(
        "--short",
        nargs="*",
        metavar="LAYERS-RANKS-LIMIT",
        help="whole searches with limits of a few seconds",
    )
    args = parser.parse_args()
    if args.short is not None:
        named = {
            f"{layers}-{ranks}-{limit_s:.0f}": (layers, ranks, limit_s)
            for layers, ranks, limit_s in SHORT
        }
        measure_short([named[name] for name in args.short or named])
    elif args.search:
        searches = THREE_AXES_SEARCHES if args.three_axes else SEARCHES
        measure_searches(searches[:1] if args.quick else searches, args.limit)
    else:
        cases = THREE_AXES if args.three_axes else CASES
        measure_placements(cases[:2] if args.quick else cases, args.limit)


def measure_placements(cases: tuple[tuple[int, tuple[int, ...]], ...], limit_s: float) -> None:
    print("| layers | mesh | CPU s | wall s | step | gap | |\n|---|---|---|---|---|---|---|")
    for num_layers, sizes in cases:
        graph = planned_graph(num_layers, sizes[0])
        mesh = Mesh(tuple(zip(("x", "y", "z"), sizes, strict=False)))
        config = ComputeConfig(plan_ngpus=mesh.size, runtime_ngpus=mesh.size, outputs="loss")
        hardware = load_hardware("a100-80gb", mesh.size)
        began, cpu = time.perf_counter(), time.process_time()
        ranks = tuple(range(mesh.size))
        found = place(
            PlacementRequest(
                graph, mesh, ranks, hardware, config, time_limit_s=limit_s, outputs={"logits": None}
            )
        )
        took = f"{time.process_time() - cpu:.1f} | {time.perf_counter() - began:.1f}"
        if isinstance(found, Infeasible):
            print(f"| {num_layers} | {mesh} | {took} | | | {found.reason} |")
        else:
            print(
                f"| {num_layers} | {mesh} | {took} | {found.cost_s * 1e3:.1f} ms | "
                f"{found.gap:.2%} | {found.proof} |",
                flush=True,
            )


def measure_searches(cases: tuple[tuple[int, int, int], ...], limit_s: float) -> None:
    print(
        "| layers | ranks | axes | CPU s | wall s | step | gap | plan "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for num_layers, num_ranks, max_axes in cases:
        graph = planned_graph(num_layers, 8)
        config = ComputeConfig(
            plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True, outputs="loss"
        )
        hardware = load_hardware("a100-80gb", num_ranks)
        began, cpu = time.perf_counter(), time.process_time()
        options = AutodistOptions(
            num_microbatches=64, max_axes=max_axes, simpler_within=0.0, time_limit_s=limit_s
        )
        found = search(graph, config, options, hardware)
        certificate = settled(found, config, hardware).certificate
        took = f"{time.process_time() - cpu:.1f} | {time.perf_counter() - began:.1f}"
        assert certificate is not None and found.best is not None
        step = f"{certificate.cost_s:.3f} s | {certificate.gap:.2%}"
        print(
            f"| {num_layers} | {num_ranks} | {max_axes} | {took} | {step} | {found.best.title} |",
            flush=True,
        )


def measure_short(cases: Sequence[tuple[int, int, float]]) -> None:
    """``left out``: meshes whose plans of simple policies there was no time to compare with, as the
    certificate says.
    """
    print(
        "| layers | ranks | limit | took | step, audited | bound | left out | plan "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for num_layers, of_layers in itertools.groupby(sorted(cases), key=lambda case: case[0]):
        graph = planned_graph(num_layers, 8)
        for case in of_layers:
            process = multiprocessing.get_context("fork").Process(
                target=_measure_short, args=(graph, *case)
            )
            process.start()
            process.join()
            assert process.exitcode == 0, case


def _measure_short(graph: PlannableGraph, num_layers: int, num_ranks: int, limit_s: float) -> None:
    """One search, in a process of its own."""
    time.monotonic = time.process_time  # the time that limits are of
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True, outputs="loss"
    )
    hardware = load_hardware("a100-80gb", num_ranks)
    began = time.process_time()
    found = search(
        graph,
        config,
        AutodistOptions(num_microbatches=64, simpler_within=0.0, time_limit_s=limit_s),
        hardware,
    )
    certificate = settled(found, config, hardware).certificate
    took_s = time.process_time() - began
    assert certificate is not None and found.best is not None
    step = f"{certificate.cost_s:.3f} s | {certificate.bound_s:.3f} s | {len(found.not_compared)}"
    print(
        f"| {num_layers} | {num_ranks} | {limit_s:.0f} | {took_s:.1f} | {step} | "
        f"{found.best.title} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
