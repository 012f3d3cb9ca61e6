"""A directory of generated files as tables for people: the plan, the tensors, and where a split
fell back to replication.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.compiler.cost.work_share import WorkShare
from shardwright.compiler.ops.strategy import exchange, split_factor
from shardwright.compiler.plan.imbalance import imbalance_text
from shardwright.compiler.plan.plan import Note, Plan

if TYPE_CHECKING:
    from shardwright.runtime.manifest import Manifest

Row = tuple[str, ...]


def show_directory(
    console: Console, directory: Path, manifest: Manifest, plan: Plan, *, every_layer: bool
) -> None:
    """Print what a directory holds. Names that differ in numbers only share a row, unless
    ``every_layer``.
    """
    console.print(header(directory, manifest, plan), soft_wrap=True)
    if manifest.work is not None and not every_layer:
        console.print(work_reasons(manifest.work), soft_wrap=True, end="")
    console.print(tensor_table(manifest, every_layer=every_layer))
    console.print(strategy_table(plan, every_layer=every_layer))
    console.print(notes(plan.notes, every_layer=every_layer), soft_wrap=True)


def header(directory: Path, manifest: Manifest, plan: Plan) -> RenderableType:
    """What it is, in a few lines."""
    config = manifest.request.get("config", {})
    units = config.get("runtime_ngpus", plan.mesh.size) // plan.mesh.size
    zero = [f"stage {plan.zero_stage}, as the plan says"] if plan.zero_stage is not None else []
    zero += [f"parameters in pieces over {plan.zero} units"] if plan.zero > 1 else []
    lines = [
        ("model", manifest.class_name),
        ("policy", plan.policy),
        ("mesh", f"{mesh_in_words(plan)}, {units} unit{'s' if units != 1 else ''}"),
    ]
    if plan.stages:
        microbatches = f"{plan.num_microbatches} microbatches"
        lines.append(("pipeline", f"{stages_in_words(plan)}, {plan.schedule}, {microbatches}"))
    if plan.batch is not None:
        lines.append(("batch", f"{plan.batch} samples in a unit"))
    if zero:
        lines.append(("zero", ", ".join(zero)))
    if plan.imbalance is not None:
        share = f"{imbalance_text(plan.imbalance)} of an even share"
        lines.append(("experts", f"the busiest rank is assumed to get {share}"))
    versions = f"shardwright {manifest.shardwright_version}, torch {manifest.torch_version}"
    lines += [("made by", versions), ("files", str(directory))]
    if manifest.work is not None:
        lines.append(("work", str(WorkShare.from_json(manifest.work))))
    return Text("\n".join(f"{name:<8} {value}" for name, value in lines))


def work_reasons(data: Mapping[str, Any]) -> Text:
    """Where ranks do much more than their part of one device's arithmetic: what is not divided.
    Layers alike are together.
    """
    work = WorkShare.from_json(data)
    return Text(
        "".join(f"         {reason}\n" for reason in work.reasons) if work.is_uneven else ""
    )


def stages_in_words(plan: Plan) -> str:
    """The stages of a plan in words: ``8 stages in 4 positions``; ``1 stage``."""
    positions, number = len({stage.ranks for stage in plan.stages}), len(plan.stages)
    words = f"{number} stages" if number > 1 else "1 stage"
    return f"{words} in {positions} positions" if positions < number else words


def tensor_table(manifest: Manifest, *, every_layer: bool) -> Table:
    """Parameters, buffers and constants with their stored layouts."""
    table = new_table("Tensors", "name", "kind", "dtype", "layout")
    rows = (
        (tensor.name, tensor.kind, str(tensor.dtype).removeprefix("torch."), str(tensor.layout))
        for tensor in manifest.tensors.values()
    )
    fill_table(table, rows, every_layer=every_layer)
    return table


def strategy_table(plan: Plan, *, every_layer: bool) -> RenderableType:
    """What every operator does along each mesh axis, by the names of the model's dims."""
    axes = axes_of(plan)
    if not plan.strategies or not axes:
        return Text(
            f"Every operator is computed on every rank{' of its stage' if plan.stages else ''}."
        )
    table = new_table("Operators", "name", *axes)
    rows = ((op, *(in_words(plan, op, axis) for axis in axes)) for op in plan.strategies)
    fill_table(table, rows, every_layer=every_layer)
    legend = "Operators not listed are computed whole on every rank, as '-' is."
    return Group(table, Text(legend))


