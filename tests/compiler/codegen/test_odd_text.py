"""Names, keys, paths and values of a model go into source as text: no other statement comes of
them, and no other number.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from pathlib import Path
from typing import Any

import odd_text
import plans
import pytest
import torch
from hypothesis import Phase, example, given, settings
from odd_text import AWKWARD, AXES, CONSTANTS, NAMES, PLAIN, Texts
from torch import Tensor, nn

from shardwright.compiler.codegen.literals import source
from shardwright.compiler.ir.identifier import axis_variable, identifier
from shardwright.compiler.ir.quote import comment, docstring, quoted, quoted_with_layer
from shardwright.compiler.plan.check import check_mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, TraceError
from shardwright.runtime.layout import Layout, Mesh

ALL_AT_ONCE = Texts(
    'a"b',
    "\n",
    "'''",
    "{layer}",
    '"""',
    "x" * 130,
    "\\",
    "\u2028",
    'C"""\nimport os',
    "\n#\f",
    "class",
    math.nan,
)


UNSHRUNK = [Phase.explicit, Phase.generate]
"""A compile takes too long to look for the smallest failure."""


@pytest.mark.slow
@settings(max_examples=4, phases=UNSHRUNK)
@given(odd_text.texts())
@example(ALL_AT_ONCE)
def test_files_have_the_statements_they_should_have(texts: Texts) -> None:
    odd_text.check_shape(texts)


@pytest.mark.slow
@settings(max_examples=40, phases=UNSHRUNK)
@given(odd_text.texts())
@example(ALL_AT_ONCE)
def test_files_of_pipelines_too(texts: Texts) -> None:
    odd_text.check_shape(texts, "pp")


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_every_awkward_text_in_every_place(half: int) -> None:
    """All places at once, each with another text; every text comes to every place in turn."""
    for turn in range(half, len(AWKWARD), 2):
        texts = {
            field: AWKWARD[(turn + 5 * place) % len(AWKWARD)] for place, field in enumerate(NAMES)
        }
        axis = AXES[turn % len(AXES)]
        odd_text.check_shape(dataclasses.replace(PLAIN, **(texts | {"axis": axis})))


NUMBERS = {
    "digits": Texts(
        "01",
        "__x",
        "forward",
        "a b",
        "\\",
        "key " * 30,
        '"',
        "{0}",
        "float",
        "x\n",
        "self",
        10**5000,
    ),
    "unicode": Texts(
        "²",
        "ﬁ",
        "\\'",
        "{layer}",
        "__class__",
        1,
        None,
        ("a", 1.5),
        "torch",
        "\f",
        "é",
        {"k'": (-0.0,)},
    ),
    "keywords": Texts(
        "class",
        "हिन्दी",
        "\r\n",
        "weights",
        "mesh",
        True,
        b"'",
        -0.0,
        "all_reduce",
        '"""',
        "linear",
        [1j, ...],
    ),
}


@pytest.mark.parametrize("texts", NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_those_of_one_device(texts: Texts, tmp_path: Path) -> None:
    odd_text.check_numbers(texts, tmp_path)


@pytest.mark.slow
@settings(max_examples=40, phases=UNSHRUNK)
@given(odd_text.texts())
def test_numbers_under_any_names(tmp_path_factory: pytest.TempPathFactory, texts: Texts) -> None:
    odd_text.check_numbers(texts, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("constant", [*CONSTANTS, -(10**5000)], ids=lambda c: type(c).__name__)
def test_the_source_of_a_constant_is_that_constant(constant: Any) -> None:
    # Results of such types are rebuilt, see the numbers.
    if not isinstance(constant, odd_text.Pair | odd_text.Record):
        assert odd_text.same_constant(
            eval(source(constant), {"torch": torch, "odd_text": odd_text}), constant
        )


def test_text_stays_inside_of_its_quotes() -> None:
    for text in AWKWARD:
        assert eval(quoted(text)) == text
        assert eval(quoted_with_layer(text, text), {"layer": 7}) == f"{text}7{text}"
        assert len(f"{comment(text)}|{docstring(text)}".splitlines()) == 1
        assert eval(f'"""{docstring(text)}."""').isprintable()
        assert identifier(text).isidentifier()
        assert not text.isidentifier() or axis_variable(text).isidentifier()
    assert (
        quoted("it's") == '"it\'s"'
        and quoted('say "a"') == "'say \"a\"'"
        and quoted("\\") == '"\\\\"'
    )


def test_axes_of_any_name_have_layouts() -> None:
    for axis in AXES:
        assert Layout.parse(f"[3, 12/{axis} * 64] G({axis}2)").cut_axes == (axis,)
        check_mesh(Plan(Mesh(((axis, 2),))), ComputeConfig(plan_ngpus=2, runtime_ngpus=2))
    assert len({axis_variable(axis) for axis in AXES}) == len(AXES)


@pytest.mark.parametrize("axis", ["a b", "", "1", "a/b", "ﬁ", "tp)", "a,b"])
def test_axes_without_a_name_are_refused(axis: str) -> None:
    with pytest.raises(PlanError, match="the plan's mesh has an axis called"):
        check_mesh(Plan(Mesh(((axis, 2),))), ComputeConfig(plan_ngpus=2, runtime_ngpus=2))


class Keys(nn.Module):
    """Returns a structure over its input, whose keys and leaves are given."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.result = result

    def forward(self, x: Any, **others: Tensor) -> Any:
        first = x if isinstance(x, Tensor) else x["a"]["b"]
        return {"loss": self.up(first).sum(), "result": self.result}


class Local(enum.Enum):
    """A member of it is written by its import path, which the class in the test has not."""

    A = 1


def local_member() -> Any:
    return enum.Enum("Inner", {"A": 1}, qualname="local.<locals>.Inner").A


X = torch.zeros(4, 6)
REFUSED = [
    (Keys({1: X, "1": X}), {"x": X}, "the result of forward has two leaves called 'result.1'"),
    (
        Keys({object: 1}),
        {"x": X},
        "a key of the result of forward is a type, which generated code cannot write",
    ),
    (
        Keys({1, 2}),
        {"x": X},
        "'result' in the result of forward is a set, which generated code cannot write",
    ),
    (Keys(local_member()), {"x": X}, "generated code cannot import"),
    (
        Keys(None),
        {"x": {"a": {"b": X}, "a.b": X}},
        "the argument 'x' of forward has two leaves called 'x.a.b'",
    ),
    (Keys(None), {"x": X, "a b": X}, "Keys.forward is given an argument called 'a b'"),
    (Keys(None), {"x": X, "class": X}, "Keys.forward is given an argument called 'class'"),
]


@pytest.mark.parametrize(("model", "inputs", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_source_is_refused(
    model: nn.Module, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        plans.traced(model, inputs)
