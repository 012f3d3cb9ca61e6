"""Holds the files of ranks that run the same stages to one program.

A type says how a value is held, not which value it is: a file that takes ``relu`` where another
takes ``gelu`` has the same types. The compiler writes one program for all ranks of a stage. What is
of a rank alone comes from calls, as ``tp.offset(30)`` does. So their files are alike but for the
number of the rank, and for the pieces that it exchanges with other stages. They are compared as
parsed source, without comments:

    gencode1.py does not compute what gencode0.py does, though each runs stage 0
      gencode0.py:114: up = F.gelu(hidden)
      gencode1.py:114: up = F.relu(hidden)
      F.gelu in the first, F.relu in the second

Operators that are recorded in a step would tell less. A step runs no evaluation, and its operators
have numbers that rightly differ, such as the sizes of uneven pieces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from shardwright.runtime.manifest import code_file

MOST_COLUMNS = 60
"""How long a part of a statement may be to be shown by itself."""

Sources = Mapping[int, str]
"""The source of each rank's file."""

OWN_PIECES = frozenset({"shape", "pieces", "grad_pieces"})
"""The arguments of a ``Transfer`` that are of a rank alone."""

OF_STAGES = ("actions", "segments")
"""How the attributes of a class begin that ranks of other stages have of their own."""


def differences(directory: Path, groups: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """What is said of files that do not compute what others of their group do, or whose classes do
    not declare what all classes do.

    ``groups``: the ranks that run the same stages, under the words for these stages.
    """
    ranks = [rank for group in groups.values() for rank in group]
    sources = {
        rank: directory.joinpath(code_file(rank)).read_text(encoding="utf-8") for rank in ranks
    }
    found = [*filter(None, (_of_number(rank, source) for rank, source in sources.items()))]
    found += [
        line
        for stages, group in groups.items()
        for line in _of_group(f"runs {stages}", {rank: sources[rank] for rank in group}, program_of)
    ]
    if not found and len(groups) > 1:
        firsts = {group[0]: sources[group[0]] for group in groups.values()}
        found = _of_group("is of one pipeline", firsts, _attributes_of)
    return tuple(found)


def _of_group(what: str, sources: Sources, tree_of: Callable[[str], ast.Module]) -> list[str]:
    """What is said of the files of a group. ``what``: what they have in common."""
    same_text: dict[str, list[int]] = {}
    for rank, source in sources.items():
        same_text.setdefault(_without_rank(source), []).append(rank)
    alike: dict[str, list[int]] = {}
    for text, ranks in same_text.items():
        alike.setdefault(ast.dump(tree_of(text)), []).extend(ranks)
    # The edit of one file is told as that file's, whichever rank it is of.
    most, *others = sorted(alike.values(), key=lambda same: (-len(same), same))
    return [_told(what, sources, most, same, tree_of) for same in others]


_NUMBER = re.compile(r"^    rank = (.*)$", re.MULTILINE)
"""The statement that gives a file the number of its rank."""


def _of_number(rank: int, source: str) -> str:
    """What is said of a file that has the number of another rank, or nothing."""
    found = _NUMBER.search(source)
    if found is None or found[1] == str(rank):
        return ""
    line = source.count("\n", 0, found.start()) + 1
    return (
        f"{code_file(rank)} has the number of another rank, and is the file of rank {rank}\n"
        f"  {code_file(rank)}:{line}: {found[0].strip()}"
    )


def _without_rank(source: str) -> str:
    """A source without its docstring, which names the rank, and without the number of the rank. Its
    lines stay where they are.
    """
    if source.startswith('"""'):
        _, header, source = source.split('"""', 2)
        source = "\n" * header.count("\n") + source
    return _NUMBER.sub("    rank = its_own", source, count=1)


def program_of(source: str) -> ast.Module:
    """What a file does: its tree without the pieces of one rank."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Transfer":
            node.keywords = [word for word in node.keywords if word.arg not in OWN_PIECES]
    return tree


def _attributes_of(source: str) -> ast.Module:
    """What the classes of a file declare for all stages."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    found: list[ast.stmt] = [
        statement
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and not ast.unparse(statement.targets[0]).startswith(OF_STAGES)
    ]
    return ast.Module(found, [])


