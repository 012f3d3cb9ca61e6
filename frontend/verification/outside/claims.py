"""What a generated file states of its statements, by line: layouts in comments, and which values
have no effect.

    up = F.linear(x_tp_in, self.up.weight)  # [batch, hidden/tp]  my_project.py:9

says that what line 1 computes has its second dim cut over ``tp``. A comment that is too long for
its line stands above the statement.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.frontend.verification.outside.effects import effective
from shardwright.runtime.errors import LoadError
from shardwright.runtime.layout import Layout

_COMMENT = re.compile(r"(?:^|\s)# (?:each )?(\[.*)$")
_LAYOUT = re.compile(r"\[[^\]]*\](?: at [\d.e+-]+)?(?: P\([^)]*\))?(?: G\([^)]*\))?")


def claims_of(source: str) -> dict[int, tuple[Layout, ...]]:
    """The layouts of the results of each statement, by the numbers of all its lines. ``each`` is
    one layout for all results.
    """
    lines = source.splitlines()
    found: dict[int, tuple[Layout, ...]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
            continue
        last = node.end_lineno or node.lineno
        layouts = _stated(lines[last - 1])
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        if not layouts and above.startswith("#"):
            layouts = _stated(above)
        if layouts:
            found |= dict.fromkeys(range(node.lineno, last + 1), layouts)
    return found


_RECEIVED = re.compile(r"^ +# (\w+): (\[.*)$")


def received_by(source: str) -> dict[str, Layout]:
    """The layouts of values that come from other stages, by name: comments of a stage's method."""
    found = (match for line in source.splitlines() if (match := _RECEIVED.match(line)))
    return {match[1]: Layout.parse(match[2]) for match in found}


def _stated(line: str) -> tuple[Layout, ...]:
    """The layouts in the comment of a line; none if it has no such comment."""
    comment = _COMMENT.search(line)
    if comment is None:
        return ()
    texts = [re.sub(r" at [\d.e+-]+", "", text) for text in _LAYOUT.findall(comment[1])]
    try:
        return tuple(Layout.parse(text) for text in texts)
    except LoadError:
        return ()


@dataclass(frozen=True)
class Transition:
    """What an adapter makes along its axes: ``S(1) -> R`` has the ``target`` R."""

    axes: tuple[str, ...]
    target: str


_TRANSITION = re.compile(r"(?:^|\s)# (\w+(?:, \w+)*): [RGPS]\S* -> ([RGP]|S\(\d+\))(?:\s|$)")


def transitions_of(source: str) -> dict[int, Transition]:
    """What the comments of adapters say: ``tp: S(1) -> R``, by line, for all lines of each."""
    lines = source.splitlines()
    found: dict[int, Transition] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            last = node.end_lineno or node.lineno
            if stated := _TRANSITION.search(lines[last - 1]):
                transition = Transition(tuple(stated[1].split(", ")), stated[2])
                found |= dict.fromkeys(range(node.lineno, last + 1), transition)
    return found


def unread(source: str) -> dict[int, str]:
    """The variables that no result depends on, by the number of all lines of the statements that
    make them. Of several results of a statement one that is read is enough.
    """
    found: dict[int, str] = {}
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for method in (node for cls in classes for node in cls.body):
        if not isinstance(method, ast.FunctionDef):
            continue
        kept = effective(method)
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and node not in kept:
                names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found |= dict.fromkeys(lines, next(names))
    return found


def claim_of(claims: Mapping[int, tuple[Layout, ...]], line: int, count: int) -> tuple[Layout, ...]:
    """The layouts of ``count`` results of the statement on a line; none if it does not say so."""
    stated = claims.get(line, ())
    if len(stated) == 1:
        return stated * count
    return stated if len(stated) == count else ()
