"""``register_op``: one operator in a trace, a call in the source, a rule that holds, and errors in
words.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import user_ops
from torch import Tensor, nn

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.prover import prove
from shardwright.compiler.ops.register import UserOpDef, register_op
from shardwright.compiler.ops.render import call_source, imports_of
from shardwright.compiler.ops.strategy import strategies
from shardwright.compiler.trace import trace
from shardwright.runtime.errors import AnnotationError, ConfigError, TraceError


def rand(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


class Model(nn.Module):
    """Calls one function on its input and a parameter."""

    def __init__(
        self, function: Any, *shapes: tuple[int, ...], rest: tuple[Any, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__()
        self.function, self.rest, self.kwargs = function, rest, kwargs
        self.weights = nn.ParameterList([rand(*shape) for shape in shapes])

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights, *self.rest, **self.kwargs)


def traced(
    function: Any, x: Tensor, *shapes: tuple[int, ...], rest: tuple[Any, ...] = (), **kwargs: Any
) -> IROp:
    """The only operator of the model's graph."""
    (op,) = trace(Model(function, *shapes, rest=rest, **kwargs), {"x": x}).ops
    return op


def source(op: IROp) -> str:
    return call_source(op, lambda value: value.name, to_python)


def clipped(x: Tensor, w: Tensor) -> Tensor:
    return user_ops.Clipped.apply(x, w)  # type: ignore[no-any-return]


