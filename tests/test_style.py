"""Docstrings begin with the thing or with a verb, and no conditional expression holds another.

A first word such as "Of" or "By" makes a riddle of a docstring, as what it is about stands nowhere.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "benchmarks",
    "codegen_templates",
    "compiler",
    "examples",
    "frontend",
    "policies",
    "runtime",
    "tests",
)

RIDDLES = ("As", "At", "By", "For", "From", "In", "Of", "On", "The same", "Those", "To", "With")
"""Words with which no docstring opens: each refers to something that the sentence does not name."""

DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The syntax trees of the files that are held to this, by path."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    paths = sorted(file.relative_to(ROOT).as_posix() for file in files)
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in paths}


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


@pytest.mark.parametrize(
    ("find", "hint"),
    [
        (riddles, "open it with the thing, or with a verb"),
        (nested_conditionals, "write if statements, early returns or a small function"),
    ],
)
def test_it_reads_at_once(find, hint):
    found = [
        f"{path}:{line}: {text}" for path, tree in sources().items() for line, text in find(tree)
    ]
    assert not found, "\n".join([*found, hint])


def test_the_files_are_those_of_the_package():
    assert {path.partition("/")[0] for path in sources()} == set(FOLDERS)
    assert len(sources()) > 300


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


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = a if b else c", 0),
        ("x = a if b else c if d else e", 1),
        ("x = (a if b else c) if d else e", 1),
        ("x = [a if b else c for y in (d if e else f)]", 0),
        ("x = [a if b else c for y in z] if d else e", 1),
    ],
)
def test_nested_conditionals_are_found(source, count):
    assert len(list(nested_conditionals(ast.parse(source)))) == count
