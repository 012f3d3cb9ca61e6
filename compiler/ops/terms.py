"""What the makers of annotations share: terms for given shapes, and parallel forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from shardwright.compiler.ir.op import Arg, IROp, RankDraw, WhenTraining
from shardwright.compiler.ir.size import Size, is_static, product
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import (
    DimRefs,
    FactorKind,
    LocalSizes,
    OpRule,
    ParallelFactor,
    ParallelForm,
    TensorRefs,
)
from shardwright.runtime.atoms import Atom
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Layout

RUNTIME = "shardwright.runtime.ops"


# ------------------------------------------------------------------------------------------------
# terms


def names(count: int, prefix: str, mark: str = "") -> list[str]:
    """The names of ``count`` dims, each with a mark: ``["b0^", "b1^"]``."""
    return [f"{prefix}{i}{mark}" for i in range(count)]


def annotation(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]]) -> str:
    """The annotation whose terms are given as lists of dims."""
    return f"{', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, results))}"


def broadcast(
    shapes: Sequence[Sequence[Size]], prefix: str = "b"
) -> tuple[list[list[str]], list[str]]:
    """The terms of shapes that are broadcast against each other, and that of their result."""
    ndim = max((len(shape) for shape in shapes), default=0)
    whole: list[Size] = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, start=ndim - len(shape)):
            whole[dim] = size if whole[dim] == 1 else whole[dim]
    result = [f"{prefix}{dim}" if size != 1 else "1" for dim, size in enumerate(whole)]
    terms = []
    for shape in shapes:
        # Dims are matched from the last one on, as torch broadcasts them.
        own = result[ndim - len(shape) :]
        terms.append(["1" if size == 1 else name for name, size in zip(own, shape, strict=True)])
    return terms, result


# ------------------------------------------------------------------------------------------------
# arguments


def indices(op: IROp, *parameters: str) -> tuple[int, ...]:
    """The positions of the operands that are bound to these parameters, as far as they are there. A
    parameter that takes several counts with all of them.
    """
    return tuple(
        index for index, name in enumerate(op.operand_names) if name.partition("[")[0] in parameters
    )


def may_be(arg: Arg, test: Callable[[Any], bool]) -> bool:
    """Whether ``test`` holds for an argument, in training or in evaluation."""
    return test(arg.train) or test(arg.eval) if isinstance(arg, WhenTraining) else test(arg)


# ------------------------------------------------------------------------------------------------
# parallel forms


def define_form(name: str, signature: str) -> str:
    """Register a function of ``shardwright.runtime.ops`` that lowering puts in an operator's place;
    returns its target.
    """

    def no_rule(op: IROp) -> NoReturn:
        raise InternalError(f"{op.target} is made by lowering and has no rule")

    return define(f"{RUNTIME}.{name}", signature, f"{RUNTIME}.{name}", no_rule).name


def over_count(target: str, factors: Iterable[str], count: Size) -> ParallelForm:
    """The form of a mean: the local sum over the global ``count``, without communication."""
    return ParallelForm(
        target,
        {factor: ParallelFactor(anywhere=True) for factor in factors},
        {},
        lambda op, local: {"count": count},
    )


DRAW = "draw=None"
"""What the runtime's random functions take beside the arguments of the operator."""


def drawn(rule: OpRule, target: str, term_of: Callable[[OpRule], TensorRefs]) -> OpRule:
    """The rule of a random operator; ``term_of`` gives the refs of the tensor that is drawn."""

    def local_args(op: IROp, local: LocalSizes) -> dict[str, Arg]:
        assert op.rule is not None, f"{op.name} has no rule"
        return {"draw": _draw_of(op.name, op.rule, term_of(op.rule), local)}

    factors = [factor.name for factor in rule.factors if factor.kind is not FactorKind.FROZEN]
    form = ParallelForm(
        target, {name: ParallelFactor(anywhere=True) for name in factors}, {}, local_args
    )
    return replace(rule, random=True, parallel=form)


def _draw_of(name: str, rule: OpRule, term: TensorRefs, local: LocalSizes) -> RankDraw:
    """The draw of a tensor, with its layout and the values of sizes in it that are not numbers."""

    def dim(refs: DimRefs) -> tuple[Atom, ...]:
        atoms = tuple(
            Atom(rule.factor(ref.factor).segments, local.axes.get(ref.factor, ())) for ref in refs
        )
        return atoms or (Atom((1,)),)

    layout = Layout(tuple(map(dim, term)))
    # Names in the layout's text, such as ``seq``, whose values are passed beside it.
    atoms = (atom for atoms_of_dim in layout.dims for atom in atoms_of_dim)
    expressions = (size for atom in atoms for size in atom.segments if not is_static(size))
    symbols = {symbol for size in expressions for symbol in size.free_symbols}
    sizes = tuple((str(symbol), symbol) for symbol in sorted(symbols, key=str))
    return RankDraw(name, layout.cut_axes, str(layout), sizes)


def local_size(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    """The argument ``size`` of a call that makes a tensor: that of the local result."""
    return {"size": local.shape(rule.results[0])}


def start_of(refs: DimRefs, local: LocalSizes) -> Size:
    """The global index of the first local element of a dim of which at most the outermost factor is
    split.
    """
    if not refs:
        return 0
    return product([local.offsets[refs[0].factor], *(local.full[ref.factor] for ref in refs[1:])])
