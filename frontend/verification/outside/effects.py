"""Which statements of a generated method have an effect: their values reach its result, a buffer,
or a check.

    w = self.norm.weight      no effect, as the next statement gives ``w`` another value
    w = self.other.weight     has one
    y = x * w                 has one
    z = y + 1                 no effect: nothing reads ``z``
    return y

Statements are gone through from the last to the first, with the names that those behind them read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def effective(method: ast.FunctionDef) -> set[ast.stmt]:
    """The statements with an effect, also those inside of loops and of inner functions."""
    found: set[ast.stmt] = set()
    _before(method.body, set(), found)
    return found


def reads_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement by itself, without the statements inside of it."""
    for _, value in ast.iter_fields(statement):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield part
            elif isinstance(part, ast.withitem):
                yield part.context_expr


def _before(body: Sequence[ast.stmt], read: set[str], found: set[ast.stmt]) -> set[str]:
    """The names that are read before statements, where ``read`` are those read behind them.
    ``found``: where to add statements with an effect.
    """
    for statement in reversed(body):
        made = _made(statement)
        match statement:
            case ast.FunctionDef():
                if statement.name not in read:
                    continue
                own = {argument.arg for argument in statement.args.args}
                read = read - {statement.name} | (_before(statement.body, set(), found) - own)
            case ast.For():
                # What an iteration reads may come from the one before.
                while not (inner := _before(statement.body, read, found)) <= read:
                    read = read | inner
            case ast.If():
                read = _before(statement.body, read, found) | _before(statement.orelse, read, found)
            case ast.With():
                read = _before(statement.body, read, found)
            case ast.Return():
                read = set()
            case _ if made is not None and not made & read:
                continue
            case ast.Assign():
                read = read - (made or set())
        found.add(statement)
        read = read | _names(statement)
    return read


def _made(statement: ast.stmt) -> set[str] | None:
    """The variables that a statement gives values to, and nothing else: ``a, b = ...``, or
    ``steps.append(a)``. ``None`` for others, which have an effect by themselves.
    """
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Delete() | ast.Pass():
            return set()
        case ast.FunctionDef(name=name):
            return {name}
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))):
            return {name}
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self")))):
            return None
        case ast.Expr():
            return set()
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in ast.walk(target)]
            # What is written into an object or a tensor is read elsewhere.
            if all(isinstance(x, ast.Name | ast.Tuple | ast.expr_context) for x in parts):
                return {part.id for part in parts if isinstance(part, ast.Name)}
    return None


def _names(statement: ast.stmt) -> set[str]:
    """The names that a statement reads by itself."""
    nodes = (node for part in reads_of(statement) for node in ast.walk(part))
    return {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
