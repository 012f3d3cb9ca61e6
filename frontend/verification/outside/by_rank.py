"""Refuses statements that go by which rank runs them.

One rank of a stage is typed, and speaks for all. That holds as long as all take the same way
through one program. This statement stands in all files, and yet rank 1 alone runs its body:

    if self.rank == 1:
        x = torch.relu(x)

The compiler writes nothing of the kind. So a file is held to what the compiler writes:

- A condition asks ``self.training`` or ``self.trains``.
- A loop runs over ``range`` of numbers, or over constants.
- An axis is an argument of a call, or is asked for sizes. Its ``offset`` is an argument of a call:
  ``embedding(x, weight, start=tp.offset(30))``.
- Nothing else tells the rank: no ``self.rank``, ``torch.distributed.get_rank()`` or
  ``os.environ``.

It finds what is written by mistake, not what somebody hides: ``torch.mul(x, tp.offset(1))`` passes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwright.frontend.verification.outside.one_program import text_of
from shardwright.runtime.manifest import code_file

CONDITIONS = frozenset({"self.training", "self.trains"})
"""What a condition may ask: it is the same on all ranks."""

SIZES = frozenset({"size", "local_size", "holds"})
"""What an axis may be asked for anywhere. Pieces of a dim may be of different lengths."""

OF_THE_MODULE = frozenset({"rank", "ranks", "mpu"})
"""The attributes of a module that tell its rank. A scope may have such a name, as in
``self.blocks[0].rank``.
"""

TELL_THE_RANK = frozenset(
    {"get_rank", "get_group_rank", "get_node_local_rank", "current_world", "environ", "getenv"}
)
"""The names of other objects that tell the rank, wherever they come from."""


def goes_by_rank(source: str, rank: int) -> tuple[str, ...]:
    """What is said of the statements of a file that may do other things on other ranks."""
    found: dict[int, str] = {}
    for statement, why in _Statements(source).questions():
        place = f"{code_file(rank)}:{statement.lineno}: {text_of(statement, source)}"
        found.setdefault(statement.lineno, f"{place}\n  {why}")
    return tuple(found.values())


class _Statements:
    """The statements of a file, of whose parts it is known where they stand."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        classes = [node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        self.modules = {"self", "type(self)", "self.__class__", *classes}

    def questions(self) -> Iterator[tuple[ast.stmt, str]]:
        """The statements that go by the rank, and what is said of each."""
        for node in ast.walk(self.tree):
            for condition in _conditions(node):
                if ast.unparse(_without_not(condition)) not in CONDITIONS:
                    asked = " and ".join(f"`{name}`" for name in sorted(CONDITIONS))
                    yield self._told(
                        condition, f"`{ast.unparse(condition)}`: a condition may ask {asked} only"
                    )
            if isinstance(node, ast.For | ast.comprehension) and not _is_alike(node.iter):
                text = ast.unparse(node.iter)
                why = f"`{text}`: a loop may run over `range` of numbers or constants only"
                yield self._told(node.iter, why)
            if isinstance(node, ast.Name | ast.Attribute) and self._tells_rank(node):
                yield self._told(node, f"`{ast.unparse(node)}` tells which rank this is")
        for axis in self._axes():
            if said := self._of_axis(axis):
                yield self._told(axis, said)

    def _tells_rank(self, node: ast.Name | ast.Attribute) -> bool:
        if isinstance(node, ast.Name):
            return node.id in TELL_THE_RANK
        of_module = node.attr in OF_THE_MODULE and ast.unparse(node.value) in self.modules
        return of_module or node.attr in TELL_THE_RANK

    def _axes(self) -> Iterator[ast.expr]:
        """Where the methods use an axis: the names of one, and ``self.axis(...)``."""
        for method in ast.walk(self.tree):
            if not isinstance(method, ast.FunctionDef):
                continue
            names: set[str] = set()
            for node in ast.walk(method):
                if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "self.axis"):
                    continue
                statement = self.parents[node]
                if isinstance(statement, ast.Assign):
                    names |= {x.id for x in statement.targets if isinstance(x, ast.Name)}
                else:
                    yield node
            for node in ast.walk(method):
                if isinstance(node, ast.Name) and node.id in names and _is_read(node):
                    yield node

    def _of_axis(self, axis: ast.expr) -> str:
        """What is said of the use of an axis, or nothing."""
        used = self.parents[axis]
        if not isinstance(used, ast.Attribute):
            only = f"`{ast.unparse(axis)}` is an axis, which may be an argument of a call only"
            return "" if self._is_argument(axis) else only
        if used.attr in SIZES:
            return ""
        text = ast.unparse(used)
        if used.attr != "offset":
            return f"`{text}` tells which rank this is"
        return "" if self._is_argument(used) else f"`{text}(...)` may be an argument of a call only"

    def _is_argument(self, node: ast.AST) -> bool:
        """Whether an expression, or what it is called for, is a part of an argument of a call."""
        while isinstance(node, ast.expr | ast.keyword):
            parent = self.parents[node]
            if isinstance(parent, ast.Call) and node is not parent.func:
                return True
            node = parent
        return False

    def _told(self, expression: ast.expr, why: str) -> tuple[ast.stmt, str]:
        statement: ast.AST = expression
        while not isinstance(statement, ast.stmt):
            statement = self.parents[statement]
        return statement, why


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The conditions that decide what of a node is run."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.Match):
        return [node.subject]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _without_not(condition: ast.expr) -> ast.expr:
    negated = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
    return condition.operand if negated else condition  # type: ignore[attr-defined]


def _is_alike(node: ast.expr) -> bool:
    """Whether a loop over it is the same on all ranks: ``range(12)``, ``("logits", "count")``."""
    if isinstance(node, ast.Tuple | ast.List):
        return all(isinstance(x, ast.Constant) for x in node.elts)
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "range"
        and all(isinstance(x, ast.Constant) for x in node.args)
    )
