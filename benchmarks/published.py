"""Published runs beside what the cost model says of their plans.

    python benchmarks/published.py                      # the tables in benchmarks/published
    python benchmarks/published.py OTHER.csv --rows     # any table of the same columns, row by row
    python benchmarks/published.py OTHER.csv --presets  # presets alone, whatever the study
    python benchmarks/published.py --fit                # the constants of all studies again
    python benchmarks/published.py --pictures docs/validation

Each plan is compiled for the model of its row, on tensors without memory, and audited. Layers of a
model are alike, so that two programs, with four and eight layers a stage, tell what any number of
layers costs: time and memory are linear in it. Rows that differ in units or microbatches only share
their programs.

A study is what one source measured on one kind of device. Its constants lie in
``published/machines.json``, with the rows on which they were fitted: every so many rows of the
table, at most a tenth. All other rows are predicted, and only these count in the summary. A study
of less than ten rows is priced by the preset, and by what is believed of a host.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from published_models import built_by_sizes, is_named
from published_pictures import write_picture
from published_runs import (
    LATER_MEGATRON,
    Row,
    depths_of,
    hardware_of,
    program_of,
    refusal,
    shape_of,
    with_microbatches,
)
from published_tables import read_tables, unread_columns
from rich.console import Console
from rich.table import Table

from shardwright.compiler.cost.audit import audit, time_of_step
from shardwright.compiler.cost.machine.hardware import Hardware, Link, Tier
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.errors import ConfigError, ShardwrightError

TABLES = Path(__file__).with_suffix("")
MACHINES = TABLES / "machines.json"

FUSED_ADAM = OptimizerMemory(fused=True)
"""All studies use a fused Adam, with float32 masters and moments."""

ADDING_ADAM = replace(FUSED_ADAM, products_add=True)
"""That of Megatron's later programs, whose products add to its gradients."""

CASTS = (4.0, 0.0, 4.0)
"""How many bytes casts to float8 move for each element of inputs, weights and gradients in
Transformer Engine: what products sum over must lie in rows, so a cast also writes the tensor
transposed (or scaled along columns); weights are cast in the first microbatch only.
"""

NODES = {"vTrain, several nodes, A100 80GB": 4 * 24e9}
"""Bytes per second that a node sends to others, by study, where the table tells of other machines
than the preset does: four cards of 200 Gb/s for eight devices, each as fast as the preset's.
"""

MEMORY = {"torchtitan, H100": 2.4e12, "torchtitan, not compiled, H100": 2.4e12}
"""Peak bytes per second of memory, by study, where a source tells of another one: torchtitan's H100
have HBM2e of 2.4 TB/s.
"""

NVLINK = {2: (20e-6, 184e9), 4: (9.5e-6, 214e9), 8: (12.5e-6, 238e9)}
"""Seconds of a hop and bytes per second inside a node of vTrain, by the devices that meet: a line
through each table of all-reduces that its authors measured (``trace/a100`` of their repository), of
1 to 256 MiB, to 2, 2 and 6 % in the mean. (The preset's latency is that of small messages, its rate
that of large ones on 8 devices.)
"""

FLASH_1_IN_TRITON, FLASH_2 = "FlashAttention in Triton", "FlashAttention-2"

KERNELS = {
    "llm-foundry": FLASH_1_IN_TRITON,
    "torchtitan": FLASH_2,
    "foundation-model-stack/fms-fsdp": FLASH_2,
}
"""The kernel of attention that a system ran, by the beginning of a study's name, where it is not
the preset's. llm-foundry's default at the time was ``triton`` (``scripts/train/benchmarking/
submit_benchmarks.py``, v0.4.0). torch took FlashAttention-2 on H100 until 2.10, and cuDNN since
(``check_prefer_cudnn_attention`` in torch's ``sdp_utils.cpp``); torchtitan asks for it by name on
devices before Blackwell (pytorch/torchtitan#1196).
"""

