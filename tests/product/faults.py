"""Kill or stop one rank of a job at a random moment, again and again: do the others end, and in
words?

    python tests/product/faults.py --minutes 60
    python tests/product/faults.py --runs 20 --seed 7

Each run compiles a small model on real processes with gloo and trains it, without checkpoints, with
some, or with some that are saved in the background. One rank sends itself SIGKILL or SIGSTOP at a
random communication, or gets it at a random time. Every other rank must end within its limit, with
an error of shardwright that names the one it missed, and the newest checkpoint must be whole.
Prints a line for what went wrong, and the counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import faults
from faults import Fault, Job, Outcome

import shardwright
from shardwright.runtime import errors

JOBS = {
    "tp": Job("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}, saves=True),
    "dp": Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2}, has_store=True),
    "zero 1": Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 1}, saves=True),
    "zero 1, saving in the background": Job(
        "dp",
        {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 1},
        saves=True,
        in_background=True,
        num_steps=12,
    ),
    "tp, saving in the background": Job(
        "tp",
        {"plan_ngpus": 2, "runtime_ngpus": 2},
        saves=True,
        in_background=True,
        num_steps=12,
    ),
    "zero 2, overlapping": Job(
        "dp",
        {
            "plan_ngpus": 1,
            "runtime_ngpus": 3,
            "use_zero": 2,
            "distributed_optimizer": {"overlap_grad_sync": True, "overlap_param_sync": True},
        },
    ),
    "zero 3": Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}, saves=True),
    "tp x 2 units": Job("tp", {"plan_ngpus": 2, "runtime_ngpus": 4}, has_store=True),
    "pp": Job(
        "pp",
        {
            "plan_ngpus": 2,
            "runtime_ngpus": 2,
            "use_end2end": True,
            "pas_config": {"num_microbatches": 2},
        },
    ),
    "pp, 4 stages": Job(
        "pp",
        {
            "plan_ngpus": 4,
            "runtime_ngpus": 4,
            "use_end2end": True,
            "pas_config": {"num_microbatches": 6},
        },
    ),
    "pp, interleaved": Job(
        "pp",
        {
            "plan_ngpus": 2,
            "runtime_ngpus": 2,
            "use_end2end": True,
            "pas_config": {"num_microbatches": 4, "schedule": "1f1b_interleaved", "chunks": 2},
        },
    ),
    "pp x 2 units, ZeRO 1": Job(
        "pp",
        {
            "plan_ngpus": 2,
            "runtime_ngpus": 4,
            "use_zero": 1,
            "use_end2end": True,
            "pas_config": {"num_microbatches": 4},
        },
    ),
}
LIMIT_S = 6.0
LONGEST_S = 2.5
"""After this long, from when the ranks have begun, even slow runs are past their compile."""


def random_fault(rng: random.Random, job: Job) -> tuple[Fault, float]:
    """Who leaves, when and how; and after how many seconds where the moment is a time."""
    by_number = rng.random() < 0.6
    signal = rng.choice(list(faults.SIGNALS.values()))
    moment = rng.randint(1, 120) if by_number else None
    return Fault(rng.randrange(job.num_ranks), moment, signal), rng.uniform(0.0, LONGEST_S)


def judged(outcome: Outcome, fault: Fault) -> list[str]:
    """What each survivor did, in a few words; what begins with ``WRONG`` must not be."""
    verdicts = []
    for rank, text in outcome.errors.items():
        kind = text.partition(":")[0]
        if rank in outcome.stuck:
            verdicts.append("WRONG: stuck")
        elif not text:
            verdicts.append("ended before")
        elif not (isinstance(getattr(errors, kind, None), type) and "rank" in text):
            verdicts.append(f"WRONG: {text.splitlines()[0]}")
        else:
            names = (
                f"rank {fault.victim}" in text or "ranks" in text or "store does not answer" in text
            )
            verdicts.append("in words" if names else "in words, of another survivor")
    return verdicts


def one(rng: random.Random, name: str | None) -> tuple[str, Fault, list[str]]:
    """One random run, of the job of that name or of any."""
    name = name or rng.choice(list(JOBS))
    job = JOBS[name]
    fault, after_s = random_fault(rng, job)
    with tempfile.TemporaryDirectory() as folder:
        outcome = faults.run(
            Path(folder), job, fault, timeout_s=LIMIT_S, after_s=after_s, target="compile_and_train"
        )
        verdicts = judged(outcome, fault) + newest(Path(folder) / "checkpoints")
    title = f"{name}, after {after_s:.2f} s" if fault.moment is None else name
    return title, fault, verdicts


def newest(directory: Path) -> list[str]:
    """What reading the newest checkpoint gives; nothing where none was complete."""
    if not (directory / "LATEST").exists():
        return []
    try:
        shardwright.read_checkpoint(directory)
    except errors.ShardwrightError as error:
        return [f"WRONG: the newest checkpoint: {error}"]
    return ["newest checkpoint whole"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--only", choices=JOBS, help="the job of all runs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, counts, number = random.Random(arguments.seed), Counter[str](), 0
    minutes = arguments.minutes if arguments.minutes or arguments.runs else 10.0
    end_s = time.monotonic() + 60 * (minutes or 1e9)
    while time.monotonic() < end_s and number < (arguments.runs or 10**9):
        number += 1
        title, fault, verdicts = one(rng, arguments.only)
        counts[fault.signal.name] += 1
        counts.update(verdicts)
        for verdict in verdicts:
            if verdict.startswith("WRONG"):
                print(f"run {number}: {title}, {fault}: {verdict}", flush=True)
    print(
        f"{number} runs: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    )
    sys.exit(any(what.startswith("WRONG") for what in counts))


if __name__ == "__main__":
    main()
