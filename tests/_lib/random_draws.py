"""The scripts that compare random plans with one device: their arguments, their loop, what they
print.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from shardwright.runtime.errors import ConfigError, PlanError

Draw = TypeVar("Draw")


def try_draws(
    description: str | None,
    models: Collection[str],
    draw: Callable[[int, int, Sequence[str]], Draw],
    run: Callable[[Draw], str],
    most_refused: float,
    every: Sequence[Draw] = (),
) -> int:
    """Try draws until enough of them ran, and return the exit status.

    ``draw``: of a number, a seed and the models to draw from. ``run``: what is wrong with a draw,
    ``""`` if nothing is; what the compiler refuses, it raises. ``most_refused``: how many draws may
    be refused for each that is equal. ``every``: what ``--every`` tries in the place of draws.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(models)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--only", type=int, help="the number of the only draw")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    if every:
        parser.add_argument("--every", action="store_true", help="a table of plans, not draws")
    arguments = parser.parse_args()
    listed = every if every and arguments.every else None
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    failed: list[str] = []
    start = time.monotonic()
    numbers: Iterator[int] = itertools.count(arguments.first)
    if arguments.only is not None:
        numbers = iter([arguments.only])
    elif listed is not None:
        numbers = iter(range(arguments.first, len(listed)))
    for number in numbers:
        late = time.monotonic() - start > 60 * arguments.minutes
        if late or (listed is None and counts["equal"] + counts["failed"] >= arguments.plans):
            break
        if listed is None and counts["refused"] > most_refused * max(20, counts["equal"]):
            failed.append("as too many draws are refused")
            break
        if listed is None:
            found = draw(number, arguments.seed, arguments.models)
        else:
            found = listed[number]
        try:
            problem = run(found)
        except (PlanError, ConfigError) as error:
            counts["refused"] += 1
            print(f"refused {found}: {str(error).splitlines()[0]}", flush=True)
            continue
        except Exception as error:  # a crash is a finding like others
            problem = f"{type(error).__name__}: {error}"
        counts["failed" if problem else "equal"] += 1
        print("FAILED " if problem else "equal  ", found, flush=True)
        if problem:
            failed.append(str(found))
            print(problem, flush=True)
    done = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{done or 'nothing done'}, {time.monotonic() - start:.0f} s")
    for which in failed:
        print("FAILED", which)
    return 1 if failed else 0
