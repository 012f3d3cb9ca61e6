"""A record of published plans beside searches: a CSV with a line for each row of the tables.

    python benchmarks/published_record.py FILE ...    # sums records up, with a line for each study

``published_dense.py --record FILE`` adds to it and leaves out what it has, so that a long list can
be searched in parts.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from published_search import Found, Theirs, change, line

from shardwright.runtime.swap import write_file

EQUAL_WITHIN = 5e-4
"""Steps that differ by less than this part count as equal: tables show no more digits."""

READ = {"str": str, "int": int, "float": float, "bool": "True".__eq__}
"""What reads a cell, by the type of its field."""

COLUMNS = ("study", "plans", "step of the plan found", "median", "gap, median", "largest")
COLUMNS += ("with meshes left out", "CPU s, median", "largest")


@dataclass(frozen=True)
class Searched:
    """A row of the tables, and what a search of at most ``limit_s`` CPU seconds found for it."""

    row: str
    study: str
    model: str
    gpus: int
    limit_s: float


Record = dict[str, tuple[Searched, Theirs, Found]]
"""What was searched, by the name of the row: a line has all fields of the three."""


def read_record(path: Path) -> Record:
    """The record in a file; empty if there is none."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [
            (_of(Searched, row), _of(Theirs, row), _of(Found, row)) for row in csv.DictReader(file)
        ]
    return {searched.row: (searched, theirs, found) for searched, theirs, found in rows}


def _of(kind: Any, cells: dict[str, str]) -> Any:
    return kind(**{field.name: READ[field.type](cells[field.name]) for field in fields(kind)})


def write_record(path: Path, record: Record) -> None:
    """Replace the record in a file. Figures have six digits."""
    text = io.StringIO()
    names = [field.name for kind in (Searched, Theirs, Found) for field in fields(kind)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for parts in record.values():
        cells = [cell for part in parts for cell in asdict(part).items()]
        writer.writerow(
            {n: f"{cell:.6g}" if isinstance(cell, float) else cell for n, cell in cells}
        )
    write_file(path, text.getvalue().encode())


def summary(record: Record) -> list[str]:
    """A table: what was found for the plans of each study, and for all."""
    parts: dict[str, list[tuple[Theirs, Found]]] = {}
    for searched, *pair in sorted(record.values(), key=lambda item: item[0].study):
        parts.setdefault(searched.study, []).append((pair[0], pair[1]))
    parts["all"] = [pair for pairs in parts.values() for pair in pairs]
    lines = [_summed(study, pairs) for study, pairs in parts.items()]
    return [line(COLUMNS), "|---" * len(COLUMNS) + "|", *lines]


def _summed(study: str, pairs: Sequence[tuple[Theirs, Found]]) -> str:
    changes = [more for pair in pairs if (more := change(*pair)) is not None]
    known = [found for _, found in pairs if found.found_s]
    counts = {
        "shorter": sum(more < -EQUAL_WITHIN for more in changes),
        "equal": sum(abs(more) <= EQUAL_WITHIN for more in changes),
        "longer": sum(more > EQUAL_WITHIN for more in changes),
        "none": len(pairs) - len(known),
        "where the published plan does not fit": len(known) - len(changes),
    }
    cells = [study, str(len(pairs))]
    cells.append(", ".join(f"{count} {word}" for word, count in counts.items() if count))
    cells.append(f"{median(changes):+.1%}" if changes else "")
    cells += _middle_and_most((found.gap for found in known), "{:.1%}")
    cells.append(str(sum(found.left_out > 0 for found in known)))
    cells += _middle_and_most((found.cpu_s for _, found in pairs), "{:.0f}")
    return line(cells)


def _middle_and_most(figures: Iterable[float], form: str) -> list[str]:
    found = list(figures)
    return [form.format(median(found)), form.format(max(found))] if found else ["", ""]


def main() -> None:
    record: Record = {}
    for path in sys.argv[1:]:
        record |= read_record(Path(path))
    print("\n".join(summary(record)))


if __name__ == "__main__":
    main()
