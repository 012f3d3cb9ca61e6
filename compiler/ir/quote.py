"""Text from a model in generated source: the only place that makes string literals, comments and
docstrings of it.

Names of modules, parameters, keys, files and classes may hold anything: quotes, backslashes, line
breaks, characters that look like line breaks to some tools (U+2028, form feeds) or that turn the
direction of a line. What is printable stays as it is, all else is escaped, so that a name never
ends the literal or the line it stands in.
"""

from __future__ import annotations

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """A string literal that evaluates to ``text``, in the quotes that formatters choose: those that
    need fewer escapes.
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    quote = _quote_for(text)
    return f"{quote}{_escaped(text, quote)}{quote}"


def quoted_with_layer(before: str, after: str) -> str:
    """An f-string that evaluates to ``before``, the number in the variable ``layer``, and
    ``after``.
    """
    quote = _quote_for(before + after)
    # Braces would begin a place to fill in.
    start, end = (
        _escaped(part, quote).replace("{", "{{").replace("}", "}}") for part in (before, after)
    )
    return f"f{quote}{start}{{layer}}{end}{quote}"


def comment(text: str) -> str:
    """``text`` for a comment or a line of a dump: on one line, with escapes in place of what does
    not print.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def docstring(text: str) -> str:
    """``text`` for the inside of a docstring in double quotes: on one line, without double quotes
    and escapes of its own.
    """
    return comment(text.replace("\\", "/").replace('"', "'")).replace("\\", "\\\\")


def _quote_for(text: str) -> str:
    return "'" if text.count('"') > text.count("'") else '"'


def _escaped(text: str, quote: str) -> str:
    return "".join(f"\\{c}" if c in ("\\", quote) else _printable(c) for c in text)


def _printable(character: str) -> str:
    """The character, or an escape that stands for it in a string literal."""
    if character.isprintable():
        return character
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
