"""Sums, means and losses of elements that a mask chooses; what needs their number is refused where
they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, 8, dtype=torch.float64, generator=GENERATOR)
Y = torch.rand(4, 6, 8, dtype=torch.float64, generator=GENERATOR)
MASK = torch.rand(4, 6, generator=GENERATOR) > 0.4
CLASSES = torch.randint(8, (4, 6), generator=GENERATOR).masked_fill(~MASK, -7)
CLASSES[0, :2] = -100
WEIGHTS = torch.linspace(0.5, 2, 8, dtype=torch.float64)
INPUTS = {"x": X, "y": Y, "mask": MASK, "classes": CLASSES}

Read = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Reads(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(8, 8).double(), read

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
        return self.read(self.inner(x), y, mask, classes)


def drawn() -> Tensor:
    return torch.randint(0, 2, (4, 6), dtype=torch.bool)


def changed_after(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    x = x * 1
    rows = x[mask]
    x.mul_(3)
    return rows.sum() + x[mask].mean()


def masks_of_rows(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    rows = mask[..., None]
    of_places = x.mean(-1, keepdim=True).masked_select(mask[:1, :, None].expand(4, 6, 3))
    return F.l1_loss(x.masked_select(rows), y.masked_select(rows)) + of_places.square().sum()


def chosen_without_gradient(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    with torch.no_grad():
        rows = x[mask]
    return rows.sum() * x.mean()


def written_back(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    x = x.clone()
    x[mask] *= 2
    x[classes > 2] = y[classes > 2] - x[classes > 2] / 3
    x[mask] = y[mask]
    return x.square().sum()


def changed_in_place(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    rows = also = x[mask]
    rows.mul_(3)
    rows += y[mask]
    return also.sum() + x.sum()


def finite_where_chosen(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    chances = x.sigmoid() * mask[..., None]  # zero elsewhere
    chances = chances.masked_fill(classes[..., None] == 1, float("inf"))
    counted = mask & (classes != 1)
    return (
        chances[counted].log().mean()
        + (1 / chances[counted]).sqrt().sum()
        + chances[counted].pow(0.5).sum()
    )


def counted(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    if x[mask].numel() != y[mask].numel() or x[mask].shape[0] < 1 or x[mask].size(0) < 1:
        raise ValueError("the mask chooses nothing")
    return x.sum() * x[mask].numel()


def put_elsewhere(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Chosen by one mask, written by another one that is true as often."""
    other = mask.flip(0, 1)
    x = x.masked_scatter(other[..., None], y[mask] * 2)
    x = x + torch.zeros_like(x).masked_scatter(other[..., None], x[mask].square())
    return x.square().sum()