def mesh_in_words(plan: Plan) -> str:
    """The mesh of a plan in words: ``pp=2 x tp=4``. If stages have meshes of their own, these
    follow one another: ``tp=4 | tp=2 | one rank``.
    """
    if not has_own_meshes(plan):
        return str(plan.mesh)
    return " | ".join(
        str(mesh) for mesh in {stage.ranks: stage.mesh for stage in plan.stages}.values()
    )


def has_own_meshes(plan: Plan) -> bool:
    """Whether stages are on meshes that differ, or that are none of the plan's: its own counts
    ranks only, then.
    """
    meshes = {stage.mesh for stage in plan.stages}
    return len(meshes) > 1 or any(not set(mesh.names) <= set(plan.mesh.names) for mesh in meshes)


def axes_of(plan: Plan) -> tuple[str, ...]:
    """The axes along which operators are split: those of the stages where there are some."""
    if not plan.stages:
        return plan.mesh.names
    return tuple(dict.fromkeys(name for stage in plan.stages for name in stage.mesh.names))


def in_words(plan: Plan, op: str, axis: str) -> str:
    """What an operator does along an axis: ``split heads``, for example."""
    strategy = plan.assignment(op).get(axis, "R")
    factor = split_factor(strategy)
    if factor is not None:
        verb = "exchange" if exchange(strategy) else "split"
        return f"{verb} {plan.dims.get(op, {}).get(axis, factor)}"
    return {"R": "-", "G": "-, gradients summed later"}.get(strategy, "on summands of its operands")


def notes(found: Iterable[Note], *, every_layer: bool) -> Text:
    """The operators that the policy could not split, with the reasons."""
    rows = _counted(
        ((note.op, note.axis, note.reason, note.source) for note in found), every_layer=every_layer
    )
    if not rows:
        return Text("No operator fell back to replication.")
    text = Text("Replicated", "bold")
    for (op, axis, reason, source), count in rows.items():
        text.append(f"\n{op}{_times(count)} over {axis}: {reason}\n    {source}", "not bold")
    return text


def new_table(title: str, *columns: str) -> Table:
    """A table without rows, as all commands print them."""
    table = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        title_style="bold",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def fill_table(table: Table, rows: Iterable[Row], *, every_layer: bool) -> None:
    """Add the rows, those of alike layers as one unless ``every_layer``."""
    for row in alike_rows(rows, every_layer=every_layer):
        table.add_row(*row)


def alike_rows(rows: Iterable[Row], *, every_layer: bool = False) -> list[Row]:
    """The rows with those of alike layers as one, which says how many they are."""
    return [
        (row[0] + _times(count), *row[1:])
        for row, count in _counted(rows, every_layer=every_layer).items()
    ]


def _counted(rows: Iterable[Row], *, every_layer: bool) -> dict[Row, int]:
    """How often each row occurs, alike layers taken together unless ``every_layer``."""
    alike: dict[Row, list[Row]] = {}
    for row in rows:
        alike.setdefault(row if every_layer else (_without_numbers(row[0]), *row[1:]), []).append(
            row
        )
    return {key if len(found) > 1 else found[0]: len(found) for key, found in alike.items()}


def _times(count: int) -> str:
    return f"  x{count}" if count > 1 else ""


def _without_numbers(name: str) -> str:
    """``h.3.attn`` as ``h.*.attn``; layers of one kind look alike then."""
    return re.sub(r"(?<=[._])\d+(?=[._]|$)", "*", name)
