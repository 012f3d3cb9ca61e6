"""Schedules in files, and what is said about bad ones."""

import json
from pathlib import Path

import pytest
from schedules import schedules_of

from shardwright.compiler.schedule import files
from shardwright.compiler.schedule.files import (
    from_csv,
    from_json,
    load_schedule,
    save_schedule,
    to_csv,
    to_json,
)
from shardwright.compiler.schedule.planned import by_hand
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.validate import validate
from shardwright.runtime.errors import PlanError


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_back(name: str) -> None:
    for _, _, _, schedule in schedules_of(name, 4, 4, 2):
        assert from_json(to_json(schedule)) == schedule
        assert from_csv(to_csv(schedule), name=name) == schedule


@pytest.mark.parametrize("suffix", [".json", ".csv", ".CSV"])
def test_files_by_suffix(tmp_path: Path, suffix: str) -> None:
    schedule = generate("zb_v", 2, 3)
    path = tmp_path / f"zb_v{suffix}"
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    assert load_schedule(str(path)) == schedule
    assert by_hand(load_schedule(path).texts).actions == schedule.actions


def test_json_for_people() -> None:
    assert to_json(generate("1f1b", 2, 1)) == (
        '{\n  "format": 1,\n  "name": "1f1b",\n  "num_microbatches": 1,\n  "placement": [0, 1],\n'
        '  "actions": [\n    ["0F0", "0B0"],\n    ["1F0", "1B0"]\n  ]\n}\n'
    )


def test_the_csv_of_the_documentation_runs() -> None:
    text = files.__doc__.split(":\n\n", 1)[1].split("\n\nJSON")[0]
    schedule = from_csv(text)
    validate(schedule)
    assert schedule == Schedule(3, (0, 1), generate("1f1b", 2, 3).actions)


def test_a_csv_of_a_v() -> None:
    schedule = from_csv("0F0,3F0,3B0,0B0\r\n1F0,2F0,2B0,1B0\r\n")
    validate(schedule)
    assert schedule.placement == (0, 1, 1, 0)


@pytest.mark.parametrize(
    "text, error",
    [
        (
            "# mine\n0F0,0B0\n1F0, 1X0\n",
            "'1X0' is not an action of a schedule\n  where: mine.csv, line 3, cell 2\n"
            "  why:   an action is written <stage><kind><microbatch>, with kind F, B, I or W\n"
            "  try:   write for example 0F3, 0B3, 0I3, 0W3; messages and reductions follow "
            "from these",
        ),
        (
            "0F0,0B0\n\n1F0,0F1,1B0\n",
            "stage 0 is on two ranks\n  where: mine.csv, line 3, cell 2: 0F1\n"
            "  why:   line 1 is rank 0 and has the stage too\n  try:   keep all actions of a "
            "stage in one line",
        ),
        (
            "0F0\n2F0\n",
            "no line has actions of stage 1\n  where: mine.csv\n  why:   stages are counted "
            "from 0 and there is a stage 2",
        ),
        (
            "# nothing\n",
            "a schedule without actions\n  where: mine.csv\n  try:   write one line per "
            "rank, for example 0F0,0B0",
        ),
    ],
)
def test_bad_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(text)
    with pytest.raises(PlanError) as raised:
        load_schedule("mine.csv")
    assert str(raised.value) == error


GOOD = {
    "format": 1,
    "name": "mine",
    "num_microbatches": 1,
    "placement": [0, 1],
    "actions": [["0F0"], ["1F0"]],
}


@pytest.mark.parametrize(
    "change, error",
    [
        (
            {"format": 2},
            "a schedule in format 2\n  where: mine.json\n  why:   this version reads format 1",
        ),
        (
            {"name": 3},
            "'name' of the schedule is something else than a string\n  where: mine.json, line 3",
        ),
        (
            {"num_microbatches": True},
            "'num_microbatches' of the schedule is something else than a whole number\n  "
            "where: mine.json, line 4",
        ),
        (
            {"placement": [0, -1]},
            "'placement' of the schedule is something else than a list of ranks, one per "
            "stage\n  where: mine.json, line 5",
        ),
        (
            {"actions": ["0F0", "1F0"]},
            "'actions' of the schedule is something else than a list of lists of actions, "
            "one per rank\n"
            "  where: mine.json, line 9",
        ),
        (
            {"actions": [["0F0"], ["1F0", "1Q0"]]},
            "'1Q0' is not an action of a schedule\n  where: mine.json, line 15, rank 1\n"
            "  why:   an action is written <stage><kind><microbatch>, with kind F, B, I or W\n"
            "  try:   write for example 0F3, 0B3, 0I3, 0W3; messages and reductions follow "
            "from these",
        ),
        (
            {"speed": 1},
            "the schedule has other fields than it should\n  where: mine.json\n"
            "  why:   has actions, format, name, num_microbatches, placement, speed\n"
            "  try:   write format, name, num_microbatches, placement, actions",
        ),
    ],
)
def test_bad_json(change: dict, error: str) -> None:
    with pytest.raises(PlanError) as raised:
        from_json(json.dumps(GOOD | change, indent=1), where="mine.json")
    assert str(raised.value) == error


def test_not_json() -> None:
    with pytest.raises(PlanError) as raised:
        from_json('{\n "format": 1,\n "name" "x"}', where="mine.json")
    assert (
        str(raised.value)
        == "the schedule is not JSON\n  where: mine.json, line 3, column 9\n  why:   Expecting "
        "':' delimiter"
    )
    with pytest.raises(PlanError, match="why:   has list"):
        from_json("[]")


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError,
        match=r"neither a \.csv nor a \.json file\n  try:   name the file schedule\.csv or",
    ):
        save_schedule(generate("1f1b", 1, 1), tmp_path / "schedule.txt")
    with pytest.raises(
        PlanError, match=r"cannot read the schedule .*absent\.csv\n  why:   .*No such file"
    ):
        load_schedule(tmp_path / "absent.csv")
