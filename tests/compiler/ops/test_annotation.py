"""The annotation grammar: what it says, and the text of every error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.ir.value import IRValue, SourceLocation
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.grammar import parse
from shardwright.compiler.ops.rule import FactorKind, OpRule
from shardwright.compiler.ops.rule_builder import annotation_text
from shardwright.runtime.errors import AnnotationError


def call(shapes: dict[str, Any], *results: tuple[Any, ...]) -> IROp:
    """An operator call; a list of shapes stands for a tuple of tensors, a number for itself."""

    def value(name: str, shape: Any) -> Any:
        if isinstance(shape, list):
            return tuple(value(f"{name}{i}", item) for i, item in enumerate(shape))
        return IRValue(name, shape, torch.float64) if isinstance(shape, tuple) else shape

    args = tuple((name, value(name, shape)) for name, shape in shapes.items())
    return IROp(
        "op",
        "op",
        args,
        tuple(IRValue(f"y{i}", shape, torch.float64) for i, shape in enumerate(results)),
    )


LINEAR = call({"input": (4, 6, 7), "weight": (5, 7), "bias": (5,)}, (4, 6, 5))


def sizes(rule: OpRule) -> dict[str, Any]:
    return {factor.name: factor.size for factor in rule.factors}


def kinds(rule: OpRule) -> dict[str, FactorKind]:
    return {factor.name: factor.kind for factor in rule.factors}


def text(rule: OpRule) -> str:
    """The rule written out again, with segments."""
    return annotation_text(rule.factors, rule.operands, rule.results)


def test_factors_and_marks() -> None:
    rule = parse_rule("b s k+, n k, n -> b s n", LINEAR)
    assert sizes(rule) == {"b": 4, "s": 6, "k": 7, "n": 5}
    assert kinds(rule)["k"] is FactorKind.SUMMED
    assert text(rule) == "b s k+, n k, n -> b s n"
    assert parse_rule("b s k, n k+, n -> b s n", LINEAR).factors == rule.factors


def test_star() -> None:
    rule = parse_rule("* k+, n k, n -> * n", LINEAR)
    assert sizes(rule) == {"*0": 4, "*1": 6, "k": 7, "n": 5}
    empty = parse_rule(
        "* k+, n k, n -> * n", call({"input": (7,), "weight": (5, 7), "bias": (5,)}, (5,))
    )
    assert sizes(empty) == {"k": 7, "n": 5}
    assert kinds(parse_rule("*^ a -> * a", call({"x": (2, 3, 4)}, (2, 3, 4)))) == {
        "*0": FactorKind.FROZEN,
        "*1": FactorKind.FROZEN,
        "a": FactorKind.FREE,
    }
    assert sizes(parse_rule("a *+ -> a", call({"x": (2, 3, 4)}, (2,)))) == {
        "a": 2,
        "*0": 3,
        "*1": 4,
    }


def test_products_take_the_size_that_is_left() -> None:
    heads = call({"x": (2, 12)}, (2, 3, 4))
    assert sizes(parse_rule("b (h d) -> b h d", heads)) == {"b": 2, "h": 3, "d": 4}
    grouped = call({"q": (2, 8, 6), "k": (2, 4, 6)}, (2, 8, 6))
    assert sizes(parse_rule("b (g r) d, b g d -> b (g r) d", grouped)) == {
        "b": 2,
        "g": 4,
        "r": 2,
        "d": 6,
    }
    assert sizes(parse_rule("b (h=3 d) -> (d h) b", call({"x": (2, 12)}, (12, 2)))) == {
        "b": 2,
        "h": 3,
        "d": 4,
    }
    assert sizes(parse_rule("(a b c^) -> (a b)", call({"x": (24,)}, (12,)), sizes={"a": 4})) == {
        "a": 4,
        "b": 3,
        "c": 2,
    }


def test_segments() -> None:
    rule = parse_rule("c[3|5] d, d -> c#0 d, c#1 d", call({"x": (8, 2), "w": (2,)}, (3, 2), (5, 2)))
    assert rule.factor("c").segments == (3, 5)
    assert [refs[0][0].segment for refs in rule.results] == [0, 1]
    sized = parse_rule("c -> c", call({"x": (8,)}, (8,)), sizes={"c": (3, 5)})
    assert sized.factor("c").segments == (3, 5)


def test_sizes_of_one_carry_no_factor() -> None:
    rule = parse_rule("a 1 b () -> a b c^", call({"x": (4, 1, 6, 1)}, (4, 6, 1)))
    assert sizes(rule) == {"a": 4, "b": 6}
    assert rule.operands == (((rule.operands[0][0]), (), (rule.operands[0][2]), ()),)
    assert sizes(parse_rule("a b -> a b", call({"x": (1, 6)}, (1, 6)))) == {"b": 6}


def test_symbolic_sizes() -> None:
    batch, seq = DynamicSize("batch", 32), DynamicSize("seq", 32)
    rule = parse_rule(
        "(b s) (h=3 d) -> b s h d", call({"x": (batch * seq, 12)}, (batch, seq, 3, 4))
    )
    assert sizes(rule) == {"b": batch, "s": seq, "h": 3, "d": 4}
    assert sizes(parse_rule("(b s) -> b s", call({"x": (2 * seq,)}, (2, seq)))) == {
        "b": 2,
        "s": seq,
    }
    with pytest.raises(AnnotationError) as caught:
        parse_rule("b, b -> b", call({"y": (seq,), "x": (2 * seq,)}, (seq,)))
    assert "dim 0 of x has size 2*seq, but b is seq" in str(caught.value)
    assert caught.value.hint == "give dims of always equal size one name in dynamic_dims"


def test_unknown_operands_stay_whole() -> None:
    rule = parse_rule("?, a -> a", call({"x": (2, 3), "w": (4,)}, (4,)))
    assert kinds(rule) == {"?x0": FactorKind.FROZEN, "?x1": FactorKind.FROZEN, "a": FactorKind.FREE}


def test_terms_stand_for_parameters() -> None:
    names = ["input", "weight", "bias"]
    without_bias = call({"input": (4, 6, 7), "weight": (5, 7), "bias": None}, (4, 6, 5))
    assert len(parse_rule("* k+, n k, n -> * n", without_bias, parameters=names).operands) == 2
    listed = call({"xs": [(3, 4), (3, 4)], "dim": 0}, (2, 3, 4))
    rule = parse_rule("a b, ? -> s^ a b", listed, parameters=["xs", "dim"], by_parameter=True)
    assert len(rule.operands) == 2
    assert parse_rule("a b, a b -> s^ a b", listed).operands == rule.operands
    assert parse_rule("-> a b", call({}, (2, 3))).operands == ()
    assert parse_rule("a+ -> ", call({"x": (2,)}, ())).results == ((),)


def test_fields_of_the_rule() -> None:
    rule = parse_rule(
        "b s k+, n k, n -> b s n", LINEAR, additive=(2,), linear_sets=(frozenset({0, 2}),)
    )
    assert rule.additive == (2,)
    assert rule.linear_sets == (frozenset({0, 2}),)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (
            "b s k+, n k, n",
            "annotation: there is no '->'\n"
            "  why:   b s k+, n k, n\n"
            "                       ^\n"
            "  try:   write operands -> results, as in 'b k+, n k+ -> b n'",
        ),
        ("b $ -> b", "annotation: unexpected character '$'\n  why:   b $ -> b\n           ^"),
        (
            "b ( -> b",
            "annotation: expected a name, '1', '(' or '*', found '->'\n  why:   b ( -> b\n   "
            "          ^^",
        ),
        ("b -> b -> b", "annotation: unexpected '->'\n  why:   b -> b -> b\n                ^^"),
        (
            "* b * -> b",
            "annotation: '*' stands twice in one term\n  why:   * b * -> b\n             ^",
        ),
        ("b[3 -> b", "annotation: expected '|' or ']'\n  why:   b[3 -> b\n             ^^"),
        (
            "b[k] -> b",
            "annotation: expected the size of a segment, found 'k'\n  why:   b[k] -> b\n     "
            "      ^",
        ),
        (
            "b 3 -> b",
            "annotation: a dim of fixed size 3\n"
            "  why:   b 3 -> b\n"
            "           ^\n"
            "  try:   give the dim a name, with ^ if it must not be split",
        ),
    ],
)
def test_errors_of_the_text(annotation: str, message: str) -> None:
    with pytest.raises(AnnotationError) as error:
        parse(annotation)
    assert str(error.value) == message


SHAPES = "         shapes: input [4, 6, 7], weight [5, 7], bias [5] -> [4, 6, 5]"


@pytest.mark.parametrize(
    ("annotation", "what", "span", "hint"),
    [
        (
            "* k, n k, n -> * n",
            "a result lacks k, which has no mark",
            (2, 1),
            "write k+ if the result is the plain sum over it, else k^",
        ),
        ("b s k+, k n, n -> b s n", "dim 0 of weight has size 5, but k is 7", (8, 1), None),
        ("b k+, n k, n -> b n", "input has 3 dims, the annotation 2", (0, 4), None),
        (
            "b s k+, n k, n -> b s k",
            "k is marked + but every result has it",
            (4, 1),
            "leave the mark out",
        ),
        ("b s k+, n k^, n -> b s n", "k is marked both + and ^", (10, 1), None),
        (
            "b s k+, 1 k, n -> b s n",
            "dim 0 of weight has size 5, but the dim as written is 1",
            (8, 3),
            None,
        ),
        ("b s k+, n k -> b s n", "2 operand terms for 3 tensors", (0, 12), None),
        ("b s k+, n k, n, n -> b s n", "4 operand terms for 3 arguments", (16, 1), None),
        ("b s k+, n k, n -> b s n, n", "2 result terms for 1 results", (25, 1), None),
        (
            "* k+, * a, n -> * n",
            "'*' stands for 1 dims of weight, but for 2 elsewhere",
            (6, 1),
            None,
        ),
        (
            "b s k+, (n m) k, (n m) -> b s (n m)",
            "the sizes of n and m do not follow from the shapes",
            (9, 1),
            "give sizes, as in (n=12 m)",
        ),
        (
            "b s k+, (n=2 m) k, n -> b s (n m)",
            "dim 0 of weight has size 5, which 2 does not divide",
            (13, 1),
            None,
        ),
        (
            "b s s, n s, n -> b s n",
            "s stands twice in input",
            (4, 1),
            "mark it s^, or name one of them anew",
        ),
        ("b s k+, n[2|2] k, n -> b s n", "dim 0 of weight has size 5, but n is 4", (8, 1), None),
        ("b s k+, n[2|3] k, n#2 -> b s n", "n has 2 segments", (18, 1), None),
    ],
)
def test_errors_of_the_fit(
    annotation: str, what: str, span: tuple[int, int], hint: str | None
) -> None:
    with pytest.raises(AnnotationError) as error:
        parse_rule(annotation, LINEAR)
    carets = " " * (9 + span[0]) + "^" * span[1]
    lines = [
        f"annotation of op: {what}",
        f"  why:   {annotation}",
        carets,
        SHAPES,
        *([f"  try:   {hint}"] if hint else []),
    ]
    assert str(error.value) == "\n".join(lines)


def test_errors_name_the_users_line() -> None:
    op = replace(LINEAR, source=SourceLocation("model.py", 12), module_path="encoder.0")
    with pytest.raises(AnnotationError) as error:
        parse_rule("a -> a", op)
    assert "  where: model.py:12, encoder.0\n" in str(error.value)


names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True)


@given(names, st.data())
def test_every_annotation_reads_back(dims: list[str], data: st.DataObject) -> None:
    """A rule written out in the grammar gives the same rule."""
    shape = {name: data.draw(st.integers(2, 5)) for name in dims}
    groups = data.draw(st.permutations(dims))
    marks = {name: data.draw(st.sampled_from(["", "^"])) for name in dims}
    term = " ".join(f"{name}{marks[name]}" for name in dims)
    product = 1
    for size in shape.values():
        product *= size
    op = call({"x": tuple(shape.values())}, (product,))
    rule = parse_rule(f"{term} -> ({' '.join(groups)})", op)
    assert parse_rule(text(rule), op) == replace(rule, annotation=text(rule))
    assert sizes(rule) == shape