def as_many(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Rows of one number, as many as are chosen."""
    rows = x[mask]
    scaled = rows * torch.full((rows.shape[0], 8), 3.0, dtype=x.dtype)
    weighted = y[mask] * rows.new_ones([rows.size(0), 1]) + torch.ones_like(rows)
    flags = torch.zeros(size=(rows.shape[0],), dtype=torch.bool)
    return scaled.sum() + weighted.mean() + flags.logical_not().sum() * x.mean()


def at_places(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Places where a mask is true in the place of the mask, as OneFormer writes to them."""
    x, other = x.clone(), classes > 3
    x[torch.where(other)] = 0.0
    x[(classes == 1).nonzero(as_tuple=True)] = y[torch.nonzero(classes == 1, as_tuple=True)] * 2
    rows, columns = torch.where(mask)
    (first,) = torch.where(mask[:, 0])
    return x[rows, columns, :].sum() + y[first].square().mean() + (rows * columns).sum()


def rows_by_themselves(x: Tensor, y: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """A norm and an MLP for some tokens, another norm for the others, as Higgs Audio has them."""
    x = torch.where(mask[..., None], x, x.clone().fill_(float("inf")))
    normed = y.masked_scatter(mask.unsqueeze(-1), F.rms_norm(x[mask], [8], WEIGHTS))
    rows = F.layer_norm(normed[~mask], (8,)) * F.softmax(y[~mask], dim=-1)
    normed = normed.masked_scatter(~mask.unsqueeze(-1), rows)
    gate, up = F.linear(normed[mask], torch.cat([y[0], y[1, :2]])).chunk(2, -1)
    normed[mask] += (F.silu(gate) * up) @ y[2, 2:] - up.log_softmax(1).amax(-1, keepdim=True)
    ids = F.embedding(classes[mask].clamp(0, 5), y[3], padding_idx=2)
    normed[mask] *= torch.mean(ids, dim=[-1], keepdim=True) + ids.split(3, 1)[2].sum(1, True)
    return normed.square().sum() + normed[mask].mean(0).sum()


READS: dict[str, Read] = {
    "rows by themselves": rows_by_themselves,
    "places": at_places,
    "every row": lambda x, y, mask, classes: x[mask, :].sum() + x[mask, ...].square().mean(),
    "as many": as_many,
    "counted": counted,
    "put elsewhere": put_elsewhere,
    "sum": lambda x, y, mask, classes: x[mask].sum(),
    "rows": lambda x, y, mask, classes: (
        x[mask].sum(0) + torch.mean(x[mask,], dim=[-2]) + x[x > 0].sum(-1)
    ),
    "mean": lambda x, y, mask, classes: torch.mean(x[mask]) + x.masked_select(x > 0).mean(),
    "masks of rows": masks_of_rows,
    "count": lambda x, y, mask, classes: x.sum() * (mask & (classes > 1))[mask].sum(),
    "cross entropy": lambda x, y, mask, classes: F.cross_entropy(
        x[mask], classes[mask], WEIGHTS, label_smoothing=0.1
    ),
    "classes": lambda x, y, mask, classes: F.cross_entropy(
        x[classes >= 0], classes[classes >= 0], reduction="sum"
    ),
    "of each": lambda x, y, mask, classes: F.cross_entropy(
        x[mask], classes[mask], reduction="none", ignore_index=3
    ).mean(),
    "module": lambda x, y, mask, classes: nn.CrossEntropyLoss()(
        x.flatten(0, 1)[mask.flatten()], classes.flatten()[mask.flatten()]
    ),
    "squares": lambda x, y, mask, classes: (
        F.mse_loss(x[mask], y[mask]) + F.l1_loss(x[y > 0.3], y[y > 0.3], reduction="sum")
    ),
    "binary": lambda x, y, mask, classes: (
        F.binary_cross_entropy(x.sigmoid()[mask], y[mask], reduction="none").mean(0).sum()
        + F.binary_cross_entropy_with_logits(x[mask], y[mask])
    ),
    "smooth": lambda x, y, mask, classes: (
        F.smooth_l1_loss(x[mask], y[mask], beta=0.5) + F.huber_loss(x[mask], y[mask], delta=2.0)
    ),
    "elements": lambda x, y, mask, classes: (
        ((x[mask] - y[mask]) ** 2).mean() + (x[mask] * WEIGHTS).float().double().sum()
    ),
    "numbers": lambda x, y, mask, classes: (
        (x[mask] > 0).sum() * (1 - x[mask]).mean() * (classes[mask] == 3).double().mean()
    ),
    "written back": written_back,
    "changed in place": changed_in_place,
    "finite where chosen": finite_where_chosen,
    "changed after": changed_after,
    "chosen without gradient": chosen_without_gradient,
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_a_selection(name: str) -> None:
    graph = traced(Reads(READS[name]), INPUTS, exact=False)
    assert not any("masked_select" in op.target for op in graph.ops)
    # Rows that come back to where they were chosen need no order of them, which none may split.
    assert name != "rows by themselves" or not any("sort" in op.target for op in graph.ops)


class Tagger(nn.Module):
    """The loss of the tokens that have a class, as it is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        hidden = self.down(self.up(x).relu())
        mixed = x.clone()
        mixed[classes > 2] = self.down(self.up(hidden[classes > 2]).tanh()) * 0.5
        mixed[torch.where(classes == 1)] = 0.25
        loss = F.cross_entropy(self.head(hidden)[classes >= 0], classes[classes >= 0])
        return (
            loss
            + F.mse_loss(hidden[x > 0], x[x > 0])
            + ((mixed[classes >= 0] - 1) ** 2).mean(0).sum()
        )


@pytest.mark.parametrize(("policy", "ranks"), spread([("tp", 3), ("data", 2), ("autodist", 4)], 3))
def test_parity(policy: str, ranks: int) -> None:
    report = verify(
        Tagger(),
        {"x": X, "classes": CLASSES},
        policy,
        {"plan_ngpus": ranks, "runtime_ngpus": ranks},
    )
    assert report.ok, str(report)


class Speech(nn.Module):
    """CTC of labels end to end, as transformers computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.up(x).tanh())
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        said = labels >= 0
        targets = labels.masked_select(said)
        return F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), targets, lengths, said.sum(-1), reduction="sum"
        )


