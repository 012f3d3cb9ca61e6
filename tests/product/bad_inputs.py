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
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import bad_inputs

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
    counts = bad_inputs.run(
        *arguments.groups,
        names=arguments.names,
        share=arguments.share,
        tell=lambda text: print(text, flush=True),
    )
    print(counts.table())
    print(f"{len(counts.troubles)} defects, {time.monotonic() - start:.0f} s")
    return 1 if counts.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
