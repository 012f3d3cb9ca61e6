"""Random names, keys, paths and constants in one model: its files must have the statements of plain
names, and its numbers.

    python tests/product/names.py [--minutes 10] [--seed 0] [--runs 1000]

The default tests try a few (tests/compiler/codegen/test_odd_text.py). Every failure is printed with
the names that made it; the exit status tells whether there was one. A third of the models is a
pipeline, of which the statements are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import odd_text
from hypothesis import HealthCheck, Phase, given, seed, settings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()

    @seed(options.seed)
    @settings(
        max_examples=options.runs,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(odd_text.texts())
    def try_one(texts: odd_text.Texts) -> None:
        if time.monotonic() > end:
            return
        kind = ("statements", "numbers", "pipeline")[sum(counts.values()) % 3]
        try:
            if kind == "numbers":
                with tempfile.TemporaryDirectory() as folder:
                    odd_text.check_numbers(texts, Path(folder))
            else:
                odd_text.check_shape(texts, "pp" if kind == "pipeline" else "tp")
        except Exception as error:
            counts["failed"] += 1
            print(
                f"FAILED ({kind}) {texts!r}\n  {type(error).__name__}: {str(error)[:500]}",
                flush=True,
            )
        else:
            counts[kind] += 1

    try_one()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
