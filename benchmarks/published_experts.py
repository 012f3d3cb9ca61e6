"""Published plans of mixtures of experts beside what autodist finds, both by the audit of the
program emitted.

    python benchmarks/published_experts.py [ROW ...] [--limit 600]

``published/runs.csv`` has the rows: NVIDIA's tables of Megatron-Bridge (github.com/NVIDIA-NeMo/
Megatron-Bridge, docs/performance-summary-archive.md, containers 25.09 and 25.11), pretraining, no
context parallelism, ZeRO-1. Routing is forced to be balanced there, so that ``imbalance`` is 1 on
both sides. Rows whose plan, sizes and machine are those of an earlier row are left out, as what
differs (precision, container) is not priced: everything here is bfloat16.

A unit has the ranks of one copy of all experts. The search gets the same ranks per unit, the same
size and number of microbatches and the same stage of ZeRO, and may choose everything else. Of the
published plan all forms are audited, with no, full, or the attention's recomputation, and with and
without sequence parallelism where there is tensor parallelism; the best that fits is named. Where
none fits, the one with the least memory is, in brackets. Everything is priced, nothing is run.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fused_kernels import one_rotary_kernel
from published_models import qwen3
from published_runs import PRESETS, hardware_of, over_nodes
from published_search import Published, audited, cells, found_for, heading, line
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    logging,
)

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.trace.entry import trace
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

logging.set_verbosity_error()  # nothing is said of random weights

ROWS = Path(__file__).parent / "published" / "runs.csv"
GPUS = ("H100", "GB200")
"""The GPUs whose rows are compared."""
LIMIT_S = AutodistOptions.time_limit_s
RECOMPUTED = {"no": (), "attention": ("model.layers.*.self_attn",), "full": ("model.layers.*",)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3_30B_a3B": lambda: qwen3(48, 2048, 32, 768),
    "Qwen3_235B_a22B": lambda: qwen3(94, 4096, 64, 1536),
    "DeepSeekV3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config()),
    "GPT OSS 120B": lambda: GptOssForCausalLM(GptOssConfig()),
}


@dataclass(frozen=True)
class Row:
    """A published run. ``chunks``: stages of each pipeline rank; ``microbatch``: samples of one
    data-parallel rank; ``batch``: those of a step.
    """

    name: str
    model: str
    gpu: str
    gpus: int
    tp: int
    pp: int
    ep: int
    chunks: int
    microbatch: int
    batch: int
    seq: int

    @classmethod
    def read(cls, row: dict[str, str]) -> Row:
        names = ("gpus", "tp", "pp", "ep", "vp", "mbs", "gbs", "seq")
        return cls(row["id"], row["model"], row["gpu"], *(int(row[name]) for name in names))

    @property
    def stage_ranks(self) -> int:
        """The ranks of a pipeline stage that hold all experts once."""
        return max(self.tp, self.ep)

    @property
    def dp(self) -> int:
        """The ranks of a unit's stage that share a microbatch."""
        return self.stage_ranks // self.tp

    @property
    def num_microbatches(self) -> int:
        return self.batch * self.tp * self.pp // (self.gpus * self.microbatch)

    @property
    def config(self) -> ComputeConfig:
        """Without the options of a policy."""
        return ComputeConfig(
            plan_ngpus=self.pp * self.stage_ranks,
            runtime_ngpus=self.gpus,
            use_end2end=True,
            outputs="loss",
            use_zero=1,
        )

    @property
    def plan_text(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        text = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        return text + (f" x{self.chunks}" if self.chunks > 1 else "")


def known_rows() -> list[Row]:
    """The rows of these GPUs, one for each plan."""
    with ROWS.open() as file:
        rows = [
            Row.read(row)
            for row in csv.DictReader(file)
            if row["experts"] and row["source"].endswith("/Megatron-Bridge")
        ]
    kept: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.gpu in GPUS:
            kept.setdefault((row.model, row.gpu, row.gpus, row.plan_text, row.microbatch), row)
    return list(kept.values())


def graph_of(row: Row) -> PlannableGraph:
    """The model for a microbatch of one unit, of which the loss is wanted; its tokens are chosen
    evenly.
    """
    with torch.device("meta"):
        model = MODELS[row.model]().to(torch.bfloat16)
    tokens = torch.zeros(row.microbatch * row.dp, row.seq, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    with one_rotary_kernel():
        graph = annotate(trace(model, inputs), pass_manager())
    return PlannableGraph.of(needed(with_imbalance(graph, 1.0), row.config))


def published_plans(row: Row, graph: PlannableGraph) -> Iterator[tuple[str, Plan]]:
    """The published plan in all its forms."""
    for sequence_parallel in (True, False) if row.tp > 1 else (False,):
        for name, again in RECOMPUTED.items():
            options = {
                "num_stages": row.pp,
                "dp": row.dp,
                "tp": row.tp,
                "ep": over_nodes(row.ep, row.gpu),
                "num_microbatches": row.num_microbatches,
                "hardware": PRESETS[row.gpu],
                "recompute": again,
                "sequence_parallel": sequence_parallel,
            }
            if row.chunks > 1:
                options |= {"schedule": "1f1b_interleaved", "chunks": row.chunks}
            config = replace(row.config, pas_config=options)
            title = f"{name} recomputation" + (", sequence parallel" if sequence_parallel else "")
            yield title, find_policy("hybrid").apply(graph, config)


def published(row: Row) -> Published:
    """The plan of a row and the work it is for."""
    graph = graph_of(row)
    return Published(
        row.plan_text,
        graph,
        row.config,
        hardware_of(row.gpu, row.gpus),
        row.num_microbatches,
        lambda: published_plans(row, graph),
    )


def compared(row: Row, limit_s: float) -> str:
    """A row of the table."""
    known = published(row)
    options = AutodistOptions(
        num_microbatches=row.num_microbatches,
        time_limit_s=limit_s,
        imbalance=1.0,
        simpler_within=0.0,
        hardware=PRESETS[row.gpu],
    )
    found = found_for(known, lambda: search(known.graph, row.config, options, known.hardware))
    own = [row.name, row.model, f"{row.gpus} {row.gpu}"]
    return line([*own, *cells(audited(known), found)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="by number (default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="CPU seconds for each search")
    arguments = parser.parse_args()
    time.monotonic = time.process_time  # the time that limits are of
    torch.set_num_threads(1)
    print(heading(["row", "model", "GPUs"]), flush=True)
    rows = {row.name: row for row in known_rows()}
    for name in arguments.rows or rows:
        print(compared(rows[name], arguments.limit), flush=True)


if __name__ == "__main__":
    main()
