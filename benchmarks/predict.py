"""What the cost model says of plans, against what they take: seconds of a step, and peak bytes of
each rank.

    python benchmarks/predict.py [--ranks 2] [--rounds 12] [--hardware FILE] [--keep FOLDER] python
    benchmarks/predict.py --profile [--ranks 2] [--rounds 12] [--hardware FILE] [--keep FOLDER]
    python benchmarks/predict.py --peaks [--ranks 2]

One GPT in float32 with Adam on CPU, gloo, one thread per rank, some twenty plans for the same work:
copies, ZeRO, tensor parallelism, data parallelism inside a unit, pipelines with several schedules,
numbers of microbatches and splits, recomputation. Every step trains on the same number of samples.

Without ``--hardware`` the machine is calibrated first; ``--keep`` keeps its file and what was
measured. With ``--profile`` predictions are made of measured times of all operators, as after
``shardwright profile``.

All plans live in the same processes and take turns step by step, so that load from elsewhere meets
all; the fastest round counts, as load only adds time. A step lasts from the first rank's start to
the last one's end: a rank that shares its core may begin late. Memory is counted in steps of its
own, storage by storage, and the samples count too. "Busy" leaves out waiting: what the processor
spent on the busiest rank, which other jobs on the machine hardly change. ``--peaks`` measures
memory only, which needs no calibration and no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import GPT

import shardwright
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import PlanCost, audit
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.calibrate.profile import profile
from shardwright.policies.known_policies import find_policy

SEQ_LENGTH, VOCAB_SIZE, BATCH_SIZE = 64, 2048, 16
SIZES = {
    "num_layers": 4,
    "hidden_size": 192,
    "num_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_length": SEQ_LENGTH,
}


@dataclass(frozen=True)
class Case:
    """A plan. ``unit``: ranks of a unit, 0 for all. ``num_microbatches``: of a step. ``recompute``:
    module paths.
    """

    name: str
    policy: str
    unit: int = 0
    num_microbatches: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()

    @property
    def has_stages(self) -> bool:
        return self.policy in ("pp", "hybrid")

    def config(self, num_ranks: int) -> shardwright.ComputeConfig:
        options = {
            **self.options,
            **({"num_microbatches": self.num_microbatches} if self.has_stages else {}),
        }
        return shardwright.ComputeConfig(
            plan_ngpus=self.unit or num_ranks,
            runtime_ngpus=num_ranks,
            use_end2end=True,
            pas_config=options,
            **self.fields,
        )

    def plan(self, graph: Any, config: Any) -> Any:
        """The policy's plan, with the modules that are recomputed."""
        found = find_policy(self.policy).apply(graph, config)
        return replace(getattr(found, "plan", found), recompute=self.recompute)

    def sample(self, num_ranks: int) -> dict[str, torch.Tensor]:
        """One microbatch of one unit."""
        num_units = num_ranks // (self.unit or num_ranks)
        size = BATCH_SIZE // num_units // self.num_microbatches
        tokens = torch.randint(
            VOCAB_SIZE, (size, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(0)
        )
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


BLOCKS = ("blocks.*",)
EVEN = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}
UNEVEN = {2: ("blocks.1",), 4: ("blocks.0", "blocks.1", "blocks.2")}
"""Where stages begin, by the number of ranks."""

CASES = [
    Case("dp", "dp", unit=1),
    Case("dp, async reducer", "dp", unit=1, fields={"use_async_reducer": True}),
    Case("dp, recompute", "dp", unit=1, recompute=BLOCKS),
    Case("dp, 4 microbatches", "dp", unit=1, num_microbatches=4),
    Case("dp, ZeRO-1", "dp", unit=1, fields={"use_zero": 1}),
    Case("dp, ZeRO-2, 2 microbatches", "dp", unit=1, num_microbatches=2, fields={"use_zero": 2}),
    Case("dp, ZeRO-3", "dp", unit=1, fields={"use_zero": 3}),
    Case("data", "data"),
    Case("tp", "tp"),
    Case("tp, recompute", "tp", recompute=BLOCKS),
    Case("tp, 4 microbatches", "tp", num_microbatches=4),
    Case("pp, 1F1B, 2 microbatches", "pp", num_microbatches=2),
    Case("pp, 1F1B, 4 microbatches", "pp", num_microbatches=4),
    Case("pp, 1F1B, 8 microbatches", "pp", num_microbatches=8),
    Case("pp, GPipe, 4 microbatches", "pp", num_microbatches=4, options={"schedule": "gpipe"}),
    Case(
        "pp, interleaved, 4",
        "pp",
        num_microbatches=4,
        options={"schedule": "1f1b_interleaved", "chunks": 2},
    ),
    Case("pp, ZB-H1, 4", "pp", num_microbatches=4, options={"schedule": "zb_h1"}),
]
FOUR = [
    Case("tp in pairs, 2 units", "tp", unit=2),
    Case(
        "pp x tp, 4 microbatches", "hybrid", num_microbatches=4, options={"num_stages": 2, "tp": 2}
    ),
]