ATTENTION: Mapping[tuple[str, str], tuple[float, float]] = {
    (FLASH_1_IN_TRITON, "A100"): (0.40 * 312e12, 0.30 * 312e12),
    (FLASH_1_IN_TRITON, "H100"): (0.40 * 1.62 * 312e12, 0.30 * 1.64 * 312e12),
    (FLASH_2, "H100"): (335e12, 322e12),
    (FLASH_2, "H200"): (335e12, 322e12),
}
"""Operations per second that a kernel of attention reaches, forward and backward, by the beginning
of the device's name; for other devices those of the preset.

- The first FlashAttention in Triton reaches 30 to 50 % of an A100's 312 Tflop/s forward and 25 to
  35 % backward (Dao 2023, arXiv 2307.08691).
- FlashAttention-2 on H100: causal forward, and backward, of the longest sequence with heads of 128
  (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6). A100's preset has it.
- Both are written for the instructions of A100. FlashAttention-2 reaches 370 and 322 Tflop/s on
  H100 without a mask, and 0.73 and 0.63 of the peak on A100: 1.62 and 1.64 times as much. The
  first one in Triton is taken to gain as much.
"""

TIMED = ("vTrain", "Megatron-LM")
"""The beginnings of studies whose hosts wait for their devices at the end of each forward. Megatron
of that time has a clock around each forward and each backward (``megatron/schedules.py``), which it
reads after ``torch.cuda.synchronize()`` (``megatron/global_vars.py``).
"""

BOUNDS = {
    "products": (0.3, 1.0),
    "memory": (0.3, 1.0),
    "launch_us": (5.0, 500.0),
    "step_ms": (0.1, 100.0),
    "waits": (0.05, 1.0),
    "late_us": (1.0, 1000.0),
}
"""The constants that may be fitted, and the least and most that each may be.

``products``: the part of the tensor cores' peak that products reach in full rounds of tiles.
``memory``: the part of the memory's peak. ``launch_us``: microseconds in which the host launches
one operator. ``step_ms``: milliseconds that a step takes besides (gradient norm, loss scale).
``waits``: how long a device waits for a message, of the time that the message takes on links by
itself: less than 1 where messages run beside other work. ``late_us``: microseconds for which two
ranks that meet in a collective wait for each other, and more ranks longer (``Hardware.late_s``). (A
step that is bound by its host does not wait.)
"""

GATHERS_AHEAD = False
"""Whether rows of ZeRO-3 are priced with weights gathered one ahead, as our programs have it. They
ran other programs: FSDP, which hides gathers and reduce-scatters of whole layers. Where ``waits``
is fitted it stands for what is hidden, so ours would be hidden twice.
"""

DOUBT = {
    "products": 0.15,
    "memory": 0.2,
    "launch_us": 0.7,
    "step_ms": 0.7,
    "waits": 0.7,
    "late_us": 0.7,
}
"""How far constants may be from what is believed before any row is seen, as logarithms."""

ROW_ERROR = 0.07
"""How far a row is from its prediction with the right constants, as a logarithm: what the model
leaves out.
"""

STEP = 0.03
"""How much a constant is changed to see what that changes, as a logarithm."""


@dataclass(frozen=True)
class Machine:
    """The constants of a study. ``fitted_on``: the names of rows."""

    constants: Mapping[str, float]
    fitted_on: tuple[str, ...] = ()

    def hardware(self, row: Row) -> Hardware:
        """The preset of the row's device with these constants."""
        # Rows share machines, and with them what is known of operators and messages.
        constants = tuple(sorted(self.constants.items()))
        return _machine(constants, row.study, row.gpu, row.gpus, row.precision, _meeting(row))


