"""Small calls of an operator, with values, to try its rule on.

A call of a model may have tensors of gigabytes, and none of them has values while a model is
compiled. What a rule says holds for every size that it leaves open, so the call is made again with
dims of a few elements:

    affine(x [8192, 4096], weight [11008, 4096])   b k+, n k+ -> b n
    affine(x [4, 6], weight [8, 6])                float64, random

Sizes that an argument repeats, or that the function insists on, stay. What a function needs is not
known beforehand, so :func:`sample_calls` makes several calls, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.size import Size, dynamic_sizes, product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.local_shards import is_continuous
from shardwright.compiler.ops.prover import OperatorCall
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.rule import FactorKind, OpRule
from shardwright.runtime.errors import ShardwrightError

_SMALL = (4, 6, 8, 10, 12, 14)
"""Sizes for dims in turn. They are even, as functions may halve a dim, and different, so that the
prover sees when a rule mistakes one dim for another.
"""

_MOST_ELEMENTS = 2**22
"""The most elements that all operands of a sample have together."""

_WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDER |= {torch.complex64: torch.complex128}


class UnusableError(Exception):
    """A sample on which nothing can be proved; says why."""


class WiderCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes casts to fewer than 64 bits casts to 64, inside of functions too, so that no rounding
    hides a mistake.

    ``opaque``: whether kernels ran that are not torch's own, whose casts are out of reach.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.opaque = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.opaque |= getattr(func, "namespace", "aten") not in ("aten", "prim", "prims")
        out = func(
            *map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()}
        )
        if (
            isinstance(out, Tensor)
            and out.dtype in _WIDER
            and not isinstance(args[0] if args else None, Tensor)
        ):
            return out.to(_WIDER[out.dtype])  # made of nothing, in the default dtype
        return out


def _wider(arg: Any) -> Any:
    return _WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg


@dataclass(frozen=True)
class Sample:
    """A call with values. ``casts``: what watches it in float64, ``None`` in the dtypes of the
    model.
    """

    call: OperatorCall
    casts: WiderCasts | None

    @property
    def shapes(self) -> str:
        """The operands of a call in words: ``x [4, 6], weight [8, 6]``."""
        names = zip(self.call.op.operand_names, self.call.operands, strict=True)
        return ", ".join(f"{name} {list(x.shape)}" for name, x in names)


def sample_calls(op: IROp, opdef: UserOpDef) -> Iterator[Sample | UnusableError]:
    """Small calls like ``op``, first in float64, then in the dtypes of the model. A call that is of
    no use is replaced by the reason.
    """
    # The prover calls functions with numbers, and any number stands for a dynamic size.
    op = _static(op)
    rule = instantiate(opdef, op)
    devices = ["cpu"]
    # Ranks as threads share one backward thread of a GPU.
    if torch.cuda.is_available() and rule.parallel is None:
        devices.append("cuda")
    # The cheapest and most telling call first; the caller stops at one that is of use.
    for device in devices:
        for in_float64 in (True, False):
            for sizes in _sizes(op, rule):
                for positive in (False, True) if opdef.input_gen is None else (False,):
                    try:
                        yield _sample(
                            op, opdef, rule, sizes, device, in_float64=in_float64, positive=positive
                        )
                    except UnusableError as error:
                        yield error


def _static(op: IROp) -> IROp:
    """The call with the sizes of the dummy arguments in the place of dynamic ones."""

    # A size that depends on symbols, at the example of each.
    def number(size: Any) -> Any:
        if not isinstance(size, sympy.Basic):
            return size
        found = size.subs({symbol: symbol.example for symbol in dynamic_sizes(size)})
        if found.is_Integer:
            return int(found)
        return float(found) if found.is_Number else found

    def static(leaf: Any) -> Any:
        if isinstance(leaf, IRValue):
            return replace(leaf, shape=tuple(map(number, leaf.shape)))
        return number(leaf)

    return replace(op.map_args(static), results=tuple(map(static, op.results)))


def _sizes(op: IROp, rule: OpRule) -> Iterator[Mapping[str, Size]]:
    """New sizes of factors, from the smallest samples to the call's own sizes."""
    numbers = {
        leaf
        for _, arg in op.args
        for leaf in leaves(arg)
        if isinstance(leaf, int) and not isinstance(leaf, bool)
    }
    small: dict[str, Size] = {}
    for factor in rule.factors:
        if len(factor.segments) == 1 and isinstance(factor.size, int):
            small[factor.name] = min(factor.size, _SMALL[len(small) % len(_SMALL)])
    told = {factor.name for factor in rule.factors if factor.size in numbers}
    frozen = {factor.name for factor in rule.factors if factor.kind is FactorKind.FROZEN}
    tried: list[Mapping[str, Size]] = []
    # A function may be told a size as an argument, or rely on one that must stay whole. Those keep
    # their size in the later tries.
    for kept in (set(), told, frozen, told | frozen, set(small)):
        sizes = {name: size for name, size in small.items() if name not in kept}
        if sizes not in tried:
            tried.append(sizes)
            yield sizes


