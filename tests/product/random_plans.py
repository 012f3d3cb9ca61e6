"""Random good plans, compiled and verified: none may raise an alarm.

    python tests/product/random_plans.py [--count 1000] [--after 0] [--run]

The mutations of ``tests/museum`` show that the verifier sees wrong programs. This shows that it
leaves right ones alone: any strategy of any operator, on one mesh, in pieces over units (ZeRO-3),
and in stages on meshes of different sizes. Stages that cannot be cut are refused in words and
counted. Every alarm is printed with the model and the seed; the exit status tells whether there was
one.

``--run`` runs plans on one mesh, of all models of the zoo, and holds the loss and all gradients to
one device. The tests run a few dozens (tests/parity/test_random_plans.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import random_plans
import zoo


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--after", type=int, default=0, help="skip so many seeds")
    parser.add_argument("--run", action="store_true", help="and hold them to one device")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.monotonic()
    seed = arguments.after
    while counts["verified"] + counts["alarms"] < arguments.count:
        # Every model meets every kind of plan: kinds go by the seed, models by groups of seeds.
        group = seed // len(random_plans.KINDS)
        name = random_plans.MODELS[group % len(random_plans.MODELS)]
        if arguments.run:
            name = zoo.names()[seed % len(zoo.names())]
        try:
            if arguments.run:
                with tempfile.TemporaryDirectory() as folder:
                    random_plans.run_random(name, seed, Path(folder))
                reason = None
            else:
                reason = random_plans.refused(name, seed)
        except Exception as error:
            counts["alarms"] += 1
            print(f"ALARM {name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
        else:
            counts["refused" if reason else "verified"] += 1
            if reason:
                print(f"refused {name}, seed {seed}: {reason}", flush=True)
        seed += 1
    print(
        f"{counts['verified']} verified, {counts['alarms']} alarms, {counts['refused']} refused, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if counts["alarms"] else 0


if __name__ == "__main__":
    sys.exit(main())