@functools.lru_cache(maxsize=64)
def _machine(
    named: tuple[tuple[str, float], ...],
    study: str,
    gpu: str,
    gpus: int,
    precision: str,
    meeting: int,
) -> Hardware:
    hardware, constants = hardware_of(gpu, gpus), dict(named)
    device, changed = hardware.device, dict[str, Any]()
    products = constants.get("products", device.matmul_efficiency)
    changed["matmul_efficiency"] = products
    # What attention reaches does not depend on what other products do.
    reached = tuple(device.matmul_efficiency * x for x in device.attention_efficiency)
    rates = _attention_rates(study, gpu)
    if rates is not None:
        reached = tuple(rate / device.flops_per_s["bfloat16"] for rate in rates)
    changed["attention_efficiency"] = tuple(x / products for x in reached)
    # Presets assume nine tenths of the peak.
    peak_bytes_per_s = MEMORY.get(study, device.bytes_per_s / 0.9)
    changed["bytes_per_s"] = constants.get("memory", 0.9) * peak_bytes_per_s
    if precision != "bfloat16":
        changed |= {"linear_dtype": precision, "linear_cast_bytes": CASTS}
    if "launch_us" in constants:
        changed["queue_s"] = (1e-6 * constants["launch_us"],) * 2
        changed["queue_stops"] = study.startswith(TIMED)
        changed["experts_one_by_one"] = study.startswith(LATER_MEGATRON)
    *inner, network = hardware.tiers
    network = replace(network, uplink_bytes_per_s=NODES.get(study))
    if study.startswith("vTrain"):
        latency_s, bytes_per_s = NVLINK[meeting]
        inner = [replace(tier, latency_s=latency_s, bytes_per_s=bytes_per_s) for tier in inner]
    waits = constants.get("waits", 1.0)
    return replace(
        hardware,
        device=replace(device, **changed),
        tiers=tuple(_as_waited_for(tier, waits) for tier in (*inner, network)),
        late_s=1e-6 * constants.get("late_us", 0.0),
    )


def _attention_rates(study: str, gpu: str) -> tuple[float, float] | None:
    """The operations per second of a study's attention, forward and backward; nothing if they are
    those of the preset.
    """
    kernel = next((kernel for name, kernel in KERNELS.items() if study.startswith(name)), None)
    return ATTENTION.get((kernel or "", gpu.partition(" ")[0]))


def _meeting(row: Row) -> int:
    """How many devices of a node meet in the collectives of a row: those of tensor parallelism, or
    those that sum gradients. Of the sizes that were measured the next one.
    """
    size = row.tp if row.tp > 1 else row.copies
    return next((measured for measured in NVLINK if measured >= size), max(NVLINK))


def _as_waited_for(tier: Tier, waits: float) -> Tier:
    """Links on which messages take this part of their time."""

    def rate(bytes_per_s: float | None) -> float | None:
        return None if bytes_per_s is None else bytes_per_s / waits

    kinds = {
        kind: Link(waits * link.latency_s, link.bytes_per_s / waits)
        for kind, link in tier.kinds.items()
    }
    return replace(
        tier,
        latency_s=waits * tier.latency_s,
        bytes_per_s=tier.bytes_per_s / waits,
        uplink_bytes_per_s=rate(tier.uplink_bytes_per_s),
        fabric_bytes_per_s=rate(tier.fabric_bytes_per_s),
        kinds=kinds,
    )


class Programs:
    """The programs of rows, each compiled once. What cannot be compiled is an error, by shape."""

    def __init__(self) -> None:
        self._programs: dict[object, Program | PipelineProgram | ShardwrightError] = {}
        self._peaks: dict[object, float] = {}

    def of(self, row: Row) -> list[Program | PipelineProgram]:
        """The programs of a row, with four and with eight layers a stage, or the model's own.

        Raises:
            ShardwrightError: a plan of ours cannot say it.
        """
        found = []
        for depth in depths_of(row) or (None,):
            key = shape_of(row, depth)
            if key not in self._programs:
                try:
                    self._programs[key] = program_of(row, depth)
                except ShardwrightError as error:
                    self._programs[key] = error
            program = self._programs[key]
            if isinstance(program, ShardwrightError):
                raise program
            found.append(with_microbatches(program, row.num_microbatches))
        return found

    def peak_bytes(self, row: Row) -> float:
        """The bytes at the peak of the fullest rank."""
        # Microbatches count as far as they are under way at a time.
        under_way = min(row.num_microbatches, 2 * row.pp * row.chunks)
        sharded = row.gpus if row.zero else 0
        key = shape_of(row), under_way, sharded
        if key not in self._peaks:
            row = replace(row, batch=row.copies * row.microbatch * under_way)
            hardware = hardware_of(row.gpu, row.gpus)
            peaks = []
            for program in self.of(row):
                cost = audit(
                    program,
                    row.config,
                    hardware,
                    optimizer=FUSED_ADAM,
                    num_microbatches=under_way,
                )
                peaks.append(np.array([cost.peak_bytes]))
            self._peaks[key] = float(at_depth(row, peaks)[0])
        return self._peaks[key]


