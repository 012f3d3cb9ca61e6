"""Megatron-LM's published plans beside what autodist finds, both by the audit of the program
emitted.

    python benchmarks/megatron_plans.py [CASE ...]

Cases are the best known settings of Narayanan et al. 2021 ("Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", table 1) and Korthikanti et al. 2022 ("Reducing
Activation Recomputation in Large Transformer Models", table 3): GPT in float16 on A100-80GB nodes
of eight, tensor by pipeline ranks, and units of them side by side. The search gets the same ranks
per unit and the same samples, and may choose everything else: with ``--sizes`` the size of a
microbatch too, and with ``--zero`` the stage of ZeRO, of which the published plans have none. Of
Megatron's plan all forms are audited, with and without sequence parallelism, with full, selective
(the attention core) and no recomputation, and the best that fits is named. Times are CPU seconds of
this process, and so are limits, so that what else runs on the machine changes little;
``published_search.py`` says what else the columns mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron_times import RESIDUAL_STREAM, SEQ, VOCAB, Layer
from published_search import Published, audited, cells, found_for, heading, line
from torch import Tensor, nn

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.trace.entry import trace
from shardwright.policies.autodist.autodist_policy import search_each
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.batch_sizes import batches
from shardwright.policies.autodist.search.subsearches import Subsearches
from shardwright.policies.pipeline_mesh import PipelineOptions, add_stages
from shardwright.runtime.config import ComputeConfig


@dataclass(frozen=True)
class Case:
    """A published setting. ``batch``: of all units; ``chunks``: stages of each pipeline rank."""

    name: str
    layers: int
    hidden: int
    heads: int
    tensor_ranks: int
    pipeline_ranks: int
    chunks: int
    microbatch: int
    batch: int
    gpus: int

    @property
    def unit_ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    @property
    def num_microbatches(self) -> int:
        """The microbatches of one unit."""
        return self.batch * self.unit_ranks // (self.gpus * self.microbatch)

    @property
    def config(self) -> ComputeConfig:
        return ComputeConfig(
            plan_ngpus=self.unit_ranks, runtime_ngpus=self.gpus, use_end2end=True, outputs="loss"
        )


CASES = (
    Case("3.6B", 30, 3072, 32, 2, 1, 1, 16, 512, 64),
    Case("7.5B", 36, 4096, 32, 4, 1, 1, 16, 512, 128),
    Case("18.4B", 40, 6144, 48, 8, 1, 1, 8, 1024, 256),
    Case("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 8),
    Case("39B", 48, 8192, 64, 8, 2, 1, 4, 1536, 512),
    Case("145B", 80, 12288, 96, 8, 8, 1, 2, 2304, 1536),
    Case("175B", 96, 12288, 96, 8, 8, 3, 1, 64, 64),
)

RECOMPUTED = {"full": ("layers.*",), "selective": ("layers.*.core",), "no": ()}


class Gpt(nn.Module):
    """``forward(tokens, positions, labels)``, ``[seq, batch]``, gives the mean loss."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, hidden), nn.Embedding(SEQ, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.token(tokens) + self.position(positions), 0.1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def graph_of(case: Case) -> PlannableGraph:
    with torch.device("meta"):
        model = Gpt(case.layers, case.hidden, case.heads).half()
    tokens = torch.zeros(SEQ, case.microbatch, dtype=torch.long)
    inputs = {
        "tokens": tokens,
        "positions": torch.zeros(SEQ, 1, dtype=torch.long),
        "labels": tokens,
    }
    return annotate(trace(model, inputs), pass_manager())


