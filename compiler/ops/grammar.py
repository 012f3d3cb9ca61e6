"""The annotation grammar: einsum-like strings that say what the dims of an operator are.

    b s k+, n k+, n -> b s n                   a linear layer
    b (g r) q d^, b g k^ d^, b g k^ e -> b (g r) q e      grouped-query attention

Terms, separated by commas, stand for the tensor operands in signature order, those after the arrow
for the results. (More terms than tensors: they stand for the parameters, and the terms of those
that hold no tensor are passed over.) A term is a list of dims:

    ``b``            a factor: the same name is the same size wherever it stands
    ``k+``  ``k^``   marked once anywhere: *summed* (results that lack it are the sum over its
                     pieces), *frozen* (never split)
    ``1`` ``()``     a dim of size 1
    ``(h d)``        a product, outermost first; ``(h=12 d)`` where sizes do not follow from others
    ``c[3|5]``       a concatenation of segments, each cut by itself; ``c#1`` is its segment 1 alone
    ``*``            any number of dims, the same wherever it stands; ``*+`` and ``*^`` mark all
    ``?``            a whole term: any tensor, never split, or no tensor at all

Factors of size 1 are dropped: there is nothing to split. Sizes broadcast only where a ``1`` is
written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from shardwright.compiler.ops.rule import FactorKind
from shardwright.runtime.errors import AnnotationError

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<symbol>->|[,()*?+^=#|\[\]]))"
)


@dataclass(frozen=True, slots=True)
class Name:
    """A factor as written: with its mark, the sizes given with it, and where it stands in the
    text.
    """

    name: str
    span: tuple[int, int]
    kind: FactorKind = FactorKind.FREE
    sizes: tuple[int, ...] | None = None  # (12,) for h=12, (3, 5) for c[3|5]
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class Star:
    """``*``: any number of dims."""

    span: tuple[int, int]
    kind: FactorKind = FactorKind.FREE


@dataclass(frozen=True, slots=True)
class Term:
    """The dims of one tensor. ``dims`` is ``None`` for ``?``."""

    dims: tuple[tuple[Name, ...] | Star, ...] | None
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A parsed annotation, not yet fitted to shapes."""

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]


class _SyntaxError(Exception):
    """A defect of the text alone: ``span`` is the offending token."""

    def __init__(self, message: str, span: tuple[int, int], hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.span, self.hint = message, span, hint


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    kind: str  # name, number, symbol, end
    span: tuple[int, int]


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise _SyntaxError(f"unexpected character {text[start]!r}", (start, start + 1))
        kind = match.lastgroup
        assert kind is not None
        tokens.append(_Token(match[kind], kind, match.span(kind)))
        position = match.end()
    return [*tokens, _Token("", "end", (len(text), len(text) + 1))]


class _Parser:
    """Recursive descent over the tokens of one annotation."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.index = text, _tokens(text), 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.index]

    def next(self) -> _Token:
        token = self.token
        self.index += 1
        return token

    def accept(self, *texts: str) -> _Token | None:
        return self.next() if self.token.text in texts and self.token.kind == "symbol" else None

    def expect(self, kind: str, meaning: str) -> _Token:
        if self.token.kind != kind:
            raise _SyntaxError(
                f"expected {meaning}" + (f", found {self.token.text!r}" if self.token.text else ""),
                self.token.span,
            )
        return self.next()

    def annotation(self) -> Annotation:
        # ``operands -> results``
        operands = self.terms("->")
        if not self.accept("->"):
            what = (
                f"expected ',' or '->', found {self.token.text!r}"
                if self.token.text
                else "there is no '->'"
            )
            raise _SyntaxError(
                what, self.token.span, "write operands -> results, as in 'b k+, n k+ -> b n'"
            )
        results = self.terms("")
        if self.token.kind != "end":
            raise _SyntaxError(f"unexpected {self.token.text!r}", self.token.span)
        return Annotation(self.text, operands, results)

    def terms(self, stop: str) -> tuple[Term, ...]:
        """The terms up to ``stop``; no term at all where operands are empty (``-> a b``)."""
        terms = [self.term()]
        while self.accept(","):
            terms.append(self.term())
        none = stop == "->" and len(terms) == 1 and terms[0].dims == ()
        return () if none else tuple(terms)

    def term(self) -> Term:
        start = self.token.span[0]
        if mark := self.accept("?"):
            return Term(None, mark.span)
        dims: list[tuple[Name, ...] | Star] = []
        while not (self.token.kind == "end" or self.token.text in (",", "->")):
            dims.append(self.dim())
        if sum(isinstance(dim, Star) for dim in dims) > 1:
            raise _SyntaxError(
                "'*' stands twice in one term",
                dims[-1].span if isinstance(dims[-1], Star) else (start, start + 1),
            )
        return Term(tuple(dims), (start, max(start + 1, self.tokens[self.index - 1].span[1])))

    def dim(self) -> tuple[Name, ...] | Star:
        # ``*``, ``(a b)``, ``1`` or a name
        if star := self.accept("*"):
            return Star(star.span, self.mark())
        if self.accept("("):
            names: list[Name] = []
            while not self.accept(")"):
                names.append(self.factor())
            return tuple(names)
        if self.token.kind == "number":
            number = self.next()
            # A fixed size would hold for one model only, while a rule is of any call.
            if number.text != "1":
                hint = "give the dim a name, with ^ if it must not be split"
                raise _SyntaxError(f"a dim of fixed size {number.text}", number.span, hint)
            return ()
        return (self.factor(),)

    def factor(self) -> Name:
        name = self.expect("name", "a name, '1', '(' or '*'")
        sizes: tuple[int, ...] | None = None
        segment = None
        # ``h=12``
        if self.accept("="):
            sizes = (int(self.expect("number", "a size").text),)
        # ``c[4|8]``: a concatenation of segments
        elif self.accept("["):
            numbers = [int(self.expect("number", "the size of a segment").text)]
            while self.accept("|"):
                numbers.append(int(self.expect("number", "the size of a segment").text))
            if not self.accept("]"):
                raise _SyntaxError("expected '|' or ']'", self.token.span)
            sizes = tuple(numbers)
        # ``c#1``: one segment of it
        elif self.accept("#"):
            segment = int(self.expect("number", "the index of a segment").text)
        return Name(name.text, name.span, self.mark(), sizes, segment)

    def mark(self) -> FactorKind:
        mark = self.accept("+", "^")
        return FactorKind(mark.text) if mark else FactorKind.FREE


@lru_cache(maxsize=4096)
def _parse(text: str) -> Annotation | _SyntaxError:
    try:
        return _Parser(text).annotation()
    except _SyntaxError as error:
        return error


def parse(text: str) -> Annotation:
    """Read an annotation. Raises :class:`AnnotationError` with the offending token marked."""
    parsed = _parse(text)
    if isinstance(parsed, _SyntaxError):
        raise AnnotationError(
            f"annotation: {parsed.message}", why=underline(text, parsed.span), hint=parsed.hint
        )
    return parsed


def underline(text: str, span: tuple[int, int]) -> str:
    """The annotation with carets below ``span``, as it stands after the label of an error line."""
    return f"{text}\n{' ' * (9 + span[0])}{'^' * max(1, span[1] - span[0])}"
