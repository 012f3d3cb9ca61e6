"""The parts of a generated file: what stands around an expression, and what its names mean.

tp = self.axis("tp")          an axis
batch = x.size(0)             a size that varies from call to call
y = my_project.scaled(x)      a function that the model brings along
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from shardwright.frontend.verification.outside.unread_weights import BLOCK, LAYER, declared_name
from shardwright.frontend.verification.outside.written import (
    NUMBERS,
    OF_AN_AXIS,
    OF_SELF,
    OURS,
    SIZES,
)


class FileParts:
    """The parsed source of a file.

    - ``parents``: what each part stands in.
    - ``bound``, ``imported``: the names that the file binds, and those that it imports.
      ``brought``: those of what the model brings along.
    - ``variables``: the variables of each method. ``of_class``: those of the class.
    - ``of_self``, ``of_block``: the paths below ``self``, and below ``block``, that mean something.
    - ``axes``: the expressions that are axes.
    - ``inputs``: the dims of each input. ``dims``: the variables that are sizes.
    """

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        nodes = [*ast.walk(self.tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.methods = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        self.bound = {name.id for name in names if not is_read(name)}
        self.bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        # What the model brings along: the first names of its modules, and what comes from them.
        self.brought: set[str] = set()
        # The names that imports bind, and the paths that begin with them.
        self.imported: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                first = {(name.asname or name.name).partition(".")[0] for name in node.names}
                self.imported |= first
                self.brought |= first
            if isinstance(node, ast.ImportFrom):
                names_of_it = {name.asname or name.name for name in node.names}
                self.bound |= names_of_it
                self.imported |= names_of_it
                if str(node.module).partition(".")[0] not in OURS:
                    self.brought |= names_of_it
        self.brought -= OURS
        self.variables = {
            method: {x.id for x in ast.walk(method) if isinstance(x, ast.Name) and not is_read(x)}
            | {x.arg for x in ast.walk(method) if isinstance(x, ast.arg)}
            for method in self.methods
        }
        # What stands in a class is read through ``self``; its methods may have variables of the
        # same names.
        self.of_class = {
            name.id
            for name in names
            if not is_read(name) and not isinstance(self.scope(name), ast.FunctionDef)
        }
        declared = [*self.declared(nodes)]
        # What stands below ``self``, down to a weight, and below a block of it, without numbers.
        self.of_self = {*OF_SELF, *(method.name for method in self.methods)}
        self.of_self |= {part for name in declared for part in beginnings(name)}
        self.of_block = {
            part
            for name in declared
            for end in ends(name)
            for part in (f"{BLOCK}{path}" for path in beginnings(end))
        }
        self.axes = [*self._find_axes()]
        self.inputs = dims_of_inputs(nodes)
        self.dims = self._find_dims()

    def scope(self, node: ast.AST) -> ast.AST:
        """The method that an expression runs in, or what is around all methods. Defaults of a
        method's arguments run where it is defined.
        """
        while node in self.parents:
            inner, node = node, self.parents[node]
            if isinstance(node, ast.FunctionDef) and inner in node.body:
                return node
        return node

    def whole(self, node: ast.expr) -> ast.expr:
        """The longest path that begins with a name: ``Net.rank``."""
        while isinstance(parent := self.parents[node], ast.Attribute):
            node = parent
        return node

    def is_module(self, node: ast.expr) -> bool:
        """Whether a name is one that the file imports, which no variable of its method has."""
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return False
        scope = self.scope(node)
        return not isinstance(scope, ast.FunctionDef) or node.id not in self.variables[scope]

    def is_brought(self, call: ast.Call) -> bool:
        """Whether a call is one of a function that the model brings along."""
        return ast.unparse(call.func).partition(".")[0] in self.brought

    def call_around(self, node: ast.AST) -> ast.Call | None:
        """The innermost call that has an expression, or what it is called for, as a part of an
        argument.
        """
        while isinstance(node, ast.expr | ast.keyword):
            parent = self.parents[node]
            if isinstance(parent, ast.Call) and node is not parent.func:
                return parent
            node = parent
        return None

    def declared(self, nodes: list[ast.AST]) -> Iterator[str]:
        """The paths below ``self`` of what a file declares, without the numbers of layers."""
        kinds = {"self.parameter": "", "self.buffer": "", "self.constant": ""}
        kinds["self.random_function"] = "random."
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in kinds:
                yield numberless(kinds[ast.unparse(node.func)] + declared_name(node.args[0]))

    def _find_dims(self) -> set[str]:
        """The names of sizes: those of inputs that vary, and those of pieces."""
        values: dict[str, list[ast.expr]] = {}
        for node in self.parents:
            if isinstance(node, ast.Assign):
                for name in node.targets:
                    values.setdefault(ast.unparse(name), []).append(node.value)

        def is_size(value: ast.expr) -> bool:
            asks = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            return asks and value.func.attr in {"size", *SIZES}  # type: ignore[attr-defined]

        return {name for name, found in values.items() if all(map(is_size, found))}

    def _find_axes(self) -> Iterator[ast.expr]:
        """Where the methods use an axis: the names of one, and ``self.axis(...)``."""
        for method in self.methods:
            # A function that runs in pieces gets what tells their sizes, as an axis does.
            names = {x.arg for x in ast.walk(method) if isinstance(x, ast.arg)} & {"piece"}
            for node in ast.walk(method):
                if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "self.axis"):
                    continue
                statement = self.parents[node]
                if isinstance(statement, ast.Assign):
                    names |= {x.id for x in statement.targets if isinstance(x, ast.Name)}
                else:
                    yield node
            for node in ast.walk(method):
                if isinstance(node, ast.Name) and node.id in names and is_read(node):
                    yield node

    def paths_of(self, method: ast.AST, variable: str) -> Iterator[str]:
        """The paths of the inputs that a variable of a method is: ``cache.0``."""
        for node in ast.walk(method):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="check_inputs"), args=[ast.Dict() as given, *_]
                ):
                    for path, value in zip(given.keys, given.values, strict=True):
                        if isinstance(path, ast.Constant) and ast.unparse(value) == variable:
                            yield str(path.value)
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Subscript(slice=ast.Constant(value=str(path))),
                ) if name == variable:
                    yield path

    def is_size_of_input(self, call: ast.AST) -> bool:
        """Whether a call reads the size of an input: ``batch = x.size(0)``, where ``x`` is declared
        as ``[batch, 8]``.
        """
        match call, self.parents[call]:
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=x)), args=[ast.Constant(value=int(dim))]
                ),
                ast.Assign(targets=[ast.Name(id=name)]),
            ):
                method = self.scope(call)
                given = [*values_given(method, x)]
                paths = [*self.paths_of(method, x)]
                dims = self.inputs.get(paths[0], ()) if len(paths) == 1 else ()
                is_given_once = all(isinstance(value, ast.Subscript) for value in given)
                return is_given_once and len(given) < 2 and list(dims)[dim : dim + 1] == [name]
        return False

    def is_size_or_index(self, name: ast.Name) -> bool:
        if name.id in self.dims | {size for dims in self.inputs.values() for size in dims}:
            return True
        loops = (x for x in self.parents if isinstance(x, ast.For | ast.comprehension))
        return name.id in {x.target.id for x in loops if isinstance(x.target, ast.Name)}

    def is_number(self, node: ast.expr) -> bool:
        """Whether an expression is a number, or a text, on sight."""
        match node:
            case ast.Constant() | ast.JoinedStr():
                return True
            case ast.Name():
                return self.is_size_or_index(node)
            case ast.UnaryOp():
                return self.is_number(node.operand)
            case ast.BinOp():
                return self.is_number(node.left) and self.is_number(node.right)
            case ast.Call():
                asks = isinstance(node.func, ast.Attribute) and node.func.attr in OF_AN_AXIS
                return asks or makes_number(node)
            case ast.Attribute():
                return node.attr == "size" or ast.unparse(node).startswith(NUMBERS)
        return False


def is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def first_of(node: ast.expr) -> ast.expr:
    """What an expression like ``x.a.b`` begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def makes_number(call: ast.expr) -> bool:
    """Whether it is a call that makes a number of numbers."""
    return isinstance(call, ast.Call) and f"{ast.unparse(call.func)}(".startswith(NUMBERS)


