"""Published iteration times of Megatron-LM, by the cost model.

    python benchmarks/megatron_times.py

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 5:
GPT on A100-80GB, with full recomputation, and with sequence parallelism and selective recomputation
(the attention core). Two efficiencies of the device, of products and of memory, are fitted on the
22B and 175B models; 530B and 1T are predicted.

The seconds are put together from the real pieces: a GPT of Megatron's shape is traced on meta,
planned as Megatron splits it, and lowered; every operator and adapter of the program is costed for
one microbatch, stages are filled with as many layers as they hold, and the schedule is simulated
with its messages. Three habits of Megatron that programs here do not have are costed as it does
them: kernels fused by hand (:data:`FUSED`), weight gradients added to a float32 sum by the product
that makes them, and the reduction of an input's gradient, which runs beside that product.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.time.adapter_time import step_time
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.compiler.trace.entry import trace
from shardwright.runtime.layout import Mesh

SEQ, VOCAB, TENSOR_RANKS = 2048, 51200, 8

OPTIMIZER_BYTES = 46
"""Read and written per parameter and step: gradient to float32 (2 + 4), its norm (4), Adam on
float32 parameter and two moments (16 + 12), float16 copy (4 + 2), zero gradients (2).
"""


FUSED: Mapping[str, tuple[float, float]] = {"dropout": (2.5, 2.5), "add": (1.0, 0.0)}
"""Times their result that Megatron's kernels move, forward and backward. Bias, dropout and residual
are one kernel: it reads two tensors, writes one and a mask of bytes. The others (bias and GeLU;
scale, mask and softmax) move what operators here do.
"""


@dataclass(frozen=True)
class Case:
    """A row of the paper's tables 3 and 5: sizes, and seconds per iteration with full and with
    selective recomputation.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    pipeline_ranks: int
    chunks: int
    batch: int
    microbatch: int
    full_s: float
    selective_s: float

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.microbatch


