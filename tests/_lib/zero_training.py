"""Training the model of :mod:`mlp_files` with a distributed optimizer, on some ranks and on one
device for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlp_files import make_batch, make_model
from mlp_training import assert_equal_pieces
from torch import Tensor, nn

from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero.gathering import gathered_gradients

STEPS = 3
MAX_NORM = 5.0

Factory = Callable[[Any], torch.optim.Optimizer]


class Muonlike(torch.optim.Optimizer):
    """An optimizer that needs whole tensors: momentum, and for matrices an update of nearly
    orthogonal directions.
    """

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = (
                    state.setdefault("momentum", torch.zeros_like(p))
                    .mul_(group["momentum"])
                    .add_(p.grad)
                )
                update = momentum / (1e-4 + momentum.norm())
                if p.ndim == 2:
                    # Newton and Schulz; more steps would amplify rounding of small directions.
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                p.sub_(update, alpha=group["lr"])


OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, eps=1e-4, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=1e-4, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, eps=1e-4),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, eps=1e-4, momentum=0.5),
    "muonlike": Muonlike,
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05, eps=(1e-4, 1e-3)),
}


def train_reference(
    optimizer: Factory, num_units: int, accumulate: int = 1, steps: int = STEPS
) -> dict[str, Any]:
    """One device: the sum over units and the batches of a step."""
    model = make_model()
    stepper = optimizer(model.parameters())
    norms, gradients = [], {}
    for step in range(steps):
        stepper.zero_grad()
        batches = [
            make_batch(100 * step + 10 * unit + index)
            for unit in range(num_units)
            for index in range(accumulate)
        ]
        torch.stack([model(*batch) for batch in batches]).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        stepper.step()
    return {"norms": norms, "gradients": gradients, "parameters": dict(model.named_parameters())}


def train_rank(
    directory: Path,
    optimizer: Factory,
    config: dict[str, Any],
    accumulate: int = 1,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train on one of several ranks. ``state_elements``: how many elements the optimizer's state
    has on this rank.
    """
    module = load_class(directory)()
    stepper = build_optimizer(module, optimizer, config)
    unit = module.ranks.unit
    norms: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        stepper.zero_grad()
        for index in range(accumulate):
            batch = make_batch(100 * step + 10 * unit + index)
            if index + 1 < accumulate:
                with stepper.no_sync():
                    module(*batch).backward()
            else:
                module(*batch).backward()
        norms.append(stepper.clip_gnorm(MAX_NORM))
        found = gathered_gradients(stepper._reducer.buckets)
        gradients = {
            name: gradient.clone() for name, gradient in found.items() if gradient is not None
        }
        stepper.step()
    return {
        "norms": norms,
        "gradients": gradients,
        "parameters": {name: p.detach() for name, p in module.named_parameters()},
        "state_elements": state_elements(stepper),
    }


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    """The elements of an optimizer's state, step counts and other single numbers aside."""
    tensors = [
        x
        for state in optimizer.state.values()
        for key, x in state.items()
        if isinstance(x, Tensor) and key != "step"
    ]
    return sum(x.numel() for x in tensors)


def check(
    directory: Path,
    num_ranks: int,
    num_units: int,
    optimizer: str = "adamw",
    accumulate: int = 1,
    steps: int = STEPS,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train on threads and on one device, and assert equal norms, gradients and parameters. What
    each rank recorded.
    """
    config = {"plan_ngpus": num_ranks // num_units, "runtime_ngpus": num_ranks, **options}
    factory = OPTIMIZERS[optimizer]
    results = run_ranks(
        num_ranks, lambda rank: train_rank(directory, factory, config, accumulate, steps)
    )
    assert_equal_pieces(directory, train_reference(factory, num_units, accumulate, steps), results)
    return results


def process_job(directory: str) -> dict[str, Any]:
    """Four units in two groups, scattered and overlapped, with buckets of a few parameters."""
    options = {"zero_ngroups": 2, "use_async_reducer": True, "reducer_bucket_cap_mb": 4e-4}
    config = {"plan_ngpus": 1, "runtime_ngpus": 4, "use_zero": 2, **options}
    return {
        name: train_rank(Path(directory), OPTIMIZERS[name], config)
        for name in ("adamw", "muonlike")
    }
