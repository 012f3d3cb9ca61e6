"""Published plans of dense models beside what autodist finds, both by the audit of the program
emitted.

    python benchmarks/published_dense.py [ROW ...] [--study vTrain] [--most 20] [--limit 600]
    python benchmarks/published_dense.py 745 --free     # the search chooses units and batches, too

Rows are those of ``published/runs.csv`` and ``single_node.csv``, or of other tables (``--table``).
Plans that a table repeats with other precisions or containers count once. A row that no plan of
ours says is named with the reason.

The search gets the same ranks and the same batch. It keeps the row's unit, microbatches and stage
of ZeRO, and chooses everything else; with ``--free`` it also chooses the ranks of a unit (powers of
2, up to ``--most-ranks``), the size of a microbatch and the stage of ZeRO. Devices are the presets,
and all products in bfloat16. A plan says its samples and microbatches, ``2 x 24``. Rows of the same
work share a search, and its CPU seconds.

``--most``: so many rows of those asked for, evenly over the list. ``--record``: a CSV to which each
row is added, and whose rows are not searched again; ``published_record.py`` sums it up.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from published import TABLES
from published_record import Record, Searched, read_record, summary, write_record
from published_runs import (
    SEQUENCE_PARALLEL,
    Row,
    graph_of,
    hardware_of,
    plan_of,
    refusal,
)
from published_search import Found, Published, audited, cells, found_for, heading, line
from published_tables import read_tables

from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Batch, Plan
from shardwright.policies.autodist.autodist_policy import search_each
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.batch_sizes import batches
from shardwright.policies.autodist.search.subsearches import Subsearches
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ShardwrightError

BATCH_DIMS = {"input_ids": 0, "labels": 0}


def distinct(rows: Sequence[Row]) -> list[Row]:
    """One row for each plan of a model on a number of devices."""
    kept: dict[object, Row] = {}
    for row in rows:
        work = (row.study, row.model, row.sizes, row.gpu, row.gpus, row.batch)
        kept.setdefault((*work, row.plan_text, row.microbatch), row)
    return list(kept.values())


def spread(rows: Sequence[Row], most: int | None) -> list[Row]:
    """So many of the rows, evenly over the list."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[(2 * i + 1) * len(rows) // (2 * most)] for i in range(most)]


def forms(row: Row, graph: PlannableGraph) -> Iterator[tuple[str, Plan]]:
    """The published plan in all its forms."""
    for recompute in ("none", "selective", "full"):
        name = f"{recompute.replace('none', 'no')} recomputation"
        yield name, plan_of(replace(row, recompute=recompute), graph)
        if row.tp > 1:
            form = replace(row, recompute=f"{recompute}, {SEQUENCE_PARALLEL}")
            yield f"{name}, {SEQUENCE_PARALLEL}", plan_of(form, graph)


def published(row: Row) -> Published:
    """The plan of a row and the work it is for."""
    whole = graph_of(row.model, row.sizes, row.microbatch * row.dp)
    graph = PlannableGraph.of(needed(whole, row.config))
    return Published(
        f"{row.plan_text}, {row.microbatch} x {row.num_microbatches}",
        graph,
        row.config,
        hardware_of(row.gpu, row.gpus),
        row.num_microbatches,
        lambda: forms(row, graph),
    )


def searched(row: Row, known: Published, limit_s: float) -> SearchResult:
    """What autodist finds for the same unit, microbatches and stage of ZeRO."""
    options = AutodistOptions(
        num_microbatches=row.num_microbatches, simpler_within=0.0, time_limit_s=limit_s
    )
    parts = Subsearches.of({None: known.graph}, row.config, None)
    return search_each(parts, options, known.hardware)