def megatron_plans(case: Case, graph: PlannableGraph) -> Iterator[tuple[str, Plan]]:
    """The published plan in all its forms: heads, ffn and vocabulary split, equal stages, 1F1B
    (interleaved).
    """
    axes = {"pp": case.pipeline_ranks, "tp": case.tensor_ranks}
    for sequence_parallel in (True, False):
        b = graph.builder(mesh={axis: size for axis, size in axes.items() if size > 1})
        for dim in ("heads", "up_dim", "vocab"):
            b.split(dim, "tp")
        if sequence_parallel:  # the first dim of [seq, batch, hidden] is called batch by its place
            b.split(
                "batch",
                "tp",
                where=lambda op: op.target in RESIDUAL_STREAM and ".core" not in op.module_path,
            )
        for name, again in RECOMPUTED.items():
            title = f"{name} recomputation" + (", sequence parallel" if sequence_parallel else "")
            yield title, _staged(case, graph, replace(b.plan("megatron"), recompute=again))


def _staged(case: Case, graph: PlannableGraph, plan: Plan) -> Plan:
    if case.pipeline_ranks == 1:
        return plan
    num_stages = case.pipeline_ranks * case.chunks
    options = PipelineOptions(
        num_stages=case.pipeline_ranks,
        num_microbatches=case.num_microbatches,
        schedule="1f1b_interleaved" if case.chunks > 1 else "1f1b",
        chunks=case.chunks,
        stage_starts=tuple(
            f"layers.{case.layers * index // num_stages}" for index in range(1, num_stages)
        ),
        recompute=plan.recompute,
    )
    return add_stages(graph, case.config, plan, options, case.pipeline_ranks)


def published(case: Case) -> Published:
    """The plan of a case and the work it is for."""
    graph = graph_of(case)
    chunks = f" x{case.chunks}" if case.chunks > 1 else ""
    return Published(
        f"tp={case.tensor_ranks} pp={case.pipeline_ranks}{chunks}",
        graph,
        case.config,
        load_hardware("a100-80gb", case.gpus),
        case.num_microbatches,
        lambda: megatron_plans(case, graph),
    )


def searched(
    case: Case,
    graph: PlannableGraph,
    hardware: Hardware,
    limit_s: float,
    *,
    sizes: bool,
    zero: bool,
) -> SearchResult:
    """What autodist finds, with what it may choose besides."""
    config = replace(case.config, use_zero="auto") if zero else case.config
    if not sizes:
        options = AutodistOptions(
            num_microbatches=case.num_microbatches, simpler_within=0.0, time_limit_s=limit_s
        )
        return search_each(Subsearches.of({None: graph}, config, None), options, hardware)
    wanted = batches(config, case.batch, None, {"tokens": 1, "labels": 1})
    graphs = {batch: graph_of(replace(case, microbatch=batch.samples)) for batch in wanted}
    options = AutodistOptions(global_batch=case.batch, simpler_within=0.0, time_limit_s=limit_s)
    return search_each(Subsearches.of(graphs, config, None), options, hardware)


def compared(case: Case, limit_s: float, *, sizes: bool, zero: bool) -> str:
    """A row of the table."""
    known = published(case)
    units = f"{case.unit_ranks} x {case.gpus // case.unit_ranks}"
    found = found_for(
        known,
        lambda: searched(case, known.graph, known.hardware, limit_s, sizes=sizes, zero=zero),
    )
    return line([case.name, units, *cells(audited(known), found)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by name (default: all)")
    parser.add_argument(
        "--sizes", action="store_true", help="the search chooses the size of a microbatch"
    )
    parser.add_argument("--zero", action="store_true", help="the search chooses the stage of ZeRO")
    default_s = AutodistOptions.time_limit_s
    parser.add_argument(
        "--limit", type=float, default=default_s, help="CPU seconds for each search"
    )
    args = parser.parse_args()
    time.monotonic = time.process_time  # the time that limits are of
    print(heading(["model", "ranks x units"]), flush=True)
    for case in CASES:
        if not args.cases or case.name in args.cases:
            print(compared(case, args.limit, sizes=args.sizes, zero=args.zero), flush=True)


if __name__ == "__main__":
    main()
