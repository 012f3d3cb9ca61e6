"""Fuzzers of checkpoints: whatever kills a save or alters a folder.

    python tests/product/checkpoints.py corruption --trials 5000
    python tests/product/checkpoints.py kills --trials 500

``corruption``: a file of a checkpoint is damaged, or one entry of its index is another one (with a
new digest), at random. Two ranks load it, and one process reads it. Either all that was saved is
there, or an error of ours says why not, and module, optimizer, masters, scheduler, random numbers
and extra states are bit by bit what they were.

``kills``: saves of one run are killed at random moments, several in a row. The newest complete
checkpoint loads each time, and the directory never holds more than one unfinished folder beside
what is kept. Short forms of both are tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

from checkpoint_fuzz import corruption, kills


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("corruption", "kills"))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with tempfile.TemporaryDirectory() as name:
        counts = {"corruption": corruption, "kills": kills}[arguments.what](
            arguments.trials, arguments.seed, Path(name)
        )
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