CASES = (
    Case("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    Case("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    Case("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    Case("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
)
FITTED_ON = ("22B", "175B")


class Core(nn.Module):
    """Attention between the projections: what selective recomputation computes again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Turned so that it stays what is written: a compile takes query @ key.transpose(-1, -2) and
        # its softmax for one operator, and here each had a kernel.
        turned = key.permute(0, 1, 3, 2)
        scores = torch.matmul(query, turned)  # [batch, heads, seq, seq]
        return torch.matmul(F.dropout(torch.softmax(scores, -1), self.dropout), value)


class Layer(nn.Module):
    """A layer as Megatron computes it, with ``[seq, batch, hidden]`` activations."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.core = Core(0.1)

    def forward(self, x: Tensor) -> Tensor:
        seq, batch, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(seq, batch, self.heads, 3, hidden // self.heads)
        mixed = self.core(*qkv.permute(3, 1, 2, 0, 4).unbind(0))  # [batch, heads, seq, head]
        x = x + F.dropout(self.out(mixed.permute(2, 0, 1, 3).reshape(seq, batch, hidden)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Gpt(nn.Module):
    """One layer between embedding and loss."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, hidden), nn.Embedding(SEQ, hidden)
        self.layer = Layer(hidden, heads)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.token(tokens) + self.position(positions), 0.1)
        logits = self.head(self.norm(self.layer(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


RESIDUAL_STREAM = ("add", "dropout", "layer_norm")


def megatron_plan(graph: PlannableGraph, sequence_parallel: bool) -> Plan:
    """Heads, ffn and vocabulary over the ranks of a node; with sequence parallelism also what lies
    between the products.
    """
    b = graph.builder(mesh={"tp": TENSOR_RANKS})
    for dim in ("heads", "up_dim", "vocab"):
        b.split(dim, "tp")
    if sequence_parallel:  # the first dim of [seq, batch, hidden] is called batch by its place
        b.split(
            "batch",
            "tp",
            where=lambda op: (
                op.target in RESIDUAL_STREAM and not op.module_path.startswith("layer.core")
            ),
        )
    plan = b.build().plan
    assert plan is not None
    return plan


@functools.cache
def program_of(case: Case, sequence_parallel: bool) -> Program:
    """The program of one microbatch on the tensor-parallel ranks."""
    with torch.device("meta"):
        model = Gpt(case.hidden, case.heads).half()
    tokens = torch.zeros(SEQ, case.microbatch, dtype=torch.long)
    inputs = {
        "tokens": tokens,
        "positions": torch.zeros(SEQ, 1, dtype=torch.long),
        "labels": tokens,
    }
    graph = annotate(trace(model, inputs), pass_manager())
    return lower(graph, megatron_plan(graph, sequence_parallel))


@dataclass(frozen=True)
class Parts:
    """Seconds of one microbatch on one rank. ``core`` is the part of ``layer`` between the
    attention's projections.
    """

    embedding: OpTime
    layer: OpTime
    core: OpTime
    head: OpTime


def parts_of(case: Case, sequence_parallel: bool, hardware: Hardware) -> Parts:
    """The operators and adapters of the program, by where they are."""
    program, sums = (
        program_of(case, sequence_parallel),
        dict.fromkeys(("embedding", "layer", "core", "head"), OpTime()),
    )
    place, message_s = "embedding", 0.0
    for instruction in program.body:
        path = (
            instruction.op.module_path
            if isinstance(instruction, Compute)
            else instruction.module_path
        )
        if path.startswith("layer"):
            place = "layer"
        elif place != "embedding":
            place = "head"
        seconds = _seconds(instruction, program.plan.mesh, hardware)
        if isinstance(instruction, Adapt):
            message_s = seconds.backward_s
        elif instruction.op.target == "linear":
            weight_gradient_s = seconds.backward_s / 2
            seconds += OpTime(
                0.0,
                _accumulation_s(instruction, program.plan.mesh, hardware)
                - min(message_s, weight_gradient_s),
            )
            message_s = 0.0
        sums[place] += seconds
        if path.startswith("layer.core"):
            sums["core"] += seconds
    return Parts(**sums)


def _accumulation_s(linear: Compute, mesh: Mesh, hardware: Hardware) -> float:
    """Adding a weight's gradient to its float32 sum inside the product: reads and writes 4 bytes in
    place of writing 2.
    """
    weight = local_call(linear.original, linear.assignment, mesh).operands[1]
    return hardware.device.memory_s((4 + 4 - 2) * weight.num_elements)


def _seconds(instruction: Instruction, mesh: Mesh, hardware: Hardware) -> OpTime:
    ranks = range(mesh.size)
    if isinstance(instruction, Adapt):
        value = instruction.of
        return step_time(
            instruction.step, value.dtype, mesh, ranks, hardware, differentiable=value.requires_grad
        )
    op, assignment = instruction.original, instruction.assignment
    if op.target in FUSED:
        num_bytes = local_call(op, assignment, mesh).results[0].num_bytes
        return OpTime(
            *(hardware.device.memory_s(passes * num_bytes) for passes in FUSED[op.target])
        )
    return op_time(op, assignment, mesh, hardware, ranks=ranks)


def iteration_s(case: Case, selective: bool, hardware: Hardware) -> float:
    """Seconds of one iteration: the schedule with its messages, and the optimizer."""
    parts = parts_of(case, selective, hardware)
    recomputed_s = (parts.core if selective else parts.layer).forward_s
    num_stages = case.pipeline_ranks * case.chunks
    layers = case.layers // num_stages
    forward = [layers * parts.layer.forward_s] * num_stages
    backward = [layers * (parts.layer.backward_s + recomputed_s)] * num_stages
    for stage, ends in ((0, parts.embedding), (-1, parts.head)):
        forward[stage] += ends.forward_s
        backward[stage] += ends.backward_s
    num_elements = _elements_of_a_rank(case)
    step_s = hardware.device.memory_s(OPTIMIZER_BYTES * num_elements)
    if num_stages == 1:
        return case.num_microbatches * (forward[0] + backward[0]) + step_s
    schedule = generate(
        "1f1b_interleaved" if case.chunks > 1 else "1f1b",
        case.pipeline_ranks,
        case.num_microbatches,
        case.chunks,
    )
    times = [StageTimes(f, b, 0.0) for f, b in zip(forward, backward, strict=True)]
    # The gradient of the embedding, which first and last stage share.
    tied_bytes = 4 * VOCAB * case.hidden / TENSOR_RANKS
    tied_s = collective_s(
        hardware, "all_reduce", tied_bytes, (0, hardware.num_devices - TENSOR_RANKS)
    )
    return (
        simulate(schedule, times, _message_s(case, selective, hardware)).makespan_s
        + tied_s
        + step_s
    )


def _message_s(case: Case, sequence_parallel: bool, hardware: Hardware) -> float:
    """Seconds of a message from one stage to the next: each rank sends its piece over its own link,
    and whole activations are gathered in the node.
    """
    num_bytes = 2 * SEQ * case.microbatch * case.hidden
    seconds = collective_s(hardware, "send", num_bytes / TENSOR_RANKS, (0, TENSOR_RANKS))
    return (
        seconds
        if sequence_parallel
        else seconds + collective_s(hardware, "all_gather", num_bytes, range(TENSOR_RANKS))
    )


def _elements_of_a_rank(case: Case) -> float:
    """Parameters of the fullest rank."""
    layers = case.layers / case.pipeline_ranks * 12 * case.hidden**2
    return (layers + VOCAB * case.hidden) / TENSOR_RANKS


def machine(case: Case, product: float, memory: float) -> Hardware:
    """A100 nodes whose products and memory reach these fractions of their data sheet."""
    hardware = load_hardware("a100-80gb", TENSOR_RANKS * case.pipeline_ranks)
    return replace(
        hardware,
        device=replace(hardware.device, matmul_efficiency=product, bytes_per_s=2039e9 * memory),
    )


def log_errors(efficiencies: np.ndarray, cases: Sequence[Case]) -> np.ndarray:
    """The logarithms of modelled over measured, full and selective recomputation of each case."""
    product, memory = np.exp(efficiencies).tolist()
    modelled = [
        iteration_s(case, selective, machine(case, product, memory))
        for case in cases
        for selective in (False, True)
    ]
    return np.log(modelled) - np.log(
        [seconds for case in cases for seconds in (case.full_s, case.selective_s)]
    )


def fitted(cases: Sequence[Case]) -> np.ndarray:
    """The logarithms of the efficiencies with the least squares of the errors, by Gauss-Newton from
    the preset's.
    """
    efficiencies, step = np.log([0.8, 0.9]), 1e-2
    for _ in range(8):
        errors = log_errors(efficiencies, cases)
        slopes = np.stack(
            [(log_errors(efficiencies + step * axis, cases) - errors) / step for axis in np.eye(2)],
            axis=1,
        )
        change = np.linalg.lstsq(slopes, -errors, rcond=None)[0]
        efficiencies = efficiencies + change
        if np.abs(change).max() < 1e-3:
            break
    return efficiencies


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    efficiencies = fitted([case for case in CASES if case.name in FITTED_ON])
    product, memory = np.exp(efficiencies).tolist()
    errors = np.expm1(log_errors(efficiencies, CASES)).reshape(-1, 2)
    console, table = (
        Console(),
        Table("model", "GPUs", "recompute", "measured s", "modelled s", "error", ""),
    )
    console.print(
        f"products reach {product:.3f} of the tensor cores' peak in full rounds of tiles, "
        f"memory {memory:.3f} of its peak"
    )
    for case, pair in zip(CASES, errors.tolist(), strict=True):
        for name, seconds, error in zip(
            ("full", "selective"), (case.full_s, case.selective_s), pair, strict=True
        ):
            role = "fitted" if case.name in FITTED_ON else "predicted"
            gpus = str(TENSOR_RANKS * case.pipeline_ranks)
            table.add_row(
                case.name,
                gpus,
                name,
                f"{seconds:.2f}",
                f"{seconds * (1 + error):.2f}",
                f"{error:+.1%}",
                role,
            )
    console.print(table)


if __name__ == "__main__":
    main()