def at_depth(row: Row, found: Sequence[np.ndarray]) -> np.ndarray:
    """What the model of a row costs, by the costs of its programs: with four and with eight layers
    a stage, or with its own layers.
    """
    depths = depths_of(row)
    if depths is None:
        return found[0]
    return found[0] + (row.layers_per_stage - depths[0]) * (found[1] - found[0]) / (
        depths[1] - depths[0]
    )


def predict(row: Row, programs: Programs, machine: Machine) -> float:
    """The seconds of a row's step."""
    hardware, found = machine.hardware(row), []
    config = row.measured_config
    optimizer = ADDING_ADAM if row.is_later_megatron else FUSED_ADAM
    for program in programs.of(row):
        cost = time_of_step(
            program, config, hardware, optimizer, None, row.num_microbatches,
            gathers_ahead=GATHERS_AHEAD,
        )  # fmt: skip
        found.append(np.array([cost.step_s]))
    return float(at_depth(row, found)[0]) + 1e-3 * machine.constants.get("step_ms", 0.0)


def fit(
    rows: Sequence[Row], programs: Programs, belief: Machine, row_error: float = ROW_ERROR
) -> Machine:
    """The constants that are most likely, by Gauss-Newton: those of ``belief`` are believed as far
    as ``DOUBT`` says, and a row is believed to ``row_error``, both as logarithms. Many rows
    overrule the belief; one row moves the constants little, and most the one that is least known.
    """
    names = list(belief.constants)
    low, high = np.log([BOUNDS[name] for name in names]).T
    believed = np.clip(np.log([belief.constants[name] for name in names]), low, high)
    doubt = np.array([DOUBT[name] for name in names])
    measured = np.log([row.iter_s for row in rows])

    def errors(point: np.ndarray) -> np.ndarray:
        machine = Machine(dict(zip(names, np.exp(point).tolist(), strict=True)))
        seconds = [predict(row, programs, machine) for row in rows]
        return np.log(seconds) - measured

    at = believed
    for _ in range(20):
        now = errors(at)
        slopes = [(errors(at + STEP * axis) - now) / STEP for axis in np.eye(len(names))]
        # Rows that are far off count less (errors as of a Cauchy distribution): they want another
        # model, not other constants.
        weights = 1 / np.hypot(row_error, now)
        left = np.vstack([weights[:, None] * np.stack(slopes, axis=1), np.diag(1 / doubt)])
        right = np.append(-weights * now, (believed - at) / doubt)
        change = np.linalg.lstsq(left, right, rcond=None)[0]
        moved = np.clip(at + np.clip(change, -0.5, 0.5), low, high)
        done = np.abs(moved - at).max() < 1e-3
        at = moved
        if done:
            break
    constants = {
        name: round(float(value), 4) for name, value in zip(names, np.exp(at), strict=True)
    }
    return Machine(constants, tuple(row.name for row in rows))


# ------------------------------------------------------------------------------------------------
# the report


