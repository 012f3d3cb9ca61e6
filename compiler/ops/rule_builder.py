"""Building the rule of one call from its shapes, where a fixed annotation cannot say it."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Sequence

import torch

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import (
    DimRefs,
    Factor,
    FactorKind,
    FactorRef,
    Localise,
    OpRule,
    TensorRefs,
)

FREE, SUMMED, FROZEN = FactorKind.FREE, FactorKind.SUMMED, FactorKind.FROZEN


class RuleBuilder:
    """Collects the factors of one rule, named ``a``, ``b``, ... in the order they are made."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def factor(self, *segments: Size, kind: FactorKind = FREE) -> FactorRef:
        """A new factor, even of size 1; several segments make a concatenation."""
        turn, letter = divmod(len(self.factors), 26)
        self.factors.append(
            Factor(string.ascii_lowercase[letter] + (str(turn) if turn else ""), segments, kind)
        )
        return FactorRef(self.factors[-1].name)

    def dim(self, size: Size, kind: FactorKind = FREE) -> DimRefs:
        """A dim that is one new factor; a dim of size 1 has none."""
        return () if size == 1 else (self.factor(size, kind=kind),)

    def tensor(self, shape: Sequence[Size], frozen: Collection[int] = ()) -> TensorRefs:
        """A tensor of new factors, those of the dims listed frozen."""
        return tuple(
            self.dim(size, FROZEN if dim in frozen else FREE) for dim, size in enumerate(shape)
        )

    def whole(self, shape: Sequence[Size]) -> TensorRefs:
        """A tensor of new factors that are all frozen."""
        return self.tensor(shape, range(len(shape)))

    def rule(
        self,
        operands: Iterable[TensorRefs],
        results: Iterable[TensorRefs],
        *,
        linear: tuple[frozenset[int], ...] = (),
        additive: tuple[int, ...] = (),
        localise: Localise | None = None,
    ) -> OpRule:
        """The finished rule; factors that occur nowhere are left out."""
        operands, results = tuple(operands), tuple(results)
        dims = (dim for tensor in operands + results for dim in tensor)
        used = {ref.factor for dim in dims for ref in dim}
        factors = tuple(factor for factor in self.factors if factor.name in used)
        text = annotation_text(factors, operands, results)
        return OpRule(text, factors, operands, results, additive, linear, localise=localise)


def annotation_text(
    factors: tuple[Factor, ...], operands: tuple[TensorRefs, ...], results: tuple[TensorRefs, ...]
) -> str:
    """The rule in the annotation grammar; marks and segments stand at the first occurrence of a
    factor.
    """
    by_name = {factor.name: factor for factor in factors}
    seen: set[str] = set()

    # ``h[4|8]#0^``: segments and mark stand at the first place only.
    def ref_text(ref: FactorRef) -> str:
        factor = by_name[ref.factor]
        first = ref.factor not in seen
        seen.add(ref.factor)
        segments = (
            f"[{'|'.join(map(str, factor.segments))}]" if first and len(factor.segments) > 1 else ""
        )
        segment = "" if ref.segment is None else f"#{ref.segment}"
        segment += "" if ref.element is None else f"@{ref.element}"
        return f"{ref.factor}{segments}{segment}{factor.kind.value if first else ''}"

    def dim_text(dim: DimRefs) -> str:
        texts = [ref_text(ref) for ref in dim]
        if not texts:
            return "1"
        return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"

    def tensor_text(tensor: TensorRefs) -> str:
        return " ".join(map(dim_text, tensor))

    return f"{', '.join(map(tensor_text, operands))} -> {', '.join(map(tensor_text, results))}"


def broadcast(shape: Sequence[Size], result: TensorRefs) -> TensorRefs:
    """The dims of an operand that is broadcast to ``result``: none where its size is 1."""
    return tuple(
        () if size == 1 else refs
        for size, refs in zip(shape, result[len(result) - len(shape) :], strict=True)
    )


def whole_rule(op: IROp, *joint: tuple[str, ...]) -> OpRule:
    """A rule that splits nothing; ``joint`` as in :func:`linear_sets`."""
    build = RuleBuilder()
    operands = [build.whole(value.shape) for value in op.operands]
    results = [build.whole(value.shape) for value in op.results]
    return build.rule(operands, results, linear=linear_sets(op, *joint))


def linear_sets(op: IROp, *joint: tuple[str, ...]) -> tuple[frozenset[int], ...]:
    """The operand positions of each group of parameters in which the operator is jointly linear.

    A group is left out if one of its parameters is a literal other than 0 (the call is then affine
    in the others), if it holds or gives truth values, which have no sum, or if the results are
    rounded to integers. So it is where other numbers are made of unsigned ones: the sum of partial
    ones may be right only because it wraps around.
    """
    dtypes = {result.dtype for result in op.results}
    # Truth values have no sum.
    if torch.bool in dtypes:
        return ()
    # ``tensors[2]`` is an element of the parameter ``tensors``.
    owners = [name.partition("[")[0] for name in op.operand_names]
    found = []
    for names in joint:
        literals = [
            leaf
            for name in names
            for leaf in leaves(op.arg(name, ()))
            if not isinstance(leaf, IRValue)
        ]
        positions = frozenset(i for i, owner in enumerate(owners) if owner in names)
        summable = all(_keeps_sums(op.operands[i].dtype, dtypes) for i in positions)
        if positions and summable and not any(_is_nonzero(literal) for literal in literals):
            found.append(positions)
    return tuple(found)


def _keeps_sums(dtype: torch.dtype, results: Collection[torch.dtype]) -> bool:
    """Whether sums of numbers of ``dtype`` are sums still once they have the dtypes of the
    results.
    """
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return all(result.is_floating_point or result.is_complex for result in results)
    # Unsigned summands may wrap around, and their sum is right again only in the same dtype.
    return dtype.is_signed or all(result == dtype for result in results)


def _is_nonzero(literal: object) -> bool:
    return not (isinstance(literal, int | float | complex) and literal == 0)


def dim_of(op: IROp, ndim: int, name: str = "dim", default: int = 0) -> int:
    """The dim that an argument names, counted from the front."""
    dim = op.arg(name, default)
    assert isinstance(dim, int)
    return dim % ndim if ndim else 0


def all_dims(argument: object, ndim: int) -> tuple[int, ...]:
    """The dims an argument names (one, several, or ``None`` for all), counted from the front."""
    if argument is None:
        return tuple(range(ndim))
    dims = argument if isinstance(argument, tuple | list) else (argument,)
    return tuple(dim % max(ndim, 1) for dim in dims)
