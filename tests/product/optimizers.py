"""The full product of models, plans, stages of ZeRO and their options, optimizers and accumulation,
against one device.

    python tests/product/optimizers.py [--minutes 10] [--seed 0] [--only optimizer=muonlike]

The default tests run a cover of it (tests/parity/test_zero.py). Cases come in random order, so that
a run that ends early has seen some of everything; ``--seed`` chooses the order, and ``--after``
skips what an earlier run with this seed has done. Every failure is printed with its case; the exit
status tells whether there was one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

from zero_models import FACTORS, cases, train


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FACTOR=VALUE", help=f"of {', '.join(FACTORS)}"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=int, default=0, help="skip so many cases")
    arguments = parser.parse_args()
    wanted = dict(text.split("=", 1) for text in arguments.only)
    if unknown := wanted.keys() - FACTORS.keys():
        parser.error(f"there is no factor {min(unknown)}")
    everything = [
        case for case in cases() if all(str(case[name]) == value for name, value in wanted.items())
    ]
    random.Random(arguments.seed).shuffle(everything)
    num_equal = num_failed = 0
    start = time.monotonic()
    for case in everything[arguments.after :]:
        if time.monotonic() - start > 60 * arguments.minutes:
            break
        try:
            report = train(case)
            problem = "" if report.ok else str(report)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        num_failed, num_equal = num_failed + bool(problem), num_equal + (not problem)
        if problem:
            print("FAILED", case, f"\n{problem}", flush=True)
    print(
        f"{num_equal} equal, {num_failed} failed of {len(everything)} cases, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
