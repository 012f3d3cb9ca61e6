"""Every argument of everything public with every bad value: what is refused in words, what is
accepted, what ends raw.

    python tests/product/bad_inputs.py [--groups checkpoints states] [--names save_checkpoint]
    [--share 0.1]

Prints a table of counts and each call that ended in an exception that is not ours, or took too
long; the exit status tells whether there was one. The default tests try a part of it
(tests/test_bad_inputs.py).
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import bad_inputs

from shardwright import run_ranks

MOST_BYTES = 8 * 2**30
"""Address space of the run: a call that would fill the memory ends in an error of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = [group for groups in bad_inputs.MAKERS.values() for group in groups]
    parser.add_argument("--groups", nargs="+", default=[], choices=groups)
    parser.add_argument("--names", nargs="+", default=[], help="of functions")
    parser.add_argument("--share", type=float, default=1.0, help="of all calls, a random part")
    arguments = parser.parse_args()
    start = time.monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def on_rank(rank: int) -> bad_inputs.Counts:
            targets = bad_inputs.targets_of(folder, *arguments.groups)
            chosen = [
                target
                for target in targets
                if not arguments.names or target.name in arguments.names
            ]
            return bad_inputs.try_all(
                chosen, bad_inputs.VALUES, arguments.share, lambda text: print(text, flush=True)
            )

        (counts,) = run_ranks(1, on_rank, timeout_s=3600)
    print(counts.table())
    print(f"{len(counts.troubles)} defects, {time.monotonic() - start:.0f} s")
    return 1 if counts.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
