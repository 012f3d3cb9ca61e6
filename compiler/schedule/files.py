"""Schedules as files: JSON, and CSV that is easy to write by hand.

A CSV file has one line per rank, its cells are actions; empty cells and lines that start with ``#``
are skipped. Stages belong to the rank in whose line they are, and microbatches are those that
occur:

    # 2 ranks, 3 microbatches
    0F0, 0F1,      0B0, 0F2, 0B1,      0B2
       , 1F0, 1B0, 1F1, 1B1, 1F2, 1B2

JSON names everything:

    {"format": 1, "name": "1f1b", "num_microbatches": 3, "placement": [0, 1], "actions": [["0F0",
    ...], ["1F0", ...]]}

Reading checks what a file says, not whether the schedule runs: follow it with ``validate``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import PlanError
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.schedule_actions import ScheduleAction, parse_action

FORMAT = 1
"""The version of the JSON form."""

_FIELDS = ("format", "name", "num_microbatches", "placement", "actions")


@checked
def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write ``schedule`` as JSON or CSV, by the file's suffix.

    Raises:
        PlanError: another suffix.
    """
    path = Path(path)
    path.write_text((to_csv if _suffix(path) == ".csv" else to_json)(schedule), encoding="utf-8")


@checked
def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule from JSON or CSV, by the file's suffix. A CSV's schedule has the name of the
    file.

    Raises:
        PlanError: another suffix, a file that cannot be read, or what it says is no schedule; names
            the line.
    """
    path = Path(path)
    suffix = _suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the schedule {path}", why=str(error)) from error
    return (
        from_csv(text, name=path.stem, where=str(path))
        if suffix == ".csv"
        else from_json(text, where=str(path))
    )


@checked
def to_csv(schedule: Schedule) -> str:
    """One line per rank. The name is not kept, nor ranks and microbatches without actions."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.actions)


@checked
def from_csv(text: str, name: str = "custom", where: str = "schedule") -> Schedule:
    """The schedule in CSV ``text``; ``where`` names its source in errors.

    Raises:
        PlanError: a cell that is no action, a stage in two lines, or stages left out; names line
            and cell.
    """
    rows: list[tuple[ScheduleAction, ...]] = []
    # A stage belongs to the rank in whose line it is met first.
    owner: dict[int, tuple[int, int]] = {}  # stage -> (rank, line)
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip() or row.lstrip().startswith("#"):
            continue
        actions = []
        for cell, word in enumerate(row.split(","), start=1):
            if not word.strip():
                continue
            at = f"{where}, line {line}, cell {cell}"
            action = _csv_action(word.strip(), at)
            rank, first_line = owner.setdefault(action.stage, (len(rows), line))
            if rank != len(rows):
                raise PlanError(
                    f"stage {action.stage} is on two ranks",
                    where=f"{at}: {action}",
                    why=f"line {first_line} is rank {rank} and has the stage too",
                    hint="keep all actions of a stage in one line",
                )
            actions.append(action)
        rows.append(tuple(actions))
    if not owner:
        raise PlanError(
            "a schedule without actions",
            where=where,
            hint="write one line per rank, for example 0F0,0B0",
        )
    # Stages are counted from 0 without a gap.
    absent = next((stage for stage in range(max(owner)) if stage not in owner), None)
    if absent is not None:
        raise PlanError(
            f"no line has actions of stage {absent}",
            where=where,
            why=f"stages are counted from 0 and there is a stage {max(owner)}",
        )
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(
        num_microbatches, tuple(owner[stage][0] for stage in sorted(owner)), tuple(rows), name
    )


@checked
def to_json(schedule: Schedule) -> str:
    """Everything about ``schedule``, one line per rank."""
    # One line a rank, which ``json.dumps`` with an indent would break at every action.
    rows = ",\n".join(
        f"    {json.dumps([str(action) for action in actions])}" for actions in schedule.actions
    )
    head = {
        "format": FORMAT,
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
    }
    fields = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{fields}  "actions": [\n{rows}\n  ]\n}}\n'


@checked
def from_json(text: str, where: str = "schedule") -> Schedule:
    """The schedule in JSON ``text``: ``from_json(to_json(schedule)) == schedule``. ``where`` names
    its source in errors.

    Raises:
        PlanError: not JSON, a field missing, unknown or of the wrong type, an action that is none;
            names the line.
    """
    # Checked from the outside in: JSON, its keys, the types of its fields, each action.
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        at = f"{where}, line {error.lineno}, column {error.colno}"
        raise PlanError("the schedule is not JSON", where=at, why=error.msg) from error
    if not isinstance(data, dict) or sorted(data) != sorted(_FIELDS):
        got = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            "the schedule has other fields than it should",
            where=where,
            why=f"has {got}",
            hint=f"write {', '.join(_FIELDS)}",
        )
    if data["format"] != FORMAT:
        raise PlanError(
            f"a schedule in format {data['format']!r}",
            where=where,
            why=f"this version reads format {FORMAT}",
        )
    _expect(isinstance(data["name"], str), "name", "a string", text, where)
    _expect(_is_count(data["num_microbatches"]), "num_microbatches", "a whole number", text, where)
    _expect(
        _is_list(data["placement"], _is_count),
        "placement",
        "a list of ranks, one per stage",
        text,
        where,
    )
    _expect(
        _is_list(data["actions"], _is_row),
        "actions",
        "a list of lists of actions, one per rank",
        text,
        where,
    )
    rows = tuple(
        tuple(_json_action(word, rank, text, where) for word in row)
        for rank, row in enumerate(data["actions"])
    )
    return Schedule(data["num_microbatches"], tuple(data["placement"]), rows, data["name"])


def _json_action(word: str, rank: int, text: str, where: str) -> ScheduleAction:
    try:
        return parse_action(word)
    except PlanError as error:
        raise _placed(
            error, f"{where}, line {_line_of(json.dumps(word), text)}, rank {rank}"
        ) from None


def _csv_action(word: str, where: str) -> ScheduleAction:
    try:
        return parse_action(word)
    except PlanError as error:
        raise _placed(error, where) from None


def _placed(error: PlanError, where: str) -> PlanError:
    return PlanError(error.what, where=where, why=error.why, hint=error.hint)


def _expect(holds: bool, field: str, wanted: str, text: str, where: str) -> None:
    if not holds:
        at = f"{where}, line {_line_of(json.dumps(field), text)}"
        raise PlanError(f"{field!r} of the schedule is something else than {wanted}", where=at)


def _line_of(token: str, text: str) -> int:
    """The first line with ``token``; what is wrong about a token is wrong wherever it is."""
    return text[: text.index(token)].count("\n") + 1 if token in text else 1


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_row(value: Any) -> bool:
    return _is_list(value, lambda word: isinstance(word, str))


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise PlanError(
            f"{path} is neither a .csv nor a .json file",
            hint="name the file schedule.csv or schedule.json",
        )
    return suffix