def doubled(x: Tensor) -> Tensor:
    return user_ops.Doubled.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "args", "text", "names"),
    [
        (
            user_ops.scaled,
            (rand(4, 6, 8), rand(8)),
            "user_ops.scaled(x, weights_0)",
            ["R", "G", "split:b", "split:s"],
        ),
        (
            user_ops.affine,
            (rand(4, 6), rand(5, 6)),
            None,
            ["R", "G", "split:b", "split:k", "split:n", "linear:0", "linear:1"],
        ),
        (
            clipped,
            (rand(4, 5, 6), rand(6)),
            "user_ops.Clipped.apply(x, weights_0, 0.5)",
            ["R", "split:*0", "split:*1"],
        ),
        (doubled, (rand(4, 5),), "user_ops.Doubled.apply(x)", ["R", "G", "split:*0", "split:*1"]),
        (
            user_ops.tripled,
            (rand(4, 5),),
            "user_ops.tripled(x)",
            ["R", "G", "split:*0", "split:*1"],
        ),
        (
            user_ops.by_value,
            (rand(4, 5),),
            "user_ops.by_value(x)",
            ["R", "G", "split:n", "split:d"],
        ),
        (
            user_ops.scripted,
            (rand(4, 5),),
            "user_ops.scripted(x)",
            ["R", "G", "split:a", "split:b"],
        ),
        (
            user_ops.compiled,
            (rand(4, 5),),
            "user_ops.compiled(x)",
            ["R", "G", "split:a", "split:b"],
        ),
    ],
)
def test_one_operator_in_a_trace(
    function: Any, args: tuple[Tensor, ...], text: str | None, names: list[str]
) -> None:
    op = traced(function, args[0], *(tuple(arg.shape) for arg in args[1:]))
    opdef = registry.get(op.target)
    assert isinstance(opdef, UserOpDef)
    assert op.results[0].requires_grad
    assert list(strategies(instantiate(opdef, op))) == names
    if text is not None:
        assert source(op) == text
        assert imports_of(op) == {"import user_ops"}


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (user_ops.scaled, (rand(4, 6, 8), rand(8)), {"eps": 1e-5}),
        (user_ops.affine, (rand(4, 6), rand(5, 6), rand(5)), {}),
        (user_ops.affine, (rand(4, 6), rand(5, 6)), {}),
        (user_ops.with_biases, (rand(4, 6), rand(5, 6), (rand(5), rand(5))), {}),
        (user_ops.two_results, (rand(4, 5), 2.0, rand(4, 5)), {}),
        (user_ops.stacked, ([rand(4, 5), rand(4, 5)],), {}),
        (user_ops.stacked, ([rand(4, 5), rand(4, 5)], 1), {}),
        (user_ops.with_dtype, (rand(4, 5),), {"flip": True}),
        (user_ops.by_value, (rand(4, 5),), {}),
        (user_ops.Clipped, (rand(4, 5, 6), rand(6)), {}),
        (user_ops.Doubled, (rand(4, 5),), {}),
        (user_ops.tripled, (rand(4, 5),), {}),
        (user_ops.emitted, (rand(4, 5), 2.0), {}),
        (user_ops.row_blocks, (rand(8, 5), 4), {}),
        (user_ops.mean_square, (rand(4, 5),), {}),
    ],
)
def test_rules_hold(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    report = prove(function, args, kwargs)
    assert report.ok, str(report)


def test_the_function_still_computes() -> None:
    x, scale = rand(4, 6, 8), rand(8)
    assert user_ops.scaled.__name__ == "scaled"
    assert user_ops.scaled.__doc__ is None
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
    assert torch.equal(user_ops.scaled(x, scale), expected)


def test_emitted_source() -> None:
    op = traced(user_ops.emitted, rand(4, 5), rest=(2.0,))
    assert source(op) == "x.mul(2.0)"
    assert imports_of(op) == set()


def test_arguments_left_at_their_defaults_are_not_written() -> None:
    assert (
        source(traced(user_ops.scaled, rand(4, 6, 8), (8,), eps=1e-6))
        == "user_ops.scaled(x, weights_0)"
    )
    assert (
        source(traced(user_ops.scaled, rand(4, 6, 8), (8,), eps=0.1))
        == "user_ops.scaled(x, weights_0, eps=0.1)"
    )
    assert (
        source(traced(user_ops.with_dtype, rand(4, 5)))
        == "user_ops.with_dtype(x, torch.float64, flip=False)"
    )


def test_functions_of_torch_without_a_rule() -> None:
    function = torch.linalg.householder_product
    try:
        assert register_op("* n^ m^, * k^ -> * n m")(function) is function
        op = traced(function, rand(4, 3, 3), (4, 3))
        assert source(op) == "torch.linalg.householder_product(x, weights_0)"
        assert prove(function, (rand(4, 3, 3), rand(4, 3))).ok
    finally:
        del registry.OPS[registry.CALLABLES.pop(function)[0]]


def test_registering_again_replaces() -> None:
    def register(annotation: str) -> None:
        register_op(annotation, name="again")(user_ops.plain)

    register("a^ b -> a b")
    register("a b^ -> a b")
    report = prove(user_ops.plain, (rand(4, 5),), num_ranks=(2,))
    assert [trial.name for trial in report.trials] == ["R over 2", "G over 2", "split:a over 2"]


def test_input_gen_is_kept() -> None:
    opdef = registry.get("user_ops.row_blocks")
    assert isinstance(opdef, UserOpDef) and opdef.input_gen is not None
    op = IROp("f", "user_ops.row_blocks", (("x", IRValue("x", (4, 2), torch.float64)),), ())
    assert [tuple(tensor.shape) for tensor in opdef.input_gen(op)] == [(4, 2)]


# ---------------------------------------------------------------- errors


def message(error: pytest.ExceptionInfo[Any]) -> str:
    return str(error.value)


def test_a_bad_annotation_is_found_when_it_is_registered() -> None:
    with pytest.raises(AnnotationError) as error:
        register_op("a b")(user_ops.plain)
    assert message(error).startswith("annotation: there is no '->'\n  why:   a b\n")


def test_local_functions_cannot_be_imported() -> None:
    def local(x: Tensor) -> Tensor:
        return x

    with pytest.raises(AnnotationError) as error:
        register_op("a -> a")(local)
    assert message(error) == (
        "register_op: generated code cannot import "
        "test_local_functions_cannot_be_imported.<locals>.local\n"
        "  why:   it has no name at the top level of a module\n"
        "  try:   move it to the top level of a module"
    )


def test_arguments_must_have_names() -> None:
    with pytest.raises(AnnotationError) as error:
        register_op("a -> a")(user_ops.with_keywords)
    assert message(error) == (
        "register_op: with_keywords takes **options\n"
        "  why:   the arguments of an operator are known by name\n"
        "  try:   spell out the parameters"
    )


def test_source_is_not_copied() -> None:
    with pytest.raises(ConfigError) as error:
        register_op("a -> a", code_impl_pattern="source")
    assert message(error) == (
        "register_op: code_impl_pattern='source'\n"
        "  why:   generated files import registered functions, so that there is one "
        "definition of each\n"
        "  try:   leave it out and keep the function at the top level of a module, or pass emit="
    )


def test_operators_of_torch_keep_their_rules() -> None:
    with pytest.raises(AnnotationError) as error:
        register_op("a b -> a b")(torch.relu)
    assert message(error) == "register_op: torch.relu has a rule already, as the operator 'relu'"
    with pytest.raises(AnnotationError) as error:
        register_op("a b -> a b", name="relu")(user_ops.plain)
    assert (
        message(error)
        == "register_op: there is an operator named 'relu' already\n  try:   pass another name="
    )
    assert type(registry.get("relu")) is not UserOpDef


def test_unknown_parameters() -> None:
    register_op("a b -> a b", linear=["y"], name="unknown")(user_ops.plain)
    with pytest.raises(AnnotationError) as error:
        prove(user_ops.plain, (rand(4, 5),))
    assert message(error) == "register_op: unknown has no parameter 'y'\n  try:   one of 'x'"


def test_a_dim_that_comes_from_nowhere() -> None:
    register_op("a b -> a b c", name="nowhere")(user_ops.one_more_dim)
    with pytest.raises(AnnotationError) as error:
        prove(user_ops.one_more_dim, (rand(4, 5),))
    assert message(error) == (
        "annotation of nowhere: no argument has the dim c\n"
        "  why:   a b -> a b c\n"
        "  try:   mark it c^, or pass localise= to shrink the argument its size comes from"
    )


def test_a_parallel_form_adds_strategies() -> None:
    report = prove(user_ops.mean_square, (rand(4, 5),), num_ranks=(2,))
    assert "split:b over 2" in [trial.name for trial in report.trials]
    sources = [trial.source for trial in report.trials if trial.name == "split:b over 2"]
    assert sources == ["user_ops.mean_square_form(x=x0, count=5)"]


def test_a_function_as_an_argument_is_refused_in_words() -> None:
    """Functions of any kind are refused: a graph holds no objects, and what a lambda is cannot be
    written into a file.
    """

    def f(x: Tensor) -> Tensor:
        return x

    for given in (torch.tanh, f, torch.Tensor.tanh, functools.partial(torch.clamp, min=0)):
        with pytest.raises(TraceError) as caught:
            traced(user_ops.applied, rand(4, 5), rest=(given,))
        what, where, *_, hint = str(caught.value).splitlines()
        assert (
            what
            == f"applied() got an argument of type {type(given).__name__}, which a graph cannot "
            "hold"
        )
        assert "test_register.py:" in where
        assert (
            hint
            == "  try:   register a function that calls it with this one, or let it choose the "
            "function by a name"
        )
