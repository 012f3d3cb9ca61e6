"""What the tests hold a cover of: every model of the zoo under every built-in policy, and models in
pipelines of all sizes, against one device.

    python tests/product/models.py [--only gpt2 pp]

A case is named by its model, policy and ranks; ``--only`` takes those with one of the words in
their names. Every failure is printed; the exit status tells whether there was one.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import test_models
import test_pipelines
import zoo


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed, count = [], 0
    for name, check in cases():
        if not any(word in name for word in options.only):
            continue
        count += 1
        try:
            check()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{count}  {'WRONG' if name in failed else 'ok   '}  {name}", flush=True)
    print(f"{count - len(failed)} of {count} equal one device")
    return bool(failed)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """All cases, by name."""
    for name in zoo.names():
        for index, configuration in enumerate(test_models.CONFIGURATIONS):
            yield (
                f"{name} {' '.join(map(str, configuration))}",
                partial(test_models.check, name, index),
            )
    for name in test_pipelines.MODELS:
        for index, sizes in enumerate(test_pipelines.SIZES):
            words = " ".join(f"{key}={value}" for key, value in sizes.items())
            yield f"{name} {words}", partial(test_pipelines.test_models, name, index)


if __name__ == "__main__":
    sys.exit(main())