def cases(num_ranks: int) -> list[Case]:
    """The plans for 2 or 4 ranks."""
    uneven, even = ({"stage_starts": starts[num_ranks]} for starts in (UNEVEN, EVEN))
    placed = [
        Case("pp, 1F1B, 4, uneven", "pp", num_microbatches=4, options=uneven),
        Case("pp, 1F1B, 4, recompute", "pp", num_microbatches=4, options=even, recompute=BLOCKS),
    ]
    return CASES + placed + (FOUR if num_ranks == 4 else [])


def make_model() -> GPT:
    """A model with one set of values on all ranks."""
    torch.manual_seed(0)
    return GPT(**SIZES)


def predicted(num_ranks: int, hardware: Hardware, *, profiles: bool = False) -> list[PlanCost]:
    """The audits of all plans. ``profiles``: with measured times of their operators."""
    programs = []
    for case in cases(num_ranks):
        graph = trace(make_model(), case.sample(num_ranks))
        programs.append(
            compile_graph(graph, case.plan, case.config(num_ranks), policy_name=case.policy).program
        )
    times = None
    if profiles:
        stages = [
            stage
            for found in programs
            for stage in (found.programs if isinstance(found, PipelineProgram) else (found,))
        ]
        torch.set_num_threads(1)
        times = profile(stages, torch.device("cpu")).times
    return [
        audit(
            found,
            case.config(num_ranks),
            hardware,
            times=times,
            num_microbatches=case.num_microbatches,
        )
        for case, found in zip(cases(num_ranks), programs, strict=True)
    ]


def run_rank(folder: Path, num_rounds: int) -> None:
    """Measure all plans on the calling rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    steps, peaks = [], []
    for number, case in enumerate(cases(num_ranks)):
        config, sample = case.config(num_ranks), case.sample(num_ranks)
        model = shardwright.parallelize(
            make_model(), sample, case.plan, config, gen_savedir=str(folder / str(number))
        )
        samples = [
            {name: x.clone() for name, x in sample.items()} for _ in range(case.num_microbatches)
        ]
        peaks.append(peak_bytes(model, config, samples))
        optimizer = shardwright.build_optimizer(model, torch.optim.Adam, config, lr=1e-4)
        steps.append((model, optimizer, samples))
    moments = np.empty((num_rounds + 2 if num_rounds else 0, len(steps), 3))
    for row in moments:
        for index, step in enumerate(steps):
            row[index] = measured_step(*step)
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, (peaks, moments[2:]))
    if dist.get_rank() == 0:
        of_all = np.stack([found for _, found in gathered])  # rank, round, plan, (start, end, busy)
        taken = of_all[..., 1].max(axis=0) - of_all[..., 0].min(axis=0)
        result = {
            "seconds": taken.min(axis=0, initial=np.inf).tolist(),
            "busy": of_all[..., 2].min(axis=1, initial=np.inf).max(axis=0).tolist(),
            "peaks": [found for found, _ in gathered],
        }
        (folder / "measured.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def peak_bytes(model: Any, config: Any, samples: Sequence[dict[str, torch.Tensor]]) -> int:
    """The most bytes that live at once in a step. Of three after the first the least counts: a
    thread of gloo lets go of what it has sent when it gets to run, and what lives longer for that
    is no part of the plan.
    """
    with LiveBytes() as live:
        optimizer = shardwright.build_optimizer(model, torch.optim.Adam, config, lr=1e-4)
        live.watch(
            [
                *model.parameters(),
                *model.buffers(),
                *(x for sample in samples for x in sample.values()),
            ]
        )
        peaks = []
        for _ in range(4):
            live.restart()
            train(model, optimizer, samples)
            peaks.append(live.peak)
        return min(peaks[1:])


def train(model: Any, optimizer: Any, samples: Sequence[dict[str, torch.Tensor]]) -> None:
    model.train_step(samples)
    optimizer.step()
    optimizer.zero_grad()


def measured_step(
    model: Any, optimizer: Any, samples: Sequence[dict[str, torch.Tensor]]
) -> tuple[float, float, float]:
    """When one step began and ended on this rank, and the time of the processor that it took. All
    ranks have the same clock.
    """
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    train(model, optimizer, samples)
    return start, time.perf_counter(), time.process_time() - busy


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, where no two are equal."""
    order = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(order[0], order[1])[0, 1])


