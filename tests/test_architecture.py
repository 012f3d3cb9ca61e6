"""ARCHITECTURE.md and the READMEs of the folders against the tree: what they name exists, the list
of folders is complete, and the forms that are shown are what a compile writes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.frontend.cli.main import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = ("frontend", "data", "compiler", "policies", "runtime")
PAGES = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *sorted(
        str(page.relative_to(ROOT))
        for package in PACKAGES
        for page in (ROOT / package).rglob("README.md")
    ),
)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    """A path is written from the root of the repository or from the page's folder."""
    folders = [ROOT, (ROOT / page).parent]
    for name in re.findall(r"`([\w./]+\.py)`", (ROOT / page).read_text()):
        assert any((folder / name).is_file() for folder in folders), name


def test_every_folder_page_is_linked() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT))
    assert set(PAGES) - {"ARCHITECTURE.md"} <= linked


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_in_the_tree_of_its_page(package: str) -> None:
    tree = (ROOT / package / "README.md").read_text().split("## Folders")[1].split("```")[1]
    named, parents = set(), [package]
    for line in tree.splitlines():
        if match := re.match(r"( *)([\w/]+)/ ", line):
            parents[len(match[1]) // 4 + 1 :] = [match[2]]
            named.add("/".join(parents))
    folders = {
        str(path.parent.relative_to(ROOT)) for path in (ROOT / package).rglob("*/__init__.py")
    }
    # One folder of tables, which the line of its parent tells of.
    assert folders - {package, "compiler/ops/tables"} == named


def test_folders_that_are_named_exist() -> None:
    tree = TEXT.split("## Folders")[1].split("```")[1]
    parent = ""
    for indent, names in re.findall(r"^( *)((?:\w+/ +)+)", tree, re.MULTILINE):
        for name in names.split():
            assert (ROOT / (parent if indent else "") / name).is_dir(), name
        parent = parent if indent else names.split()[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_of_the_large_folders_is_told_of(package: str) -> None:
    page = (ROOT / package / "README.md").read_text()
    table = page.split("## Files that lie here themselves\n\n")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", table)) == sorted(
        path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"
    )


def test_the_forms_are_those_of_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the page, on the module of the README, writes every line that is shown."""
    _, module, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_project.py").write_text(f"{module}\n{example}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = re.findall(r"^shardwright (compile .+)$", TEXT, re.MULTILINE)
    assert main(command.split()) in (0, None)
    written = [*tmp_path.glob("passes/*.txt"), *tmp_path.rglob("plan.json")]
    lines = {
        line.strip()
        for path in (*written, *tmp_path.rglob("gencode0.py"))
        for line in path.read_text().splitlines()
    }
    shown = "\n".join(re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)).splitlines()
    assert len(shown) > 20
    assert {line.strip() for line in shown} - {"", "..."} <= lines


def test_the_trace_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "compiler/trace/README.md").read_text()
    source, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, flags=re.DOTALL)
    exec(source, {})
    assert capsys.readouterr().out.rstrip() == printed.rstrip()
