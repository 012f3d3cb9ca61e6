"""What is kept of the answers about rules is of rules from which the same follows, and of no
others.
"""

from __future__ import annotations

from dataclasses import replace

import plans
import pytest

from shardwright.compiler.ir.op import IROp, once
from shardwright.compiler.ops.rule import OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.strategy import layouts, placements, strategies
from shardwright.runtime.layout import Mesh

MESH = Mesh((("x", 2), ("y", 3)))


def linear() -> IROp:
    return next(op for op in plans.zoo_graph("mlp").ops if op.target == "linear")


def rule_of(op: IROp) -> OpRule:
    assert op.rule is not None
    return op.rule


def test_rules_that_say_the_same_have_one_form() -> None:
    rule = rule_of(linear())
    assert replace(rule).form is rule.form
    assert replace(rule, annotation="other", random=True).form is rule.form


@pytest.mark.parametrize(
    "changed",
    [
        lambda rule: {"grad_linear": False},
        lambda rule: {"additive": (0,)},
        lambda rule: {"linear_sets": ()},
        lambda rule: {"nonempty": not rule.nonempty},
        lambda rule: {
            "factors": tuple(replace(f, segments=(60, *f.segments)) for f in rule.factors)
        },
        lambda rule: {
            "parallel": ParallelForm(
                "form", {rule.factors[0].name: ParallelFactor(anywhere=True)}, {}
            )
        },
    ],
)
def test_rules_that_say_something_else_have_another(changed) -> None:
    rule = rule_of(linear())
    assert replace(rule, **changed(rule)).form is not rule.form


def test_layouts_are_those_of_the_rule_and_the_names_of_the_axes() -> None:
    rule = rule_of(linear())
    name = rule.factors[0].name
    split = {"x": f"split:{name}"}
    first = layouts(rule, split, MESH)
    assert layouts(replace(rule), split, MESH) == first
    assert layouts(rule, {"y": f"split:{name}"}, MESH) != first
    longer = replace(
        rule,
        factors=tuple(replace(f, segments=(60,)) if f.name == name else f for f in rule.factors),
    )
    assert layouts(longer, split, MESH) != first
    given = ParallelForm("form", {name: ParallelFactor(operands=("R",) * len(rule.operands))}, {})
    assert placements(replace(rule, parallel=given), f"split:{name}")[0] == ("R",) * len(
        rule.operands
    )
    assert "G" in strategies(rule) and "G" not in strategies(replace(rule, grad_linear=False))


def test_an_operator_is_asked_once_and_a_changed_one_again() -> None:
    asked: list[str] = []

    @once
    def name_of(op: IROp) -> str:
        asked.append(op.name)
        return op.name

    op = linear()
    assert (name_of(op), name_of(op)) == (op.name, op.name) and asked == [op.name]
    other = replace(op, name="other")
    assert name_of(other) == "other" and other.operands == op.operands
    assert op.map_args(lambda leaf: None).operands == ()
