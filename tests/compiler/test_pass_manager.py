"""The pass manager: order, times, dumps, verification."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwright.compiler.pass_manager import CompileReport, FunctionPass, PassManager, Step
from shardwright.runtime.errors import InternalError, PlanError


@dataclass(frozen=True)
class Number:
    value: int


@dataclass(frozen=True)
class Add:
    """A pass with an option."""

    amount: int
    name: str = "add"

    def __call__(self, before: Number) -> Number:
        return Number(before.value + self.amount)


def check(number: Number) -> None:
    if number.value >= 10:
        raise AssertionError(f"{number.value} is too large")


def show(number: Number) -> str:
    return f"the number {number.value}"


def test_dumps_are_numbered_and_steps_timed(tmp_path):
    manager = PassManager({Number: check}, {Number: show}, tmp_path / "dump")
    number = manager.run(FunctionPass("trace", Number), 1)
    number = manager.run(Add(2), number)
    text = manager.run(FunctionPass("emit", str), number)
    assert text == "Number(value=3)"
    dumps = {path.name: path.read_text() for path in (tmp_path / "dump").iterdir()}
    assert dumps == {"00-trace.txt": "the number 1\n", "01-add.txt": "the number 3\n"}
    assert [step.name for step in manager.report.steps] == [
        "trace",
        "verify",
        "add",
        "verify",
        "emit",
    ]
    assert all(step.seconds >= 0 for step in manager.report.steps)


def test_a_pass_with_nothing_to_do_leaves_no_trace(tmp_path):
    """What it returns was verified and written before."""
    given = Number(12)
    manager = PassManager({Number: check}, {Number: show}, tmp_path / "dump")
    assert manager.run_all([FunctionPass("same", lambda number: number)] * 2, given) is given
    assert manager.report.steps == () and not (tmp_path / "dump").exists()
    assert manager.run_all([Add(-9), FunctionPass("same", lambda n: n), Add(2)], given) == Number(5)
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [
        "00-add.txt",
        "01-add.txt",
    ]


def test_no_dump_folder_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PassManager({Number: check}, {Number: show}).run(Add(1), Number(1))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_form_names_the_pass_and_the_dump(tmp_path):
    manager = PassManager({Number: check}, {Number: show}, tmp_path)
    with pytest.raises(InternalError) as caught:
        manager.run(Add(9), Number(1))
    assert str(caught.value) == (
        "pass 'add' returned a Number that does not hold its invariants\n"
        f"  where: {tmp_path / '00-add.txt'}\n"
        "  why:   10 is too large\n"
        "  try:   this is a defect of shardwright: please report it with that file"
    )
    assert (tmp_path / "00-add.txt").read_text() == "the number 10\n"


def test_a_broken_form_is_written_down_even_without_a_dump_folder():
    with pytest.raises(InternalError) as caught:
        PassManager({Number: check}, {Number: show}).run(Add(9), Number(1))
    dump = Path(caught.value.where)
    assert dump.name == "00-add.txt" and dump.read_text() == "the number 10\n"
    dump.unlink()
    dump.parent.rmdir()


def test_an_error_in_the_users_part_passes_through():
    def refuse(number):
        raise PlanError("the policy left out an operator")

    with pytest.raises(PlanError, match=r"^the policy left out an operator$"):
        PassManager({Number: refuse}).run(Add(1), Number(1))


def test_report_adds_up_and_prints():
    report = CompileReport(
        (Step("trace", 0.5), Step("verify", 0.25), Step("rules", 1.0), Step("verify", 0.25))
    )
    assert report.total_s == 2.0
    assert report.seconds() == {"trace": 0.5, "verify": 0.5, "rules": 1.0}
    assert str(report) == (
        "trace      0.500 s\nverify     0.500 s\nrules      1.000 s\ntotal      2.000 s"
    )
