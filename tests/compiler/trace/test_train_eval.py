"""``self.training`` in traced graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing import same_as_eager, traced

from shardwright.compiler.ir.op import WhenTraining
from shardwright.compiler.trace import trace
from shardwright.runtime.errors import UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def double(module: nn.Module) -> nn.Module:
    return module.double()


def test_one_trace_without_training() -> None:
    graph = traced(double(nn.Sequential(nn.Linear(4, 3), nn.Tanh())), {"input": X})
    assert graph.eval_graph is None
    assert not any(isinstance(arg, WhenTraining) for op in graph.ops for _, arg in op.args)


class Options:
    p = 0.0


class Mapped:
    """Options that are not always what they are called, as with transformers' ``attribute_map``."""

    dropout, hidden = 0.0, 3.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("hidden" if name == "dropout" else name)


class Reads(nn.Module):
    """Multiplies its input by a number in which ``self.training`` may have a say."""

    zero = 0.0

    def __init__(self, number: Callable[[Reads], float]) -> None:
        super().__init__()
        self.number = number
        self.p, self.below, self.drop = 0.0, -0.0, nn.Dropout(0.0)
        self.options, self.mapped = Options(), Mapped()

    @property
    def changing(self) -> float:
        return 0.0 if self.training else 3.0

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS.append(self)
        return x / self.number(self)


FORWARDS: list[Reads] = []
"""The modules whose forward has run."""


def jitters(self: Reads) -> float:
    number = 3.0
    if self.training and self.p > 0:
        number = 2.0
    return number


def chooses(self: Reads) -> float:
    return 4.0 if not self.training and self.p > 0 else 5.0


@pytest.mark.parametrize(
    "number",
    [
        lambda self: self.p if self.training else 0.0,
        lambda self: 0.0 if not self.training else self.p,
        lambda self: self.zero if self.training else self.p,
        lambda self: 0.0 if not self.training else self.drop.p,
        lambda self: self.options.p if self.training else 0.0,
        jitters,
        chooses,
    ],
)
def test_a_mode_that_decides_nothing_takes_one_trace(number: Callable[[Reads], float]) -> None:
    FORWARDS.clear()
    trace(Reads(number), {"x": X})
    assert len(FORWARDS) == 1


def scales(self: Reads) -> float:
    number = 3.0
    if self.training and self.p == 0:
        number = 2.0
    return number


def repeats(self: Reads) -> float:
    number = 1.0
    while self.training and number < 4:
        number *= 2
    return number


@pytest.mark.parametrize(
    "number",
    [
        lambda self: self.p + 1.0 if self.training else self.p + 2.0,
        # 1 / 0.0 is infinite, and 1 / -0.0 is so with the other sign.
        lambda self: self.p if self.training else self.below,
        lambda self: 1.0 if self.training else self.changing,
        lambda self: 0.0 if self.training else self.changing,
        lambda self: 0.0 if self.training else self.mapped.dropout,
        lambda self: self.training + 1.0,
        lambda self: 2.0 if getattr(self, "training") else 3.0,  # noqa: B009
        scales,
        repeats,
    ],
)
def test_a_mode_that_decides_is_traced_twice(number: Callable[[Reads], float]) -> None:
    FORWARDS.clear()
    graph = trace(Reads(number), {"x": X})
    assert len(FORWARDS) == 2
    same_as_eager(graph, Reads(number), {"x": X})


def test_dropout_becomes_a_run_time_flag() -> None:
    graph = traced(
        double(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))), {"input": X}
    )
    dropout = next(op for op in graph.ops if "dropout" in op.target)
    assert WhenTraining(True, False) in [arg for _, arg in dropout.args]
    assert graph.eval_graph is None


def test_the_residual_around_dropout() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(x)
            return x + h * 2

    assert traced(Residual(), {"x": X}).eval_graph is None


def test_batch_norm_counts_batches_in_training_only() -> None:
    graph = traced(
        double(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))),
        {"input": X},
    )
    assert graph.eval_graph is None
    norm = next(op for op in graph.ops if op.target == "batch_norm")
    assert [value.fqn for value in norm.operands[1:3]] == ["1.running_mean", "1.running_var"]
    assert norm.arg("training") == WhenTraining(True, False)
    ((before, after),) = graph.buffer_updates
    assert before.fqn == "1.num_batches_tracked"
    assert next(op for op in graph.ops if after in op.results).only_in == "train"


def test_batch_norm_twice_in_one_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) * 2)

    assert traced(Twice(), {"x": X}).eval_graph is None


class TwoBodies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.inner(x - self.mean) * torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return F.relu(self.inner(x)) + torch.tensor([4.0, 3, 2, 1], dtype=torch.float64)


def test_another_structure_gives_two_bodies() -> None:
    graph = traced(TwoBodies(), {"x": X})
    assert graph.eval_graph is not None
    assert {v.name for v in graph.eval_graph.parameters} == {v.name for v in graph.parameters}
    assert [v.name for v, _ in graph.constants] == ["const_0"] and [
        v.name for v, _ in graph.eval_graph.constants
    ] == ["const_0_eval"]
    assert graph.buffer_updates and not graph.eval_graph.buffer_updates


def test_a_buffer_updated_in_training_only() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            if self.training:
                self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
            return y.sin()

    graph = traced(Average(), {"x": X})
    assert graph.eval_graph is None
    assert [op.only_in for op in graph.ops] == [
        None,
        "train",
        "train",
        "train",
        "train",
        "train",
        None,
    ]


class KeepsNormFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()
        self.drop = nn.Dropout(0.5)

    def train(self, mode: bool = True) -> KeepsNormFrozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


@pytest.mark.filterwarnings("ignore:the module is in")
def test_an_overridden_train_is_respected() -> None:
    graph = traced(KeepsNormFrozen(), {"x": X})
    assert graph.buffer_updates == () and graph.eval_graph is None


def test_mixed_modes_are_reported() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Dropout(0.1))
    module[1].eval()
    with pytest.warns(
        UserWarning,
        match="the module is in training mode but these submodules are in eval mode: 1; the "
        "compiled",
    ):
        trace(module, {"input": X.float()})
    assert [m.training for m in module] == [True, False, True]


class Rescales(nn.Module):
    """Divides its weight when it is evaluated, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.layer.weight.div_(2)
        return self.layer(x).square().mean()


def test_a_module_that_changes_parameters_in_eval_mode_trains(tmp_path: Path) -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="the compiled module trains and does not evaluate"):
        graph = plans.traced(Rescales(), {"x": x})
    compiled = plans.compile_with(graph, "tp", 2)
    plans.write(tmp_path, compiled, Rescales())

    def rank(index: int) -> None:
        module = load_class(tmp_path)()
        module(x=x).backward()
        with pytest.raises(
            UsageError, match="Rescales was compiled for training only, and is in eval mode"
        ):
            module.eval()(x=x)

    run_ranks(2, rank)
