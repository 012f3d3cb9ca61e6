"""Refuses files in which nothing reads a parameter that is trained.

Types follow values from where they are read. An edit that drops a weight leaves nothing to type:

    norm = F.layer_norm(x, (32,), None, self.norm.bias)

So does one that gives a weight another name, which nothing reads: ``w = self.norm.weight``. What
counts are statements with an effect (:mod:`.effects`).

A model may have parameters that it does not use. The compiler says so where it declares them:

    self.parameter("spare.weight", "[3, 3]", torch.float32)  # no statement reads it

Everything is found in the text of the file: which weights its statements name, layer by layer where
a method runs for several.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from string import Formatter

from shardwright.compiler.codegen.declare import UNREAD
from shardwright.frontend.verification.outside.effects import effective, reads_of
from shardwright.frontend.verification.outside.one_program import text_of
from shardwright.runtime.manifest import code_file

LAYER = "{layer}"
"""The number of a layer in a path. As in f-strings, braces of names are doubled."""

BLOCK = "{block}."
"""How a path below the argument ``block`` begins."""

_CALLED = re.compile(r"forward|stage\d+(_eval)?|output(_eval)?")
"""The methods that the runtime calls."""


def unread_weights(source: str, rank: int) -> tuple[str, ...]:
    """What is said of trained parameters that nothing reads, unless the file says so of them."""
    file = _File(source)
    found: dict[int, str] = {}
    for names, statement in file.trained():
        unread = [name for name in names if name not in file.read]
        if not unread or UNREAD in file.comment_of(statement):
            continue
        place = f"{code_file(rank)}:{statement.lineno}: {text_of(statement, source)}"
        why = (
            f"no statement reads {unread[0]}, and no comment says so (files of older compiles have "
            "no such comment: compile again)"
        )
        if not unread[0]:
            why = "the name is computed, so the checks do not know what reads the parameter"
        found[statement.lineno] = f"{place}\n  {why}"
    return tuple(found.values())


class _File:
    """The declarations of a file, and the weights that its statements name."""

    def __init__(self, source: str) -> None:
        self.lines, tree = source.splitlines(), ast.parse(source)
        # By statement the numbers that ``layer`` takes there.
        self.layers: dict[ast.AST, tuple[int, ...]] = {}
        for loop in ast.walk(tree):
            if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
                numbers = tuple(range(*map(ast.literal_eval, loop.iter.args)))
                self.layers |= dict.fromkeys(ast.walk(loop), numbers)
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.methods = {node.name: node for node in methods}

    def trained(self) -> Iterator[tuple[list[str], ast.stmt]]:
        """The names of parameters that are trained, by the statement that declares them."""
        for statement in ast.walk(self.methods["declare"]):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
                continue
            call = statement.value
            frozen = any(ast.unparse(word) == "requires_grad=False" for word in call.keywords)
            if ast.unparse(call.func) == "self.parameter" and not frozen:
                yield self._numbered(declared_name(call.args[0]), statement), statement

    def comment_of(self, statement: ast.stmt) -> str:
        """The comment behind a statement, or the one above it."""
        last, above = (
            self.lines[(statement.end_lineno or 1) - 1],
            self.lines[statement.lineno - 2].strip(),
        )
        return last.partition("  # ")[2] or (above if above.startswith("#") else "")

    @cached_property
    def read(self) -> set[str]:
        """The weights that statements with an effect read, and the modules on the way to them."""
        found: set[str] = set()
        blocks: dict[str, set[str]] = defaultdict(set)  # by method, what it gets as ``block``
        inside: dict[str, set[str]] = defaultdict(set)  # by method, what it reads of ``block``
        for name, nodes in self._run().items():
            for node in nodes:
                path = path_of(node)
                if path.startswith(BLOCK):
                    inside[name] |= set(self._numbered(path.removeprefix(BLOCK), node))
                elif path:
                    found |= set(self._numbered(path, node))
                if isinstance(node, ast.Call):
                    for function, block in pairwise([node.func, *node.args]):
                        blocks[path_of(function)] |= set(self._numbered(path_of(block), node))
        for called, paths in inside.items():
            found |= {f"{block}.{path}" for block in blocks[called] for path in paths}
        return found

    def _run(self) -> dict[str, list[ast.AST]]:
        """What the statements with an effect read, by method that is called."""
        found: dict[str, list[ast.AST]] = {}
        called = [name for name in self.methods if _CALLED.fullmatch(name)]
        while called:
            name = called.pop()
            statements = effective(self.methods[name])
            found[name] = [
                node
                for statement in statements
                for part in reads_of(statement)
                for node in ast.walk(part)
            ]
            asked = {node.attr for node in found[name] if isinstance(node, ast.Attribute)}
            called += (asked & self.methods.keys()) - found.keys() - {*called}
        return found

    def _numbered(self, path: str, node: ast.AST) -> list[str]:
        """The names that a path stands for: one for each number that ``layer`` takes at a node."""
        has_layer = any(field == "layer" for _, field, *_ in Formatter().parse(path))
        numbers = self.layers.get(node, ()) if has_layer else ("",)
        return [path.format(layer=number, block=BLOCK) for number in numbers]


def path_of(node: ast.AST) -> str:
    """The path of a module or weight below ``self``, or of one below ``block`` with that in front.
    Nothing for other expressions.

        self.h[0].norm.weight   h.0.norm.weight
        self.h[layer]           h.{layer}
        block["odd name"]       {block}.odd name
        block["{layer}"]        {block}.{{layer}}
    """
    match node:
        case ast.Call(func=ast.Attribute(attr="weights"), args=[ast.Constant(value=str(path))]):
            return _doubled(path)
        case ast.Attribute(value=value, attr=part):
            pass
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            part = _doubled(str(key))
        case ast.Subscript(value=value, slice=ast.Name(id="layer")):
            part = LAYER
        case _:
            return ""
    if isinstance(value, ast.Name):
        return {"self": part, "block": f"{BLOCK}{part}"}.get(value.id, "")
    front = path_of(value)
    return f"{front}.{part}" if front else ""


def declared_name(name: ast.expr) -> str:
    """The path in a declaration: ``"up.weight"``, or ``f"h.{layer}.up.weight"``. Nothing for
    other expressions.
    """
    found = ""
    for part in name.values if isinstance(name, ast.JoinedStr) else [name]:
        match part:
            case ast.Constant(value=str(text)):
                found += _doubled(text)
            case ast.FormattedValue(value=ast.Name(id="layer")):
                found += LAYER
            case _:
                return ""
    return found


def _doubled(name: str) -> str:
    """A name as a path has it."""
    return name.replace("{", "{{").replace("}", "}}")