@dataclass(frozen=True)
class Score:
    """How near predictions are. ``error``: mean of the absolute relative errors. ``rank``: rank
    correlation (Spearman's). ``ordered``: of pairs of rows that took different times, the share
    that is ordered right. What a table cannot tell is no number.
    """

    count: int
    error: float
    rank: float
    ordered: float

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What a table shows: one row has no order, and none has no error."""
        return (
            str(self.count),
            f"{self.error:.1%}" if self.count else "",
            "" if math.isnan(self.rank) else f"{self.rank:.3f}",
            "" if math.isnan(self.ordered) else f"{self.ordered:.1%}",
        )

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Score:
        ours, theirs = np.array(predicted), np.array(measured)
        first, second = np.triu_indices(len(ours), 1)
        agree = np.sign(ours[first] - ours[second]) == np.sign(theirs[first] - theirs[second])
        agree = agree[theirs[first] != theirs[second]]
        rank = float("nan")
        if min(len(set(ours)), len(set(theirs))) > 1 and len(ours) > 2:
            rank = float(np.corrcoef(_places(ours), _places(theirs))[0, 1])
        ordered = float(agree.mean()) if len(agree) else float("nan")
        error = float(np.abs(ours / theirs - 1).mean()) if len(ours) else float("nan")
        return cls(len(ours), error, rank, ordered)


def _places(values: np.ndarray) -> np.ndarray:
    """The place of each value among all in order; equal ones share the mean of theirs, such as one
    plan that was measured twice.
    """
    _, found, counts = np.unique(values, return_inverse=True, return_counts=True)
    places: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[found]
    return places


APART = (0.0, 0.02, 0.05, 0.1, 0.2, float("inf"))
"""How much longer than the other of two plans one is predicted to take: the edges of classes."""


def pairs_of_plans(rows: Sequence[Row], seconds: Sequence[float]) -> list[tuple[float, bool]]:
    """How much longer the one of two plans is predicted to take, and whether it took longer: for
    every two of one model, batch, precision and number of GPUs that took different times.
    ``seconds``: predicted, by row. Two that are predicted alike are not ordered.
    """
    found = []
    pairs = itertools.combinations(zip(rows, seconds, strict=True), 2)
    for (row, step_s), (other, other_s) in pairs:
        if same_work(row) == same_work(other) and row.iter_s != other.iter_s:
            right = (step_s - other_s) * (row.iter_s - other.iter_s) > 0
            found.append((max(step_s, other_s) / min(step_s, other_s) - 1, right))
    return found


def same_work(row: Row) -> tuple[object, ...]:
    """What two plans have in common that a planner would choose between. How tp pads a vocabulary
    and which kernels it allows is part of the plan. Another recipe of float8 is other work.
    """
    sizes = replace(row.sizes, vocab=0, one_softmax=True)
    return row.model, sizes, row.experts, row.gpu, row.gpus, row.recipe.lower(), row.batch


def load_machines() -> dict[str, Machine]:
    """The constants of all studies."""
    data = json.loads(MACHINES.read_text())
    return {
        study: Machine(entry["constants"], tuple(entry["fitted_on"]))
        for study, entry in data.items()
    }


def save_machines(machines: Mapping[str, Machine]) -> None:
    """Write the constants of these studies; those of others stay as they are."""
    data = json.loads(MACHINES.read_text()) | {
        study: {"constants": dict(machine.constants), "fitted_on": list(machine.fitted_on)}
        for study, machine in machines.items()
    }
    MACHINES.write_text(json.dumps(dict(sorted(data.items())), indent=2) + "\n")


FEWEST = 10
"""The rows that a study has at least of which one is fitted."""


def refit(studies: Mapping[str, Sequence[Row]], programs: Programs) -> dict[str, Machine]:
    """All constants again, each study from every tenth of its rows or fewer."""
    found = {}
    for study, rows in studies.items():
        if len(rows) < FEWEST:
            continue
        count = min(MOST_FITTED, len(rows) // 10)
        chosen = [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]
        found[study] = fit(chosen, programs, believed(count))
    return found


BELIEF = Machine(
    {
        "products": 0.7,
        "memory": 0.7,
        "launch_us": 50.0,
        "step_ms": 2.0,
        "waits": 0.7,
        "late_us": 50.0,
    }
)
"""The constants that are believed of any study before its rows are seen. Ranks are believed to come
to a collective as far apart as the launch of one operator.
"""


def believed(count: int) -> Machine:
    """What is believed before so many rows are seen. Fewer rows than constants cannot tell how late
    ranks are from how fast links are: then they are not late, as in presets.
    """
    constants = dict(BELIEF.constants)
    if count < len(constants):
        del constants["late_us"]
    return Machine(constants)


MOST_FITTED = 48
"""The most rows of a study on which its constants are fitted."""


HOST = Machine({name: BELIEF.constants[name] for name in ("launch_us", "step_ms")})
"""What a study has that is fitted on no row: what is believed of its host, of which presets say
nothing.
"""


def machine_of(study: str, machines: Mapping[str, Machine]) -> Machine:
    """The constants of a study; of one that is not fitted those of a host."""
    return machines.get(study, HOST)


SECONDS_BETWEEN_LINES = 20
"""The seconds after which the next row says how far the run is."""


def sorted_out(
    rows: Sequence[Row], programs: Programs
) -> tuple[dict[str, list[Row]], dict[str, list[str]]]:
    """The rows that can be priced by study, and the names of the others by reason."""
    studies: dict[str, list[Row]] = {}
    refused: dict[str, list[str]] = {}
    said = time.monotonic()
    for count, row in enumerate(rows):
        if time.monotonic() > said + SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"compiling row {count + 1} of {len(rows)}", file=sys.stderr, flush=True)
        why = refusal(row)
        if why is None:
            try:
                programs.of(row)
                Machine({}).hardware(row)
            except ShardwrightError as error:
                why = error.what
        if why is None:
            studies.setdefault(row.study, []).append(row)
        else:
            refused.setdefault(why, []).append(row.name)
    return studies, refused


def report(
    studies: Mapping[str, Sequence[Row]],
    programs: Programs,
    machines: Mapping[str, Machine],
    console: Console,
    *,
    each: bool,
    memory: bool,
    pictures: Path | None,
) -> None:
    """Print every study, and write its picture."""
    pairs: list[tuple[float, bool]] = []
    heads = ("study", "rows", "error", "rank", "pairs in order")
    summary = Table(*heads, *["over memory"] * memory, "fitted")
    for study, rows in studies.items():
        machine = machine_of(study, machines)
        found = {row.name: predict(row, programs, machine) for row in rows}
        peaks = {row.name: programs.peak_bytes(row) for row in rows} if memory else {}
        tested = [row for row in rows if row.name not in machine.fitted_on]
        seconds = [found[row.name] for row in tested]
        score = Score.of(seconds, [row.iter_s for row in tested])
        pairs += pairs_of_plans(tested, seconds)
        # All published plans ran, so a peak above the device's memory is wrong.
        over = [str(sum(peaks[row.name] > memory_of(row) for row in rows))] if memory else []
        summary.add_row(
            study,
            *score.cells,
            *over,
            _fitted_text(machine),
        )
        if each:
            console.print(_rows_table(study, rows, found, peaks, machine))
        if pictures is not None:
            points = [(row.iter_s, found[row.name]) for row in tested]
            write_picture(pictures, study, points)
    if studies:
        console.print(summary)
    if pairs:
        console.print(_pairs_table(pairs))


def _fitted_text(machine: Machine) -> str:
    constants = ", ".join(f"{name} {value:g}" for name, value in machine.constants.items())
    if machine.fitted_on:
        return f"{constants} (on {rows_of(machine.fitted_on)})"
    return f"nothing ({constants} are believed)" if constants else "nothing (preset alone)"


def by_sizes(studies: Mapping[str, Sequence[Row]]) -> dict[str, list[str]]:
    """The names of the rows whose models have names that are not known, by what stands for them."""
    found: dict[str, list[str]] = {}
    for row in itertools.chain.from_iterable(studies.values()):
        if not is_named(row.model):
            found.setdefault(built_by_sizes(row.experts), []).append(row.name)
    return found


def rows_of(names: Sequence[str]) -> str:
    return f"{len(names)} row{'s' * (len(names) != 1)}"


def _pairs_table(pairs: Sequence[tuple[float, bool]]) -> Table:
    table = Table("predicted apart", "pairs", "in order", title="Two plans for the same work")
    for low, high in itertools.pairwise(APART):
        right = [is_right for apart, is_right in pairs if low <= apart < high]
        upto = f"{low:.0%} or more" if high == float("inf") else f"{low:.0%} to {high:.0%}"
        table.add_row(upto, str(len(right)), f"{np.mean(right):.0%}" if right else "")
    return table


def memory_of(row: Row) -> float:
    """The bytes of a row's device."""
    return hardware_of(row.gpu, row.gpus).device.memory_bytes


