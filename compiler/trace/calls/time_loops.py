"""Loops over time steps: library functions that are one operator, and a warning where a loop is
unrolled.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.known_loops import KNOWN_LOOPS, LIBRARY, as_operator, known_loop
from shardwright.compiler.trace.step_loops import MANY_STEPS


def known_functions_of(files: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, replacement)`` for each known loop in files of Python, by the names of their
    modules.

    A model calls such a function by its name in the file of its class, so that is where it is
    replaced for the time of a trace.
    """
    for file in sorted(name for name in set(files) if name.startswith(LIBRARY)):
        for path in KNOWN_LOOPS:
            owner_path, _, name = path.rpartition(".")
            owner = sys.modules.get(file)
            if owner_path:
                owner = getattr(owner, owner_path, None)
            function = getattr(owner, name, None)
            if function is not None and (loop := known_loop(function)) is not None:
                yield owner, name, as_operator(function, loop)


def warn_of_unrolled(ops: Sequence[IROp]) -> None:
    """Warn where one line of the model runs so often that compiling and reading the file get
    slow.
    """
    # The same line, in the same module, with the same operator.
    counts = Counter((op.module_path, op.source, op.target) for op in ops if op.source is not None)
    if not counts:
        return
    (module_path, source, target), count = max(counts.items(), key=operator.itemgetter(1))
    if count < MANY_STEPS:
        return
    warnings.warn(
        f"a loop in forward is unrolled: {source} runs {target} {count} times in "
        f"{module_path or 'the model'}\n"
        "  why:   every step becomes operators of its own, so compile time and generated "
        "code grow with the steps\n"
        "  try:   put the loop into a function at the top level of a module, and tell its "
        "dims with "
        "shardwright.register_op",
        stacklevel=2,
    )
