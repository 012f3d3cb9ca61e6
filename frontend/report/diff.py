"""What differs between two plans, in the words of the model: for a person who compares them, or
edits one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.compiler.cost.plan_cost import spans
from shardwright.compiler.plan.imbalance import imbalance_text
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.report.plan_tables import fill_table, in_words, mesh_in_words, new_table
from shardwright.runtime.layout import Layout


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs. ``name``: the operator, tensor or setting. ``before``, ``after``:
    what it is in either plan, in words.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans.

    ``settings``: mesh, policy, schedule and the like. ``operators``: what each does along each
    axis. ``tensors``: stored layouts, inputs and outputs. What a plan leaves to the default is
    ``-``.
    """

    settings: tuple[Change, ...]
    operators: tuple[Change, ...]
    tensors: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.settings or self.operators or self.tensors)

    def to_json(self) -> dict[str, Any]:
        parts = {"settings": self.settings, "operators": self.operators, "tensors": self.tensors}
        return {
            kind: [{"name": c.name, "before": c.before, "after": c.after} for c in found]
            for kind, found in parts.items()
        }


def diff(before: Plan, after: Plan) -> PlanDiff:
    """What differs between two plans of one model."""
    return PlanDiff(
        _changes(_settings(before), _settings(after)),
        _operators(before, after),
        _changes(_tensors(before), _tensors(after)),
    )


def show_diff(found: PlanDiff, *, every_layer: bool = False) -> RenderableType:
    """The difference as tables. Alike layers share a row, unless ``every_layer``."""
    if not found:
        return Text("The plans are the same.")
    parts: list[Table] = []
    for title, changes in (
        ("Settings", found.settings),
        ("Operators", found.operators),
        ("Tensors", found.tensors),
    ):
        if changes:
            part = new_table(title, "name", "before", "after")
            fill_table(
                part,
                ((c.name, c.before, c.after) for c in changes),
                every_layer=every_layer or title == "Settings",
            )
            parts.append(part)
    return Group(*parts)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, "-"), after.get(name, "-")) for name in names)
    return tuple(Change(name, old, new) for name, old, new in pairs if old != new)


def _settings(plan: Plan) -> dict[str, str]:
    settings = {"policy": plan.policy, "mesh": mesh_in_words(plan)}
    if plan.stages:
        settings["stages"] = str(len(plan.stages))
        settings["schedule"] = plan.schedule
        settings["microbatches"] = str(plan.num_microbatches)
        for index, stage in enumerate(plan.stages):
            first = stage.first_op or "the first operator"
            ranks = (
                f"ranks {spans(stage.ranks)} as {stage.mesh}"
                if len(stage.ranks) > 1
                else f"rank {stage.ranks[0]}"
            )
            settings[f"stage {index}"] = f"from {first}, on {ranks}"
        settings.update({f"actions of position {i}": text for i, text in enumerate(plan.actions)})
    if plan.zero_stage is not None:
        settings["stage of ZeRO"] = str(plan.zero_stage)
    if plan.zero > 1:
        settings["parameters in pieces"] = f"over {plan.zero} units"
    if plan.batch is not None:
        settings["batch of a unit"] = str(plan.batch)
    if plan.imbalance is not None:
        settings["imbalance of experts"] = imbalance_text(plan.imbalance)
    if plan.recompute:
        settings["recompute"] = ", ".join(plan.recompute)
    for name, loop in plan.loops.items():
        settings[f"loop {name}"] = f"{len(loop.strategies)} operators in {loop.count} pieces"
    return settings


def _operators(before: Plan, after: Plan) -> tuple[Change, ...]:
    """The changes of operators. Strategies decide what differs: names of dims are for people, and
    an edit of a strategy leaves them as they were.
    """
    found = []
    for op in dict.fromkeys([*before.strategies, *after.strategies]):
        old, new = (_split(plan, op) for plan in (before, after))
        if old == new:
            continue
        dims = [plan.dims.get(op, {}) for plan in (before, after)]
        stale = any(
            axis in dims[0] and dims[0][axis] == dims[1].get(axis)
            for axis in old
            if new.get(axis, old[axis]) != old[axis]
        )
        both = ((before, old), (after, new))
        words = [_told(plan, op, chosen, by_name=not stale) for plan, chosen in both]
        # Names of dims may be alike where strategies are not.
        if words[0] == words[1]:
            words = [_told(plan, op, chosen, by_name=False) for plan, chosen in both]
        found.append(Change(op, words[0], words[1]))
    return tuple(found)


def _split(plan: Plan, op: str) -> dict[str, str]:
    """What an operator does along the axes on which it is not ``R``."""
    return {axis: strategy for axis, strategy in plan.assignment(op).items() if strategy != "R"}


def _told(plan: Plan, op: str, chosen: Mapping[str, str], *, by_name: bool) -> str:
    """What an operator does along each axis, in words: ``tp: split ffn``. If names tell nothing, it
    is ``tp: split:n``, as plans write it.
    """
    words = (
        f"{axis}: {in_words(plan, op, axis) if by_name else strategy}"
        for axis, strategy in chosen.items()
    )
    return ", ".join(words) or "-"


def _tensors(plan: Plan) -> dict[str, str]:
    def text(wish: Layout | str | None) -> str:
        return "dropped" if wish is None else str(wish)

    told = {name: str(layout) for name, layout in plan.stored.items()}
    told |= {f"input {name}": str(layout) for name, layout in plan.inputs.items()}
    told |= {f"{name} once gathered": choice for name, choice in plan.gathers.items()}
    return told | {
        f"output {path or '(the result)'}": text(wish) for path, wish in plan.outputs.items()
    }