def _sample(
    op: IROp,
    opdef: UserOpDef,
    rule: OpRule,
    sizes: Mapping[str, Size],
    device: str,
    *,
    in_float64: bool,
    positive: bool,
) -> Sample:
    """One call. Raises :class:`UnusableError`."""
    op = _resized(op, rule, sizes)
    number = sum(int(product(value.shape)) for value in op.operands)
    if number > _MOST_ELEMENTS:
        raise UnusableError(
            f"its tensors have {number} elements together, and the annotation leaves no dim smaller"
        )
    # ``input_gen`` gives all operands, or the prover makes all of them.
    operands = _generated(op, opdef) if opdef.input_gen is not None else [None] * len(op.operands)
    generator = torch.Generator().manual_seed(0)
    smallest = min(
        (int(size) for value in op.operands for size in value.shape if size > 1), default=2
    )
    # Below ``smallest``, so that integers are valid indices wherever they are used.
    values = [
        _value(value, given, smallest, generator, in_float64=in_float64, positive=positive)
        for value, given in zip(op.operands, operands, strict=True)
    ]
    casts = WiderCasts() if in_float64 else None
    within: Callable[[], AbstractContextManager[Any]] = (
        nullcontext if casts is None else lambda: casts
    )
    call = OperatorCall(op, rule, values, device=device, within=within)
    results = _run(call, least_finite=0.5 if positive or opdef.input_gen is not None else 1.0)
    results_now = tuple(IRValue(f"y{i}", tuple(y.shape), y.dtype) for i, y in enumerate(results))
    op = replace(op, results=results_now)
    try:
        # Rules may depend on sizes: make it anew for the small call.
        found = instantiate(opdef, op)
    except ShardwrightError as error:
        raise UnusableError(f"the annotation does not fit it: {error.what}") from error
    # A proof on the sample holds for the model's call only if both follow one rule.
    if _form(found) != _form(rule):
        raise UnusableError(f"the annotation says something else of it: {found.annotation}")
    return Sample(replace(call, op=replace(op, rule=found), rule=found), casts)


def _form(rule: OpRule) -> Any:
    """What a rule says, whatever the sizes."""
    kinds = [(factor.name, factor.kind, len(factor.segments)) for factor in rule.factors]
    sets = [sorted(positions) for positions in rule.linear_sets]
    return kinds, rule.operands, rule.results, rule.additive, sets, rule.grad_linear, rule.nonempty


def _resized(op: IROp, rule: OpRule, sizes: Mapping[str, Size]) -> IROp:
    """The call with other sizes of factors, and its operands named as the prover names them."""
    # Operands come in the order of ``rule.operands``.
    shapes = iter(rule.operands)
    count = 0

    def size_of(ref: Any) -> Size:
        factor = rule.factor(ref.factor)
        # One element of a dim, such as the query of ``q k v`` in one matrix.
        if ref.element is not None:
            return 1
        return (
            factor.segments[ref.segment]
            if ref.segment is not None
            else sizes.get(factor.name, factor.size)
        )

    def resized(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, IRValue):
            return leaf
        shape = tuple(product(size_of(ref) for ref in refs) for refs in next(shapes))
        trained = leaf.requires_grad and op.grad_enabled
        made = IRValue(f"x{count}", shape, leaf.dtype, trained)
        count += 1
        return made

    return replace(op.map_args(resized), results=())


def _generated(op: IROp, opdef: UserOpDef) -> list[Tensor | None]:
    """What the user's ``input_gen`` makes. Numbers that are all alike prove nothing: in their place
    random ones come.
    """
    assert opdef.input_gen is not None
    try:
        given = list(opdef.input_gen(op))
    except Exception as error:
        raise UnusableError(f"its input_gen raises {type(error).__name__}: {error}") from error
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in given]
    if shapes != [value.shape for value in op.operands]:
        raise UnusableError(
            f"its input_gen makes {shapes}, the operands have the shapes "
            f"{[v.shape for v in op.operands]}"
        )
    # Random numbers take the place of numbers that are all alike, where those are continuous.
    return [
        x if not is_continuous(x) or x.numel() < 2 or bool((x != x.flatten()[0]).any()) else None
        for x in given
    ]


def _value(
    value: IRValue,
    given: Tensor | None,
    smallest: int,
    generator: torch.Generator,
    *,
    in_float64: bool,
    positive: bool,
) -> Tensor:
    """A tensor for an operand: given, or random. Integers may be indices of any dim, so they are
    below the smallest.
    """
    dtype = _WIDER.get(value.dtype, value.dtype) if in_float64 else value.dtype
    if given is not None:
        return given.detach().to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, value.shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, smallest, value.shape, generator=generator).to(dtype)
    # Between 0.1 and 0.9: roots and logarithms are finite there.
    if positive:
        return (
            torch.rand(value.shape, generator=generator, dtype=torch.float64)
            .mul(0.8)
            .add(0.1)
            .to(dtype)
        )
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(value.shape, generator=generator, dtype=wide).to(dtype)


def _run(call: OperatorCall, least_finite: float) -> list[Tensor]:
    """The results of the plain call, which is run twice, and backward once.

    Raises :class:`UnusableError` if they tell nothing. ``least_finite``: the share of each result
    that must be finite.
    """
    runs = []
    # Another global seed the second time shows what draws random numbers.
    for seed in (0, 1):
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(seed)
                runs.append(call.run_plain() if seed else call.run_whole().outcome.results)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise UnusableError(f"the call raises {type(error).__name__}: {first}") from error
    first_run, second_run = runs
    if len(first_run) != len(second_run) or not all(map(_same, first_run, second_run)):
        raise UnusableError(
            "the same call gives other results the second time: it draws random numbers, or "
            "remembers earlier calls"
        )
    for index, result in enumerate(first_run):
        if (
            is_continuous(result)
            and result.numel()
            and result.isfinite().double().mean() < least_finite
        ):
            raise UnusableError(f"result {index} is infinite or not a number")
    return first_run


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not is_continuous(a):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
