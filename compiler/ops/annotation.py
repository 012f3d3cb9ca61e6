"""Annotations (see ``grammar.py``) meet the shapes of a call: the rule of an operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.size import Size, divides, is_static, product, quotient
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.grammar import Annotation, Name, Star, Term, parse, underline
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.rule import DimRefs, Factor, FactorKind, FactorRef, OpRule, TensorRefs
from shardwright.runtime.errors import AnnotationError


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

    ``sizes`` gives factor sizes (a tuple: segments) that are not written in the text, symbolic ones
    for instance. ``parameters`` are the names of the operator's signature, in order: needed where
    terms stand for parameters, which ``by_parameter`` asks for (a parameter holding a tuple of
    tensors gives all of them its term). Further keyword arguments are fields of :class:`OpRule`
    (``linear_sets``, ``localise``, ...). Raises :class:`AnnotationError` naming the token, the
    annotation and the shapes.
    """
    return _Fit(parse(text), op, dict(sizes or {}), tuple(parameters), by_parameter).rule(**fields)


def instantiate(opdef: OpDef, op: IROp) -> OpRule:
    """The rule of ``op``, made by the maker (or the annotation) of its definition."""
    rule = opdef.rule(op)
    return (
        parse_rule(rule, op, parameters=[p.name for p in opdef.parameters])
        if isinstance(rule, str)
        else rule
    )


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
            self.fail(
                f"{len(self.annotation.results)} result terms for {len(self.op.results)} results",
                span,
            )
        # ``* k+, n k+ -> * n``: the star has as many dims everywhere.
        star = self.star_size([*operand_terms, *self.annotation.results])
        operands, results = [], []
        given = zip(operand_terms, self.op.operands, self.op.operand_names, strict=True)
        for term, value, name in given:
            operands.append(self.expand(term, value, star, name))
        made = zip(self.annotation.results, self.op.results, strict=True)
        for number, (term, value) in enumerate(made):
            results.append(self.expand(term, value, star, f"result {number}"))
        # First which names there are and what they are, then the size of each.
        kinds = self.kinds([*operands, *results], results)
        segments = self.infer_sizes([*operands, *results])
        # Factors of size 1 are left out, so that broadcast operands need no rules of their own.
        kept = {name for name, sizes in segments.items() if sizes != (1,)}
        factors = tuple(
            Factor(name, segments[name], kinds[name]) for name in segments if name in kept
        )
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
        # A term for each operand, in order.
        if len(terms) == len(operands) and not self.by_parameter:
            return list(terms)
        if len(terms) < len(operands) and not self.by_parameter:
            self.fail(
                f"{len(terms)} operand terms for {len(operands)} tensors",
                (0, self.annotation.text.find("->")),
            )
        if len(terms) > len(self.parameters):
            self.fail(
                f"{len(terms)} operand terms for {len(self.parameters) or len(operands)} arguments",
                terms[-1].span,
            )
        # ``register_op``: a term for each parameter, those that are no tensors included. A list of
        # tensors takes one term.
        by_name = dict(zip(self.parameters, terms, strict=False))
        matched = []
        for key, value in self.op.args:
            tensors = sum(isinstance(leaf, IRValue) for leaf in leaves(value))
            if tensors and key not in by_name:
                self.fail(
                    f"argument {key!r} is a tensor without a term",
                    (0, self.annotation.text.find("->")),
                )
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
            # The dims that the other terms leave over.
            here = value.ndim - (len(term.dims) - 1)
            if here < 0 or (count is not None and here != count):
                self.fail(
                    f"'*' stands for {here} dims of {value.name}"
                    + (f", but for {count} elsewhere" if here >= 0 else ""),
                    star.span,
                )
            count = here
        return count

    def expand(self, term: Term, value: IRValue, star: int | None, what: str) -> _Expanded:
        """The names in each dim of one tensor, stars replaced by ``*0 *1 ...`` and ``?`` by frozen
        names of its own.
        """
        # ``?``: nothing is said of this tensor, so it stays whole.
        if term.dims is None:
            own = tuple(
                (Name(f"?{value.name}{i}", term.span, FactorKind.FROZEN),)
                for i in range(value.ndim)
            )
            return own, value, what
        dims: list[tuple[Name, ...]] = []
        for dim in term.dims:
            if isinstance(dim, Star):
                # The stars of all tensors get the same names, so ``* k, k n -> * n`` ties their
                # dims together.
                dims += [(Name(f"*{i}", dim.span, dim.kind),) for i in range(star or 0)]
            else:
                dims.append(dim)
        if len(dims) != value.ndim:
            self.fail(f"{what} has {value.ndim} dims, the annotation {len(dims)}", term.span)
        return tuple(dims), value, what

    def kinds(self, tensors: list[_Expanded], results: list[_Expanded]) -> dict[str, FactorKind]:
        # The marks: a name may carry ``+`` or ``^`` at any of its places, but one of them only.
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
                # Cutting one factor would cut both dims of the tensor, and leave its diagonal
                # blocks alone.
                if name.name in seen and kinds[name.name] is not FactorKind.FROZEN:
                    self.fail(
                        f"{name.name} stands twice in {tensor[2]}",
                        name.span,
                        f"mark it {name.name}^, or name one of them anew",
                    )
                seen.add(name.name)
        # A name that a result lacks must say what happens to it: summed, or whole.
        in_results = [{name.name for name in _names([result])} for result in results]
        for name in _names(tensors):
            everywhere = all(name.name in names for names in in_results)
            if kinds[name.name] is FactorKind.SUMMED and everywhere and in_results:
                self.fail(
                    f"{name.name} is marked + but every result has it",
                    name.span,
                    "leave the mark out",
                )
            if kinds[name.name] is FactorKind.FREE and not everywhere:
                hint = (
                    f"write {name.name}+ if the result is the plain sum over it, else {name.name}^"
                )
                self.fail(f"a result lacks {name.name}, which has no mark", name.span, hint)
        return kinds

    def infer_sizes(self, tensors: list[_Expanded]) -> dict[str, tuple[Size, ...]]:
        """The segments of every factor, in order of appearance."""
        # Sizes that are written down come first, ``(g=8 r)``.
        sizes: dict[str, tuple[Size, ...]] = {}
        for name in _names(tensors):
            given = self.given.get(name.name, name.sizes)
            if given is not None:
                found = given if isinstance(given, tuple) else (given,)
                if sizes.setdefault(name.name, found) != found:
                    self.fail(
                        f"{name.name} is given the sizes {sizes[name.name]} and {found}", name.span
                    )
        dims = [
            (dim, value.shape[i], i, what)
            for names, value, what in tensors
            for i, dim in enumerate(names)
        ]
        # Each round takes the dims of which all factors but one are known, until nothing is left or
        # nothing new follows.
        while dims:
            waiting = [dim for dim in dims if not self.infer_dim(*dim, sizes)]
            if len(waiting) == len(dims):
                unknown = [name for name in waiting[0][0] if name.name not in sizes]
                hint = f"give sizes, as in ({unknown[0].name}=12 {unknown[-1].name})"
                self.fail(
                    f"the sizes of {' and '.join(n.name for n in unknown)} do not follow "
                    "from the shapes",
                    unknown[0].span,
                    hint,
                )
            dims = waiting
        return {name.name: sizes[name.name] for name in _names(tensors)}

    def infer_dim(
        self,
        dim: tuple[Name, ...],
        size: Size,
        index: int,
        what: str,
        sizes: dict[str, tuple[Size, ...]],
    ) -> bool:
        """Check one dim, or take the size of its only unknown factor from it; ``False`` if it has
        several.
        """
        # ``name#1`` is a segment of a concatenation: its size cannot be divided out.
        unknown = [name for name in dim if name.name not in sizes]
        if len(unknown) > 1 or any(name.segment is not None for name in unknown):
            return False
        known = product(self.name_size(name, sizes) for name in dim if name.name in sizes)
        where = f"dim {index} of {what} has size {size}"
        if not unknown:
            # Every size is known: they have to make up the dim.
            if known != size:
                span = (dim[0].span[0], dim[-1].span[1]) if dim else self.term_span(what)
                text = " x ".join(name.name for name in dim) or "the dim as written"
                static = is_static(known) and is_static(size)
                hint = None if static else "give dims of always equal size one name in dynamic_dims"
                self.fail(f"{where}, but {text} is {known}", span, hint)
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
        spans = dict(
            zip(self.op.operand_names, (term.span for term in self.match_operands()), strict=True)
        )
        spans |= {f"result {i}": term.span for i, term in enumerate(self.annotation.results)}
        return spans[what]

    def fail(self, what: str, span: tuple[int, int], hint: str | None = None) -> NoReturn:
        shapes = ", ".join(
            f"{name} {_shape(value)}"
            for name, value in zip(self.op.operand_names, self.op.operands, strict=True)
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
    """All names in the dims of some tensors, in order."""
    for dims, _, _ in tensors:
        for dim in dims:
            yield from dim


def _refs(dims: tuple[tuple[Name, ...], ...], kept: set[str]) -> TensorRefs:
    def refs(dim: tuple[Name, ...]) -> DimRefs:
        return tuple(FactorRef(name.name, name.segment) for name in dim if name.name in kept)

    return tuple(refs(dim) for dim in dims)


def _shape(value: IRValue) -> str:
    return f"[{', '.join(map(str, value.shape))}]"
