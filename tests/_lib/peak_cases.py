"""Plans of which peaks that are predicted are held to those measured, with the deviation that each
may have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peak_ranks import PeakCase, predicted
from spawn import run_processes

from shardwright.compiler.cost.machine.backend import Backend

BLOCKS = ("transformer.h.*",)
BF16 = torch.bfloat16


def table(**options: object) -> dict[str, object]:
    return {"distributed_optimizer": options}


PLAIN = [
    PeakCase("dp", 1),
    PeakCase("dp", 1, recompute=BLOCKS),
    PeakCase("dp", 1, 4),
    PeakCase("data"),
    PeakCase("tp"),
    PeakCase("tp", recompute=BLOCKS),
    PeakCase("tp", num_microbatches=4),
]
ZERO = [
    PeakCase("dp", 1, fields={"use_zero": 1}),
    PeakCase("dp", 1, fields={"use_zero": 1, "zero_use_reduce_scatter": True}),
    PeakCase("dp", 1, 2, fields={"use_zero": 2}),
    PeakCase("dp", 1, 2, fields={"use_zero": 2, "reducer_bucket_cap_mb": 0.2}),
    PeakCase(
        "dp", 1, 2, fields={"use_zero": 2, "reducer_bucket_cap_mb": 0.2, "use_async_reducer": True}
    ),
    PeakCase("dp", 1, fields={"use_zero": 3}),
    PeakCase("dp", 1, fields={"use_zero": 3}, recompute=BLOCKS),
]
OVERLAP = [
    PeakCase("tp", fields={"overlap_communication": True}),
    PeakCase("tp", fields={"overlap_communication": True}, options={"sequence_parallel": True}),
    PeakCase("tp", fields={"overlap_communication": True}, recompute=BLOCKS),
    PeakCase("tp", options={"sequence_parallel": True}),
]
RANDOM = [PeakCase("random", seed=1), PeakCase("random", seed=3, recompute=BLOCKS)]
TABLES = [
    PeakCase("dp", 1, 8, fields={"use_zero": 0} | table(), dtype=BF16),
    PeakCase("dp", 1, 8, fields=table(), dtype=BF16),
    PeakCase("dp", 1, 8, fields=table(store_param_remainders=True), dtype=BF16),
    PeakCase("dp", 1, 8, fields=table(grad_sync_dtype="bf16"), dtype=BF16),
    PeakCase("dp", 1, 8, fields=table(dtype="bf16")),
    PeakCase(
        "dp", 1, 8, fields=table(contiguous_param_buffer=True, overlap_grad_sync=False), dtype=BF16
    ),
    PeakCase("dp", 1, 8, fields=table(contiguous_grad_buffer=False), dtype=BF16),
    PeakCase("dp", 1, 8, fields=table(overlap_param_sync=True, bucket_cap_mb=0.2), dtype=BF16),
    PeakCase("dp", 1, 8, fields={"use_zero": 2} | table(bucket_cap_mb=0.2), dtype=BF16),
    PeakCase("dp", 1, 8, fields={"use_zero": 3} | table(), dtype=BF16),
    PeakCase("tp", 0, 8, fields={"use_zero": 0} | table(store_param_remainders=True), dtype=BF16),
]
# The tied embedding is split between its two stages.
PIPELINES = [
    PeakCase("pp", num_microbatches=2),
    PeakCase("pp", num_microbatches=8),
    PeakCase(
        "pp", num_microbatches=4, recompute=BLOCKS, options={"stage_starts": ("transformer.h.2",)}
    ),
    PeakCase("pp", num_microbatches=8, fields={"use_zero": 1}),
    *(
        PeakCase(
            "pp",
            num_microbatches=4,
            options={"schedule": name, **({"chunks": 2} if chunks else {})},
        )
        for name, chunks in (
            ("gpipe", False),
            ("1f1b_interleaved", True),
            ("zb_h1", False),
            ("zb_v", True),
        )
    ),
]
MUON, ADAFACTOR = "zero_training:Muonlike", "Adafactor"
WHOLES = [
    PeakCase("tp", 0, 8, optimizer=ADAFACTOR),
    PeakCase("tp", 0, 8, optimizer=MUON),
    PeakCase("tp", 0, 8, fields={"reducer_bucket_cap_mb": 0.05}, optimizer=MUON),
    PeakCase("dp", 1, 8, fields={"use_zero": 1}, optimizer=MUON),
    PeakCase("dp", 1, 8, fields={"use_zero": 3}, optimizer=MUON),
    PeakCase("dp", 1, 8, fields={"use_zero": 3} | table(), dtype=BF16, optimizer=ADAFACTOR),
    PeakCase("tp", 0, 8, fields={"use_zero": 0} | table(), dtype=BF16, optimizer=MUON),
]
WHOLES_ON_FOUR = [
    PeakCase("tp", 2, 8, fields={"use_zero": 1}, optimizer=MUON),
    PeakCase("tp", 2, 8, fields={"use_zero": 2}, optimizer=ADAFACTOR),
    PeakCase("hybrid", num_microbatches=16, options={"num_stages": 2, "tp": 2}, optimizer=MUON),
    PeakCase(
        "hybrid",
        0,
        8,
        fields={"use_zero": 3},
        options={"dp": 2, "num_stages": 1, "tp": 2},
        optimizer=ADAFACTOR,
    ),
]
FOUR = [
    PeakCase("dp", 1, 2, fields={"use_zero": 2}),
    PeakCase("tp", 2),
    PeakCase("pp", num_microbatches=4),
    PeakCase("pp", 2, 4, fields={"use_zero": 2}),
    PeakCase("pp", 2, 4, fields={"use_zero": 3}),
    PeakCase("hybrid", num_microbatches=4, options={"num_stages": 2, "tp": 2}),
]
# 4 ranks in zigzag: the first has runs 0 and 7 of eight, which are documents of one token each. So
# it has almost nothing to do, and takes as many queries of others as it may.
UNEVEN = (*(1,) * 256, *(256,) * 6, *(1,) * 256)
PACKED = [
    PeakCase("cp", options={"cp_mode": "ring"}, documents=UNEVEN),
    PeakCase("cp", options={"cp_mode": "gather"}, documents=UNEVEN),
    PeakCase("cp", options={"cp_mode": "ring"}, documents=(2048,)),
]


# Of the layers of a block the first three come together. What sums gradients is there at the peak.
WIDTHS = (192, 64, 64, 64, 192)
WEIGHTS = [
    PeakCase("dp", 1, 2, fields={"use_zero": 3}, widths=WIDTHS),
    PeakCase("dp", 1, 2, fields={"use_zero": 3} | table(), dtype=BF16, widths=WIDTHS),
    PeakCase("dp", 1, fields={"use_zero": 2}, widths=WIDTHS),
    PeakCase("dp", 1, fields={"use_zero": 2}, widths=WIDTHS, optimizer=MUON),
]


@dataclass(frozen=True)
class Group:
    """Plans on as many ranks, and how far their predictions may be below and above what is
    measured, as shares of it. ``of_most``: only the rank with the largest peak counts.
    """

    num_ranks: int
    cases: list[PeakCase]
    below: float = 0.05
    above: float = 0.05
    of_most: bool = False


GROUPS = {
    "plain": Group(2, PLAIN),
    "overlap": Group(2, OVERLAP),
    "zero": Group(2, ZERO),
    "random": Group(2, RANDOM),
    "tables": Group(2, TABLES),
    "pipelines": Group(2, PIPELINES),
    "four ranks": Group(4, FOUR),
    # Whole tensors of what the plan cuts, and their state, lie on their owners; microbatches are so
    # small that they bind.
    "wholes": Group(2, WHOLES, 0.02, 0.02, of_most=True),
    "wholes on four ranks": Group(4, WHOLES_ON_FOUR, 0.02, 0.02, of_most=True),
    # Documents decide how many queries a rank computes for others, and are known at run time only:
    # the prediction is that of a row with which it computes as many as it ever may.
    "packed": Group(4, PACKED[:2], 0.005, 0.01, of_most=True),
    "weights": Group(2, WEIGHTS, 0.001, 0.001, of_most=True),
    "one document": Group(4, PACKED[2:], 0.005, 0.05, of_most=True),
}


def deviations(folder: str, group: Group, backend: Backend = "gloo") -> tuple[list[str], list[str]]:
    """Run the plans of a group on ranks that are processes; for NCCL there are fake devices.
    Returns all lines that compare a prediction with what was measured, and those of them that
    differ by more than they may.
    """
    measured = run_processes(
        group.num_ranks, "peak_ranks:measure", folder, group.cases, fake_cuda=backend == "nccl"
    )
    lines, wrong = [], []
    for number, case in enumerate(group.cases):
        peaks = predicted(case, group.num_ranks, backend)
        found = [of_rank[number] for of_rank in measured]
        pairs = {
            f"rank {rank}": (peaks[rank % len(peaks)], theirs) for rank, theirs in enumerate(found)
        }
        if group.of_most:
            pairs = {"the rank with most": (max(peaks), max(found))}
        for whose, (mine, theirs) in pairs.items():
            share = mine / theirs - 1
            line = f"{case}, {whose}: predicted {mine}, measured {theirs} ({share:+.2%})"
            lines.append(line)
            if not -group.below <= share <= group.above:
                wrong.append(line)
    return lines, wrong
