"""Every rule of the operator tables is proved on example calls: all strategies, on three ranks,
whose pieces are of different sizes. On two ranks and on two axes slow tests prove
a third of the calls.

The calls are those that torch's dispatch reports, so the aliases and their arguments are tested
along with the rules.
"""

from __future__ import annotations

from typing import Any

import op_examples
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.prover import prove
from shardwright.compiler.ops.terms import RUNTIME
from shardwright.runtime.layout import Mesh

WITHOUT_EXAMPLE = {
    "ctc_loss": "nothing may be split",
    "empty": "its values are arbitrary",
    "randperm": "nothing may be split",
    "tensor": "nothing may be split",
    "time_steps": "its rule follows from those of the operators in the loop",
}

CALLS = [
    pytest.param(
        function,
        args,
        kwargs[0] if kwargs else {},
        id=f"{group}-{getattr(function, '__name__', 'entry')}-{index}",
    )
    for group, calls in op_examples.EXAMPLES.items()
    for index, (function, args, *kwargs) in enumerate(calls)
]


LATE_DERIVATIVES = ("nextafter", "aminmax")
"""Functions that the oldest torch we support cannot differentiate."""


class FirstCall(TorchFunctionMode):
    """Remembers the first call that torch dispatches."""

    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ != "__get__":  # reading a property of a tensor
            self.call = self.call or (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def dispatched(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call as a trace sees it; entries of the registry and in-place methods as they are."""
    if isinstance(function, OpDef) or (
        function.__name__[-1] == "_" and function.__name__[:2] != "__"
    ):
        return function, args, kwargs
    with torch.random.fork_rng(devices=[]), FirstCall() as mode:
        function(*args, **kwargs)
    assert mode.call is not None, f"{function} is not dispatched"
    return mode.call


def missing_derivative(function: Any, args: tuple[Any, ...]) -> str:
    """What this version of torch says of a call that only newer ones can differentiate; or
    nothing.
    """
    if getattr(function, "__name__", "") in LATE_DERIVATIVES:
        results = function(
            *(
                arg.detach().requires_grad_() if isinstance(arg, torch.Tensor) else arg
                for arg in args
            )
        )
        try:
            (results if isinstance(results, torch.Tensor) else results[0]).sum().backward()
        except (NotImplementedError, RuntimeError) as error:
            return str(error)
    return ""


def skip_without_derivative(function: Any, args: tuple[Any, ...]) -> None:
    """Leave out a call that this version of torch cannot differentiate, where newer ones can."""
    if reason := missing_derivative(function, args):
        pytest.skip(reason)


@pytest.mark.filterwarnings(
    "ignore"
)  # torch's own, about broadcasting in losses and about beta functions
@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_rule_holds(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    skip_without_derivative(function, args)
    report = prove(*dispatched(function, args, kwargs), num_ranks=(3,))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS[::3])
def test_rule_holds_on_two_ranks_and_two_axes(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    skip_without_derivative(function, args)
    report = prove(function, args, kwargs, num_ranks=[2, {"u": 2, "v": 2}])
    assert report.ok, str(report)


ONE_TURN = Mesh((("u", 3),), (("u", 1),))
MORE_TURNS = (Mesh((("u", 2), ("v", 2)), (("v", 2),)), Mesh((("u", 2),), (("u", 3),)))
IN_ZIGZAG = [
    *((group, ONE_TURN) for group in op_examples.EXAMPLES),
    *(("attention", mesh) for mesh in MORE_TURNS),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("group", "mesh"), IN_ZIGZAG, ids=str)
def test_rules_hold_in_zigzag(group: str, mesh: Mesh) -> None:
    """Pieces may be several runs, where the rule allows that."""
    every = 1 if mesh == ONE_TURN else 4
    for function, args, *kwargs in op_examples.EXAMPLES[group][::every]:
        if missing_derivative(function, args):
            continue
        report = prove(function, args, kwargs[0] if kwargs else {}, num_ranks=[mesh])
        assert report.ok, str(report)


def test_every_operator_has_an_example() -> None:
    operators = {
        name
        for name, opdef in registry.OPS.items()
        if type(opdef) is OpDef and not name.startswith(RUNTIME)
    }
    if not hasattr(F, "linear_cross_entropy"):  # as in torch 2.11
        operators.remove("linear_cross_entropy")
    shown = {found[0].name for call in CALLS if (found := registry.find(call.values[0]))}
    shown |= {call.values[0].name for call in CALLS if isinstance(call.values[0], OpDef)}
    assert operators - shown == set(WITHOUT_EXAMPLE)


MOST_DELICATE = ("norms", "experts")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(g, marks=() if g in MOST_DELICATE else pytest.mark.slow)
        for g in op_examples.EXAMPLES
    ],
)
def test_more_ranks_than_elements(group: str) -> None:
    """Pieces may be empty, unless the rule says that the function refuses them. Gradients pass
    through them.
    """
    for function, args, *kwargs in op_examples.EXAMPLES[group]:
        if missing_derivative(function, args):
            continue
        report = prove(function, args, kwargs[0] if kwargs else {}, num_ranks=(7,))
        assert report.ok, str(report)


def test_no_rank_is_left_without_a_matrix_of_a_determinant() -> None:
    """Torch 2.11 gives an empty stack no gradient, so ranks with matrices would wait for that."""
    for num_matrices, is_split in ((2, False), (4, True)):  # 1, 1 and 0, or 2, 1 and 1
        stack = torch.randn(num_matrices, 3, 3)
        report = prove(torch.linalg.det, (stack,), {}, num_ranks=(3,))
        tried = [trial.assignment for trial in report.trials if not trial.skipped]
        assert report.ok and ({"a": "split:a"} in tried) == is_split