LABELS = torch.tensor([[1, 2, -100], [-100, 3, 1], [-100, 4, -100], [2, 3, 2]])


def test_ctc_of_chosen_labels() -> None:
    torch.manual_seed(0)
    traced(Speech().double(), {"x": X, "labels": LABELS}, exact=False)
    report = verify(
        Speech(), {"x": X, "labels": LABELS}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2}
    )
    assert report.ok, str(report)


class Known(nn.Module):
    """A mask that is a part of how the module is built chooses a number of elements that is
    known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("upper", torch.ones(6, 6).triu(1).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x @ x.mT
        above = torch.stack([row[self.upper] for row in pairs])
        return (
            above.reshape(4, 3, 5) * pairs[:, torch.arange(6) < 3].sum()
            + pairs[0].masked_select(self.upper).sum()
        )


def test_masks_of_known_values_choose_places() -> None:
    assert traced(Known(), {"x": X}).outputs[0].shape == (4, 3, 5)


def test_the_number_of_elements_decides_nothing() -> None:
    with pytest.raises(TraceError, match=r"__bool__\(\) needs the values"):
        trace(
            Reads(lambda x, y, mask, classes: x[mask].sum() if x[mask].shape[0] else x.sum()),
            INPUTS,
        )


@pytest.mark.parametrize(
    "read",
    [
        lambda x, y, mask, classes: x[mask],
        lambda x, y, mask, classes: x[mask] * 2,
        lambda x, y, mask, classes: (x[mask] * y[y > 0]).sum(),
        lambda x, y, mask, classes: (x[mask] * x.flatten(0, 1)).sum(),
        lambda x, y, mask, classes: (x[mask] * classes[mask]).sum(),
        lambda x, y, mask, _: torch.where(mask[0, 0], x[mask], 0.0).sum() + y[mask].reshape(-1),
        lambda x, y, mask, classes: x.clone().index_put((mask,), y[mask]),
        lambda x, y, mask, classes: x.clone().__setitem__(classes > 2, y[mask]),
        lambda x, y, mask, classes: x if x[mask] else y,
        lambda x, y, mask, classes: x * float(x[mask]),
        lambda x, y, mask, classes: x * len(x[mask]),
        lambda x, y, mask, classes: x[mask].sum(-1),
        lambda x, y, mask, classes: x[mask].sum((0, 1)),
        lambda x, y, mask, classes: F.mse_loss(x[mask], y[classes > 0]),
        lambda x, y, mask, classes: F.mse_loss(x[mask], y[mask], weight=y[mask]),
        lambda x, y, mask, classes: F.mse_loss(x[drawn()], y[drawn()]),
        lambda x, y, mask, classes: F.cross_entropy(x[mask], y[mask]),
        lambda x, y, mask, classes: x[:, mask[0]].sum(),
        lambda x, y, mask, classes: x[mask, :3].sum(),
        lambda x, y, mask, classes: F.linear(y[0], x[mask]).sum(),
        lambda x, y, mask, classes: (x[mask] @ y).sum(),
        lambda x, y, mask, classes: x[mask].softmax(0).mean(),
        lambda x, y, mask, classes: F.layer_norm(x[mask], (15, 8)).sum(),
        lambda x, y, mask, classes: x[mask].chunk(2)[0].sum(),
        lambda x, y, mask, classes: x[mask].amax(dim=0).sum(),
    ],
)
def test_what_needs_the_number_of_elements_is_refused_where_they_are_chosen(read: Read) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Reads(read), INPUTS)
    first, where, why, hint = str(caught.value).split("\n")
    assert first == "__getitem__() needs the values of a tensor while tracing"
    assert f"{__file__}:{read.__code__.co_firstlineno} in (root) (Reads)" in where
    assert why.startswith("  why:   the size of what it returns depends on values")
    assert "keep all elements" in hint
