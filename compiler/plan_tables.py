"""A directory of generated files as tables for people: the plan, the tensors, and where a split fell back to replication."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.compiler.plan.plan import Note, Plan

if TYPE_CHECKING:
    from shardwright.runtime.manifest import Manifest

Row = tuple[str, ...]


def show_directory(console: Console, directory: Path, manifest: Manifest, plan: Plan, *, every_layer: bool) -> None:
    """Print what a directory holds. Names that differ in numbers only share a row, unless ``every_layer``."""
    console.print(header(directory, manifest, plan))
    console.print(tensor_table(manifest, every_layer=every_layer))
    console.print(strategy_table(plan, every_layer=every_layer))
    console.print(note_table(plan.notes, every_layer=every_layer))


def header(directory: Path, manifest: Manifest, plan: Plan) -> RenderableType:
    """What it is, in a few lines."""
    config = manifest.request.get("config", {})
    units = config.get("runtime_ngpus", plan.mesh.size) // plan.mesh.size
    lines = [
        ("model", manifest.class_name),
        ("policy", plan.policy),
        ("mesh", f"{plan.mesh}, {units} unit{'s' if units != 1 else ''}"),
        ("made by", f"shardwright {manifest.shardwright_version}, torch {manifest.torch_version}"),
        ("files", str(directory)),
    ]
    return Text("\n".join(f"{name:<8} {value}" for name, value in lines))


def tensor_table(manifest: Manifest, *, every_layer: bool) -> Table:
    """Parameters, buffers and constants with their stored layouts."""
    table = _table("Tensors", "name", "kind", "dtype", "layout")
    rows = (
        (tensor.name, tensor.kind, str(tensor.dtype).removeprefix("torch."), str(tensor.layout))
        for tensor in manifest.tensors.values()
    )
    _fill(table, rows, every_layer=every_layer)
    return table


def strategy_table(plan: Plan, *, every_layer: bool) -> RenderableType:
    """What every operator does along each mesh axis; operators not listed are computed on every rank."""
    if not plan.strategies:
        return Text("Every operator is computed on every rank.")
    axes = plan.mesh.names
    table = _table("Operators", "name", *axes)
    rows = ((op, *(assignment.get(axis, "R") for axis in axes)) for op, assignment in plan.strategies.items())
    _fill(table, rows, every_layer=every_layer)
    legend = "split:f cuts factor f of the operator's rule; R and G compute it on every rank; linear:i passes sums through."
    return Group(table, Text(legend))


def note_table(notes: Iterable[Note], *, every_layer: bool) -> RenderableType:
    """Where the policy could not split, and why."""
    rows = [(note.op, note.axis, note.reason, note.module_path, note.source) for note in notes]
    if not rows:
        return Text("No operator fell back to replication.")
    table = _table("Replicated", "operator", "axis", "why", "module", "source")
    _fill(table, rows, every_layer=every_layer)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _fill(table: Table, rows: Iterable[Row], *, every_layer: bool) -> None:
    counts: dict[Row, int] = {}
    for row in rows:
        key = row if every_layer else tuple(_without_numbers(cell) if index == 0 else cell for index, cell in enumerate(row))
        counts[key] = counts.get(key, 0) + 1
    for key, count in counts.items():
        table.add_row(key[0] + (f"  x{count}" if count > 1 else ""), *key[1:])


def _without_numbers(name: str) -> str:
    """``h.3.attn`` as ``h.*.attn``; layers of one kind look alike then."""
    return re.sub(r"(?<=[._])\d+(?=[._]|$)", "*", name)