def searched_freely(row: Row, known: Published, limit_s: float, most_ranks: int) -> SearchResult:
    """What autodist finds for the same ranks and batch."""
    sizes = [size for size in _powers(min(most_ranks, row.gpus)) if row.gpus % size == 0]
    config = replace(row.config, use_zero="auto")
    parts = {size: _of_unit(row, replace(config, plan_ngpus=size)) for size in sizes}
    options = AutodistOptions(
        global_batch=row.batch, unit_sizes=sizes, simpler_within=0.0, time_limit_s=limit_s
    )
    return search_each(Subsearches.of_units(parts), options, known.hardware)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _of_unit(row: Row, config: ComputeConfig) -> Subsearches:
    """The searches for units of one size."""
    wanted: list[Batch] = batches(config, row.batch, None, BATCH_DIMS)
    graphs: dict[Batch | None, PlannableGraph] = {
        batch: graph_of(row.model, row.sizes, batch.samples) for batch in wanted
    }
    return Subsearches.of(graphs, config, None)


class Searches:
    """The searches for rows, of at most ``limit_s`` CPU seconds each: rows of the same work share
    one. ``most_ranks``: of a unit, where the search chooses it.
    """

    def __init__(self, limit_s: float, most_ranks: int | None) -> None:
        self._limit_s, self._most_ranks = limit_s, most_ranks
        self._known: dict[object, Found] = {}

    def found(self, row: Row, known: Published) -> Found:
        """What is found for a row."""
        sizes = row.microbatch * row.dp, row.num_microbatches
        work = row.model, row.sizes, row.gpu, row.config, *sizes
        if work not in self._known:
            self._known[work] = found_for(known, lambda: self._search(row, known))
        return self._known[work]

    def _search(self, row: Row, known: Published) -> SearchResult:
        if self._most_ranks is None:
            return searched(row, known, self._limit_s)
        return searched_freely(row, known, self._limit_s, self._most_ranks)


def recorded(path: Path | None) -> Record:
    """What a record holds now: others may add to it at the same time."""
    return read_record(path) if path else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="by name (default: all)")
    parser.add_argument("--table", nargs="*", type=Path, metavar="CSV", help="other tables")
    parser.add_argument("--study", default="", help="only studies whose name has this text")
    parser.add_argument("--most", type=int, help="rows, evenly over those asked for")
    default_s = AutodistOptions.time_limit_s
    parser.add_argument(
        "--limit", type=float, default=default_s, help="CPU seconds for each search"
    )
    parser.add_argument(
        "--record", type=Path, metavar="CSV", help="added to; its rows are left out"
    )
    parser.add_argument("--free", action="store_true", help="units and batches are searched, too")
    parser.add_argument("--most-ranks", type=int, default=64, help="of a unit, with --free")
    arguments = parser.parse_args()
    time.monotonic = time.process_time  # the time that limits are of
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of plans in which ranks do more than their part
    tables = arguments.table or sorted(TABLES.glob("*.csv"))
    try:
        rows = read_tables(tables)
    except ShardwrightError as error:
        sys.exit(f"error: {error}")
    rows = [row for row in rows if arguments.study in row.study and not row.experts]
    rows = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    said = distinct([row for row in rows if refusal(row) is None])
    record: Record = {}
    searches = Searches(arguments.limit, arguments.most_ranks if arguments.free else None)
    print(heading(["row", "study", "model", "GPUs"]), flush=True)
    for row in spread(said, arguments.most):
        record |= recorded(arguments.record)
        if row.name in record:
            continue
        known = published(row)
        theirs, found = audited(known), searches.found(row, known)
        own = [row.name, row.study, row.model, str(row.gpus)]
        print(line([*own, *cells(theirs, found)]), flush=True)
        work = Searched(row.name, row.study, row.model, row.gpus, arguments.limit)
        record |= {**recorded(arguments.record), row.name: (work, theirs, found)}
        if arguments.record:
            write_record(arguments.record, record)
    for row in rows:
        if refusal(row) is not None:
            print(f"left out, {row.name}: {refusal(row)}")
    print("\n".join(["", *summary(record)]))


if __name__ == "__main__":
    main()