def _rows_table(
    study: str,
    rows: Sequence[Row],
    found: Mapping[str, float],
    peaks: Mapping[str, float],
    machine: Machine,
) -> Table:
    # Columns in which no row says anything are left out.
    precision = any(row.recipe for row in rows)
    measured = any(row.peak_bytes for row in rows)
    fitted = any(row.name in machine.fitted_on for row in rows)
    # The column of what is computed again, too, if all rows say the same.
    again = len({row.recompute for row in rows}) > 1
    heads = ["row", "model", "GPUs", *["precision"] * precision, "plan", *["recomputed"] * again]
    heads += ["measured s", "predicted s", "error"]
    heads += ["measured GB"] * measured + ["predicted GB"] * bool(peaks) + [""] * fitted
    table = Table(*heads, title=study)
    for row in rows:
        predicted = found[row.name]
        cells = [
            row.name,
            row.model,
            str(row.gpus),
            *[row.recipe] * precision,
            f"{row.plan_text}, {row.microbatch} x {row.num_microbatches}",
            *[row.recompute] * again,
            f"{row.iter_s:.3f}",
            f"{predicted:.3f}",
            f"{predicted / row.iter_s - 1:+.1%}",
        ]
        if measured:
            cells.append(f"{row.peak_bytes / 1e9:.1f}" if row.peak_bytes else "")
        if peaks:
            cells.append(f"{peaks[row.name] / 1e9:.1f}")
        if fitted:
            cells.append("fitted" if row.name in machine.fitted_on else "")
        table.add_row(*cells)
    return table


