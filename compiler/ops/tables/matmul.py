"""Products: linear layers, matrix products with broadcast leading dims, einsum and its
relatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import callables, functions, methods, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import annotation, broadcast, define_form, indices, names

_NO_OUT = without("out")


def _linear(op: IROp) -> OpRule:
    weight = "n k+" if op.operands[1].ndim == 2 else "k+"
    bias, n = (", n" if op.has_arg("bias") else ""), ("n" if op.operands[1].ndim == 2 else "")
    text = f"* k, {weight}{bias if n else bias and ', '} -> * {n}"
    return parse_rule(
        text,
        op,
        additive=indices(op, "bias"),
        linear_sets=linear_sets(op, ("input", "bias"), ("weight", "bias")),
    )


define("linear", "input, weight, bias=None", "F.linear", _linear, F.linear)


def _matmul(op: IROp) -> OpRule:
    """Leading dims are broadcast; a vector on either side has no row, or no column, dim."""
    left, right = op.operands
    (batch_left, batch_right), batch = broadcast([left.shape[:-2], right.shape[:-2]])
    m, n = ["m"] if left.ndim > 1 else [], ["n"] if right.ndim > 1 else []
    text = annotation([[*batch_left, *m, "k+"], [*batch_right, "k", *n]], [[*batch, *m, *n]])
    return parse_rule(text, op, linear_sets=linear_sets(op, ("input",), ("other",)))


define(
    "matmul",
    "input, other",
    "@",
    _matmul,
    *through(_NO_OUT, callables("matmul", "mm", "bmm", "mv", "dot")),
    torch.linalg.matmul,
    *methods("__matmul__"),
    *through(lambda args, kwargs: (args[::-1], kwargs), methods("__rmatmul__")),
    renames={"mat2": "other", "vec": "other", "tensor": "other"},
)


def _vdot(op: IROp) -> OpRule:
    """Apart from ``dot``, as it conjugates complex operands: linear over real factors, which is
    what sums need.
    """
    return parse_rule("k+, k -> ", op, linear_sets=linear_sets(op, ("input",), ("other",)))


define("vdot", "input, other", "torch.vdot", _vdot, *through(_NO_OUT, callables("vdot")))


def _added(left: str, right: str, result: str) -> Any:
    """The rule of ``beta * input + alpha * product``, with ``input`` broadcast to the result."""

    def rule(op: IROp) -> OpRule:
        added, first, second = op.operand_names
        target = result.split()
        shape = op.operands[0].shape
        # ``input`` lies on the last dims of the result.
        aligned = target[len(target) - len(shape) :]
        term = " ".join(
            "1" if size == 1 else name for size, name in zip(shape, aligned, strict=True)
        )
        return parse_rule(
            f"{term}, {left}, {right} -> {result}",
            op,
            additive=(0,),
            linear_sets=linear_sets(op, (added, first), (added, second)),
            nonempty=op.target
            == "addmv",  # which does not broadcast what it adds to an empty product
        )

    return rule


_SCALES = "*, beta=1, alpha=1"
define(
    "addmm",
    f"input, mat1, mat2, {_SCALES}",
    "torch.addmm",
    _added("m k+", "k n", "m n"),
    *through(_NO_OUT, callables("addmm")),
)
define(
    "addmv",
    f"input, mat, vec, {_SCALES}",
    "torch.addmv",
    _added("m k+", "k", "m"),
    *through(_NO_OUT, callables("addmv")),
)
define(
    "addr",
    f"input, vec1, vec2, {_SCALES}",
    "torch.addr",
    _added("m", "n", "m n"),
    *through(_NO_OUT, callables("addr")),
)
define(
    "baddbmm",
    f"input, batch1, batch2, {_SCALES}",
    "torch.baddbmm",
    _added("b m k+", "b k n", "b m n"),
    *through(_NO_OUT, callables("baddbmm")),
)
define(
    "addbmm",
    f"input, batch1, batch2, {_SCALES}",
    "torch.addbmm",
    _added("b+ m k+", "b k n", "m n"),
    *through(_NO_OUT, callables("addbmm")),
)


def _einsum(op: IROp) -> OpRule:
    """The equation is the annotation: letters that the result lacks are summed, those twice in one
    operand stay whole.
    """
    equation = op.arg("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    # ``ij,jk`` means ``ij,jk->ik``: what occurs once, in alphabetic order, behind the dots.
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    # How many dims the dots of each operand stand for; they are aligned at their end.
    num_dots = [
        value.ndim - len(term.replace("...", "")) if "..." in term else 0
        for term, value in zip(terms, op.operands, strict=True)
    ]
    diagonal = {
        letter for term in terms for letter in term if letter != "." and term.count(letter) > 1
    }
    sizes: dict[str, Any] = {}

    def letters(term: str, dots: int) -> list[str]:
        before, _, after = term.partition("...")
        dotted = [f"i{max(num_dots) - dots + i}" for i in range(dots)] if "..." in term else []
        return [*before, *dotted, *after]

    # Every operand as names, with dots spelled out.
    spelled = [letters(term, dots) for term, dots in zip(terms, num_dots, strict=True)]
    result = letters(right, max(num_dots))
    for term, value in zip(spelled, op.operands, strict=True):
        sizes |= {name: size for name, size in zip(term, value.shape, strict=True) if size != 1}

    def dim(name: str, size: Any) -> str:
        if size == 1:
            return "1"
        if name in diagonal:
            return f"{name}^"
        return name if name in result else f"{name}+"

    operands = [
        [dim(name, size) for name, size in zip(term, v.shape, strict=True)]
        for term, v in zip(spelled, op.operands, strict=True)
    ]
    text = annotation(operands, [[dim(name, sizes.get(name, 1)) for name in result]])
    return parse_rule(text, op, linear_sets=tuple(frozenset({i}) for i in range(len(op.operands))))


define("einsum", "equation, *operands", "torch.einsum", _einsum, torch.einsum)


def _tensordot(op: IROp) -> OpRule:
    left, right = op.operands
    dims = op.arg("dims", 2)
    if isinstance(dims, int):
        # A number: the last dims of the left side with the first of the right.
        dims = (range(left.ndim - dims, left.ndim), range(dims))
    contracted = [
        [dim % value.ndim for dim in ((d,) if isinstance(d, int) else d)]
        for d, value in zip(dims, (left, right), strict=True)
    ]
    terms = [names(left.ndim, "m"), names(right.ndim, "n")]
    for index, (i, j) in enumerate(zip(*contracted, strict=True)):
        # A size of 1 is summed over as if repeated.
        terms[0][i] = "1" if left.shape[i] == 1 else f"k{index}+"
        terms[1][j] = "1" if right.shape[j] == 1 else f"k{index}+"
    # The result has what is not contracted, left before right.
    kept = [
        name
        for term, dims_ in zip(terms, contracted, strict=True)
        for i, name in enumerate(term)
        if i not in dims_
    ]
    return parse_rule(annotation(terms, [kept]), op, linear_sets=linear_sets(op, ("a",), ("b",)))


define("tensordot", "a, b, dims=2", "torch.tensordot", _tensordot, (torch.tensordot, _NO_OUT))


def _outer(op: IROp) -> OpRule:
    return parse_rule("m, n -> m n", op, linear_sets=linear_sets(op, ("input",), ("vec2",)))


define("outer", "input, vec2", "torch.outer", _outer, *through(_NO_OUT, callables("outer", "ger")))


def _bilinear(op: IROp) -> OpRule:
    bias = ", o" if op.has_arg("bias") else ""
    sets = linear_sets(op, ("input1", "bias"), ("input2", "bias"), ("weight", "bias"))
    return parse_rule(
        f"* i+, * j+, o i j{bias} -> * o",
        op,
        additive=indices(op, "bias"),
        linear_sets=sets,
        nonempty=True,
    )


define(
    "bilinear", "input1, input2, weight, bias=None", "F.bilinear", _bilinear, *callables("bilinear")
)


def _grouped_mm(op: IROp) -> OpRule:
    """Products of groups of rows, each with the matrix of its expert; which rows is in ``offs``, so
    tokens stay whole.
    """
    left, right = op.operands[:2]
    # Without offsets the groups are a dim: a batch of products.
    experts = ", e" if op.has_arg("offs") else ""
    bias = ", e n" if op.has_arg("bias") else ""
    terms = {
        (2, 3): "t^ k+, e^ k n -> t n",
        (3, 3): "e t k+, e k n -> e t n",
        (3, 2): "e^ t k+, k n^ -> t n",
        (2, 2): "t k^, k n -> e^ t n",
    }[left.ndim, right.ndim]
    operands, results = terms.split(" -> ")
    sets = linear_sets(op, ("input", "bias"), ("mat2", "bias"))
    # Torch's kernel wants rows of whole 16 bytes, which pieces may not be.
    widths = {"k": ParallelFactor(anywhere=True), "n": ParallelFactor(anywhere=True)}
    form = ParallelForm(_GROUPED, widths, {}) if right.ndim == 3 else None
    return parse_rule(
        f"{operands}{experts}{bias} -> {results}",
        op,
        additive=indices(op, "bias"),
        linear_sets=sets,
        nonempty=True,
        parallel=form,
    )


_GROUPED_MM = "input, mat2, *, offs=None, bias=None, out_dtype=None"
_GROUPED = define_form("grouped_mm", _GROUPED_MM)
define(
    "grouped_mm",
    _GROUPED_MM,
    "F.grouped_mm",
    _grouped_mm,
    *functions("_grouped_mm"),
    F.grouped_mm,
    renames={"mat_a": "input", "mat_b": "mat2", "self": "input"},
)
