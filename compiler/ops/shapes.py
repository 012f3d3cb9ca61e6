"""What becomes of the dims of a tensor when it is viewed in another shape, and slices that take a
piece of one dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, divides, is_static, product, quotient
from shardwright.compiler.ops.index_expressions import read_index, slice_bounds
from shardwright.compiler.ops.rule import DimRefs, FactorRef, LocalSizes, OpRule, TensorRefs
from shardwright.compiler.ops.rule_builder import FROZEN, RuleBuilder, linear_sets


def factorise(
    build: RuleBuilder, old: Sequence[Size], new: Sequence[Size]
) -> tuple[TensorRefs, TensorRefs]:
    """Two shapes of the same elements as products of common factors, outermost first.

    ``[4, 128, 768]`` and ``[512, 12, 64]`` give ``a b (c d)`` and ``(a b) c d``. Where the shapes
    have nothing in common, as 3 x 4 and 4 x 3, the dims of that stretch are frozen.
    """
    old_refs: list[list[FactorRef]] = [[] for _ in old]
    new_refs: list[list[FactorRef]] = [[] for _ in new]
    # 0 elements are 0 in any grouping, so equal products say nothing about the dims.
    if 0 in old:
        return build.whole(old), build.whole(new)
    left = [(refs, size) for refs, size in zip(old_refs, old, strict=True) if size != 1]
    right = [(refs, size) for refs, size in zip(new_refs, new, strict=True) if size != 1]
    while left and right:
        common = common_divisor(left[0][1], right[0][1])
        if common == 1:
            _freeze_stretch(build, left, right)
            continue
        factor = build.factor(common)
        for side in (left, right):
            refs, size = side.pop(0)
            refs.append(factor)
            rest = quotient(size, common)
            if rest != 1:
                side.insert(0, (refs, rest))
    for refs, size in left + right:  # only where symbolic sizes hide that the shapes are equal
        refs.append(build.factor(size, kind=FROZEN))
    return tuple(map(tuple, old_refs)), tuple(map(tuple, new_refs))


def common_divisor(a: Size, b: Size) -> Size:
    """The greatest common divisor, as far as it can be told for symbolic sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return math.gcd(a, b)
    if divides(a, b):
        return a
    if divides(b, a):
        return b
    divisor = sympy.gcd(sympy.sympify(a), sympy.sympify(b))
    if divisor.is_Integer:
        return int(divisor)
    return divisor if divides(divisor, a) and divides(divisor, b) else 1


_Side = list[tuple[list[FactorRef], Size]]


def _freeze_stretch(build: RuleBuilder, left: _Side, right: _Side) -> None:
    """Take dims off both sides until their products agree, each a frozen factor of its own."""
    taken_left, taken_right = _freeze_one(build, left), _freeze_one(build, right)
    while not (divides(taken_left, taken_right) and divides(taken_right, taken_left)):
        # The side with the smaller product takes its next dim: 6 and 4 become 6 * 2 and 4 * 3.
        behind = left if _is_behind(taken_left, taken_right) else right
        if not behind:
            behind = right if behind is left else left
        if not behind:
            return
        if behind is left:
            taken_left = product((taken_left, _freeze_one(build, left)))
        else:
            taken_right = product((taken_right, _freeze_one(build, right)))


def _freeze_one(build: RuleBuilder, side: _Side) -> Size:
    refs, size = side.pop(0)
    refs.append(build.factor(size, kind=FROZEN))
    return size


def _is_behind(taken: Size, other: Size) -> bool:
    return (
        taken < other
        if isinstance(taken, int) and isinstance(other, int)
        else divides(taken, other)
    )


# ------------------------------------------------------------------------------------------------
# slices


def slice_of(op: IROp) -> tuple[int, int, int] | None:
    """``(dim, start, stop)`` if the call takes a plain slice of exactly one dim and leaves all
    others whole.

    Bounds are numbers counted from the front; slices with symbolic bounds are not reported. New
    dims (``None``) in the index are allowed.
    """
    # ``x.narrow(dim, start, length)``
    if op.target == "narrow":
        shape = op.operands[0].shape
        dim, start, length = op.arg("dim") % len(shape), op.arg("start"), op.arg("length")
        if not (is_static(start) and is_static(length) and is_static(shape[dim])):
            return None
        start += shape[dim] if start < 0 else 0
        return None if length == shape[dim] else (dim, start, start + length)
    if op.target != "getitem":
        return None
    # ``x[:, 2:5]``: one dim is cut, all others are taken as they are.
    items = read_index(op.arg("index"), op.operands[0].shape)
    if items is None or any(item.kind not in ("slice", "full", "new") for item in items):
        return None
    slices = [item for item in items if item.kind == "slice"]
    if len(slices) != 1 or slices[0].arg.step not in (None, 1):
        return None
    start, stop = slice_bounds(slices[0].arg, op.operands[0].shape[slices[0].dim])
    return (slices[0].dim, start, stop) if is_static(start) and is_static(stop) else None


def segmented_slice_rule(op: IROp, segments: Sequence[Size], index: int) -> OpRule:
    """The rule of a slice (see :func:`slice_of`) whose dim is the concatenation of ``segments``: it
    takes segment ``index``.

    The dim can then be split, each segment by itself, and the bounds follow from the local sizes of
    the segments.
    """
    found = slice_of(op)
    assert found is not None, f"{op.name} is not a slice of one dim"
    dim = found[0]
    assert op.rule is not None
    build = RuleBuilder()
    # The dim of the source is one factor of several segments, the dim of the result one segment of
    # it.
    source = list(build.tensor(op.operands[0].shape))
    whole = build.factor(*segments)
    source[dim] = (whole,)
    taken: DimRefs = (FactorRef(whole.factor, index),)
    if op.target == "narrow":
        result = (*source[:dim], taken, *source[dim + 1 :])
    else:
        items = read_index(op.arg("index"), op.operands[0].shape)
        assert items is not None
        # Any other index takes the dim as it is.
        refs_of_kind: dict[str, DimRefs] = {"new": (), "slice": taken}
        result = tuple(
            refs_of_kind[i.kind] if i.kind in refs_of_kind else source[i.dim] for i in items
        )

    def localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        first, *inner = rule.operands[0][dim]
        unit = product(local.ref_size(ref) for ref in inner)
        # The local sizes of the segments tell where the slice begins on a rank.
        sizes = [product((size, unit)) for size in local.segments[first.factor]]
        start: Size = sum(sizes[:index])
        if op.target == "narrow":
            return {"start": start, "length": sizes[index]}
        items = read_index(op.arg("index"), op.operands[0].shape)
        assert items is not None
        # The first and the last segment need no bound, so generated code reads ``x[:n]``.
        last = index == len(sizes) - 1
        bounds = slice(None if index == 0 else start, None if last else start + sizes[index])
        written: dict[str, Arg] = {"slice": bounds, "full": slice(None)}
        return {"index": tuple(written.get(i.kind, i.arg) for i in items)}

    return build.rule(
        [tuple(source)], [result], linear=linear_sets(op, ("input",)), localise=localise
    )
