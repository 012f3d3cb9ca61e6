"""The full product of models, schedules, meshes and numbers of microbatches, against one device.

    python tests/product/pipelines.py [--models gpt2 t5] [--minutes 10] [--seed 0]

The default tests run a cover of it (tests/parity/test_pipelines.py). Cases come in random order, so
that a run that ends early has seen some of everything; ``--seed`` chooses the order, and
``--after`` skips what an earlier run with this seed has done. Every failure is printed with its
case; the exit status tells whether there was one. A case whose schedule does not exist
(interleaving needs whole rounds of microbatches) is left out; one that the compiler refuses is
counted, with its reason once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import zoo

from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import PlanError

MODELS = ("gpt2", "llama", "t5", "vit", "resnet", "unet", "gpt2-uneven", "bert", "transformer")
MESHES: dict[str, dict[str, Any]] = {
    "pp 2": {"policy": "pp", "ranks": 2},
    "pp 3": {"policy": "pp", "ranks": 3},
    "pp 4": {"policy": "pp", "ranks": 4},
    "pp 2 x 2 units": {"policy": "pp", "ranks": 2, "units": 2},
    "pp 2 x tp 2": {"policy": "hybrid", "ranks": 4, "num_stages": 2},
    "pp 4 x tp 2": {"policy": "hybrid", "ranks": 8, "num_stages": 4},
    "pp 2 x tp 2 x 2 units": {"policy": "hybrid", "ranks": 4, "num_stages": 2, "units": 2},
    "pp 2 x dp 2 x tp 2": {"policy": "hybrid", "ranks": 8, "num_stages": 2, "dp": 2},
}
Case = tuple[str, str, str, int]
"""Model, schedule, mesh, number of microbatches."""


def cases(models: list[str]) -> list[Case]:
    """All that exist."""
    schedules = [name for name, method in SCHEDULES.items() if method.trains]
    found = []
    for model, schedule, mesh, num_microbatches in itertools.product(
        models, schedules, MESHES, range(1, 10)
    ):
        positions = MESHES[mesh].get("num_stages", MESHES[mesh]["ranks"])
        if not SCHEDULES[schedule].whole_rounds or num_microbatches % positions == 0:
            found.append((model, schedule, mesh, num_microbatches))
    return found


def run(case: Case) -> str:
    """``""`` for a case that equals one device, else what is wrong with it. Raises
    :class:`PlanError` for a refused one.
    """
    model, schedule, mesh, num_microbatches = case
    options = dict(MESHES[mesh])
    policy, ranks, units = options.pop("policy"), options.pop("ranks"), options.pop("units", 1)
    config = {
        "plan_ngpus": ranks,
        "runtime_ngpus": ranks * units,
        "use_end2end": True,
        "pas_config": {**options, "schedule": schedule, "num_microbatches": num_microbatches},
    }
    entry = zoo.get(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(entry.build(), entry.inputs(), policy, config, steps=2)
    return "" if report.ok else str(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=int, default=0, help="skip so many cases")
    arguments = parser.parse_args()
    everything = cases(arguments.models)
    random.Random(arguments.seed).shuffle(everything)
    counts: Counter[str] = Counter()
    reasons: set[str] = set()
    start = time.monotonic()
    for case in everything[arguments.after :]:
        if time.monotonic() - start > 60 * arguments.minutes:
            break
        try:
            problem = run(case)
        except PlanError as error:
            counts["refused"] += 1
            if str(error) not in reasons:
                reasons.add(str(error))
                print("refused", *case, f"\n{error}", flush=True)
            continue
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        counts["failed" if problem else "equal"] += 1
        if problem:
            print("FAILED", *case, f"\n{problem}", flush=True)
    done = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{done or 'nothing done'} of {len(everything)} cases, {time.monotonic() - start:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
