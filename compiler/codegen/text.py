"""Lines of generated source: statements with trailing comments, broken the way ``ruff format``
breaks them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.compiler.ir.quote import comment

WIDTH = 128
"""The most columns of a line of generated source."""


@dataclass(frozen=True, slots=True)
class Line:
    """One statement.

    - ``comment``: stands behind it, or above it if there is no room.
    - ``guards``: the ``with`` and ``if`` headers under which it stands, outermost first.
    - ``module``: the path of the module that it belongs to. What moves values between modules has
      none.
    - ``heading``: a comment above it that begins a paragraph.
    """

    code: str
    comment: str = ""
    guards: tuple[str, ...] = ()
    module: str | None = None
    heading: str = ""


def layout_lines(lines: list[Line], indent: int) -> list[str]:
    """The text of a body. Guards become nested blocks, which neighbouring lines share. Comments
    trail where they fit.
    """
    text: list[str] = []
    open_guards: tuple[str, ...] = ()
    for line in lines:
        # Blocks that are open and that this line is in too; the others end here.
        shared = 0
        while (
            shared < min(len(open_guards), len(line.guards))
            and open_guards[shared] == line.guards[shared]
        ):
            shared += 1
        # A function stands between blank lines.
        begun = any(map(_is_function, line.guards[shared:]))
        if text and (begun or any(map(_is_function, open_guards[shared:]))):
            text.append("")
        if line.heading:
            text += [
                *([""] if text and text[-1] else []),
                f"{' ' * (indent + 4 * shared)}# {line.heading}",
            ]
        for depth in range(shared, len(line.guards)):
            left = indent + 4 * depth
            text += [f"{' ' * left}{part}" for part in wrap(f"{line.guards[depth]}:", WIDTH - left)]
        open_guards = line.guards
        text += _place(line, indent + 4 * len(line.guards))
    return text


def _is_function(guard: str) -> bool:
    return guard.startswith("def ")


def with_headings(lines: list[Line], own: str) -> list[Line]:
    """Put the path of its module above each stretch of lines of one module, or ``own`` if that is
    the module itself.

    A module without parts that has only one statement, such as a linear layer, gets no heading: the
    statement counts as one of the module around it, as its weight says its name.
    """
    counts = Counter(line.module for line in lines if line.module is not None)
    # A module with a single line, a leaf such as ``mlp.act``, gets no heading of its own: its line
    # stands under ``mlp``.
    around = {path: path.rpartition(".")[0] for path in counts}
    parents = set(around.values())
    homes = {
        path: around[path] if count == 1 and path not in parents else path
        for path, count in counts.items()
    }
    if not set(homes.values()) - {""}:
        return lines
    headed, current = [], None
    for line in lines:
        home = current if line.module is None else homes[line.module]
        headed.append(line if home == current else replace(line, heading=comment(home or own)))
        current = home
    return headed


def _place(line: Line, indent: int) -> list[str]:
    pad = " " * indent
    if line.comment and len(line.code) + indent + len(line.comment) + 4 <= WIDTH:
        return [f"{pad}{line.code}  # {line.comment}"]
    code = [pad + part for part in wrap_statement(line.code, WIDTH - indent)]
    above = (
        [f"{pad}# {part}" for part in wrap_comment(line.comment, WIDTH - indent - 2)]
        if line.comment
        else []
    )
    return [*above, *code]


def wrap_comment(text: str, width: int) -> list[str]:
    """Break a comment where two spaces separate its parts. A part that is longer than a line stays
    whole.
    """
    lines = [""]
    for part in text.split("  "):
        joined = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def wrap_statement(code: str, width: int) -> list[str]:
    """Break a long statement inside the brackets that its value ends in, or else inside new ones
    around the value.
    """
    if len(code) <= width:
        return [code]
    head, value = _split_statement(code)
    if len(head) >= width and "," in head:
        # Several names that no line holds: one line each.
        names = head.removesuffix(" = ").rstrip(",").split(", ")
        first, *rest = wrap_statement(f"_ = {value}", width)
        # The value was wrapped behind ``_``, which the closing bracket of the names now replaces.
        return ["(", *(f"    {name}," for name in names), f"){first[1:]}", *rest]
    signs = _signs(value)
    lines = wrap(code, width)
    if not head or (not signs and len(lines) > 1 and len(lines[0]) <= width):
        return lines
    if len(value) + 4 <= width:
        inside = [value]
    elif signs:  # in front of every operator sign
        inside = [value[a:b].strip() for a, b in pairwise([0, *signs, len(value)])]
    else:
        inside = wrap(value, width - 4)
    return [f"{head}(", *(f"    {line}" for line in inside), ")"]


def _split_statement(code: str) -> tuple[str, str]:
    """The head and the value of a statement: ``("y = ", "f(x)")``, ``("return ", "y")``. An
    expression has no head: ``("", code)``.
    """
    if code.startswith("return "):
        return "return ", code.removeprefix("return ")
    sign = next(
        (start for start, _, text, depth in _tokens(code) if text == "=" and depth == 0), None
    )
    return (code[: sign + 2], code[sign + 2 :]) if sign is not None else ("", code)


def _signs(value: str) -> list[int]:
    """The columns of the operator signs that join the value's outermost operands."""
    outer = [
        (start, text)
        for start, _, text, depth in _tokens(value)
        if depth == 0 and text not in ".,()[]{}"
    ]
    return [
        start
        for start, text in outer
        # A sign at the very beginning joins nothing: ``-x``.
        if start > 0 and (text in _WORDS or not (text[0].isalnum() or text[0] in "_\"'"))
    ]