@dataclass(frozen=True)
class _Difference:
    """Where two trees differ: the statement of each, and the part of it if one part is all that
    differs. Where one tree lacks a statement, ``lacks`` is 0 for the first tree and 1 for the
    second, and ``places`` has the statement that stands in its place.
    """

    places: tuple[Any, Any]
    parts: tuple[Any, Any] | None = None
    lacks: int | None = None


def _first_difference(one: Any, other: Any, places: tuple[Any, Any] = (None, None)) -> _Difference:
    """Go down from two nodes that differ to the smallest parts that do. ``places``: the statements
    that they are in.
    """
    if isinstance(one, ast.stmt):
        places = one, other
    whole = _Difference(places, None if one in places else (one, other))
    if type(one) is not type(other):
        return whole
    fields = [(getattr(one, name), getattr(other, name)) for name in one._fields]
    changed = [pair for pair in fields if _text(pair[0]) != _text(pair[1])]
    if len(changed) > 1:
        return whole
    ((first, second),) = changed
    if isinstance(first, list) and isinstance(second, list):
        if isinstance((first or second)[0], ast.stmt):
            return _of_statements(first, second, places)
        pairs = [
            pair for pair in zip(first, second, strict=False) if _text(pair[0]) != _text(pair[1])
        ]
        if len(first) != len(second) or len(pairs) > 1:
            return whole
        ((first, second),) = pairs
    # A sign by itself tells less than what it stands in.
    if isinstance(first, ast.expr | ast.stmt | ast.keyword) and isinstance(second, ast.AST):
        return _first_difference(first, second, places)
    return whole


def _of_statements(first: list[Any], second: list[Any], places: tuple[Any, Any]) -> _Difference:
    """The first difference of two lists of statements."""
    matcher = SequenceMatcher(None, [*map(_text, first)], [*map(_text, second)], autojunk=False)
    kind, i, _, j, _ = next(step for step in matcher.get_opcodes() if step[0] != "equal")
    if kind == "replace":
        return _first_difference(first[i], second[j], places)
    # Where one is lacking stands what follows, or else what comes before, or what all are part of.
    at = [*first, *first[-1:], places[0]][i], [*second, *second[-1:], places[1]][j]
    return _Difference(at, lacks=1 if kind == "delete" else 0)


def _text(node: Any) -> str:
    if isinstance(node, list):
        return "\n".join(map(_text, node))
    return ast.dump(node) if isinstance(node, ast.AST) else repr(node)


def _told(
    what: str,
    sources: Sources,
    most: Sequence[int],
    same: Sequence[int],
    tree_of: Callable[[str], ast.Module],
) -> str:
    """What is said of files that do not compute what most do: the first difference."""
    pair = most[0], same[0]
    one, other = (tree_of(_without_rank(sources[rank])) for rank in pair)
    found = _first_difference(one, other)
    lines = [f"{_named(same)} not compute what {_named(most)}, though each {what}"]
    for number, (rank, statement) in enumerate(zip(pair, found.places, strict=True)):
        text = text_of(statement, sources[rank])
        lacking = "no such statement, here stands: " if number == found.lacks else ""
        lines.append(f"  {code_file(rank)}:{statement.lineno}: {lacking}{text}")
    parts = [ast.unparse(part) for part in found.parts or ()]
    if parts and all(len(part) <= MOST_COLUMNS for part in parts):
        lines.append(f"  {parts[0]} in the first, {parts[1]} in the second")
    return "\n".join(lines)


def text_of(statement: ast.stmt, source: str) -> str:
    """A statement in one line, of a compound one what stands before its body."""
    body = getattr(statement, "body", None)
    last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
    return " ".join(" ".join(source.splitlines()[statement.lineno - 1 : last]).split())


def _named(ranks: Sequence[int]) -> str:
    """Files in words, with their verb: ``gencode0.py and 2 others do``."""
    more = len(ranks) - 1
    if not more:
        return f"{code_file(ranks[0])} does"
    return f"{code_file(ranks[0])} and {more} other{'s' if more > 1 else ''} do"
