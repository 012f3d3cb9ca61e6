"""Loaders of data, moved and killed at random.

    python tests/product/data.py moves --trials 500
    python tests/product/data.py kills --trials 100

``moves``: a run goes on under another plan (units, dp, cp, tp, pp), with another number of workers
that read ahead another number of steps, again and again. Plain, blended and packed data. All ranks
together must be given the global batches of one rank that was never interrupted, twins must be
given the same with nothing sent, and no global generator may move.

``kills``: ranks and workers of a training are killed at random moments. The next job, on another
number of ranks and workers, goes on from the last checkpoint. Each checkpoint lists the samples
that were trained; none may be lost or repeated. Short forms of both are tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

from data_kills import kill
from data_moves import move


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("moves", "kills"))
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "moves":
        compared = move(arguments.trials, arguments.seed, log=print)
        print(f"{arguments.trials} moves, {compared} steps compared: all are those of one rank")
        return
    with tempfile.TemporaryDirectory() as name:
        counts = kill(arguments.trials, arguments.seed, Path(name))
    print(", ".join(f"{count} times {what}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
