"""In-place operators become functional ones, with the values and gradients they had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError

X = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 7 - 1
Y = torch.linspace(-2, 1, 24, dtype=torch.float64).reshape(4, 6)
MASK = X > 0.2


def augmented(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    x += y
    x *= 2
    x -= 0.5
    x /= y + 3
    return x


def methods(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.add_(y, alpha=2).mul_(y).clamp_(min=-1).sub_(1)
    x.masked_fill_(MASK, 0.5)
    x.copy_(x + y)
    return x.relu_()


def argument(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def both_names(x: Tensor, y: Tensor) -> Tensor:
    a = x + 0
    b = a
    b.add_(y)
    return a * b


def write_view(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    row = x[1]
    row.mul_(y[0])
    return x.sin() + row


def read_view_after_write(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    view, flat = x[:, 2:4], x.view(-1)
    x.mul_(y)
    return view.sum() + flat[3] + x.t().sum()


def nested_views(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    other = x.view(2, 2, 6)
    x.view(2, 2, 6)[0].transpose(0, 1)[2:5, 1].add_(y[0, :3])
    return other + x.view(2, 2, 6)


def split_views(x: Tensor, y: Tensor) -> Tensor:
    x = x.detach() + 0  # autograd itself refuses writes to one of several views
    a, b = x.split([2, 4], dim=1)
    c, d = b.chunk(2, dim=-1)
    c.zero_()
    a.copy_(d)
    for row in x.unbind(0):
        row.mul_(2)
    return x * y + torch.cat((a, c, d), 1)


def diagonal(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    x.diagonal().fill_(3.0)
    return x * y


def select_narrow(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    x.select(1, 2).mul_(3)
    x.narrow(1, 3, 2).add_(y[:, :2])
    x.unsqueeze(0).squeeze(0).permute(1, 0)[0].neg_()
    return x


def set_items(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    x[0] = 1
    x[1:3, ::2] = y[1:3, ::2]
    x[..., -1] = y[:, 0]
    x[-1, 2:4] = 5
    x[:] = x * 2
    x[None, 2] = y[0]
    return x


def set_items_by_tensors(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    x[MASK] = 0.25
    x[MASK[:, 0]] = 7
    x[torch.tensor([0, 2]), torch.tensor([1, 3])] = y[0, :2]
    x[[1, 3]] = y[[0, 1]]
    x[:, torch.tensor([4])] = y[:, :1]
    return x


def set_items_by_numbers_and_tensors(x: Tensor, y: Tensor) -> Tensor:
    cube = torch.stack([x * 1, y * 2, x - y])
    cube[:, 1, MASK[0]] = y[0, : int(MASK[0].sum())]
    cube[0, :, torch.tensor([1, 2])] = 5.0
    cube[1:, torch.tensor([0, 3]), 2:4] = y[:2, :2]
    cube[-1, ..., MASK[1]] = x[2, : int(MASK[1].sum())].mean()
    cube[2, MASK] = 0.25
    cube[torch.stack([MASK, ~MASK, MASK])[..., 0], 2:4] = 0.75
    return cube.square()


def signs(x: Tensor, y: Tensor) -> Tensor:
    mask, number = x > 0, torch.arange(24).reshape(4, 6)
    kept = mask[1:]
    mask &= y < 0.5
    mask |= y < -1.5
    kept ^= MASK[1:]
    number <<= 2
    number >>= 1
    return x * mask + y * number * kept[0]


def casting(x: Tensor, y: Tensor) -> Tensor:
    low = x.float()
    low.add_(y)
    low[0] = y[0]
    return low


def flags(x: Tensor, y: Tensor) -> Tensor:
    h = F.relu(x * y, inplace=True)
    h = F.silu(h - 1, True)
    return F.leaky_relu(h, 0.2, inplace=True)


def out_argument(x: Tensor, y: Tensor) -> Tensor:
    result = torch.empty(4, 6, dtype=torch.float64)
    torch.add(x.detach(), y.detach(), out=result)
    return result * x


def metadata(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    v = x.detach() * y
    v.t_()
    v.unsqueeze_(0)
    v.add_(1)
    return v * x.t()


def scatter(x: Tensor, y: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2, 3, 0, 1]])
    x = (x + 0).scatter_(0, index, y[:1])
    x.scatter_add_(0, index, y[1:2]).index_add_(0, torch.tensor([1, 3]), y[:2])
    return x.index_copy_(1, torch.tensor([5]), y[:, :1])


def detached(x: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    h.detach().add_(1)
    with torch.no_grad():
        h.mul_(3)
    return h * y


def complex_numbers(x: Tensor, y: Tensor) -> Tensor:
    z = torch.fft.rfft(x)
    out = torch.zeros_like(z)
    out[:, :2] = z[:, :2] * 2
    out[:, 3] = z[:, 0]
    out.narrow(-1, 1, 2).mul_(3)
    out.diagonal().add_(1)
    return torch.fft.irfft(out, n=6) + y


FUNCTIONS = [
    augmented, methods, argument, both_names, write_view, read_view_after_write, nested_views,
    split_views, diagonal,
    select_narrow, set_items, set_items_by_tensors, set_items_by_numbers_and_tensors,
    signs, casting, flags, out_argument, metadata, scatter, detached,
    complex_numbers,
]  # fmt: skip


class Apply(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.filterwarnings("ignore:forward changes its arguments")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_same_values_and_gradients(function: object) -> None:
    graph = traced(Apply(function), {"x": X, "y": Y})
    assert not [op.target for op in graph.ops if op.target.endswith("_") or "setitem" in op.target]


def test_the_caller_is_told_about_changed_arguments() -> None:
    with pytest.warns(UserWarning, match="forward changes its arguments in place: x; "):
        trace(Apply(argument), {"x": X, "y": Y})


class Counter(nn.Module):
    """Buffers changed in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(4, 6, dtype=torch.float64), persistent=False)
        self.register_buffer("unchanged", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.last[1:] = x[:-1]
        scaled = x * self.average + self.unchanged
        self.average = self.average * 2
        return scaled


def test_buffer_updates() -> None:
    graph = traced(Counter(), {"x": X})
    assert [before.fqn for before, _ in graph.buffer_updates] == ["steps", "average", "last"]


class ChangesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def test_a_changed_parameter_is_refused() -> None:
    module = ChangesParameter()
    with pytest.raises(TraceError) as caught:
        trace(module, {"x": X})
    text = str(caught.value)
    assert text.startswith("forward changes the parameter weight in place\n  where: ")
    assert "test_inplace.py:" in text and "in (root) (ChangesParameter)" in text
    assert "  try:   change a copy of it, or make it a buffer" in text
    assert torch.equal(module.weight, torch.ones(6, dtype=torch.float64)) and isinstance(
        module.weight, nn.Parameter
    )


def through_unfold(x: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    x.unfold(1, 2, 2).mul_(2)
    return x


def test_a_write_through_an_exotic_view_is_refused() -> None:
    with pytest.raises(
        TraceError,
        match=r"an in-place operator changes a view made by unfold\(\)\n  where: "
        r".*test_inplace.py:\d+ in",
    ):
        trace(Apply(through_unfold), {"x": X, "y": Y})


OUTSIDE = torch.zeros(6, dtype=torch.float64)


def changes_outside(x: Tensor, y: Tensor) -> Tensor:
    OUTSIDE.add_(1)
    return x + OUTSIDE


def test_a_change_of_a_captured_tensor_is_refused() -> None:
    with pytest.raises(
        TraceError,
        match="forward changes the tensor const_0 in place, which is neither parameter nor buffer",
    ):
        trace(Apply(changes_outside), {"x": X, "y": Y})
    assert torch.equal(OUTSIDE, torch.zeros(6, dtype=torch.float64))


class Window(nn.Module):
    """Reads a part of a tensor that it took before it filled the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.up, self.down = (
            nn.Linear(6, 6).double(),
            nn.Linear(6, 8).double(),
            nn.Linear(8, 6).double(),
        )

    def forward(self, x: Tensor) -> Tensor:
        filled = x.new_zeros(2, 4, 6)
        first = filled[0]
        filled[:] = self.make(x)
        return (self.down(self.up(first).relu()) * first).pow(2).sum()


def test_gradients_flow_through_views_taken_before_a_write() -> None:
    graph = traced(Window(), {"x": X})
    assert all(value.requires_grad for op in graph.ops if op.operands for value in op.results)
    report = verify(Window(), {"x": X}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2})
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("write", "how"),
    [
        (lambda h: h.data.mul_(2), "through .data"),
        (lambda h: h.detach()[0].zero_(), "through .detach()"),
        (lambda h: torch.no_grad()(h.clamp_)(0), "under no_grad"),
    ],
)
def test_writes_that_autograd_does_not_see_are_refused_where_a_gradient_comes(
    write: Any, how: str
) -> None:
    class Writes(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6).double().requires_grad_(trained)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            write(hidden)
            return hidden * 3

    with pytest.raises(TraceError) as caught:
        trace(Writes(trained=True), {"x": X})
    text = str(caught.value)
    assert text.startswith(
        f"forward changes a tensor in place {how}, and a gradient comes to it\n  where: {__file__}:"
    )
    assert "x = x + (new - x).detach()" in text
    assert trace(Writes(trained=False), {"x": X}).ops
