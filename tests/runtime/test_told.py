"""What two calls are compared by where an argument has no literal."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.runtime.errors import InputError, TraceError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.told import Told, UntoldError, told


def times(factor: Any) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor, by: float = 1.0) -> Tensor:
        return x * factor * by

    return scaled


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


PAIRS = {
    "functions": (F.relu, F.silu),
    "built-in functions": (torch.relu, torch.tanh),
    "lambdas": (lambda x: x + 1, lambda x: x + 2),
    "what a function reads": (times(2), times(3)),
    "what is given before": (
        functools.partial(F.leaky_relu, negative_slope=0.1),
        functools.partial(F.leaky_relu, negative_slope=0.2),
    ),
    "modules": (nn.ReLU(), nn.Tanh()),
    "attributes of modules": (Scaled(2), Scaled(3)),
    "methods": (Scaled(2).forward, Scaled(3).forward),
    "classes": (nn.ReLU, nn.Tanh),
    "sets": ({"relu", "tanh"}, {"relu", "gelu"}),
    "the type of a number": ({1}, {True}),
    "shapes": (torch.Size([2, 3]), torch.Size([3, 2])),
    "slices": (slice(1), slice(2)),
}


@pytest.mark.parametrize("case", PAIRS)
def test_values_are_told_apart(case: str) -> None:
    one, other = PAIRS[case]
    assert Told(told(one)).fits(one) and not Told(told(one)).fits(other)


def test_what_is_made_anew_is_the_same() -> None:
    assert Told(told(times(2))).fits(times(2)) and Told(told(Scaled(2))).fits(Scaled(2))
    assert Told(told({"a", "b", "c"})).fits({"c", "b", "a"})


def test_the_text_is_the_same_in_every_process() -> None:
    """Python orders sets of strings anew in each, those among the constants of a function too."""
    code = (
        "from shardwright.runtime.told import told\n"
        "print(told((lambda x: x in {'a', 'b', 'c', 'd'}, {'e', 'f', 'g', 'h'})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("value", [nn.Linear(2, 2), times(torch.ones(2)), times(object())])
def test_what_cannot_be_told(value: Any) -> None:
    with pytest.raises(UntoldError):
        told(value)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, options: dict[str, Any]) -> Any:
        y: Tensor = options["activation"](self.inner(x)) * options.get("scale", 1.0)
        if "result" not in options:
            return y.sum()
        result = options["result"]()
        result.loss = y.sum()
        return result


def test_a_call_with_another_function_is_refused(tmp_path: Path) -> None:
    """It ran the program of the first one; so did a call with a further option."""
    x, model = torch.ones(2, 4), Activated()
    graph = plans.traced(model, {"x": x, "options": {"activation": F.hardtanh}})
    plans.write(tmp_path, plans.compile_with(graph, "dp", 1), model)

    def rank(_: int) -> None:
        module = load_class(tmp_path)()
        module(x, {"activation": F.hardtanh})
        with pytest.raises(InputError, match=r"activation' is function \S+silu .* compiled as"):
            module(x, {"activation": F.silu})
        with pytest.raises(InputError, match=r"scale' is 2\.0, but was compiled without it"):
            module(x, {"activation": F.hardtanh, "scale": 2.0})

    run_ranks(1, rank)


class Doubled:
    loss: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class Negated(Doubled):
    def __call__(self, x: Tensor) -> Tensor:
        return -x


def test_objects_to_call_are_told_by_their_class(tmp_path: Path) -> None:
    x, model = torch.ones(2, 4), Activated()
    options = {"activation": Doubled(), "result": Negated}
    graph = plans.traced(model, {"x": x, "options": options})
    plans.write(tmp_path, plans.compile_with(graph, "dp", 1), model)

    def rank(_: int) -> None:
        module = load_class(tmp_path)()
        assert torch.equal(module(x, options).loss, model(x, options).loss)
        with pytest.raises(InputError, match=r"__class__' is type \S*Negated, but was compiled"):
            module(x, {"activation": Negated(), "result": Negated})

    run_ranks(1, rank)


def test_a_module_with_tensors_is_no_argument() -> None:
    options = {"activation": nn.Linear(4, 4)}
    with pytest.raises(TraceError) as caught:
        plans.traced(Activated(), {"x": torch.ones(2, 4), "options": options})
    assert str(caught.value) == (
        "an argument of forward contains a Linear\n"
        "  why:   it is or holds a module with tensors of its own, by which two calls cannot be "
        "compared: the program would be that of the first one\n"
        "  try:   pass its tensors as arguments of their own, or make it a part of the model"
    )


def test_nan_is_told() -> None:
    assert Told(told(times(math.nan))).fits(times(math.nan))
