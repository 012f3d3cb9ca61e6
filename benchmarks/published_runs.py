"""Published runs as rows, and the programs of their plans.

A row says a model, a plan and what was measured. :func:`program_of` compiles that plan for that
model as the generated files would run it, on tensors without memory. Units (copies of the plan) and
microbatches change no program of a mesh, so rows that differ in nothing else share it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from fused_kernels import one_rotary_kernel
from published_models import Family, Sizes, family_of, meant, on_meta

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.passes.chosen_rows import with_imbalance
from shardwright.compiler.passes.decide import Decide
from shardwright.compiler.passes.finish import finishing
from shardwright.compiler.passes.lower_planned import lower_planned
from shardwright.compiler.passes.recompute_regions import mark_planned
from shardwright.compiler.passes.settle import SettleInputs, SettleOutputs, SettleZero
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.trace.entry import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, ShardwrightError


@dataclass(frozen=True)
class Row:
    """A published run.

    ``study``: a source and a kind of device: what is fitted and counted together. ``precision``:
    of products (``bfloat16`` or a float8). ``recipe``: the same as the table writes it, such as
    ``FP8-MX``. ``iter_s``, ``peak_bytes``: measured; 0 where a table says no memory. Degrees of
    parallelism are 1 where a table says nothing. ``fault``: what of its cells cannot be read, in
    words.
    """

    name: str
    study: str
    model: str
    sizes: Sizes
    experts: int
    gpu: str
    gpus: int
    precision: str
    recipe: str
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
    peak_bytes: float
    notes: str
    fault: str | None = None

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
    def stages(self) -> int:
        """All stages of the pipeline: those of each rank count."""
        return self.pp * self.chunks

    @property
    def ends(self) -> int:
        """How many layers the embedding and the head stand for where layers are dealt out to
        stages: one each if they are needed for all stages to get as many. So Megatron deals them
        (``account_for_embedding_in_pipeline_split`` and ``account_for_loss_in_pipeline_split``,
        ``megatron/core/transformer/transformer_block.py``; on for Llama 405B and Qwen3 235B in
        Megatron-Bridge's recipes), and DeepSpeed BLOOM's, 70 over 12 stages. The 126 of Llama 405B
        are 128 so, and each of 128 stages gets one: the first the embedding alone.
        """
        layers, stages = self.sizes.layers, self.stages
        return 2 if stages > 1 and layers % stages and (layers + 2) % stages == 0 else 0

    @property
    def layers_per_stage(self) -> float:
        return (self.sizes.layers + self.ends) / self.stages

    @property
    def family(self) -> Family:
        """How its model is built; a row that is not refused has one."""
        family = family_of(self.model, self.experts)
        assert family is not None
        return family

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
        switched_on = {
            "overlap_grad_sync": True,
            "overlap_param_sync": self.zero != 3,
            "bucket_cap_mb": later_megatron_bucket_mb(self.copies * self.cp),
        }
        return replace(
            self.config,
            distributed_optimizer=self._optimizer_table | switched_on,
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

LATER_MEGATRON = ("NeMo", "Megatron-Bridge")
"""The beginnings of studies that ran Megatron with what its configs for performance switch on:
``sequence_parallel``, ``overlap_grad_sync``, ``overlap_param_sync``, ``ub_tp_comm_overlap`` and
``gradient_accumulation_fusion`` (NVIDIA/NeMo-Framework-Launcher,
``launcher_scripts/conf/training``; NVIDIA-NeMo/Megatron-Bridge, ``scripts/performance``).
"""


def later_megatron_bucket_mb(num_ranks: int) -> float:
    """MiB of bfloat16 gradients in a bucket over so many ranks: 40 million numbers, and a million
    for each rank where that is more, so that messages around a ring are not bound by its latency
    (``megatron/core/distributed/distributed_data_parallel.py``).
    """
    return 2 * max(40e6, 1e6 * num_ranks) / 2**20


SEQUENCE_PARALLEL = "sequence parallel"
"""The words in ``Row.recompute`` for tensor parallelism that splits the sequence where it splits no
weight.
"""


BUT_THE_LAST = "but the last stage"
"""The words in ``Row.recompute`` for stages of which the last computes nothing again."""


PRESETS = {
    "A100": "a100-80gb",
    "A100 80GB": "a100-80gb",
    "A100 40GB": "a100-40gb",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI300X": "mi300x",
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
    sizes, family = row.sizes, family_of(row.model, row.experts)
    if row.fault:
        return row.fault
    if family is None:
        return f"model {row.model!r} has layers of other kinds than attention and dense ones"
    if row.gpu not in PRESETS:
        return f"no preset describes {row.gpu or 'the GPU, which the table does not name'}"
    if row.precision not in ("bfloat16", *hardware_of(row.gpu, 1).device.flops_per_s):
        return f"the preset of {row.gpu} has no rate of {row.precision}"
    if "LoRA" in row.notes:
        return "fine-tuning with adapters: the table has neither their places nor their ranks"
    if "tokendrop" in row.notes:
        return "tokens are dropped: the table does not say how many"
    if "MTP" in row.notes and "w/o MTP" not in row.notes:
        return "a further head that predicts more tokens, which the model here has not"
    left_out = _sizes_left_out(row)
    if left_out:
        why = f"the table leaves out sizes: {', '.join(left_out)}"
        # The name was to say them all.
        if {"layers", "hidden", "heads"} <= set(left_out):
            why += f", and those of {row.model!r} are not known here{meant(row.model)}"
        return why
    if not row.iter_s:
        return "the table has no time of a step and no tokens a second"
    if (row.experts or row.ep > 1) and not family.experts:
        return f"{row.model} is a model without experts here, and the table has some"
    if sizes.hidden % sizes.heads or sizes.heads % sizes.kv_heads:
        heads = f"{sizes.heads} heads and {sizes.kv_heads} of keys"
        return f"a hidden size of {sizes.hidden} with {heads} is no whole number for each"
    if row.gpus % row.plan_ngpus:
        return f"{row.gpus} GPUs are no copies of a plan of {row.plan_ngpus}"
    if row.experts and row.etp > 1:
        return "experts with tensor parallelism of their own"
    if row.batch % (row.copies * row.microbatch) or not row.num_microbatches:
        return "the batch is no whole number of microbatches"
    if sizes.layers < row.stages and not row.ends:
        return f"{row.stages} stages for {sizes.layers} layers"
    if row.zero == 3 and row.pp > 1:
        return "parameters in pieces over units, with stages"
    return None


def _sizes_left_out(row: Row) -> list[str]:
    """The columns of sizes that a row needs and has not."""
    needed = {
        "layers": row.sizes.layers,
        "hidden": row.sizes.hidden,
        "heads": row.sizes.heads,
        "seq": row.sizes.seq,
        "gpus": row.gpus,
        "mbs": row.microbatch,
        "gbs": row.batch,
    }
    return [name for name, size in needed.items() if not size]


def shape_of(row: Row, depth: int | None = None) -> tuple[object, ...]:
    """Everything that the program of a row with ``depth`` layers a stage depends on."""
    interleaved = row.pp > 1 and row.chunks > 1
    return (
        row.family.make.__name__,
        replace(row.sizes, layers=0) if depth else row.sizes,
        *(row.tp, row.pp, row.cp, row.ep, row.chunks, row.microbatch, row.recompute, depth),
        row.ends,
        row.num_microbatches if interleaved else 0,
        row.gpus if row.zero == 3 else 0,
    )


@functools.lru_cache(maxsize=2)
def graph_of(model: str, sizes: Sizes, samples: int) -> PlannableGraph:
    """The model for one microbatch of a unit. All its experts get as many rows: the tables say that
    routing was forced to be balanced.
    """
    family = family_of(model, sizes.experts)
    assert family is not None
    tokens = torch.zeros(samples, sizes.seq, dtype=torch.long)
    inputs: dict[str, object] = {"input_ids": tokens, "labels": tokens}
    if not family.layers.startswith("layers."):  # one of transformers
        inputs["use_cache"] = False
    try:
        with one_rotary_kernel():
            traced = trace(on_meta(family, sizes), inputs)
    except ShardwrightError:
        raise
    except Exception as error:  # of transformers or torch, about sizes that fit no model
        raise ConfigError(
            f"the model cannot be built or run: {error or type(error).__name__}"
        ) from error
    graph = annotate(traced, pass_manager())
    return PlannableGraph.of(with_imbalance(graph, 1.0))


def depths_of(row: Row) -> tuple[int, int] | None:
    """Two numbers of layers a stage whose programs tell what any number costs, as its
    layers repeat; ``None`` where the model itself is as small.

    With fewer layers the head of a model may keep the device busy while the host launches the
    layers, so that a further layer takes less than one of many does.
    """
    layers, period = row.layers_per_stage, row.family.period
    return None if layers <= 8 * period else (4 * period, 8 * period)


def program_of(row: Row, depth: int | None = None) -> Program | PipelineProgram:
    """The program of a row's plan, as it is emitted. ``depth``: with so many layers a stage in the
    place of the model's own.
    """
    if depth is not None:
        row = replace(row, sizes=replace(row.sizes, layers=depth * row.stages - row.ends))
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
        *finishing(config),
    ):
        graph = step(graph)
    return graph


def plan_of(row: Row, graph: PlannableGraph) -> Plan:
    """The plan of a row for its model, with the layers that the row says."""
    family, stages = row.family, row.stages
    again = {"none": (), "full": (family.layers,)}.get(row.recompute.split(",")[0], (family.core,))
    if BUT_THE_LAST in row.recompute:
        before_last = row.sizes.layers // stages * (stages - 1)
        again = tuple(family.layers.replace("*", str(layer)) for layer in range(before_last))
    policy, options = _policy_of(row)
    if policy == "hybrid":
        options["recompute"] = again
        options["stage_starts"] = stage_starts_of(row)
    found = find_policy(policy).apply(graph, replace(row.config, pas_config=options))
    plan = found.plan if isinstance(found, PlannableGraph) else found
    assert plan is not None
    return replace(plan, recompute=again, zero=units_of_storage(row.config))


def stage_starts_of(row: Row) -> tuple[str, ...]:
    """The modules at which all stages but the first begin: as many layers each, as the systems that
    were measured cut them. Empty if layers cannot be dealt out so: the cheapest cut is taken.
    """
    counted = row.sizes.layers + row.ends
    if counted % row.stages:
        return ()
    firsts = (counted // row.stages * stage - row.ends // 2 for stage in range(1, row.stages))
    # The last stage may have the head only.
    return tuple(
        row.family.layers.replace("*", str(first)) if first < row.sizes.layers else row.family.norm
        for first in firsts
    )


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
