"""The files of a compile as a form: verified and printed like any other."""

from pathlib import Path
from typing import Any

import plans
import pytest

from shardwright.compiler.codegen.emit_files import EmittedFiles, print_files
from shardwright.compiler.codegen.unit_files import UnitFiles
from shardwright.compiler.compile import pass_manager
from shardwright.compiler.pass_manager import FunctionPass
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.errors import InternalError
from shardwright.runtime.mesh import MOST_RANKS

STAGES: Any = None  # a program whose ranks run different files


def test_a_file_that_is_no_python_names_the_pass_and_the_dump(tmp_path: Path) -> None:
    emitted = EmittedFiles(STAGES, {"gencode0.py": "x = 1\n", "gencode1.py": "def f(:\n"})
    with pytest.raises(InternalError) as caught:
        pass_manager(dump=tmp_path).run(FunctionPass("emit", lambda _: emitted), None)
    assert str(caught.value) == (
        "pass 'emit' returned a EmittedFiles that does not hold its invariants\n"
        f"  where: {tmp_path / '00-emit.txt'}\n"
        "  why:   invalid syntax (gencode1.py, line 1)\n"
        "  try:   this is a defect of shardwright: please report it with that file"
    )


def test_files_stand_under_their_names() -> None:
    files = {"gencode0.py": "x = 1\n", "plan.json": "{}"}
    assert print_files(EmittedFiles(STAGES, files)) == (
        "==== gencode0.py\nx = 1\n\n==== plan.json\n{}\n"
    )


def test_files_of_many_ranks_are_made_when_they_are_read() -> None:
    """A unit of a million ranks is priced without writing a million files."""
    files = plans.compile_with(plans.zoo_graph("mlp"), find_policy("tp").apply, 2).files
    first, second = (files[name].splitlines() for name in list(files)[:2])
    assert [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]] == [
        ("rank    0 (tp=0)", "rank    1 (tp=1)"),
        ("    rank = 0", "    rank = 1"),
    ]
    many = UnitFiles(MOST_RANKS, lambda rank: f"rank = {rank}\n", "{}")
    assert len(many) == MOST_RANKS + 1 and many[f"gencode{MOST_RANKS - 1}.py"] == "rank = 1048575\n"
    assert [name in many for name in ("gencode1048576.py", "gencode01.py", "plan.json")] == [
        False,
        False,
        True,
    ]