NO_MEMORY = "memory was not audited: a plan may need more than its device has (--memory tells)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", type=Path, metavar="CSV")
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--presets", action="store_true", help="price by the presets alone")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--memory", action="store_true", help="audit the memory of each, too")
    parser.add_argument("--study", default="", help="only studies whose name has this text")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write a picture per study")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except ShardwrightError as error:
        sys.exit(f"error: {error}")


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ConfigError: a table that cannot be read, or no row of the studies that are asked for.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of plans in which ranks do more than their part
    tables = arguments.tables or sorted(TABLES.glob("*.csv"))
    all_rows = read_tables(tables)
    rows = [row for row in all_rows if arguments.study in row.study]
    where = ", ".join(map(str, tables))
    if not all_rows:
        hint = "give a table with a line for each run below its first line"
        raise ConfigError("there are no rows", where=where, hint=hint)
    if not rows:
        raise ConfigError(
            f"no study has {arguments.study!r} in its name",
            where=where,
            why="the studies are " + "; ".join(sorted({row.study for row in all_rows})),
            hint="leave out --study, or give a part of one of these names",
        )
    programs, console = Programs(), Console(width=160, markup=False)
    for said in filter(None, map(unread_columns, tables)):
        console.print(said)
    studies, refused = sorted_out(rows, programs)
    machines = dict.fromkeys(studies, Machine({})) if arguments.presets else load_machines()
    if arguments.fit:
        fitted = refit(studies, programs)
        for study in studies.keys() - fitted.keys():
            console.print(f"{study}: nothing was fitted, as it has less than {FEWEST} rows")
        save_machines(fitted)
        machines |= fitted
    report(
        studies,
        programs,
        machines,
        console,
        each=arguments.rows,
        memory=arguments.memory,
        pictures=arguments.pictures,
    )
    if studies and not arguments.memory:
        console.print(NO_MEMORY)
    for built_as, names in by_sizes(studies).items():
        said = f"{rows_of(names)}: built as a {built_as} by sizes, as the name is not known here"
        console.print(f"{said} ({', '.join(names)})")
    for why, names in sorted(refused.items()):
        console.print(f"left out, {rows_of(names)}: {why} ({', '.join(names)})")


if __name__ == "__main__":
    main()
