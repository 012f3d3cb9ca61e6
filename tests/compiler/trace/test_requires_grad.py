"""What forward reads of gradients while it is traced is what it reads outside of a trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR).requires_grad_()

READ: list[dict[str, tuple[bool, bool, bool]]] = []


class Reads(nn.Module):
    """Notes what it reads of many tensors; of ``y`` the dummy argument requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.frozen = (
            nn.Linear(4, 4).double(),
            nn.Linear(4, 4).double().requires_grad_(False),
        )
        self.register_buffer("state", torch.zeros(4, dtype=torch.float64))

    def note(self, **tensors: Tensor) -> None:
        READ.append(
            {name: (x.requires_grad, x.is_leaf, x.grad_fn is None) for name, x in tensors.items()}
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.free(x)
        self.note(
            x=x, y=y, h=h, weight=self.free.weight, frozen=self.frozen.weight, state=self.state
        )
        self.note(
            of_x=self.frozen(x),
            of_y=self.frozen(y),
            of_both=x * y,
            view=x.view(-1),
            chosen=h.argmax(-1),
        )
        self.note(detached=h.detach(), data=h.data, moved=x.to(torch.float64), dense=x.contiguous())
        with torch.no_grad():
            without, of_x, view = self.free(x), x * 2, x.view(-1)
        self.note(without=without, of_x=of_x, view=view, used=of_x * x, view_used=view * 2)
        copies = [torch.zeros_like(x) for _ in range(3)]
        rows = [copy[0] for copy in copies]
        copies[0][0], copies[1][0] = x[0], h[0]
        self.note(
            **{f"copy_{i}": copy for i, copy in enumerate(copies)},
            **{f"row_{i}": row for i, row in enumerate(rows)},
        )
        self.note(literal=torch.tensor([1.0]), trained=torch.tensor([1.0], requires_grad=True))
        self.note(ones=torch.ones(2), trained_ones=torch.ones(2, requires_grad=True))
        asked, later = x.detach().requires_grad_(), x + 1
        later.requires_grad = True
        x.requires_grad_(False)
        self.note(asked=asked, of_asked=asked * 2, later=later, of_later=later * 2, x=x)
        return h.sum() + (of_x + asked + later).sum() + sum(copy.sum() for copy in copies)


@pytest.mark.filterwarnings("ignore:forward reads")
def test_models_read_what_they_read_outside_of_a_trace() -> None:
    READ.clear()
    Reads()(X, Y)
    expected = list(READ)
    READ.clear()
    trace(Reads(), {"x": X, "y": Y})
    assert expected == READ and len(expected) == 8


class Branches(nn.Module):
    """Goes other ways where tensors require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.frozen = (
            nn.Linear(4, 8).double(),
            nn.Linear(4, 8).double().requires_grad_(False),
        )
        self.back = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if x.requires_grad else x
        with torch.no_grad():
            target = self.free(x)
        hidden, kept = self.free(x), self.frozen(x)
        for number, tensor in enumerate((target, hidden, kept, hidden.detach())):
            hidden = hidden * (number + 3) if tensor.requires_grad else hidden - tensor
        return self.back(hidden).pow(2).sum()


@pytest.mark.parametrize("x", [X, Y.detach().requires_grad_()], ids=["without", "with"])
def test_branches_on_gradients_are_those_of_one_device(x: Tensor) -> None:
    does = "does" if x.requires_grad else "does not"
    says = (
        r"reads requires_grad of a tensor made of its arguments: .*test_requires_grad.py:\d+ in "
        rf".* it {does} require"
    )
    with pytest.warns(UserWarning, match=says):
        report = verify(Branches(), {"x": x}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2})
    assert report.ok, str(report)


def test_what_follows_from_the_module_alone_is_read_without_a_warning() -> None:
    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            assert hidden.requires_grad and all(p.requires_grad for p in self.parameters())
            return hidden if hidden.detach().grad_fn is None else hidden * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Checks(), {"x": X})


def test_a_frozen_encoder_of_torch_is_traced_by_its_parts() -> None:
    layer = (
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        .double()
        .requires_grad_(False)
    )
    graph = trace(nn.TransformerEncoder(layer, 2), {"src": X[None]})
    assert graph.eval_graph is None and any(op.target == "linear" for op in graph.ops)


def test_requires_grad_is_not_taken_from_what_has_it() -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.requires_grad_(False) * 2

    with pytest.raises(TraceError, match="sets requires_grad of a tensor to False") as caught:
        trace(Stops(), {"x": Y})
    assert f"{__file__}:" in str(caught.value) and "use x.detach()" in str(caught.value)
    assert [op.name for op in trace(Stops(), {"x": X}).ops] == ["mul"]
