"""All plans of which peaks that are predicted are held to those measured, on processes with gloo.

    python tests/product/peaks.py [--only tables zero] [--plans 20] [--seed 0]

The slow tests measure one plan of each kind (tests/compiler/cost/test_measured_peaks.py).
``--plans`` draws as many from all, by ``--seed``. Every comparison is printed; the exit status is 1
if one is further off than it may be.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

from peak_cases import GROUPS, deviations


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--plans", type=int, help="as many plans, drawn from all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    every = [(name, case) for name in arguments.only for case in GROUPS[name].cases]
    if arguments.plans is not None:
        every = random.Random(arguments.seed).sample(every, min(arguments.plans, len(every)))
    num_wrong = 0
    for name in arguments.only:
        cases = [case for of, case in every if of == name]
        if not cases:
            continue
        with tempfile.TemporaryDirectory() as folder:
            lines, wrong = deviations(folder, replace(GROUPS[name], cases=cases))
        for line in lines:
            print(f"{'WRONG ' if line in wrong else ''}{name}: {line}", flush=True)
        num_wrong += len(wrong)
    print(f"{len(every)} plans, {num_wrong} predictions wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
