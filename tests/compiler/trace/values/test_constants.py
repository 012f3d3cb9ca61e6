"""Tensors with values of their own."""

from __future__ import annotations

import functools
import gc
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from interpret import run_graph
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.ir.op import RankDevice
from shardwright.compiler.trace import trace
from shardwright.compiler.trace.context.fakes import note_caches
from shardwright.runtime.errors import TraceError

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GLOBAL = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
ARRAY = np.arange(4.0)


class Captures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(4, dtype=torch.float64) * 3

    def forward(self, x: Tensor) -> Tensor:
        literal = torch.tensor([0.5, 0.25, 0, 1], dtype=x.dtype)
        literal[0] = 7
        x = x * self.table + GLOBAL * literal + torch.as_tensor(ARRAY) + torch.from_numpy(ARRAY)
        x = x + x.new_tensor([1, 2, 3, 4]) + self.table
        return x[[0, 2]] + np.float64(2.5) * ARRAY[1]


def test_captured_tensors_and_literals() -> None:
    graph = traced(Captures(), {"x": X})
    named = {value.name: tensor for value, tensor in graph.constants}
    assert torch.equal(named["table"], torch.ones(4, dtype=torch.float64) * 3), (
        "an attribute gives its name, and is one constant"
    )
    assert any(torch.equal(tensor, GLOBAL) for tensor in named.values())
    assert any(
        tensor.dtype == torch.int64 and tensor.tolist() == [0, 2] for tensor in named.values()
    )
    assert all(type(tensor) is torch.Tensor for tensor in named.values())


def test_values_of_constants_may_be_read() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if GLOBAL[0] > 0 and torch.tensor(3).item() == 3:
                return x * float(torch.tensor(2.0)) + sum(torch.tensor([1, 2]).tolist())
            return x

    assert len(traced(Reads(), {"x": X}).ops) == 2


