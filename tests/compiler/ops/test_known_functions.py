"""Rules of autograd Functions of transformers: each is proved, and a model with one is split around
it.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from torch import Tensor

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.known_functions import KNOWN, register_known
from shardwright.compiler.ops.prover import prove


def rand(*shape: int) -> Tensor:
    return (
        torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
        + 0.1
    )


def chosen_experts() -> Tensor:
    return torch.randint(4, (6, 1), generator=torch.Generator().manual_seed(0))


CALLS: dict[str, list[tuple[Any, ...]]] = {
    "GeLUFunction": [(rand(4, 6) - 0.5,)],
    "SqrtBoundDerivative": [(rand(4, 6),)],
    "PhimoeMultiplier": [(rand(6, 4), rand(6, 1), chosen_experts(), rand(6, 4), rand(6, 1))],
    "XSoftmax": [
        (rand(2, 4, 6, 6), torch.ones(2, 1, 6, 6).tril(), -1),
        (rand(2, 4, 6), torch.ones(2, 4, 6), 1),
    ],
}


def known(path: str) -> Any:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    register_known(found)
    return found


@pytest.mark.parametrize("path", KNOWN)
def test_rules_are_proved(path: str) -> None:
    for call in CALLS[path.rpartition(".")[2]]:
        report = prove(known(path), call)
        assert report.ok and any(trial.name.startswith("split") for trial in report.trials), str(
            report
        )


class Namesake(torch.autograd.Function):
    """A function of a library of another version: the same place, other parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_other_parameters_have_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, f"{Namesake.__module__}.Namesake", ("x", "* -> *"))
    register_known(Namesake)
    assert registry.find(Namesake) is None


def test_bloom_is_split_around_its_activation(tmp_path: Path) -> None:
    """Its GELU is a Function with a backward of its own. Two all-reduces a layer each way, as for
    any transformer.
    """
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "n_layer": 1,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    make = zoo.hf("BloomForCausalLM", "BloomConfig", **zoo.NO_SPECIAL_TOKENS, **sizes)
    entry = zoo.ZooModel("bloom", make, zoo.causal_lm(32))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no rule.*")
        compiled, _ = plans.check_policy(
            entry.build(), entry.inputs(), "tp", 2, tmp_path, outputs="loss"
        )
    kinds = [a.step.kind for a in compiled.program.adapters()]
    assert (
        kinds.count("all_reduce"),
        kinds.count("grad_all_reduce"),
        kinds.count("all_gather"),
    ) == (3, 3, 0)