def busy_s(cost: PlanCost) -> float:
    """What the busiest rank computes and communicates: all of a step but waiting."""
    return max(rank.compute_s + rank.communication_s for rank in cost.ranks)


def report_peaks(num_ranks: int, costs: Sequence[PlanCost], measured: dict[str, Any]) -> None:
    """A line for each plan: every rank's peak, and the largest error."""
    worst = 0.0
    for index, (case, cost) in enumerate(zip(cases(num_ranks), costs, strict=True)):
        ranks = [peaks[index] for peaks in measured["peaks"]]
        found = [cost.memory[rank % len(cost.memory)].peak_bytes for rank in range(num_ranks)]
        error = max((mine / theirs - 1 for mine, theirs in zip(found, ranks, strict=True)), key=abs)
        worst = max(worst, abs(error))
        pairs = ", ".join(
            f"{mine / 1e6:.2f} / {theirs / 1e6:.2f}"
            for mine, theirs in zip(found, ranks, strict=True)
        )
        print(f"{case.name:28} {error:+7.2%}   {pairs}")
    print(f"\nlargest error of a peak: {worst:.2%} (MB, predicted / measured, by rank)")


def report(num_ranks: int, costs: Sequence[PlanCost], measured: dict[str, Any]) -> None:
    print(f"{'':28} {'step, ms':>20} {'':>7} {'busy, ms':>19}   {'peak, MB':>18}")
    print(
        f"{'plan':28} {'predicted measured':>20} {'':>7} {'predicted measured':>19}   "
        f"{'predicted measured':>18}"
    )
    worst = 0.0
    for index, (case, cost) in enumerate(zip(cases(num_ranks), costs, strict=True)):
        taken = measured["seconds"][index]
        ranks = [peaks[index] for peaks in measured["peaks"]]
        found = [cost.memory[rank % len(cost.memory)].peak_bytes for rank in range(num_ranks)]
        errors = [mine / theirs - 1 for mine, theirs in zip(found, ranks, strict=True)]
        error = max(errors, key=abs)
        worst = max(worst, abs(error))
        print(
            f"{case.name:28} {cost.step_s * 1e3:10.1f} {taken * 1e3:9.1f} "
            f"{cost.step_s / taken - 1:+7.1%}"
            f" {busy_s(cost) * 1e3:10.1f} {measured['busy'][index] * 1e3:8.1f}"
            f"   {max(found) / 1e6:9.2f} {max(ranks) / 1e6:8.2f} {error:+7.2%}"
        )
    times = [cost.step_s for cost in costs]
    ratios = np.array(times) / np.array(measured["seconds"])
    print(f"\nrank correlation of step times: {rank_correlation(times, measured['seconds']):.3f}")
    busy = [busy_s(cost) for cost in costs]
    print(f"rank correlation of busy times: {rank_correlation(busy, measured['busy']):.3f}")
    print(
        f"predicted / measured: median {np.median(ratios):.2f}, from {ratios.min():.2f} to "
        f"{ratios.max():.2f}"
    )
    print(f"largest error of a peak: {worst:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hardware", help="a hardware file (default: calibrate)")
    parser.add_argument(
        "--profile", action="store_true", help="predict with measured times of operators"
    )
    parser.add_argument("--peaks", action="store_true", help="memory only")
    parser.add_argument("--keep", type=Path, help="a folder for machine.json and measured.json")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_in:
        return run_rank(arguments.rank_in, arguments.rounds)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.hardware
        if arguments.peaks:
            file, arguments.rounds = file or "cpu", 0
        if file is None:
            file = f"{folder}/machine.json"
            command = [
                sys.executable,
                "-m",
                "shardwright",
                "calibrate",
                "--device",
                "cpu",
                "--out",
                file,
            ]
            subprocess.run([*command, "--ranks", str(arguments.ranks)], check=True, env=environment)
        hardware = load_hardware(file, arguments.ranks)
        costs = predicted(arguments.ranks, hardware, profiles=arguments.profile)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={arguments.ranks}",
        ]
        command = [*torchrun, __file__, "--rank-in", folder, "--rounds", str(arguments.rounds)]
        subprocess.run(command, check=True, env=environment)
        show = report_peaks if arguments.peaks else report
        show(arguments.ranks, costs, json.loads((Path(folder) / "measured.json").read_text()))
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / "machine.json").write_text(hardware.dumps())
            shutil.copy(f"{folder}/measured.json", arguments.keep)


if __name__ == "__main__":
    main()
