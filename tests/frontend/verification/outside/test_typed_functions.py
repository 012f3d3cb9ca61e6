"""Functions that a model brings along are typed by the annotation that they are registered with."""

from typing import Any

import pytest
import spmd_types as spmd
import torch

from shardwright.compiler.ops.register import register_op
from shardwright.frontend.verification.outside.spmd_layouts import TypedMesh, in_words
from shardwright.frontend.verification.outside.typed_functions import (
    brought_along,
    typed_function,
)
from shardwright.runtime.layout import Layout, Mesh


class Scaled(torch.autograd.Function):
    """Rows times one number each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Unknown(Scaled):
    """The same, without an annotation."""


def weighted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer of a library."""
    return torch.nn.functional.linear(x, weight, bias)


register_op("t e^, t 1 -> t e^")(Scaled)
WEIGHTED = register_op(
    "t k+, n k+, n -> t n", linear=["x", "weight"], additive=["bias"], grad_linear=True
)(weighted)


def typed(text: str) -> torch.Tensor:
    """A tensor of a layout on two ranks, as one of them has it."""
    layout = Layout.parse(text)
    x = torch.ones(layout.local_shape(Mesh((("tp", 2),)), {"tp": 0})).requires_grad_()
    spmd.assert_type(x, TypedMesh(Mesh((("tp", 2),)), ()).type_of(layout))
    return x


@pytest.mark.parametrize(
    ("function", "operands", "result"),
    [
        # Rows may be cut, also into pieces of one row. What scales them is cut as they are.
        (Scaled, ("[4/tp, 3]", "[4/tp, 1]"), "[tp, -]"),
        (Scaled, ("[2/tp, 3]", "[2/tp, 1]"), "[tp, -]"),
        (Scaled, ("[4, 3]", "[4, 1]"), "[-, -]"),
        (Scaled, ("[4/tp, 3]", "[1, 1]"), None),
        (Scaled, ("[1, 3]", "[4/tp, 1]"), None),
        (Scaled, ("[4, 6/tp]", "[4, 1]"), None),
        (Scaled, ("[4, 3] P(tp)", "[4, 1]"), None),
        # Nobody has said that its backward is linear.
        (Scaled, ("[4, 3] G(tp)", "[4, 1] G(tp)"), None),
        (WEIGHTED, ("[4, 6/tp]", "[5, 6/tp]", "[5] P(tp)"), "[-, -] P(tp)"),
        (WEIGHTED, ("[4, 6/tp]", "[5, 6/tp]", "[5]"), None),
        (WEIGHTED, ("[4, 6] G(tp)", "[8/tp, 6]", "[8/tp]"), "[-, tp]"),
        (WEIGHTED, ("[4, 6]", "[8/tp, 6]", "[8/tp]"), None),
        # Of a function without an annotation nothing is known.
        (Unknown, ("[4, 3]", "[4, 1]"), "[-, -]"),
        (Unknown, ("[4/tp, 3]", "[4/tp, 1]"), None),
        (Unknown, ("[4, 3] G(tp)", "[4, 1] G(tp)"), None),
    ],
)
def test_types_follow_annotations(
    function: Any, operands: tuple[str, ...], result: str | None
) -> None:
    mesh = TypedMesh(Mesh((("tp", 2),)), ())
    with spmd.set_current_mesh(mesh.axes()):
        args = tuple(map(typed, operands))
        called = getattr(function, "apply", function)
        assert brought_along(called) is function
        if result is not None:
            assert in_words(typed_function(function, called, args, {})) == result
            return
        with pytest.raises(spmd.SpmdTypeError):
            typed_function(function, called, args, {})


def test_functions_of_torch_are_not_brought_along() -> None:
    for function in (torch.tanh, torch.Tensor.view, torch.ops.aten.mul.Tensor):
        assert brought_along(function) is None