def test_what_is_filled_like_an_input_has_values() -> None:
    """The input gives its shape and dtype alone, which no call may change."""

    class Lengths(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            lengths = x.shape[1] * x.new_ones(x.shape[0], dtype=torch.long)
            lengths = lengths - torch.full_like(lengths, 1) + torch.zeros_like(x[:, 0]).long()
            if not (lengths == x.shape[1] - 1).all():
                return x
            return torch.stack([row[:length].sum() for row, length in zip(x, lengths, strict=True)])

    graph = traced(Lengths(), {"x": X})
    assert graph.outputs[0].shape == (X.shape[0],) and not graph.constant_inputs


def test_sizes_may_be_tensors() -> None:
    """A graph holds numbers for them: of what was counted, and of buffers. Those of a buffer that a
    checkpoint may change are compared later.
    """

    class Pads(nn.Module):
        def __init__(self, persistent: bool = False) -> None:
            super().__init__()
            self.register_buffer("stride", torch.tensor(3), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            missing = -x.shape[1] % self.stride
            x = F.pad(x, (missing, self.stride - 1)) if missing > 0 else x
            return x.view(x.shape[0], torch.div(x.shape[1], 2, rounding_mode="trunc"), 2)

    graph = traced(Pads(), {"x": X})
    arguments = {op.target: dict(op.args) for op in graph.ops}
    assert arguments["pad"]["pad"] == (2, 2) and arguments["view"]["shape"] == (3, 4, 2)
    assert not graph.constant_buffers
    with pytest.warns(UserWarning, match="forward reads the values of the buffers stride"):
        graph = trace(Pads(persistent=True), {"x": X})
    assert [name for name, _ in graph.constant_buffers] == ["stride"]


def test_a_tensor_of_tensors_is_a_stack() -> None:
    class Stacks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.tensor([[x.max(), 2], [x.min(), 0.5]])
            return (
                x * torch.as_tensor([x[0, 0], x[1, 1].long()]).sum()
                + table[0, 0]
                + table[1].to(x.dtype).sum()
            )

    graph = traced(Stacks(), {"x": X})
    assert [op.target for op in graph.ops].count("stack") == 4


def test_what_is_made_of_constants_may_have_any_size() -> None:
    class Triangle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(len(x), 4).tril()
            places = mask.nonzero()
            last = places[places[:, 0] == 2][:, 1]
            counts = torch.where(mask > 0)[0].repeat_interleave(torch.tensor(2))
            return x[:, last] + torch.masked_select(mask, mask > 0).sum() + len(counts)

    graph = traced(Triangle(), {"x": X})
    assert graph.output.value.shape == (3, 3)
    assert graph.ops[-1].arg("other") == 12


def test_a_buffer_that_decides_stays_as_it_is() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Buffer(torch.tensor(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            first = bool(self.calls == 0)
            self.calls += 1
            return x if first else -x

    with pytest.raises(TraceError) as caught:
        trace(Counts(), {"x": X})
    assert str(caught.value) == (
        "forward changes the buffer calls, whose values decide what it computes\n"
        "  why:   the traced graph does in every call what it does in the first one\n"
        "  try:   keep what decides in a buffer that forward leaves as it is, or in a number"
    )


def test_caches_of_functions_keep_nothing_of_a_trace() -> None:
    @functools.lru_cache
    def cached_table(size: int) -> tuple[Tensor, list[Tensor]]:
        table = torch.arange(size, dtype=torch.float64)
        return table * 2, [table]

    @functools.cache
    def cached_numbers() -> list[int]:
        return [1, 2]

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            table, (plain,) = cached_table(4)
            return torch.dropout(x + table + plain, 0.5, self.training) * cached_numbers()[1]

    traced(Reads(), {"x": X})
    assert all(type(tensor) is Tensor for tensor in (cached_table(4)[0], *cached_table(4)[1]))
    assert cached_numbers.cache_info().currsize == 1, "a cache without tensors is left alone"


def test_caches_that_the_collector_no_longer_sees_are_known() -> None:
    @functools.cache
    def cached_ones() -> Tensor:
        return torch.ones(4, dtype=torch.float64)

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + cached_ones()

    note_caches()
    gc.freeze()
    for _ in range(2):
        traced(Reads(), {"x": X})
        assert type(cached_ones()) is Tensor
        cached_ones.cache_clear()


def test_checks_of_values_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    class Samples(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(x, x.exp())
            entropy = torch.distributions.Categorical(logits=x).entropy()
            return normal.rsample() + normal.log_prob(x * 2) + entropy[:, None]

    traced(Samples(), {"x": X})
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(X, X)


def test_types_of_python_are_dtypes() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x.to(int), (x * 3).sum(dtype=float), torch.zeros(2, dtype=bool)

    graph = traced(Casts(), {"x": X})
    assert [value.dtype for value in graph.outputs] == [torch.int64, torch.float64, torch.bool]


def test_an_input_may_be_told_to_require_gradients() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            x.requires_grad = True
            return x

    assert trace(Asks(), {"x": X}).outputs[0].requires_grad


def test_factories_stay_operators_on_the_ranks_device() -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            position = (
                torch.arange(4) + torch.zeros(3, 1) + torch.ones_like(x) + torch.full((4,), 2.0)
            )
            return x + position + x.new_zeros(4) + torch.eye(4)[:3] + torch.linspace(0, 1, 4)

    graph = traced(Makes(), {"x": X})
    names = {"arange", "zeros", "full", "eye", "linspace"}
    factories = [
        op for op in graph.ops if op.target in names or op.target.removeprefix("torch.") in names
    ]
    assert len(factories) >= 5 and graph.constants == ()
    assert all(op.arg("device") == RankDevice() for op in factories)
    assert all(op.arg("dtype") is not None for op in factories[1:]), (
        "the default dtype is written down"
    )


def test_randomness_stays_an_operator() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.detach().clone().normal_(0.0, std=2.0)
            y[0].uniform_(to=2.0)
            y = (
                y
                + torch.empty_like(x).bernoulli_(x.detach().abs().clamp(max=1))
                + torch.empty_like(x).bernoulli_(0.25)
            )
            return (
                x * y
                + torch.randn(3, 4)
                + torch.rand_like(x)
                + torch.empty(3, 4).uniform_(1, 3)
                + torch.randn_like(x)
            )

    with torch.random.fork_rng():
        traced(Noise(), {"x": X})


class Draws(nn.Module):
    """Every method that draws in place and that has no function of the same name which draws alike
    on all ranks.
    """

    def forward(self, x: Tensor) -> list[Tensor]:
        counts = torch.zeros(len(x), dtype=torch.int64)
        return [
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).log_normal_(std=0.5, mean=0.0),
            torch.empty_like(x).cauchy_(1.0, sigma=0.1).clamp(0, 2),  # it has no mean
            torch.empty_like(x).geometric_(0.25),
            counts.clone().geometric_(0.5).double(),
            torch.empty_like(x).random_(2, 7),
            torch.empty_like(x).random_(5),
            counts.clone().random_(to=5).double(),
            torch.empty_like(x).random_() / 2**53,
        ]


def test_what_is_drawn_in_place_has_its_distribution() -> None:
    x = torch.zeros(40_000, dtype=torch.float64)
    graph = trace(Draws(), {"x": x})
    outside = [op.target for op in graph.ops if op.target.startswith("torch.ops")]
    assert not outside, "drawn from the global generator, and differently on every rank"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        means = [float(values.mean()) for values in run_graph(graph, Draws(), {"x": x})]
        wanted = [float(values.mean()) for values in Draws()(x)]
    assert means == pytest.approx(wanted, rel=0.03)
    assert means == pytest.approx(
        [0.5, math.exp(0.125), 1.0, 4.0, 2.0, 4.0, 2.0, 2.0, 0.5], rel=0.03
    )


def test_a_generator_is_refused() -> None:
    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.empty_like(x).normal_(generator=torch.Generator())

    with pytest.raises(
        TraceError, match=r"normal_\(\) is given a generator, which a graph cannot hold\n"
    ):
        trace(Seeded(), {"x": X})


def test_a_captured_meta_tensor_is_refused() -> None:
    with torch.device("meta"):
        module = Captures()
    with pytest.raises(
        TraceError,
        match="the model uses a tensor on the meta device that is neither parameter nor buffer: "
        "table\n",
    ):
        trace(module, {"x": X})
