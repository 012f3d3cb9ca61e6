"""Published runs as rows, and the programs of their plans.

A row says a model, a plan and what was measured. :func:`program_of` compiles that plan for that
model as the generated files would run it, on tensors without memory. Units (copies of the plan) and
microbatches change no program of a mesh, so rows that differ in nothing else share it.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fused_kernels import one_rotary_kernel
from published_models import KNOWN_SIZES, Sizes, family_of, on_meta

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.decide import Decide
from shardwright.compiler.passes.gathers import GatherTogether
from shardwright.compiler.passes.lower_planned import lower_planned
from shardwright.compiler.passes.recompute_regions import mark_planned
from shardwright.compiler.passes.settle import SettleInputs, SettleOutputs, SettleZero
from shardwright.compiler.passes.start_early import Overlap
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.trace.entry import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


@dataclass(frozen=True)
class Row:
    """A published run.

    ``study``: a source and a kind of device: what is fitted and counted together. ``precision``:
    of products (``bfloat16`` or a float8). ``iter_s``: measured. Degrees of parallelism are 1
    where a table says nothing.
    """

    name: str
    study: str
    model: str
    sizes: Sizes
    experts: int
    gpu: str
    gpus: int
    precision: str
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    chunks: int
    zero: int
    microbatch: int
    batch: int
    recompute: str
    iter_s: float
    notes: str

    @property
    def experts_ranks(self) -> int:
        """The ranks of a stage among which the experts are split; the unit has all of them."""
        return max(self.tp * self.cp, self.ep)

    @property
    def dp(self) -> int:
        """The ranks of a unit's stage that share a microbatch."""
        return self.experts_ranks // (self.tp * self.cp)

    @property
    def plan_ngpus(self) -> int:
        return self.pp * self.experts_ranks

    @property
    def copies(self) -> int:
        """How many ranks work on samples of their own."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def num_microbatches(self) -> int:
        return self.batch // (self.copies * self.microbatch)

    @property
    def plan_text(self) -> str:
        degrees = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "vp": self.chunks}
        text = " ".join(f"{name}={size}" for name, size in degrees.items() if size > 1)
        return f"{text} ZeRO-{self.zero}".strip() if self.zero else text or "dp"

    @property
    def is_later_megatron(self) -> bool:
        """Whether :data:`LATER_MEGATRON` says how it was run."""
        return self.study.startswith(LATER_MEGATRON)

    @property
    def config(self) -> ComputeConfig:
        """Without the options of a policy. Masters and moments are float32."""
        return ComputeConfig(
            plan_ngpus=self.plan_ngpus,
            runtime_ngpus=self.gpus,
            use_end2end=True,
            outputs="loss",
            use_zero=self.zero,
            distributed_optimizer=self._optimizer_table,
        )

    @property
    def measured_config(self) -> ComputeConfig:
        """The config of the program that is held against the measured one: messages are under way
        while ranks compute where they were so, as far as programs here can do it.
        """
        if not self.is_later_megatron:
            return self.config
        overlaps = {"overlap_grad_sync": True, "overlap_param_sync": self.zero != 3}
        return replace(
            self.config,
            distributed_optimizer=self._optimizer_table | overlaps,
            overlap_communication=True,
        )

    @property
    def _optimizer_table(self) -> dict[str, object]:
        buckets = (size for name, size in BUCKETS_MB.items() if self.study.startswith(name))
        return {
            "grad_sync_dtype": "bfloat16",
            "overlap_grad_sync": False,
            "bucket_cap_mb": next(buckets, 25.0),
        }


BUCKETS_MB = {"vTrain": 954.0, "Megatron-LM": 2.0**20}
"""MiB of gradients that are summed at once, by the beginning of a study's name. vTrain's runs are
Megatron-DeepSpeed's (``data/README.md`` of its repository), which sums 500 million numbers at once
(``MEMORY_OPT_ALLREDUCE_SIZE``, ``deepspeed/runtime/engine.py``). Megatron-LM's gradients lay in one
buffer (``megatron/model/distributed.py``).
"""

STUDIES = {
    "vtrain data/ground_truth_single": "vTrain, one node",
    "vtrain": "vTrain, several nodes",
    "2104.04473": "Megatron-LM 2021",
    "2205.05198": "Megatron-LM 2022",
    "llm-foundry": "llm-foundry",
    "megatron-bridge": "Megatron-Bridge",
    "nemo": "NeMo 24.07",
    "torchtitan": "torchtitan",
}
"""Names of studies by what stands in the source of a row; the first that does counts."""


LATER_MEGATRON = ("NeMo", "Megatron-Bridge")
"""The beginnings of studies that ran Megatron with what its configs for performance switch on:
``sequence_parallel``, ``overlap_grad_sync``, ``overlap_param_sync``, ``ub_tp_comm_overlap`` and
``gradient_accumulation_fusion`` (NVIDIA/NeMo-Framework-Launcher,
``launcher_scripts/conf/training``; NVIDIA-NeMo/Megatron-Bridge, ``scripts/performance``).
"""

SEQUENCE_PARALLEL = "sequence parallel"
"""The words in ``Row.recompute`` for tensor parallelism that splits the sequence where it splits no
weight.
"""


def study_of(source: str, gpu: str) -> str:
    """The study of a row."""
    lowered = source.lower()
    name = next((name for part, name in STUDIES.items() if part in lowered), source)
    return f"{name}, {gpu}"


def read_rows(path: Path) -> list[Row]:
    """The rows of a table in either form."""
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [_row(line, f"{path.stem} {number}") for number, line in enumerate(lines, 1)]


def _row(line: dict[str, str], fallback: str) -> Row:
    def count(key: str, default: int = 1) -> int:
        text = line.get(key) or ""
        return int(float(text)) if text else default

    model = line.get("model") or "GPT"
    known = KNOWN_SIZES.get(model, (0, 0, 0, 0, 0, 0))
    layers, hidden, heads = (count(key, known[i]) for i, key in enumerate(SIZE_COLUMNS))
    sizes = Sizes(
        layers,
        hidden,
        heads,
        count("kv_heads", known[3] or heads),
        count("ffn", known[4] or 4 * hidden),
        count("vocab", known[5] or _vocab_of(line)),
        count("seq", 0),
        # Megatron's kernel for scale, mask and softmax takes batches of four heads.
        count("mbs", 0) * heads // count("tp") % 4 == 0,
    )
    sharded = count("fsdp", 0) > 1
    row = Row(
        name=line.get("id") or fallback,
        study=study_of(line.get("source") or "", line.get("gpu") or ""),
        model=model,
        sizes=sizes,
        experts=count("experts", 0),
        gpu=line.get("gpu") or "",
        gpus=count("gpus", 0),
        precision=precision_of(line.get("precision") or "", line.get("gpu") or ""),
        tp=count("tp"),
        pp=count("pp"),
        cp=count("cp"),
        ep=count("ep"),
        etp=count("etp"),
        chunks=count("vp"),
        zero=count("zero", 3 if sharded else 0),
        microbatch=count("mbs", 0),
        batch=count("gbs", 0),
        recompute=_recompute_of(line),
        iter_s=float(line.get("iter_s") or 0),
        notes=line.get("notes") or "",
    )
    rate = line.get("tflops_per_gpu")
    if not row.iter_s and rate and row.gpus:
        row = replace(row, iter_s=_seconds_at(row, 1e12 * float(rate)))
    return row


SIZE_COLUMNS = ("layers", "hidden", "heads")

MEGATRON_VOCAB = 51200
"""The vocabulary of GPT-2, padded, where a table has none."""

GPT2_VOCAB = 50257
"""The vocabulary of GPT-2."""


def _is_of_vtrain(line: dict[str, str]) -> bool:
    return "vtrain" in (line.get("source") or "").lower()


def _vocab_of(line: dict[str, str]) -> int:
    """The vocabulary of a row whose table has none.

    vTrain's is GPT-2's (``vocab_size`` of its repository's ``src/config.py``). Megatron pads it to
    128 rows for each rank of tp. With one rank the runs are those of a head without padding.
    """
    tp = int(float(line.get("tp") or 1))
    if not _is_of_vtrain(line):
        return MEGATRON_VOCAB
    return GPT2_VOCAB if tp == 1 else -(-GPT2_VOCAB // (128 * tp)) * 128 * tp


BUT_THE_LAST = "but the last stage"


def _recompute_of(line: dict[str, str]) -> str:
    """What a row computes again, and whether its tensor parallelism is that of sequences.

    In vTrain's runs the last stage of a pipeline computes nothing again (its repository,
    ``src/predictor.py``, ``create_layer_graph``).
    """
    text = line.get("recompute") or "none"
    in_stages = (line.get("pp") or "1") != "1"
    left_out = text == "full" and in_stages and _is_of_vtrain(line)
    in_sequence = (line.get("tp") or "1") != "1" and study_of(
        line.get("source") or "", line.get("gpu") or ""
    ).startswith(LATER_MEGATRON)
    words = (text, BUT_THE_LAST * left_out, SEQUENCE_PARALLEL * in_sequence)
    return ", ".join(word for word in words if word)


def precision_of(text: str, gpu: str) -> str:
    """The dtype of products. The tables call several recipes FP8; on Blackwell MX scales whole
    blocks in hardware, at the rate of float8.
    """
    return "float8_e4m3fn" if "FP8" in text.upper() else "bfloat16"


def _seconds_at(row: Row, flops_per_s: float) -> float:
    """Seconds of a step from the rate that a paper gives: equation 3 of Narayanan et al. 2021,
    which counts a recomputed forward.
    """
    s, sizes = row.sizes.seq, row.sizes
    layers = 96 * row.batch * s * sizes.layers * sizes.hidden**2
    terms = 1 + s / (6 * sizes.hidden) + sizes.vocab / (16 * sizes.layers * sizes.hidden)
    return layers * terms / (row.gpus * flops_per_s)


PRESETS = {
    "A100": "a100-80gb",
    "A100 80GB": "a100-80gb",
    "A100 40GB": "a100-40gb",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
}
"""The preset of each device of the tables."""

BLOCKS = {"GB200": 64, "GB300": 64}
"""How many devices of a rack a larger job gets, where it does not get all: NVIDIA's advice is 16 of
18 trays of four, so that groups of experts do not lie in two racks (developer.nvidia.com, "Unlock
Exascale Performance on NVIDIA GB200 NVL72 with Slurm Topology-Aware Job Scheduling").
"""


def hardware_of(gpu: str, gpus: int) -> Hardware:
    """The machine on which a job of the tables ran."""
    hardware = load_hardware(PRESETS[gpu], gpus)
    block = BLOCKS.get(gpu, gpus)
    if gpus <= block:
        return hardware
    inside, *others = hardware.tiers
    sizes = (block,) * (gpus // block) + (gpus % block,) * (gpus % block > 0)
    return replace(hardware, tiers=(replace(inside, sizes=sizes), *others))


def refusal(row: Row) -> str | None:
    """Why a row cannot be priced, in words; ``None`` if it can."""
    sizes = row.sizes
    if family_of(row.model) is None:
        return f"model {row.model!r} is not known here"
    if row.gpu not in PRESETS:
        return f"no preset describes {row.gpu}"
    if "LoRA" in row.notes:
        return "fine-tuning with adapters: the table has neither their places nor their ranks"
    if "tokendrop" in row.notes:
        return "tokens are dropped: the table does not say how many"
    if "MTP" in row.notes and "w/o MTP" not in row.notes:
        return "a further head that predicts more tokens, which the model here has not"
    if not all((sizes.layers, sizes.hidden, sizes.seq, row.gpus, row.microbatch, row.batch)):
        return "the table leaves out sizes"
    if not row.iter_s:
        return "the table has no time"
    if row.gpus % row.plan_ngpus:
        return f"{row.gpus} GPUs are no copies of a plan of {row.plan_ngpus}"
    if row.experts and row.etp > 1:
        return "experts with tensor parallelism of their own"
    if row.batch % (row.copies * row.microbatch) or not row.num_microbatches:
        return "the batch is no whole number of microbatches"
    stages = row.pp * row.chunks
    if sizes.layers < stages:
        return f"{stages} stages for {sizes.layers} layers"
    if row.zero == 3 and row.pp > 1:
        return "parameters in pieces over units, with stages"
    return None


def shape_of(row: Row, depth: int | None = None) -> tuple[object, ...]:
    """Everything that the program of a row with ``depth`` layers a stage depends on."""
    family = family_of(row.model)
    assert family is not None
    interleaved = row.pp > 1 and row.chunks > 1
    return (
        family.make.__name__,
        replace(row.sizes, layers=0) if depth else row.sizes,
        *(row.tp, row.pp, row.cp, row.ep, row.chunks, row.microbatch, row.recompute, depth),
        row.num_microbatches if interleaved else 0,
        row.gpus if row.zero == 3 else 0,
    )


@functools.lru_cache(maxsize=2)
def graph_of(model: str, sizes: Sizes, samples: int) -> PlannableGraph:
    """The model for one microbatch of a unit. All its experts get as many rows: the tables say that
    routing was forced to be balanced.
    """
    family = family_of(model)
    assert family is not None
    tokens = torch.zeros(samples, sizes.seq, dtype=torch.long)
    inputs: dict[str, object] = {"input_ids": tokens, "labels": tokens}
    if family.layers.startswith("model."):
        inputs["use_cache"] = False
    with one_rotary_kernel():
        graph = annotate(trace(on_meta(family, sizes), inputs), pass_manager())
    return PlannableGraph.of(with_imbalance(graph, 1.0))


def depths_of(row: Row) -> tuple[int, int] | None:
    """Two numbers of layers a stage whose programs tell what any number costs, as its
    layers repeat; ``None`` where the model itself is as small.

    With fewer layers the head of a model may keep the device busy while the host launches the
    layers, so that a further layer takes less than one of many does.
    """
    family = family_of(row.model)
    assert family is not None
    layers, period = row.sizes.layers / (row.pp * row.chunks), family.period
    return None if layers <= 8 * period else (4 * period, 8 * period)


def program_of(row: Row, depth: int | None = None) -> Program | PipelineProgram:
    """The program of a row's plan, as it is emitted. ``depth``: with so many layers a stage in the
    place of the model's own.
    """
    family = family_of(row.model)
    assert family is not None
    stages = row.pp * row.chunks
    if depth is not None:
        row = replace(row, sizes=replace(row.sizes, layers=depth * stages))
    graph = graph_of(row.model, row.sizes, row.microbatch * row.dp)

    def planned(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        return plan_of(row, graph)

    policy, options = _policy_of(row)
    config = replace(row.measured_config, pas_config=options)
    for step in (
        Decide(planned, policy, config),
        SettleZero(config),
        SettleInputs(config),
        SettleOutputs(config),
        mark_planned,
        lower_planned,
        GatherTogether(config),
        Overlap(config),
    ):
        graph = step(graph)
    return graph


def plan_of(row: Row, graph: PlannableGraph) -> Plan:
    """The plan of a row for its model, with the layers that the row says."""
    family = family_of(row.model)
    assert family is not None
    stages = row.pp * row.chunks
    again = {"none": (), "full": (family.layers,)}.get(row.recompute.split(",")[0], (family.core,))
    if BUT_THE_LAST in row.recompute:
        before_last = row.sizes.layers // stages * (stages - 1)
        again = tuple(family.layers.replace("*", str(layer)) for layer in range(before_last))
    policy, options = _policy_of(row)
    if policy == "hybrid":
        options["recompute"] = again
        if row.sizes.layers % stages == 0:
            # Stages of as many layers each, as the systems that were measured cut them.
            step = row.sizes.layers // stages
            starts = [family.layers.replace("*", str(step * stage)) for stage in range(1, stages)]
            options["stage_starts"] = tuple(starts)
    found = find_policy(policy).apply(graph, replace(row.config, pas_config=options))
    plan = found.plan if isinstance(found, PlannableGraph) else found
    assert plan is not None
    return replace(plan, recompute=again, zero=units_of_storage(row.config))


def _policy_of(row: Row) -> tuple[str, dict[str, object]]:
    """The policy that makes the plan of a row, with its options."""
    if row.pp == row.cp == row.ep == 1:
        options: dict[str, object] = {}
        if SEQUENCE_PARALLEL in row.recompute:
            options["sequence_parallel"] = True
        return ("tp" if row.tp > 1 else "dp"), options
    options = {
        "num_stages": row.pp,
        "dp": row.dp,
        "tp": row.tp,
        "num_microbatches": row.num_microbatches,
        "sequence_parallel": SEQUENCE_PARALLEL in row.recompute,
    }
    if row.cp > 1:
        options |= {"cp": row.cp, "cp_mode": "ring"}
    if row.ep > 1:
        options["ep"] = over_nodes(row.ep, row.gpu)
    if row.chunks > 1:
        options |= {"schedule": "1f1b_interleaved", "chunks": row.chunks}
    return "hybrid", options


def over_nodes(ep: int, gpu: str) -> int | tuple[int, int]:
    """The option ``ep`` with which a token crosses to a node once, as it does in the dispatchers of
    Megatron (DeepEP, HybridEP).
    """
    within = BLOCKS.get(gpu, 8)  # all others of the tables have eight devices to a node
    return (ep // within, within) if ep > within and ep % within == 0 else ep


def with_microbatches(program: Program | PipelineProgram, count: int) -> Program | PipelineProgram:
    """The program with another number of microbatches a step."""
    if isinstance(program, Program) or program.plan.num_microbatches == count:
        return program
    return replace(program, plan=replace(program.plan, num_microbatches=count))
