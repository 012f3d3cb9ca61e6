"""ARCHITECTURE.md against the tree: what it names exists, and it leaves no folder out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = ("frontend", "compiler", "policies", "runtime")


def test_every_path_that_is_named_exists() -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in (*PACKAGES, "tests")
        for path in (ROOT / package).rglob("*.py")
    }
    for name in re.findall(r"`([\w./]+\.py)`", TEXT):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name


def test_every_folder_is_in_the_tree() -> None:
    tree = TEXT.split("## Folders")[1].split("```")[1]
    named, parents = set(), [""]
    for line in tree.splitlines():
        if match := re.match(r"( *)([\w/]+)/ ", line):
            parents[len(match[1]) // 4 + 1 :] = [match[2]]
            named.add("/".join(parents[1:]))
    folders = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    # One folder of tables, which the line of its parent tells of.
    assert folders - named == {"compiler/ops/tables"}


@pytest.mark.parametrize("package", ["compiler", "runtime"])
def test_every_file_of_the_large_folders_is_told_of(package: str) -> None:
    table = TEXT.split(f"| `{package}/` | |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", table)) == sorted(
        path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"
    )