_WORDS = frozenset(["and", "or", "if", "else", "in", "is", "not"])


def wrap(code: str, width: int) -> list[str]:
    """Break a long call after its outermost opening bracket: into one line for all arguments, or
    one line each. The elements of a tuple, list or dict always have one line each. A trailing comma
    is added where it means nothing.
    """
    end = code[len(code.rstrip(",:")) :]
    opening = _last_bracket(code.removesuffix(end))
    if len(code) <= width or opening is None or opening + 2 + len(end) == len(code):
        return [code]
    head, inner, tail = (
        code[: opening + 1],
        code[opening + 1 : -1 - len(end)],
        code[-1 - len(end) :],
    )
    parts = split_commas(inner)
    has_comma = inner.endswith(",") or len(parts) > 1
    is_call_or_index = opening > 0 and code[opening - 1] not in _BEFORE_DISPLAY
    # Here a comma would mean something: ``x[i,]`` is another index, and ``(x,)`` is a tuple.
    if not has_comma and code[opening] == ("[" if is_call_or_index else "("):
        return [head, *(f"    {line}" for line in wrap(inner, width - 4)), tail]
    if (is_call_or_index or not has_comma) and len(inner) + 4 <= width and not inner.endswith(","):
        return [head, f"    {inner}", tail]
    return [head, *(f"    {line}" for part in parts for line in wrap(f"{part},", width - 4)), tail]


_BEFORE_DISPLAY = " ([{*-~"
"""The characters before a bracket that makes a tuple, list or dict, or only groups. In formatted
calls and indices a name stands there.
"""


def _last_bracket(code: str) -> int | None:
    """The column of the opening bracket that closes at the very end, if there is one."""
    opening = None
    for start, end, text, depth in _tokens(code):
        if text in "([{" and depth == 0:
            opening = start
        elif text in ")]}" and depth == 0 and end == len(code):
            return opening
    return None


def split_commas(text: str) -> list[str]:
    """The parts of ``text`` between its top-level commas."""
    commas = [start for start, _, token, depth in _tokens(text) if token == "," and depth == 0]
    parts = [text[a:b].strip(" ,") for a, b in pairwise([0, *commas, len(text)])]
    return [part for part in parts if part]


def names_read(code: str) -> set[str]:
    """The variables of a statement: names that are neither attributes nor keywords nor inside
    strings.
    """
    tokens = [text for _, _, text, _ in _tokens(code)]
    around = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    return {
        text
        for before, text, after in around
        if text.isidentifier() and before != "." and after != "="
    }


def _tokens(code: str) -> Iterator[tuple[int, int, str, int]]:
    """The tokens of one line as ``(start, end, text, depth)``. A bracket has the depth of what
    stands outside it.
    """
    depth = 0
    for token in _TOKEN.finditer(code):
        text = token[0]
        depth -= text in (")", "]", "}")
        yield token.start(), token.end(), text, depth
        depth += text in ("(", "[", "{")


# Strings, numbers, names, signs. In generated code these are the tokens that `tokenize` finds, in a
# tenth of its time. Outside of strings, everything that is not ASCII is part of a name.
_TOKEN = re.compile(
    r"""[A-Za-z]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|0[xXoObB]\w+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?[jJ]?|[\w\u0080-\U0010ffff]+"""
    r"""|(?:\*\*|//|<<|>>|[-+*/%@&|^=<>!:])=|\*\*|//|<<|>>|->|\.\.\.|\S"""
)
