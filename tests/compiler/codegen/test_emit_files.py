"""The files of a compile as a form: verified and printed like any other."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.codegen.emit_files import EmittedFiles, print_files
from shardwright.compiler.compile import pass_manager
from shardwright.compiler.pass_manager import FunctionPass
from shardwright.runtime.errors import InternalError

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
