"""Refuses statements that may do other things on other ranks.

One rank of a stage is typed, and speaks for all. That holds as long as all take the same way
through one program. This statement stands in all files, and yet rank 1 alone runs its body:

    if self.rank == 1:
        x = torch.relu(x)

The compiler writes nothing of the kind. So a file is held to what the compiler writes
(:mod:`.written`), and anything else is refused:

- A statement or expression is of a kind that it writes: no ``try``, no ``while``, no ``lambda``. A
  ``with`` is ``torch.no_grad()`` or ``torch.autocast(...)``.
- A condition asks ``self.training`` or ``self.trains``.
- A loop runs over ``range`` of numbers, or over constants.
- Names of Python are ``range``, ``float`` and a few more, but not ``getattr``. Those of torch are
  dtypes, and operators: those of our tables under any name, and others that make tensors of
  tensors. Of ``self`` come weights, methods of the class, and what the compiler calls. Imports are
  of torch, ``math``, the runtime, and modules of the model.
- No tensor is changed in place.
- A tensor is asked for operators only, as in ``x.view(8, 4)``, but not for ``x.shape`` or
  ``x.data_ptr()``. ``x.size(1)`` names a size of an input that varies from call to call, which all
  ranks see alike.
- Numbers are made of constants and sizes, not of tensors: no ``float(x.sum())``.
- An axis is an argument of a call, or is asked for sizes. Sizes of pieces go where sizes belong:
  ``x.view(8, tp.local_size(5))``. The place of a piece is the first row of a function that looks
  rows up: ``embedding(x, weight, start=tp.offset(30))``.
- Nothing else tells the rank: no ``self.rank``, ``torch.distributed.get_rank()`` or
  ``os.environ``.

Functions that the model brings along may do whatever they like: nobody looks into them.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from functools import cached_property

from shardwright.compiler.codegen.file_names import BUILTINS
from shardwright.frontend.verification.outside.file_parts import (
    FileParts,
    first_of,
    is_read,
    makes_number,
    numberless,
)
from shardwright.frontend.verification.outside.one_program import text_of
from shardwright.frontend.verification.outside.unread_weights import path_of
from shardwright.frontend.verification.outside.written import (
    CONDITIONS,
    CONTEXTS,
    IMPORTS,
    IN_WORDS,
    KINDS,
    METHOD,
    MODULES,
    OF_AN_AXIS,
    OURS,
    ROWS_FROM,
    RUNTIME,
    SIZES,
    TAKE_SIZES,
    TELL_THE_RANK,
    full_name,
    is_in_place,
    is_taken,
    makes_tensors,
    operators,
    torch_names,
)
from shardwright.runtime.manifest import code_file

IN_PLACE = "changes a tensor in place, and other names may mean its memory, too"
"""What is said of ``x.add_(1)``, and of ``torch.add(x, 1, out=x)``."""

NO_OPERATOR = (
    "so the checks do not know what it does: put it into a function of the model, and register "
    "that (docs/register-op.md)"
)
"""What is said of functions of torch that no table has."""


def goes_by_rank(source: str, rank: int) -> tuple[str, ...]:
    """What is said of the statements of a file that may do other things on other ranks."""
    found: dict[int, str] = {}
    for statement, why in _Statements(source).questions():
        place = f"{code_file(rank)}:{statement.lineno}: {text_of(statement, source)}"
        found.setdefault(statement.lineno, f"{place}\n  {why}")
    return tuple(found.values())


class _Statements(FileParts):
    """The statements of a file, and what is said of them."""

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of torch that files of the compiler have."""
        return operators() | torch_names()

    def questions(self) -> Iterator[tuple[ast.stmt, str]]:
        """The statements that go by the rank, and what is said of each."""
        for node in ast.walk(self.tree):
            if said := self._of_node(node):
                yield self._told(node, said)
        for axis in self.axes:
            if said := self._of_axis(axis):
                yield self._told(axis, said)
        for method in self.methods:
            for size in self._sizes(method):
                if said := self._of_size(size):
                    yield self._told(size, said)

    def _of_node(self, node: ast.AST) -> str:
        """What is said of a part of a file by itself, or nothing."""
        if not isinstance(node, KINDS):
            word = IN_WORDS.get(type(node), f"`{type(node).__name__.lower()}`")
            return f"{word}: the compiler writes none, so the checks do not know what it may do"
        for condition in _conditions(node):
            if ast.unparse(_without_not(condition)) not in CONDITIONS:
                asked = " and ".join(f"`{name}`" for name in sorted(CONDITIONS))
                return f"`{ast.unparse(condition)}`: a condition may ask {asked} only"
        match node:
            case ast.For() | ast.comprehension() if not _is_alike(node.iter):
                text = ast.unparse(node.iter)
                return f"`{text}`: a loop may run over `range` of numbers or constants only"
            case ast.withitem() if not ast.unparse(node.context_expr).startswith(CONTEXTS):
                text = ast.unparse(node.context_expr)
                return f"`{text}`: a `with` may enter `torch.no_grad()` or `torch.autocast` only"
            case ast.BoolOp() if not self._is_required(node):
                return f"`{ast.unparse(node)}` computes one operand or the other"
            case ast.Import() | ast.ImportFrom():
                return self._of_import(node)
            case ast.FunctionDef() | ast.ClassDef():
                return self._of_definition(node)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self")))):
                return ""
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"))):
                return ""
            case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                return f"`{ast.unparse(value)}`: the compiler gives every value a name"
            case ast.Assign() if isinstance(self.parents[node], ast.Module):
                return "the compiler writes imports and a class at the top only"
            case ast.FormattedValue() if not self.is_number(node.value):
                return f"`{ast.unparse(node.value)}` in a text may be a size or a number only"
            case ast.Call() if makes_number(node):
                return self._of_number(node)
            case ast.Call() if self.is_brought(node):
                given = (*node.args, *(word.value for word in node.keywords))
                text = f"`{ast.unparse(node)}`: functions of the model are called with tensors"
                return text if all(map(self.is_number, given)) else ""
            case ast.Name() if is_read(node):
                return self._of_name(node)
            case ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
                return f"`{ast.unparse(node)}`: the compiler gives values to variables only"
            case ast.Attribute():
                return self._of_attribute(node)
            case ast.keyword(arg="out" | "inplace" as word, value=value):
                call = self.parents[node]
                assert isinstance(call, ast.Call), "a class with keywords"
                changes = not isinstance(value, ast.Constant) or bool(value.value)
                if changes and not self.is_brought(call):
                    return f"`{ast.unparse(call.func)}(..., {word}=...)` {IN_PLACE}"
        return ""

    def _of_import(self, node: ast.Import | ast.ImportFrom) -> str:
        text = ast.unparse(node)
        if not isinstance(self.parents[node], ast.Module):
            return f"`{text}`: the compiler imports at the top only"
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        first = module.partition(".")[0]
        if first == "shardwright" and isinstance(node, ast.ImportFrom):
            is_written = module.removeprefix("shardwright.runtime.") in RUNTIME
        elif text == f"import {module}" and first == "torch":
            is_written = True  # what is used of it is asked about
        elif first in OURS or any(name.asname or name.name == "*" for name in node.names):
            is_written = text in IMPORTS
        elif first in sys.stdlib_module_names:
            is_written = isinstance(node, ast.ImportFrom) and self._are_results(node)
        else:
            is_written = True
        return "" if is_written else f"`{text}`: the compiler imports no such thing"

    def _are_results(self, node: ast.ImportFrom) -> bool:
        """Whether what is imported are classes of results, which ``rebuild`` makes."""
        names = {name.name for name in node.names}
        return all(
            isinstance(call := self.parents[read], ast.Call)
            and ast.unparse(call.func) == "rebuild"
            and call.args[0] is read
            for read in self.parents
            if isinstance(read, ast.Name) and read.id in names
        )

    def _of_definition(self, node: ast.FunctionDef | ast.ClassDef) -> str:
        bases = {*map(ast.unparse, node.bases)} if isinstance(node, ast.ClassDef) else set()
        at_top = isinstance(self.parents[node], ast.Module)
        if at_top != isinstance(node, ast.ClassDef) or bases - MODULES:
            return "the compiler writes a class of a module at the top, and functions inside of it"
        if node.decorator_list:
            return f"`@{ast.unparse(node.decorator_list[0])}`: the compiler decorates nothing"
        if isinstance(self.parents[node], ast.ClassDef) and is_taken(node.name):
            return f"`{node.name}` replaces a method that modules have"
        return ""

    def _of_number(self, call: ast.Call) -> str:
        """What is said of a call that makes a number, or nothing."""
        for part in (*call.args, *(word.value for word in call.keywords)):
            if not self.is_number(part):
                text = f"`{ast.unparse(call)}` makes a number of `{ast.unparse(part)}`"
                return f"{text}, and may make one of sizes and numbers only"
        return ""

    def _of_name(self, node: ast.Name) -> str:
        scope = self.scope(node)
        if isinstance(scope, ast.FunctionDef):
            is_of_class = node.id in self.classes - self.variables[scope]
        else:
            is_of_class = node.id in self.classes | self.of_class
        is_hidden = node.id.startswith("__") and node.id not in self.bound
        whole = ast.unparse(self.whole(node))
        if node.id in TELL_THE_RANK or is_of_class or is_hidden:
            return f"`{whole}` tells which rank this is"
        if node.id == "self" and not isinstance(self.parents[node], ast.Attribute):
            return "`self` may be asked for its parts only"
        is_of_python = node.id in vars(builtins) and node.id not in self.bound
        if is_of_python and node.id not in BUILTINS:
            return f"the compiler writes no `{node.id}`"
        # Operators that a model brings along are not looked into.
        is_custom = whole.startswith("torch.ops.") and not whole.startswith("torch.ops.aten.")
        is_known = self._is_known(full_name(whole)) or is_custom
        if self.is_module(node) and node.id in {"torch", "F"} and not is_known:
            if is_in_place(whole):
                return f"`{whole}` {IN_PLACE}"
            return f"the compiler knows no operator `{whole}`, {NO_OPERATOR}"
        return ""

    def _of_attribute(self, node: ast.Attribute) -> str:
        text = ast.unparse(node)
        is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        hidden = node.attr.startswith("__") and node.attr.endswith("__")
        if node.attr in TELL_THE_RANK or hidden or (is_of_self and node.attr not in self.of_self):
            return f"`{text}` tells which rank this is"
        if node.attr == "offset" and not self._is_first_row(node):
            takers = ", ".join(sorted(ROWS_FROM))
            return f"`{text}(...)` may be the `start` of {takers} only"
        if node.attr == "place_of" and not self._is_told(node, {"Cut"}):
            return f"`{text}(...)` may be an argument of `Cut` only"
        path = numberless(path_of(node))
        if path in self.of_self or path in self.of_block or node.value in self.axes:
            return ""
        if self.is_module(first_of(node)):
            return ""  # its first name is asked about
        is_called = isinstance(call := self.parents[node], ast.Call) and call.func is node
        if is_called and node.attr == "size" and self.is_size_of_input(call):
            return ""
        if is_called and (node.attr == "append" or self._is_known(f"{METHOD}{node.attr}")):
            return ""
        text = f"{text}(...)" if is_called else text
        if is_called and is_in_place(node.attr):
            return f"`{text}` {IN_PLACE}"
        if node.attr in {"shape", "size", "numel"}:
            return f"`{text}`: the size of a piece may differ from rank to rank"
        return f"`{text}`: the compiler asks no value for its `{node.attr}`"

    def _is_known(self, name: str) -> bool:
        """Whether it is a name of torch that a file may use: of an operator, or of a dtype."""
        is_hidden = name.rpartition(".")[2].startswith("_")
        return name in self.known or (not is_hidden and makes_tensors(name))

    def _is_required(self, node: ast.AST) -> bool:
        """Whether a condition is one that ``self.require`` holds a call to."""
        while isinstance(node, ast.expr):
            node = self.parents[node]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.require":
                return True
        return False

    def _of_axis(self, axis: ast.expr) -> str:
        """What is said of the use of an axis, or nothing."""
        used = self.parents[axis]
        if isinstance(used, ast.Attribute):
            text = ast.unparse(used)
            return "" if used.attr in OF_AN_AXIS else f"`{text}` tells which rank this is"
        only = f"`{ast.unparse(axis)}` is an axis, which may be an argument of a call only"
        return "" if self.call_around(axis) else only

    def _sizes(self, method: ast.FunctionDef) -> Iterator[ast.expr]:
        """Where a method uses sizes of pieces: ``tp.local_size(5)``, and variables for them."""
        names: set[str] = set()
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr in SIZES:
                yield node
                names |= self._variable_of(node)
        for node in ast.walk(method):
            if isinstance(node, ast.Name) and node.id in names and is_read(node):
                yield node

    def _variable_of(self, size: ast.expr) -> set[str]:
        """The variable whose value is a size alone: ``local_heads = tp.local_size(4)``."""
        statement = self.parents[self.parents[size]]
        if not isinstance(statement, ast.Assign):
            return set()
        return {x.id for x in statement.targets if isinstance(x, ast.Name)}

    def _of_size(self, size: ast.expr) -> str:
        """What is said of the use of the size of a piece, or nothing."""
        end, part = self._end_of(size)
        text = ast.unparse(size) + "(...)" * isinstance(size, ast.Attribute)
        if isinstance(end, ast.Call):
            function = ast.unparse(end.func)
            if function.startswith("self.random.") or self.is_brought(end):
                return ""
            if _takes_size(end, part):
                return ""
            return f"`{text}` is the size of a piece, and `{function}` takes no size there"
        is_variable = isinstance(size, ast.Attribute) and self._variable_of(size)
        if is_variable or isinstance(end, ast.Slice):
            return ""
        return f"`{text}` is the size of a piece, and may be told to calls that take sizes only"

    def _end_of(self, node: ast.AST) -> tuple[ast.AST, ast.AST]:
        """What a number goes into: the call whose argument it is or is a part of, a slice, or a
        statement. With it the argument.
        """
        while True:
            parent = self.parents[node]
            is_part = isinstance(parent, ast.Call) and (node is parent.func or makes_number(parent))
            parts = ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.keyword | ast.Starred
            if not (is_part or isinstance(parent, parts)):
                return parent, node
            if isinstance(parent, ast.keyword):
                return self.parents[parent], parent
            node = parent

    def _is_first_row(self, node: ast.expr) -> bool:
        """Whether a place is the first row of a function of ours, or is told to a function that the
        model brings along.
        """
        inner: ast.AST = node
        while not isinstance(inner, ast.keyword) and isinstance(inner, ast.expr):
            inner = self.parents[inner]
            if isinstance(inner, ast.Call) and self.is_brought(inner):
                return True
        if not isinstance(inner, ast.keyword):
            return False
        call = self.parents[inner]
        assert isinstance(call, ast.Call), "a class with keywords"
        is_row = inner.arg == "start" and ast.unparse(call.func) in ROWS_FROM
        return is_row or self.is_brought(call)

    def _is_told(self, node: ast.expr, functions: set[str]) -> bool:
        """Whether an expression is a part of an argument of one of these functions."""
        while (call := self.call_around(node)) is not None:
            if ast.unparse(call.func) in functions:
                return True
            node = call
        return False

    def _told(self, node: ast.AST, why: str) -> tuple[ast.stmt, str]:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node, why


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The conditions that decide what of a node is run."""
    if isinstance(node, ast.If | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


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


def _takes_size(call: ast.Call, part: ast.AST) -> bool:
    """Whether an argument of a call may be the size of a piece."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name not in TAKE_SIZES:
        return False
    place = part.arg if isinstance(part, ast.keyword) else call.args.index(part)  # type: ignore[arg-type]
    return not TAKE_SIZES[name] or place in TAKE_SIZES[name]
