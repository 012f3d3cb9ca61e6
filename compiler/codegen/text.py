"""Lines of generated source: statements with trailing comments, wrapped and aligned."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 128


@dataclass(frozen=True, slots=True)
class Line:
    """One statement. ``guards`` are the ``with``/``if`` headers it stands under, outermost first."""

    code: str
    comment: str = ""
    guards: tuple[str, ...] = ()


def layout_lines(lines: list[Line], indent: int) -> list[str]:
    """The text of a body: guards become nested blocks shared by neighbouring lines; comments trail where they fit."""
    text: list[str] = []
    open_guards: tuple[str, ...] = ()
    for line in lines:
        shared = 0
        while shared < min(len(open_guards), len(line.guards)) and open_guards[shared] == line.guards[shared]:
            shared += 1
        text += [f"{' ' * (indent + 4 * depth)}{line.guards[depth]}:" for depth in range(shared, len(line.guards))]
        open_guards = line.guards
        text += _place(line, indent + 4 * len(line.guards))
    return text


def _place(line: Line, indent: int) -> list[str]:
    pad = " " * indent
    if line.comment and len(line.code) + indent + len(line.comment) + 4 <= WIDTH:
        return [f"{pad}{line.code}  # {line.comment}"]
    wrapped = [pad + part for part in wrap(line.code, WIDTH - indent)]
    return [f"{pad}# {line.comment}", *wrapped] if line.comment else wrapped


def wrap(code: str, width: int) -> list[str]:
    """Break a long call after its outermost opening bracket, one line for all arguments, or one line each."""
    end = code[len(code.rstrip(",:")) :]
    opening = _last_bracket(code.removesuffix(end))
    if len(code) <= width or opening is None:
        return [code]
    head, inner, tail = code[: opening + 1], code[opening + 1 : -1 - len(end)], code[-1 - len(end) :]
    if len(inner) + 4 <= width and not inner.endswith(","):
        return [head, f"    {inner}", tail]
    return [head, *(f"    {line}" for part in split_commas(inner) for line in wrap(f"{part},", width - 4)), tail]


def _last_bracket(code: str) -> int | None:
    """Where the bracket opens that closes at the very end."""
    return next((i for i, c in enumerate(code) if c in "([{" and _closes_at_end(code, i)), None)


def _closes_at_end(code: str, opening: int) -> bool:
    depth = 0
    for i in range(opening, len(code)):
        depth += code[i] in "([{"
        depth -= code[i] in ")]}"
        if depth == 0:
            return i == len(code) - 1
    return False


def split_commas(text: str) -> list[str]:
    """The parts of ``text`` between its top-level commas."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