def values_given(method: ast.AST, variable: str) -> Iterator[ast.expr | None]:
    """What the statements of a method assign to a variable, ``None`` for a part of a value."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = {x.id for x in ast.walk(target) if isinstance(x, ast.Name)}
                if variable in names:
                    yield node.value if isinstance(target, ast.Name) else None
        elif isinstance(node, ast.For) and ast.unparse(node.target) == variable:
            yield None


def dims_of_inputs(nodes: list[ast.AST]) -> Mapping[str, list[str]]:
    """The dims of the inputs of a class by their paths: ``batch`` and ``8`` of ``[batch, 8]``."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id="inputs")], value=ast.Dict() as table):
                for path, spec in zip(table.keys, table.values, strict=True):
                    match path, spec:
                        case ast.Constant(), ast.Tuple(elts=[ast.Constant(value=str(text)), *_]):
                            dims = text.partition("[")[2].partition("]")[0]
                            found[str(path.value)] = [dim.strip() for dim in dims.split(",")]
    return found


def numberless(path: str) -> str:
    """A path that has one word for all numbers of layers: ``blocks.{layer}.norm.weight``."""
    return ".".join(LAYER if part.isdecimal() else part for part in path.split("."))


def beginnings(path: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = path.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def ends(path: str) -> Iterator[str]:
    """``a.b.c``, ``b.c`` and ``c`` of ``a.b.c``."""
    parts = path.split(".")
    return (".".join(parts[count:]) for count in range(len(parts)))
