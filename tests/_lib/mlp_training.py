"""Training the model of :mod:`mlp_files` on some ranks, and on one device for comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlp_files import MLP, declarations, make_batch
from torch import Tensor, nn

from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer

STEPS = 3
MAX_NORM = 5.0
ADAMW = {"lr": 0.05, "eps": 1e-4, "weight_decay": 0.1}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW)


def train_reference(
    model: MLP, num_units: int, *, mean: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """One device: the loss is the sum (or mean) of the units' losses."""
    optimizer = adamw(model.parameters())
    norms, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        losses = torch.stack([model(*make_batch(10 * step + unit)) for unit in range(num_units)])
        (losses.mean() if mean else losses.sum()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return {"norms": norms, "gradients": gradients, "parameters": dict(model.named_parameters())}


def train_rank(directory: str, config: dict[str, Any] | None, steps: int = STEPS) -> dict[str, Any]:
    """What one rank has after the same steps: its pieces of parameters and gradients, and the
    norms.
    """
    module = load_class(directory)()
    optimizer = build_optimizer(module, adamw, config)
    unit = module.ranks.unit
    norms, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        module(*make_batch(10 * step + unit)).backward()
        norms.append(optimizer.clip_gnorm(MAX_NORM))
        gradients = {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
        optimizer.step()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return {
        "norms": norms,
        "gradients": gradients,
        "parameters": parameters,
        "rank": current_world().rank,
    }


def assert_equal_pieces(
    directory: Path, reference: dict[str, Any], results: list[dict[str, Any]], rtol: float = 1e-12
) -> None:
    """Every rank's tensors are its pieces of the reference's."""
    for rank, result in enumerate(results):
        cls = load_class(directory, rank)
        for norm, expected in zip(result["norms"], reference["norms"], strict=True):
            torch.testing.assert_close(norm, expected, rtol=rtol, atol=0)
        for kind in ("parameters", "gradients"):
            assert result[kind].keys() == reference[kind].keys()
            for name, tensor in result[kind].items():
                expected = piece_of(cls, rank, name, reference[kind][name].detach())
                difference = (tensor - expected).abs().max().item() if tensor.numel() else 0.0
                assert difference <= rtol * max(1.0, expected.abs().max().item()), (
                    f"{kind} {name}: off by {difference}"
                )


def piece_of(cls: Any, rank: int, name: str, whole: Tensor) -> Tensor:
    """The piece of a whole tensor that a rank holds."""
    layout = next(d.layout for d in declarations() if d.name == name)
    coords = cls.mesh.coords(rank % cls.mesh.size)
    for dim in range(whole.ndim):
        runs = layout.runs(dim, cls.mesh, coords)
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return whole


def _linear(width: int, phase: float) -> nn.Linear:
    """A layer with fixed weights: threads share the global generator, so ranks that draw at once
    draw different numbers.
    """
    linear = nn.Linear(width, width).double()
    with torch.no_grad():
        linear.weight.copy_(
            torch.sin(torch.arange(float(width * width)) + phase).view(width, width)
        )
        linear.bias.fill_(phase)
    return linear


class Mixed(nn.Module):
    """An ordinary model around compiled parts: an embedding before, a shared head after."""

    def __init__(self, make_part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before = _linear(6, 0.1)
        self.first = make_part()
        self.unused = _linear(2, 0.2)
        self.second = make_part()
        self.after = _linear(6, 0.3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.before(x)
        loss: Tensor = self.first(h, target) + self.second(self.after(torch.tanh(h)), target)
        return loss
