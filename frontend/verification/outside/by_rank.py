"""Refuses statements that go by which rank runs them.

One rank of a stage is typed, and speaks for all. That holds as long as all take the same way
through one program. This statement stands in all files, and yet rank 1 alone runs its body:

    if self.rank == 1:
        x = torch.relu(x)

The compiler writes nothing of the kind. So a file is held to what the compiler writes, and anything
else is refused:

- A statement or expression is of a kind that it writes: no ``try``, no ``while``, no ``lambda``. A
  ``with`` is ``torch.no_grad()`` or ``torch.autocast(...)``.
- A condition asks ``self.training`` or ``self.trains``.
- A loop runs over ``range`` of numbers, or over constants.
- Names of Python are ``range``, ``float`` and a few more, but not ``getattr``. Of ``self`` come
  weights, methods of the class, and what the compiler calls.
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
from collections.abc import Iterator

from shardwright.compiler.codegen.file_names import BUILTINS
from shardwright.frontend.verification.outside.one_program import text_of
from shardwright.runtime.manifest import code_file

WRITTEN = (
    # statements
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Import),
    *(ast.ImportFrom, ast.alias, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return),
    *(ast.Delete, ast.Pass, ast.If, ast.For, ast.With, ast.withitem),
    # expressions
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Call, ast.keyword),
    *(ast.Starred, ast.Tuple, ast.List, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.IfExp),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.ListComp, ast.DictComp),
    *(ast.comprehension, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
)
"""What the parts of a file may be."""

CONTEXTS = ("torch.no_grad()", "torch.autocast(")
"""How what a ``with`` enters may begin."""

CONDITIONS = frozenset({"self.training", "self.trains"})
"""What a condition may ask: it is the same on all ranks."""

OF_SELF = frozenset(
    {
        *("parameter", "buffer", "constant", "random_function", "weights", "update_buffer"),
        *("axis", "device", "training", "trains", "check_inputs", "require", "left_out"),
        *("gathered", "gathered_together", "in_pieces", "recompute", "random", "draw"),
    }
)
"""What a file may read of its module, beside weights and methods of the class."""

SIZES = frozenset({"local_size", "holds"})
"""What an axis is asked for to know sizes of pieces. They may differ between ranks."""

OF_AN_AXIS = frozenset({"size", "offset", "place_of", *SIZES})
"""What an axis may be asked for."""

ROWS_FROM = frozenset({"embedding", "cross_entropy", "nll_loss", "linear_cross_entropy"})
"""The functions of ours with an argument ``start``: which row the first one of a piece is."""

TAKE_SIZES = frozenset(
    {
        *("view", "reshape", "expand", "broadcast_to", "repeat", "repeat_interleave", "tile"),
        *("unflatten", "fold", "unfold", "as_strided", "arange", "eye", "one_hot", "dispatch"),
        *("combine",),
        *("split", "split_with_sizes", "tensor_split", "chunk", "narrow", "pad", "stacked"),
        *("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full"),
        *("group_norm", "affine_grid", "interpolate", "Cut", "Told"),
        *(f"conv{kind}{n}d" for n in (1, 2, 3) for kind in ("", "_transpose")),
        *OF_AN_AXIS,
    }
)
"""The functions that may be told the size of a piece, by the last part of their names."""

NUMBERS = (*(f"{name}(" for name in sorted(BUILTINS)), "math.")
"""How calls begin that make a number of numbers."""

TELL_THE_RANK = frozenset(
    {"get_rank", "get_group_rank", "get_node_local_rank", "current_world", "environ", "getenv"}
)
"""The names of other objects that tell the rank, wherever they come from."""

OURS = frozenset({"torch", "F", "math", "shardwright"})
"""The names of modules that a model does not bring along."""


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
        nodes = [*ast.walk(self.tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.methods = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        self.bound = {name.id for name in names if not _is_read(name)}
        self.bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        # What the model brings along: the first names of its modules, and what comes from them.
        self.brought: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                self.brought |= {name.name.partition(".")[0] for name in node.names}
            if isinstance(node, ast.ImportFrom):
                imported = {name.asname or name.name for name in node.names}
                self.bound |= imported
                if str(node.module).partition(".")[0] not in OURS:
                    self.brought |= imported
        self.brought -= OURS
        self.variables = {
            method: {x.id for x in ast.walk(method) if isinstance(x, ast.Name) and not _is_read(x)}
            for method in self.methods
        }
        # What stands in a class is read through ``self``; its methods may have variables of the
        # same names.
        self.of_class = {
            name.id
            for name in names
            if not _is_read(name) and not isinstance(self._scope(name), ast.FunctionDef)
        }
        self.of_self = {*OF_SELF, *(method.name for method in self.methods)}
        self.of_self |= {name.partition(".")[0] for name in self._declared(nodes)}

    def questions(self) -> Iterator[tuple[ast.stmt, str]]:
        """The statements that go by the rank, and what is said of each."""
        for node in ast.walk(self.tree):
            if said := self._of_node(node):
                yield self._told(node, said)
        for axis in self._axes():
            if said := self._of_axis(axis):
                yield self._told(axis, said)
        for method in self.methods:
            for size in self._sizes(method):
                if said := self._of_size(size):
                    yield self._told(size, said)

    def _declared(self, nodes: list[ast.AST]) -> Iterator[str]:
        """The names of declared tensors, of several layers up to their number."""
        for node in nodes:
            declares = ("self.parameter", "self.buffer", "self.constant")
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in declares:
                name = node.args[0]
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                yield str(getattr(first, "value", ""))

    def _of_node(self, node: ast.AST) -> str:
        """What is said of a part of a file by itself, or nothing."""
        if not isinstance(node, WRITTEN):
            return f"the compiler writes no `{type(node).__name__.lower()}`"
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
            case ast.Import() | ast.ImportFrom() if not isinstance(self.parents[node], ast.Module):
                return f"`{ast.unparse(node)}`: the compiler imports at the top only"
            case ast.Name() if _is_read(node):
                return self._of_name(node)
            case ast.Attribute():
                return self._of_attribute(node)
        return ""

    def _scope(self, node: ast.AST) -> ast.AST:
        """The method that an expression runs in, or what is around all methods. Defaults of a
        method's arguments run where it is defined.
        """
        while node in self.parents:
            inner, node = node, self.parents[node]
            if isinstance(node, ast.FunctionDef) and inner in node.body:
                return node
        return node

    def _of_name(self, node: ast.Name) -> str:
        scope = self._scope(node)
        if isinstance(scope, ast.FunctionDef):
            is_of_class = node.id in self.classes - self.variables[scope]
        else:
            is_of_class = node.id in self.classes | self.of_class
        is_hidden = node.id.startswith("__") and node.id not in self.bound
        if node.id in TELL_THE_RANK or is_of_class or is_hidden:
            return f"`{ast.unparse(self._whole(node))}` tells which rank this is"
        if node.id == "self" and not isinstance(self.parents[node], ast.Attribute):
            return "`self` may be asked for its parts only"
        is_of_python = node.id in vars(builtins) and node.id not in self.bound
        if is_of_python and node.id not in BUILTINS:
            return f"the compiler writes no `{node.id}`"
        return ""

    def _of_attribute(self, node: ast.Attribute) -> str:
        is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        hidden = node.attr.startswith("__") and node.attr.endswith("__")
        if node.attr in TELL_THE_RANK or hidden or (is_of_self and node.attr not in self.of_self):
            return f"`{ast.unparse(node)}` tells which rank this is"
        if node.attr == "offset" and not self._is_first_row(node):
            takers = ", ".join(sorted(ROWS_FROM))
            return f"`{ast.unparse(node)}(...)` may be the `start` of {takers} only"
        if node.attr == "place_of" and not self._is_told(node, {"Cut"}):
            return f"`{ast.unparse(node)}(...)` may be an argument of `Cut` only"
        return ""

    def _whole(self, node: ast.expr) -> ast.expr:
        """The longest path that begins with a name: ``Net.rank``."""
        while isinstance(parent := self.parents[node], ast.Attribute):
            node = parent
        return node

    def _is_required(self, node: ast.AST) -> bool:
        """Whether a condition is one that ``self.require`` holds a call to."""
        while isinstance(node, ast.expr):
            node = self.parents[node]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.require":
                return True
        return False

    def _axes(self) -> Iterator[ast.expr]:
        """Where the methods use an axis: the names of one, and ``self.axis(...)``."""
        for method in self.methods:
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
        if isinstance(used, ast.Attribute):
            text = ast.unparse(used)
            return "" if used.attr in OF_AN_AXIS else f"`{text}` tells which rank this is"
        only = f"`{ast.unparse(axis)}` is an axis, which may be an argument of a call only"
        return "" if self._call_around(axis) else only

    def _sizes(self, method: ast.FunctionDef) -> Iterator[ast.expr]:
        """Where a method uses sizes of pieces: ``tp.local_size(5)``, and variables for them."""
        names: set[str] = set()
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr in SIZES:
                yield node
                names |= self._variable_of(node)
        for node in ast.walk(method):
            if isinstance(node, ast.Name) and node.id in names and _is_read(node):
                yield node

    def _variable_of(self, size: ast.expr) -> set[str]:
        """The variable whose value is a size alone: ``local_heads = tp.local_size(4)``."""
        statement = self.parents[self.parents[size]]
        if not isinstance(statement, ast.Assign):
            return set()
        return {x.id for x in statement.targets if isinstance(x, ast.Name)}

    def _of_size(self, size: ast.expr) -> str:
        """What is said of the use of the size of a piece, or nothing."""
        end = self._end_of(size)
        text = ast.unparse(size) + "(...)" * isinstance(size, ast.Attribute)
        if isinstance(end, ast.Call):
            function = ast.unparse(end.func)
            if function.rpartition(".")[2] in TAKE_SIZES or function.startswith("self.random."):
                return ""
            if self._is_brought(end):
                return ""
            return f"`{text}` is the size of a piece, and `{function}` takes no size"
        is_variable = isinstance(size, ast.Attribute) and self._variable_of(size)
        if is_variable or isinstance(end, ast.Slice):
            return ""
        return f"`{text}` is the size of a piece, and may be told to calls that take sizes only"

    def _end_of(self, node: ast.AST) -> ast.AST:
        """What a number goes into: the call whose argument it is or is a part of, a slice, or a
        statement.
        """
        while True:
            parent = self.parents[node]
            is_part = isinstance(parent, ast.Call) and (
                node is parent.func or ast.unparse(parent).startswith(NUMBERS)
            )
            parts = ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.keyword | ast.Starred
            if not (is_part or isinstance(parent, parts)):
                return parent
            node = parent

    def _is_first_row(self, node: ast.expr) -> bool:
        """Whether a place is the first row of a function of ours, or is told to a function that the
        model brings along.
        """
        inner: ast.AST = node
        while not isinstance(inner, ast.keyword) and isinstance(inner, ast.expr):
            inner = self.parents[inner]
            if isinstance(inner, ast.Call) and self._is_brought(inner):
                return True
        if not isinstance(inner, ast.keyword):
            return False
        call = self.parents[inner]
        assert isinstance(call, ast.Call), "a class with keywords"
        is_row = inner.arg == "start" and ast.unparse(call.func) in ROWS_FROM
        return is_row or self._is_brought(call)

    def _is_told(self, node: ast.expr, functions: set[str]) -> bool:
        """Whether an expression is a part of an argument of one of these functions."""
        while (call := self._call_around(node)) is not None:
            if ast.unparse(call.func) in functions:
                return True
            node = call
        return False

    def _is_brought(self, call: ast.Call) -> bool:
        """Whether a call is one of a function that the model brings along."""
        return ast.unparse(call.func).partition(".")[0] in self.brought

    def _call_around(self, node: ast.AST) -> ast.Call | None:
        """The innermost call that has an expression, or what it is called for, as a part of an
        argument.
        """
        while isinstance(node, ast.expr | ast.keyword):
            parent = self.parents[node]
            if isinstance(parent, ast.Call) and node is not parent.func:
                return parent
            node = parent
        return None

    def _told(self, node: ast.AST, why: str) -> tuple[ast.stmt, str]:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node, why


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The conditions that decide what of a node is run."""
    if isinstance(node, ast.If | ast.IfExp):
        return [node.test]
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
