"""Docstrings begin with the thing or with a verb, no conditional expression holds another, no two
files of the package have one name, and tests mirror the tree.

A first word such as "Of" or "By" makes a riddle of a docstring, as what it is about stands nowhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "benchmarks",
    "codegen_templates",
    "compiler",
    "data",
    "experts",
    "examples",
    "frontend",
    "policies",
    "runtime",
    "tests",
)

RIDDLES = ("As", "At", "By", "For", "From", "In", "Of", "On", "The same", "Those", "To", "With")
"""Words with which no docstring opens: each refers to something that the sentence does not name."""

DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


# Parsing all files takes seconds, so files are left out whose text cannot hold what is looked for:
# no string opens with a riddle, and no two conditional expressions stand in one statement.
OPENS_WITH_RIDDLE = re.compile(rf"""["']\s*(?:{"|".join(RIDDLES)})\b""")
CONDITIONAL_ELSE = re.compile(r"\belse\b(?!:)")
STATEMENT = re.compile(
    r"\n\s*(?=(?:return|yield|assert|with|raise|def|class|elif|else:|try:|@)\b"
    r"|[\w.\[\], ]+ [-+*|&]?= )|\n\n"
)
"""Where statements begin. Those that begin with words of expressions, such as ``if``, are not told
from them.
"""

NAMED_MODULE = re.compile(r"""(?:^\s*(?:import|from) |["'])(\w+)""", re.MULTILINE)
"""A module that is imported, or begins a string, as what processes run does."""


def paths() -> list[str]:
    """The files that are held to this."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions and assigned names."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        before = [node if isinstance(node, DEFINITIONS) else None, *body]
        for described, item in zip(before, body, strict=False):
            text = item.value if isinstance(item, ast.Expr) else None
            if (
                isinstance(described, DEFINITIONS | ast.Assign | ast.AnnAssign)
                and isinstance(text, ast.Constant)
                and isinstance(text.value, str)
            ):
                yield item.lineno, text.value


def riddles(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and opening words of docstrings that open with a riddle."""
    for line, text in docstrings(tree):
        words = text.split()[:6]
        if words and (words[0].rstrip(",") in RIDDLES or " ".join(words[:2]) in RIDDLES):
            yield line, " ".join(words)


def nested_conditionals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of conditional expressions that hold another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
            if len(inner) > 1:
                yield node.lineno, ast.unparse(node)


def hard_to_read(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, text and hint for all that is found in a file."""
    may_nest = any(len(CONDITIONAL_ELSE.findall(part)) > 1 for part in STATEMENT.split(text))
    if not may_nest and not OPENS_WITH_RIDDLE.search(text):
        return
    tree = ast.parse(text)
    for line, words in riddles(tree):
        yield line, words, "open it with the thing, or with a verb"
    for line, nested in nested_conditionals(tree):
        yield line, nested, "write if statements, early returns or a small function"


def test_it_reads_at_once():
    found = [
        f"{path}:{line}: {text}: {hint}"
        for path in paths()
        for line, text, hint in hard_to_read((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_a_file_name_says_what_is_inside():
    """No two files of the package have one name, but for those whose name is given: the rule of an
    operator and the function that runs it, a command, a policy.
    """
    places: dict[str, list[str]] = {}
    for path in paths():
        folder, _, name = path.rpartition("/")
        if not path.startswith(("tests/", "benchmarks/", "examples/")) and "__" not in name:
            places.setdefault(name, []).append(folder)
    given = ({"compiler/ops", "runtime/ops"}, {"frontend/cli", "policies"})
    doubled = [
        f"{name}: {', '.join(folders)}"
        for name, folders in places.items()
        if len(folders) > 1 and {folder.removesuffix("/tables") for folder in folders} not in given
    ]
    assert not doubled, "\n".join(doubled)


def test_a_test_lies_where_the_file_that_it_is_called_after_does():
    """A test of several files has a name that no file below its folder has."""
    elsewhere = []
    for test in (ROOT / "tests").rglob("test_*.py"):
        folder, name = test.relative_to(ROOT / "tests").parent, test.name.removeprefix("test_")
        files = [file.parent.relative_to(ROOT) for file in (ROOT / folder).rglob(name)]
        if test.parent != ROOT / "tests" and files and folder not in files:
            elsewhere.append(f"{test.relative_to(ROOT)}: a file of that name is in {files[0]}")
    assert not elsewhere, "\n".join(elsewhere)


def test_the_files_are_those_of_the_package():
    assert {path.partition("/")[0] for path in paths()} == set(FOLDERS)
    assert len(paths()) > 300


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Of one layer."""', ["Of one layer."]),
        ('def f():\n    """By name, the shapes."""', ["By name, the shapes."]),
        ('class A:\n    """The same for another rank."""', ["The same for another rank."]),
        ('class A:\n    """The samples of a step, and its ranks."""', []),
        ('X = 1\n"""Of elements of a bucket."""', ["Of elements of a bucket."]),
        ('class A:\n    x: int\n    """By name, the sizes."""', ["By name, the sizes."]),
        ('def f():\n    """Forwards, one after the other."""', []),
        ("def f(): ...", []),
    ],
)
def test_riddles_are_found(source, expected):
    assert [text for _, text in riddles(ast.parse(source))] == expected
    assert [text for _, text, _ in hard_to_read(source)] == expected


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = a if b else c", 0),
        ("x = a if b else c if d else e", 1),
        ("x = (a if b else c) if d else e", 1),
        ("x = (\n    a\n    if b\n    else c\n    if d\n    else e\n)", 1),
        ("x = [a if b else c for y in (d if e else f)]", 0),
        ("x = [a if b else c for y in z] if d else e", 1),
    ],
)
def test_nested_conditionals_are_found(source, count):
    assert len(list(nested_conditionals(ast.parse(source)))) == count
    assert len(list(hard_to_read(source))) == count


def test_helpers_of_one_test_are_apart() -> None:
    """A helper of one test file stands in ``of_one_test``, one of several in ``_lib`` itself."""
    library = ROOT / "tests" / "_lib"
    helpers = {file.stem: file for file in library.rglob("*.py")}
    users: dict[str, list[Path]] = {name: [] for name in helpers}
    for file in (ROOT / "tests").rglob("*.py"):
        for name in {*NAMED_MODULE.findall(file.read_text())} & helpers.keys():
            if file != helpers[name]:
                users[name].append(file)
    for name, its_users in users.items():
        assert its_users, f"nothing uses {name}"
        if helpers[name].parent.name == "of_one_test":
            assert len(its_users) == 1, f"{name} has several users: move it to tests/_lib"
        else:
            # A part of another helper is shared as much as that one is.
            shared = len(its_users) > 1 or its_users[0].parent == library
            assert shared, f"only {its_users[0]} uses {name}: move it to tests/_lib/of_one_test"
