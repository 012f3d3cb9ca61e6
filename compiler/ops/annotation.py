"""The annotation grammar: einsum-like strings that say what the dims of an operator are.

    b s k+, n k+, n -> b s n                   a linear layer
    b (g r) q d^, b g k^ d^, b g k^ e -> b (g r) q e      grouped-query attention

Terms, separated by commas, stand for the tensor operands in signature order, those after the arrow for the results. (More
terms than tensors: they stand for the parameters, and the terms of those that hold no tensor are passed over.)
A term is a list of dims:

    ``b``            a factor: the same name is the same size wherever it stands
    ``k+``  ``k^``   marked once anywhere: *summed* (results that lack it are the sum over its pieces), *frozen* (never split)
    ``1`` ``()``     a dim of size 1
    ``(h d)``        a product, outermost first; ``(h=12 d)`` where the sizes do not follow from other dims
    ``c[3|5]``       a concatenation of segments, each cut by itself; ``c#1`` is its segment 1 alone
    ``*``            any number of dims, the same ones wherever it stands; ``*+`` and ``*^`` mark them all
    ``?``            a whole term: any tensor, never split, or no tensor at all

Factors of size 1 are dropped: there is nothing to split. Sizes broadcast only where a ``1`` is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn, cast

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.size import Size, divides, product, quotient
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.rule import DimRefs, Factor, FactorKind, FactorRef, OpRule, TensorRefs
from shardwright.runtime.errors import AnnotationError

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<symbol>->|[,()*?+^=#|\[\]]))")


@dataclass(frozen=True, slots=True)
class Name:
    """A factor as written: with its mark, the sizes given with it, and where it stands in the text."""

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
                f"expected {meaning}" + (f", found {self.token.text!r}" if self.token.text else ""), self.token.span
            )
        return self.next()

    def annotation(self) -> Annotation:
        operands = self.terms("->")
        if not self.accept("->"):
            what = f"expected ',' or '->', found {self.token.text!r}" if self.token.text else "there is no '->'"
            raise _SyntaxError(what, self.token.span, "write operands -> results, as in 'b k+, n k+ -> b n'")
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
                "'*' stands twice in one term", dims[-1].span if isinstance(dims[-1], Star) else (start, start + 1)
            )
        return Term(tuple(dims), (start, max(start + 1, self.tokens[self.index - 1].span[1])))

    def dim(self) -> tuple[Name, ...] | Star:
        if star := self.accept("*"):
            return Star(star.span, self.mark())
        if self.accept("("):
            names: list[Name] = []
            while not self.accept(")"):
                names.append(self.factor())
            return tuple(names)
        if self.token.kind == "number":
            number = self.next()
            if number.text != "1":
                hint = "give the dim a name, with ^ if it must not be split"
                raise _SyntaxError(f"a dim of fixed size {number.text}", number.span, hint)
            return ()
        return (self.factor(),)

    def factor(self) -> Name:
        name = self.expect("name", "a name, '1', '(' or '*'")
        sizes: tuple[int, ...] | None = None
        segment = None
        if self.accept("="):
            sizes = (int(self.expect("number", "a size").text),)
        elif self.accept("["):
            numbers = [int(self.expect("number", "the size of a segment").text)]
            while self.accept("|"):
                numbers.append(int(self.expect("number", "the size of a segment").text))
            if not self.accept("]"):
                raise _SyntaxError("expected '|' or ']'", self.token.span)
            sizes = tuple(numbers)
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
        raise AnnotationError(f"annotation: {parsed.message}", why=underline(text, parsed.span), hint=parsed.hint)
    return parsed


def underline(text: str, span: tuple[int, int]) -> str:
    """The annotation with carets below ``span``, as it stands after the label of an error line."""
    return f"{text}\n{' ' * (9 + span[0])}{'^' * max(1, span[1] - span[0])}"


def parse_rule(
    text: str,
    op: IROp,
    *,
    sizes: Mapping[str, Size | tuple[Size, ...]] | None = None,
    parameters: Sequence[str] = (),
    by_parameter: bool = False,
    **fields: object,
) -> OpRule:
    """Fit an annotation to an operator call.

    ``sizes`` gives factor sizes (a tuple: segments) that are not written in the text, symbolic ones for instance.
    ``parameters`` are the names of the operator's signature, in order: needed where terms stand for parameters, which
    ``by_parameter`` asks for (a parameter holding a tuple of tensors gives all of them its term).
    Further keyword arguments are fields of :class:`OpRule` (``linear_sets``, ``localise``, ...).
    Raises :class:`AnnotationError` naming the token, the annotation and the shapes.
    """
    return _Fit(parse(text), op, dict(sizes or {}), tuple(parameters), by_parameter).rule(**fields)


def instantiate(opdef: OpDef, op: IROp) -> OpRule:
    """The rule of ``op``, made by the maker (or the annotation) of its definition."""
    rule = opdef.rule(op)
    return parse_rule(rule, op, parameters=[p.name for p in opdef.parameters]) if isinstance(rule, str) else rule


@dataclass(slots=True)
class _Fit:
    """One annotation meeting the shapes of one call."""

    annotation: Annotation
    op: IROp
    given: dict[str, Size | tuple[Size, ...]]
    parameters: tuple[str, ...]
    by_parameter: bool

    def rule(self, **fields: object) -> OpRule:
        operand_terms = self.match_operands()
        if len(self.annotation.results) != len(self.op.results):
            span = self.annotation.results[-1].span
            self.fail(f"{len(self.annotation.results)} result terms for {len(self.op.results)} results", span)
        star = self.star_size([*operand_terms, *self.annotation.results])
        operands = [
            self.expand(term, value, star, name)
            for term, value, name in zip(operand_terms, self.op.operands, self.op.operand_names, strict=True)
        ]
        results = [
            self.expand(term, value, star, f"result {i}")
            for i, (term, value) in enumerate(zip(self.annotation.results, self.op.results, strict=True))
        ]
        kinds = self.kinds([*operands, *results], results)
        segments = self.infer_sizes([*operands, *results])
        kept = {name for name, sizes in segments.items() if sizes != (1,)}
        factors = tuple(Factor(name, segments[name], kinds[name]) for name in segments if name in kept)
        rule = OpRule(
            self.annotation.text,
            factors,
            tuple(_refs(dims, kept) for dims, _, _ in operands),
            tuple(_refs(dims, kept) for dims, _, _ in results),
        )
        return replace(rule, **fields)  # type: ignore[arg-type]

    def match_operands(self) -> list[Term]:
        """One term per operand."""
        terms, operands = self.annotation.operands, self.op.operands
        if not terms and len(operands) == 1:  # no term, or that of a scalar: they are written alike
            terms = (Term((), (0, 1)),)
        if len(terms) == len(operands) and not self.by_parameter:
            return list(terms)
        if len(terms) < len(operands) and not self.by_parameter:
            self.fail(f"{len(terms)} operand terms for {len(operands)} tensors", (0, self.annotation.text.find("->")))
        if len(terms) > len(self.parameters):
            self.fail(f"{len(terms)} operand terms for {len(self.parameters) or len(operands)} arguments", terms[-1].span)
        by_name = dict(zip(self.parameters, terms, strict=False))
        matched = []
        for key, value in self.op.args:
            tensors = sum(isinstance(leaf, IRValue) for leaf in leaves(value))
            if tensors and key not in by_name:
                self.fail(f"argument {key!r} is a tensor without a term", (0, self.annotation.text.find("->")))
            matched += [by_name[key]] * tensors if tensors else []
        return matched

    def star_size(self, terms: list[Term]) -> int | None:
        """How many dims ``*`` stands for; ``None`` if there is no star."""
        values = [*self.op.operands, *self.op.results]
        count = None
        for term, value in zip(terms, values, strict=True):
            star = next((dim for dim in term.dims or () if isinstance(dim, Star)), None)
            if star is None or term.dims is None:
                continue
            here = value.ndim - (len(term.dims) - 1)
            if here < 0 or (count is not None and here != count):
                self.fail(
                    f"'*' stands for {here} dims of {value.name}" + (f", but for {count} elsewhere" if here >= 0 else ""),
                    star.span,
                )
            count = here
        return count

    def expand(self, term: Term, value: IRValue, star: int | None, what: str) -> _Expanded:
        """The names in each dim of one tensor, stars replaced by ``*0 *1 ...`` and ``?`` by frozen names of its own."""
        if term.dims is None:
            own = tuple((Name(f"?{value.name}{i}", term.span, FactorKind.FROZEN),) for i in range(value.ndim))
            return own, value, what
        dims: list[tuple[Name, ...]] = []
        for dim in term.dims:
            if isinstance(dim, Star):
                dims += [(Name(f"*{i}", dim.span, dim.kind),) for i in range(star or 0)]
            else:
                dims.append(dim)
        if len(dims) != value.ndim:
            self.fail(f"{what} has {value.ndim} dims, the annotation {len(dims)}", term.span)
        return tuple(dims), value, what

    def kinds(self, tensors: list[_Expanded], results: list[_Expanded]) -> dict[str, FactorKind]:
        kinds: dict[str, FactorKind] = {}
        for name in _names(tensors):
            known = kinds.setdefault(name.name, name.kind)
            if known is FactorKind.FREE:
                kinds[name.name] = name.kind
            elif name.kind not in (FactorKind.FREE, known):
                self.fail(f"{name.name} is marked both + and ^", name.span)
        for tensor in tensors:
            seen: set[str] = set()
            for name in _names([tensor]):
                if name.name in seen and kinds[name.name] is not FactorKind.FROZEN:
                    self.fail(
                        f"{name.name} stands twice in {tensor[2]}", name.span, f"mark it {name.name}^, or name one of them anew"
                    )
                seen.add(name.name)
        in_results = [{name.name for name in _names([result])} for result in results]
        for name in _names(tensors):
            everywhere = all(name.name in names for names in in_results)
            if kinds[name.name] is FactorKind.SUMMED and everywhere and in_results:
                self.fail(f"{name.name} is marked + but every result has it", name.span, "leave the mark out")
            if kinds[name.name] is FactorKind.FREE and not everywhere:
                hint = f"write {name.name}+ if the result is the plain sum over it, else {name.name}^"
                self.fail(f"a result lacks {name.name}, which has no mark", name.span, hint)
        return kinds

    def infer_sizes(self, tensors: list[_Expanded]) -> dict[str, tuple[Size, ...]]:
        """The segments of every factor, in order of appearance."""
        sizes: dict[str, tuple[Size, ...]] = {}
        for name in _names(tensors):
            given = self.given.get(name.name, name.sizes)
            if given is not None:
                found = given if isinstance(given, tuple) else (given,)
                if sizes.setdefault(name.name, found) != found:
                    self.fail(f"{name.name} is given the sizes {sizes[name.name]} and {found}", name.span)
        dims = [(dim, value.shape[i], i, what) for names, value, what in tensors for i, dim in enumerate(names)]
        while dims:
            waiting = [dim for dim in dims if not self.infer_dim(*dim, sizes)]
            if len(waiting) == len(dims):
                unknown = [name for name in waiting[0][0] if name.name not in sizes]
                hint = f"give sizes, as in ({unknown[0].name}=12 {unknown[-1].name})"
                self.fail(
                    f"the sizes of {' and '.join(n.name for n in unknown)} do not follow from the shapes", unknown[0].span, hint
                )
            dims = waiting
        return {name.name: sizes[name.name] for name in _names(tensors)}

    def infer_dim(self, dim: tuple[Name, ...], size: Size, index: int, what: str, sizes: dict[str, tuple[Size, ...]]) -> bool:
        """Check one dim, or take the size of its only unknown factor from it; ``False`` if it has several."""
        unknown = [name for name in dim if name.name not in sizes]
        if len(unknown) > 1 or any(name.segment is not None for name in unknown):
            return False
        known = product(self.name_size(name, sizes) for name in dim if name.name in sizes)
        where = f"dim {index} of {what} has size {size}"
        if not unknown:
            if known != size:
                span = (dim[0].span[0], dim[-1].span[1]) if dim else self.term_span(what)
                text = " x ".join(name.name for name in dim) or "the dim as written"
                self.fail(f"{where}, but {text} is {known}", span)
        elif not divides(known, size):
            self.fail(f"{where}, which {known} does not divide", unknown[0].span)
        else:
            sizes[unknown[0].name] = (quotient(size, known),)
        return True

    def name_size(self, name: Name, sizes: dict[str, tuple[Size, ...]]) -> Size:
        segments = sizes[name.name]
        if name.segment is None:
            return cast("Size", sum(segments)) if len(segments) > 1 else segments[0]
        if name.segment >= len(segments):
            self.fail(f"{name.name} has {len(segments)} segments", name.span)
        return segments[name.segment]

    def term_span(self, what: str) -> tuple[int, int]:
        """Where the term of an operand or a result stands."""
        spans = dict(zip(self.op.operand_names, (term.span for term in self.match_operands()), strict=True))
        spans |= {f"result {i}": term.span for i, term in enumerate(self.annotation.results)}
        return spans[what]

    def fail(self, what: str, span: tuple[int, int], hint: str | None = None) -> NoReturn:
        shapes = ", ".join(
            f"{name} {_shape(value)}" for name, value in zip(self.op.operand_names, self.op.operands, strict=True)
        )
        results = ", ".join(_shape(value) for value in self.op.results)
        places = [str(self.op.source)] if self.op.source else []
        places += [self.op.module_path] if self.op.module_path else []
        raise AnnotationError(
            f"annotation of {self.op.target}: {what}",
            where=", ".join(places) or None,
            why=f"{underline(self.annotation.text, span)}\n         shapes: {shapes} -> {results}",
            hint=hint,
        )


_Expanded = tuple[tuple[tuple[Name, ...], ...], IRValue, str]
"""The names in each dim of a tensor, the tensor, and what to call it in an error."""


def _names(tensors: Sequence[_Expanded]) -> Iterator[Name]:
    return (name for dims, _, _ in tensors for dim in dims for name in dim)


def _refs(dims: tuple[tuple[Name, ...], ...], kept: set[str]) -> TensorRefs:
    def refs(dim: tuple[Name, ...]) -> DimRefs:
        return tuple(FactorRef(name.name, name.segment) for name in dim if name.name in kept)

    return tuple(refs(dim) for dim in dims)


def _shape(value: IRValue) -> str:
    return f"[{', '.join(map(str, value.shape))}]"
